"""The facts, bytes and thumbnails of samples, and previews of training batches.

Pictures are decoded and re-encoded here, a few at a time and up to a maximum number of pixels, so that neither a
decompression bomb nor many requests exhaust the machine.
"""

from __future__ import annotations

import importlib.util
import io
import math
import threading
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError, MissingExtraError, UnknownNameError
from cache.node import usable_cpus
from packer.conversion.ops import SHOWN, parse_op
from packer.formats.base import png_of
from packer.tools.view.document import checksum_of, examined
from readers import Decode, Ranks, Threads
from readers.augment import Recipe
from readers.augment.described import box_of, draws_of
from readers.augment.ops import Op
from readers.decode import Region, decode_image
from readers.feed import Feed, FeedOptions, Start, choose_tail
from readers.fields import decode_field
from readers.headers import read_header, sniff
from readers.headers.base import ImageHeader
from readers.layout import PIXELS
from readers.order import ClassBalanced, Order, Sequential, Shuffled, block_shuffled
from readers.reader import Reader
from readers.table import NO_LABEL, Buffer, MemoryColumns, npy_layout, upright_sides

__all__ = [
    "BatchRequest",
    "Batches",
    "abilities",
    "as_png",
    "field_bytes",
    "middle_of",
    "sample_document",
    "thumbnail",
]


MEDIA_TYPES = {
    "jpeg": "image/jpeg",
    "png": "image/png",
    "webp": "image/webp",
    "gif": "image/gif",
    "bmp": "image/bmp",
    "tiff": "image/tiff",
    "avif": "image/avif",
    "heif": "image/heic",
    "jxl": "image/jxl",
}
MOST_PIXELS = 50_000_000  # per decoded picture; 150 MB of RGB
_BYTES = "application/octet-stream"
_PROCESSES = {0xC0: "baseline", 0xC1: "extended", 0xC2: "progressive", 0xC3: "lossless"}
_QUALITY = 82
_decoding = threading.BoundedSemaphore(max(1, usable_cpus()))


def sample_document(reader: Reader, index: int) -> dict[str, Any]:
    """The facts of a sample. All its fields are read, and their checksums computed."""
    label, faults = int(reader.labels[index]), list[str]()
    document: dict[str, Any] = {
        "index": index,
        "key": reader.keys[index],
        "label": None if label == NO_LABEL else label,
        "class": reader.classes[label] if 0 <= label < len(reader.classes) else "",
        "fields": [],
    }
    for field in reader.fields:
        if not reader.has(index, field):
            continue
        entry = _stored_facts(reader, index, field)
        data, fault = examined(reader, index, field)
        if data is not None:
            entry |= {"bytes": len(data), "computed": f"{checksum_of(reader, field, data):08x}"}
            if media := sniff(data):
                entry["media"] = media
            try:
                if field == "image":
                    document["header"] = _header(read_header(data))
                if entry["kind"] == "array":
                    dtype, _, shape, _ = npy_layout(data)
                    entry["array"] = f"{dtype} {list(shape)}"
            except BadSampleError as error:
                fault = f"the {'image' if field == 'image' else f'field {field}'} cannot be read: {error}"
        if data is not None or fault:
            document["fields"].append(entry)
        faults += [fault] if fault else []
    return document | ({"error": "; ".join(faults)} if faults else {})


def _stored_facts(reader: Reader, index: int, field: str) -> dict[str, Any]:
    """The facts of a field that are known without reading it."""
    columns, entry = reader.table.columns, {"name": field, "kind": reader.kinds[field]}
    if name := reader.name(index, field):
        entry["file"] = name
    if isinstance(columns, MemoryColumns):
        return entry
    shard, offset, length = (int(column[0]) for column in reader.table.extents([index], field)[1:])
    checksum = int(columns.field_column(field, "crc32c")[reader.table.row(index)])
    path = reader.split_info.shards[shard].path
    return {**entry, "shard": path, "offset": offset, "length": length, "crc32c": f"{checksum:08x}"}


def _header(header: ImageHeader) -> dict[str, Any]:
    height, width = header.upright_size
    process = _PROCESSES.get(header.process, f"SOF{header.process & 15}") if header.process else ""
    facts = {name: getattr(header, name) for name in ("components", "orientation", "media")}
    return {"width": width, "height": height, "process": process, **facts}


def field_bytes(reader: Reader, index: int, field: str) -> tuple[Buffer, str]:
    """(the bytes of a field, their media type). Unencoded pixels are sent as PNG. Raises PackerError."""
    data = reader.read(index, field)
    media = sniff(data)
    if media:
        return data, MEDIA_TYPES[media]
    if reader.kinds[field] == PIXELS:
        return as_png(reader, index, field), MEDIA_TYPES["png"]
    return data, _BYTES


def as_png(reader: Reader, index: int, field: str) -> bytes:
    """A field as PNG. Raises PackerError.

    An image becomes upright RGB, a mask keeps its values in 8 or 16 bits, and an array becomes its `middle_of`.
    """
    if reader.kinds[field] == "array":
        return png_of(middle_of(reader.array(index, field)))
    data = reader.read(index, field)
    _check_size(data)
    with _decoding:
        if reader.kinds[field] == "mask":
            return png_of(_plain(decode_field("mask", data)))
        return png_of(decode_image(data))


def _plain(mask: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if mask.dtype.itemsize <= 2:
        return mask
    if mask.size and not 0 <= int(mask.min()) <= int(mask.max()) < 1 << 16:
        raise BadSampleError(f"a mask with numbers from {mask.min()} to {mask.max()} cannot be shown as PNG")
    return mask.astype(np.uint16)


def middle_of(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The middle plane of an array, uint8 [height, width], with its smallest value as 0 and its largest as 255.

    The plane is in the last two axes, or in the two axes before a last axis of at most 4 channels; the index of every
    other axis is its middle.
    """
    if array.ndim > 2 and array.shape[-1] <= 4:
        array = np.moveaxis(array, -1, 0)
    while array.ndim > 2 and array.size:
        array = array[len(array) // 2]
    if not array.size:
        raise BadSampleError("an array without numbers cannot be shown")
    step = max(1, math.isqrt(array.size // MOST_PIXELS))
    plane = np.atleast_2d(array)[::step, ::step]
    numbers = (
        np.nan_to_num((np.abs(plane) if plane.dtype.kind == "c" else plane).astype(np.float64)) / 2
    )  # half, so that any difference fits into float64
    numbers -= numbers.min()
    pixels: npt.NDArray[np.uint8] = (numbers * (255 / (numbers.max() or 1))).astype(np.uint8)
    return pixels


def thumbnail(reader: Reader, index: int, side: int) -> bytes:
    """The image of a sample, or `middle_of` its array, as an upright JPEG with a longer side of at most `side` pixels.

    Raises PackerError.
    """
    from PIL import Image

    with _decoding:
        if reader.kinds[reader.main] == "array":
            image = Image.fromarray(middle_of(reader.array(index)))
        else:
            data = reader.read(index)
            height, width = _check_size(data)
            reduce = next((scale for scale in (8, 4, 2) if max(height, width) >= scale * side), 1)
            image = Image.fromarray(decode_image(data, Region(0, 0, height, width, reduce, True)))
        image.thumbnail((side, side))
    memory = io.BytesIO()
    image.save(memory, "JPEG", quality=_QUALITY)
    return memory.getvalue()


def _check_size(data: Buffer) -> tuple[int, int]:
    """(height, width) of the upright image. Raises BadSampleError if it has too many pixels."""
    header = read_header(data)
    if header.height * header.width > MOST_PIXELS:
        raise BadSampleError(f"{header.width} x {header.height} pixels are too many to show")
    return header.upright_size


# --- The content of a training batch: its samples, their random draws, and its pixels.
# All of it is computed by the code of training: `readers.feed` chooses the samples of a batch, `readers.augment` draws
# for them (the text of an op describes its change to the plan), and an `ImageLoader` that begins with this batch makes
# the pixels.
ORDERS = ("shuffled", "block", "stored", "balanced")
_DEFAULT_OPS = ("RandomResizedCrop:224", "RandomHorizontalFlip")
_MOST_OPS, _MOST_BATCH, _MOST_BYTES = 32, 4096, 512 << 20
_KEPT = 2
Pixels = npt.NDArray[np.uint8]


def abilities(reader: Reader) -> dict[str, Any] | None:
    """The orders and ops for previews of this reader, for view.json; None without images."""
    if "image" not in reader.fields or not len(reader):
        return None
    orders = [name for name in ORDERS if name != "balanced" or (reader.labels != NO_LABEL).any()]
    texts = [*_DEFAULT_OPS, *(name for name in SHOWN if name not in ("RandomResizedCrop", "RandomHorizontalFlip"))]
    return {"orders": orders, "ops": texts, "default_ops": list(_DEFAULT_OPS)}


@dataclass(frozen=True)
class BatchRequest:
    """A request for batch `batch` of rank `rank` in an epoch. ops: ops as texts. Raises ValueError."""

    seed: int = 0
    epoch: int = 0
    batch: int = 0
    batch_size: int = 32
    ranks: int = 1
    rank: int = 0
    order: str = "shuffled"
    ops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order is one of {', '.join(ORDERS)}, not {self.order!r:.40}")
        if not 0 < self.batch_size <= _MOST_BATCH:
            raise ValueError(f"batch_size is {self.batch_size}, expected 1 to {_MOST_BATCH}")
        if len(self.ops) > _MOST_OPS:
            raise ValueError(f"there are {len(self.ops)} ops, expected at most {_MOST_OPS}")

    def augment(self) -> tuple[Op, ...]:
        """The parsed ops. Raises ValueError."""
        return tuple(parse_op(text, SHOWN, "to look at") for text in self.ops)


class Batches:
    """The batches of a split, with a cache of the pixels of the last ones."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._lock = threading.RLock()  # the first request makes the batch, and other requests of the page wait
        self._order = lru_cache(_KEPT)(self._new_order)
        self._kept_pixels = lru_cache(_KEPT)(self._pixels)

    def describe(self, request: BatchRequest) -> dict[str, Any]:
        """The samples of a batch and their random draws. Raises ValueError, UnknownNameError, PackerError."""
        feed = self._feed(request)
        augment = request.augment()
        positions, rows = feed.rows(request.epoch, self._step(feed, request))
        info = self._reader.image_info(rows)
        heights, widths = upright_sides(info)
        sides = np.maximum(heights, 1), np.maximum(widths, 1)
        draws, plan = draws_of(augment, request.seed, request.epoch, positions, *sides)
        has_pixels = importlib.util.find_spec("torch") is not None
        labels, keys = self._reader.labels, self._reader.keys
        samples = []
        for item, (position, row) in enumerate(zip(positions.tolist(), rows.tolist(), strict=True)):
            label, bad = int(labels[row]), plan.boxes.bad.get(item)
            sample: dict[str, Any] = {"item": item, "index": row, "position": position, "key": keys[row]}
            sample["label"] = None if label == NO_LABEL else label
            sample["draws"] = [draw.text for draw in draws[item]]
            if bad is not None or not heights[item]:
                sample["error"] = str(bad or "the header of the image cannot be read")
            sample["box"] = box_of(plan, item)
            samples.append(sample)
        return {
            "batches": feed.batches(request.epoch),
            "batch": request.batch,
            "has_pixels": has_pixels,
            "samples": samples,
        }

    def picture(self, request: BatchRequest, item: int) -> bytes:
        """One image of a batch, as PNG. Raises ValueError, IndexError, MissingExtraError, PackerError."""
        with self._lock:
            pixels = self._kept_pixels(request)
        if not 0 <= item < len(pixels):
            raise IndexError(f"there is no image {item} in a batch of {len(pixels)}")
        return png_of(pixels[item])

    # --- inside -----------------------------------------------------------------------------------------------------
    def _pixels(self, request: BatchRequest) -> Pixels:
        """The pixels of a batch by `ImageLoader`, uint8 [n, height, width, 3]."""
        augment = request.augment()
        height, width = Recipe(augment).out_size or (1, 1)
        if request.batch_size * height * width * 3 > _MOST_BYTES:
            raise ValueError(f"{request.batch_size} images of {height} x {width} pixels are too many to show")
        if importlib.util.find_spec("torch") is None:
            raise MissingExtraError("torch", "torch", "the pixels of batches")
        from readers.loader import ImageLoader

        feed = self._feed(request)
        step = self._step(feed, request)
        loader = ImageLoader(
            self._reader,
            request.batch_size,
            augment=augment,
            order=feed.order,
            ranks=Ranks(rank=request.rank, world_size=request.ranks),
            fields=("image",),
            decode=Decode(layout="NHWC", decoder="cpu"),
            threads=Threads(prefetch=1),
        )
        start = feed.after(step, request.epoch) if step else Start(request.epoch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the state does not name a decoder
            loader.load_state_dict(feed.token(start))
        for (images,) in loader:
            pixels: Pixels = images.numpy().copy()
            return pixels
        raise UnknownNameError(f"epoch {request.epoch} has no batch {request.batch}")

    def _feed(self, request: BatchRequest) -> Feed:
        with self._lock:
            order = self._order(request.order, request.seed)
        if not 0 <= request.rank < request.ranks:
            raise ValueError(f"rank is {request.rank}, expected 0 to {request.ranks - 1}")
        options = FeedOptions(request.rank, request.ranks, choose_tail(order))
        return Feed(self._reader, order, request.batch_size, options)

    def _step(self, feed: Feed, request: BatchRequest) -> int:
        batches = feed.batches(request.epoch)
        if request.batch >= batches:
            raise UnknownNameError(
                f"epoch {request.epoch} has {batches} batches of {request.batch_size} for rank {request.rank} of "
                f"{request.ranks}; there is no batch {request.batch}"
            )
        return request.batch

    def _new_order(self, name: str, seed: int) -> Order:
        count = len(self._reader)
        if name == "block":
            return block_shuffled(self._reader, seed)
        if name == "balanced":
            return ClassBalanced(self._reader.labels, seed=seed)
        return Shuffled(count, seed) if name == "shuffled" else Sequential(count, seed)
