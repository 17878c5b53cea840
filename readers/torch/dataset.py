"""A map-style data set over any reader: what goes into a DataLoader."""

from __future__ import annotations

import copy
import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch.utils.data import Dataset

from cache.errors import BadSampleError, ResumeError
from readers.augment.cpu import Finish, Renderer
from readers.augment.ops import Op
from readers.augment.recipe import Job, Recipe
from readers.decode import DECODER, Scratch, decode_image, decode_unchanged
from readers.feed import (
    ON_ERROR,
    OnError,
    bad_sample,
    check_choice,
    for_decoding,
    name_sample,
    read_sample,
    read_samples,
    substitute,
    substitutes,
)
from readers.headers import read_header
from readers.headers.base import upright_size
from readers.items import FieldOptions, Fields, Payloads
from readers.reader import SAMPLE_ERRORS, Reader
from readers.sample import Buffer
from readers.torch.items import ItemMaker

__all__ = ["ImageDataset", "Output", "Place"]

Output: TypeAlias = Literal["tensor", "numpy", "pil"]
_OUTPUTS = get_args(Output)


class Place(int):
    """The number of a sample, which knows where in which epoch it was asked for: what seeds its augmentation."""

    seed: int
    epoch: int
    position: int

    def __new__(cls, index: int, seed: int, epoch: int, position: int) -> Place:
        place = super().__new__(cls, index)
        place.seed, place.epoch, place.position = seed, epoch, position
        return place

    def __reduce__(self) -> tuple[Any, ...]:
        return Place, (int(self), self.seed, self.epoch, self.position)


class ImageDataset(Dataset[Any]):
    """(image, label) by number; label is -1 where a sample has none.

    transform: a list of `readers.augment` ops, which decodes no more of an image than it needs and draws by (seed,
        epoch, position) when the indices come from `EpochSampler`; or any callable that takes an image, albumentations
        included.
    decode: "RGB"; "unchanged" for the depth and channels of the file, such as uint16, float32 or the indices of a mask
        (see `readers.decode.cpu`); or None for the encoded bytes.
    output: what a callable takes and, without one, what an item has: "tensor" (uint8 [3, h, w], unchanged [channels, h,
        w]; torchvision.transforms.v2), "numpy" (uint8 [h, w, 3]; albumentations), or "pil" (torchvision.transforms),
        which is RGB only.
    target_transform: makes the label: a function of the stored label, or one of two arguments, which also sees the
        sample, {field: value}.
    fields: what an item is made of: "image", "label", "key", "index", other fields of the set, decoded by their kind
        (`readers.items`) and moved with the image by a list of ops; None where the sample lacks one. Arrays are
        tensors, or arrays with output="numpy" or "pil". {"pixel_values": "image", "labels": "label"} makes dictionaries
        with these names, as for the Trainer of transformers. Without "image" no image is read.
    field_options: how masks and boxes follow the image.
    on_error: "raise"; "skip", which makes batches smaller, or raises BadSampleError where no sample would be left; or
        "substitute" (another sample). `bad_samples` counts both, in all workers, until `report`, which an
        `EpochSampler` over this data set calls after each epoch.
    """

    def __init__(
        self,
        reader: Reader,
        transform: Sequence[Op] | Callable[[Any], Any] | None = None,
        decode: Literal["RGB", "unchanged"] | None = "RGB",
        *,
        output: Output = "tensor",
        target_transform: Callable[..., Any] | None = None,
        fields: Sequence[str] | Mapping[str, str] = ("image", "label"),
        field_options: FieldOptions | None = None,
        on_error: OnError = "raise",
    ) -> None:
        if decode not in ("RGB", "unchanged", None):
            raise ValueError(f"decode is 'RGB', 'unchanged' or None, not {decode!r}")
        check_choice("output", output, _OUTPUTS)
        check_choice("on_error", on_error, ON_ERROR)
        self.decode, self.output, self.on_error = decode, output, on_error
        self.reader = reader
        self.transform, self.target_transform = transform, target_transform
        self._ops = _OpRenderer(Recipe(transform)) if isinstance(transform, Sequence) else None
        asked = Fields(fields, reader, field_options)
        if isinstance(transform, Sequence):
            asked.check_ops(transform)
        elif transform is not None:
            asked.check_apart("a function as transform sees the image alone", "give a list of readers.augment ops")
        one_size = self._ops is not None and self._ops.out_size is not None and "image" in asked.wanted
        self._maker = ItemMaker(asked, target_transform, tensors=output == "tensor", one_size=one_size)
        if self._ops is not None and decode != "RGB":
            raise ValueError("ops need 8-bit RGB: leave decode='RGB', or give a callable as transform")
        if decode == "unchanged":
            if output == "pil":
                raise ValueError("decode='unchanged' gives tensors or arrays: choose output='tensor' or 'numpy'")
            _check_unchanged(reader)
        self._keywords = _wants_keyword(transform)
        self._counts = torch.zeros(2, dtype=torch.int64).share_memory_()  # bad samples, and the first one's number + 1
        self._local = _PerThread()

    @property
    def reader(self) -> Reader:
        return self._reader

    @reader.setter
    def reader(self, reader: Reader) -> None:
        self._reader = reader
        self._images = for_decoding(reader) if self.decode == "RGB" else reader

    @property
    def fields(self) -> tuple[str, ...]:
        return self._maker.fields.wanted

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes; position = label."""
        return self.reader.classes

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Labels by the names of the classes."""
        return self.reader.class_to_idx

    @property
    def targets(self) -> list[int]:
        """All labels, as torchvision's data sets have them."""
        return list(np.asarray(self.reader.labels).tolist())

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> Any:
        items = self._items((index,))
        if not items:
            raise name_sample(
                self.reader,
                int(index),
                "it is bad and cannot be skipped by itself: ask for batches, or take on_error='substitute'",
            )
        return items[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Many samples, read together; what DataLoader calls for a batch."""
        items = self._items(indices)
        if not items and len(indices):
            first = int(indices[0])
            raise BadSampleError(
                f"all {len(indices)} samples of a batch are bad, so that on_error='skip' leaves none of it; the first "
                f"is sample {first} ({self.reader.keys[first]}): find them with `packer verify --deep`, or take "
                f"on_error='substitute'"
            )
        return items

    def collate(self, items: Sequence[Any]) -> Any:
        """A batch, for DataLoader(collate_fn=dataset.collate): masks are stacked where ops make all images of one size
        and every sample has one; other fields of the set are lists; the rest is `default_collate`'s."""
        return self._maker.collate(items)

    def over(self, reader: Reader) -> ImageDataset:
        """A data set with the same options over another reader of the same fields."""
        other = copy.copy(self)
        other.reader = reader
        return other

    # --- bad samples --------------------------------------------------------------------------------------------
    @property
    def bad_samples(self) -> int:
        """How many samples were skipped or replaced since the last report, in this process and all workers."""
        return int(self._counts[0])

    def report(self) -> str:
        """One line about the bad samples since the last report, "" if there were none. For the end of an epoch."""
        count, first = self._counts.tolist()
        self._counts.zero_()
        if not count:
            return ""
        done = "skipped" if self.on_error == "skip" else "replaced by others"
        return f"{count} bad samples were {done}, the first is sample {first - 1} ({self.reader.keys[first - 1]})"

    def _replace(self, index: int, error: Exception) -> Any:
        """Another sample, None for none. Raises under on_error="raise"."""
        place = index if isinstance(index, Place) else Place(index, 0, 0, int(index))
        bad_sample(self.reader, self.on_error, int(index), place.position, error)
        # Two workers may add at the same time, and one of the two be lost from the count: not worth a lock.
        self._counts[0] += 1
        if not self._counts[1]:
            self._counts[1] = int(index) + 1
        if self.on_error == "skip":
            return None

        def take(row: int) -> Any:
            data = read_sample(self._images, row) if "image" in self.fields else b""
            task = self._tasks((Place(row, place.seed, place.epoch, place.position),), (data,))[0]
            return self._sample(row, data, task, self._maker.read(self.reader, [row])[0])

        others = substitutes(place.seed, place.epoch, place.position, len(self))
        return substitute(others.tolist(), error, take)[1]

    # --- state --------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """What must be the same when a run continues: the set and the decoder."""
        return {"fingerprint": self.reader.fingerprint, "decoder": DECODER}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ResumeError where `state` comes from another set."""
        if state.get("fingerprint") != self.reader.fingerprint:
            raise ResumeError(
                f"this state was saved with another set: its fingerprint is {state.get('fingerprint')}, this one's is "
                f"{self.reader.fingerprint}"
            )

    # --- inside -------------------------------------------------------------------------------------------------
    def _tasks(self, indices: Sequence[int], data: Sequence[Buffer | Exception]) -> Sequence[_Task | Exception | None]:
        if self._ops is None or "image" not in self.fields:
            return [None] * len(indices)
        return self._ops.tasks(indices, data)

    def _items(self, indices: Sequence[int]) -> list[Any]:
        rows, items = [int(index) for index in indices], []
        data: Sequence[Buffer | Exception] = [b""] * len(rows)
        if "image" in self.fields:
            data = (
                read_samples(self._images, rows) if len(rows) > 1 else [read_sample(self._images, row) for row in rows]
            )
        payloads = self._maker.read(self.reader, rows)
        for index, encoded, task, others in zip(indices, data, self._tasks(indices, data), payloads, strict=True):
            try:
                item: Any = self._sample(int(index), encoded, task, others)
            except SAMPLE_ERRORS as error:
                item = self._replace(index, error)
            if item is not None:
                items.append(item)
        return items

    def _sample(self, index: int, data: Buffer | Exception, task: _Task | Exception | None, others: Payloads) -> Any:
        for problem in (data, task):
            if isinstance(problem, Exception):
                raise problem
        if "image" not in self.fields:
            return self._maker.make(self.reader, index, others)
        if self._ops is None:
            image = self._decode_and_transform(data)  # type: ignore[arg-type]
            return self._maker.make(self.reader, index, others, image)
        image = self._ops.render(data, task)  # type: ignore[arg-type]
        return self._maker.make(self.reader, index, others, image, task)  # type: ignore[arg-type]

    def _decode_and_transform(self, data: Buffer) -> Any:
        image: Any = bytes(data) if self.decode is None else self._decode(data)
        if self.transform is None:
            return image
        call: Any = self.transform
        return call(image=image)["image"] if self._keywords else call(image)

    def _decode(self, data: Buffer) -> Any:
        if self.decode == "unchanged":
            return self._decode_unchanged(data)
        if not hasattr(self._local, "scratch"):
            self._local.scratch = Scratch()
        pixels = decode_image(data, None, self._local.scratch).copy()
        if self.output == "pil":
            from PIL import Image

            return Image.fromarray(pixels)
        if self.output == "numpy" or self._keywords:
            return pixels
        return torch.from_numpy(pixels).permute(2, 0, 1)

    def _decode_unchanged(self, data: Buffer) -> Any:
        pixels = decode_unchanged(data)
        if self.output == "numpy" or self._keywords:
            return pixels
        if pixels.dtype == np.uint16 and not hasattr(torch, "uint16"):
            pixels = pixels.astype(np.int32)  # torch before 2.3
        tensor = torch.from_numpy(pixels)
        return tensor[None] if tensor.ndim == 2 else tensor.permute(2, 0, 1)


def _check_unchanged(reader: Any) -> None:
    """Raise ValueError for images that a cache has made 8-bit RGB of."""
    while reader is not None:
        keep: Any = getattr(reader, "keep", None)
        kind = getattr(keep, "kind", "encoded")
        if kind != "encoded" and not keep.is_for_decoders:
            raise ValueError(f"decode='unchanged' over a cache that keeps images {kind}: open it with keep='encoded'")
        reader = getattr(reader, "base", None)


def _wants_keyword(transform: object) -> bool:
    """albumentations: transforms that take image= and return a dictionary."""
    return any(base.__module__.partition(".")[0] == "albumentations" for base in inspect.getmro(type(transform)))


# --- ops ----------------------------------------------------------------------------------------------------------
class _PerThread(threading.local):
    """What each thread keeps to itself; a copy in another process has nothing of it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _PerThread, ()


class _Task(NamedTuple):
    """What happens to one sample. size: of the upright image; shape: of the result; both (height, width)."""

    job: Job
    size: tuple[int, int]
    shape: tuple[int, int]


class _OpRenderer:
    """Encoded images to tensors [3, height, width]: uint8, or float32 where the ops end in Normalize."""

    def __init__(self, recipe: Recipe) -> None:
        for op in recipe.batch_ops:
            name = type(op).__name__
            raise ValueError(
                f"ImageDataset makes single samples, and {name} is for batches: use ImageLoader, or mix in the "
                f"collate_fn of the DataLoader"
            )
        self._recipe, self.out_size = recipe, recipe.out_size
        self._finish = Finish(torch.uint8 if recipe.normalize is None else torch.float32, True, recipe.normalize)
        self._local = _PerThread()

    def tasks(self, indices: Sequence[int], data: Sequence[Buffer | Exception]) -> list[_Task | Exception]:
        """One for each sample, or why there is none."""
        sizes = [_upright_size(image) for image in data]
        known = [size if isinstance(size, tuple) else (1, 1) for size in sizes]
        tasks: dict[int, _Task | Exception] = {
            row: size for row, size in enumerate(sizes) if isinstance(size, Exception)
        }
        places, epochs = _with_positions(indices), defaultdict(list)
        for row, place in enumerate(places):
            epochs[place.seed, place.epoch].append(row)
        for (seed, epoch), rows in epochs.items():  # one plan serves an epoch
            positions = np.array([places[row].position for row in rows], np.int64)
            heights, widths = np.array([known[row] for row in rows], np.int64).T
            plan = self._recipe.plan(seed, epoch, positions, heights, widths)
            shapes = zip(plan.boxes.out_height.tolist(), plan.boxes.out_width.tolist(), strict=True)
            for i, (row, job, shape) in enumerate(zip(rows, plan.jobs(), shapes, strict=True)):
                tasks.setdefault(row, plan.boxes.bad.get(i) or _Task(job, known[row], shape))
        return [tasks[row] for row in range(len(sizes))]

    def render(self, data: Buffer, task: _Task) -> torch.Tensor:
        """Raises BadSampleError."""
        renderer: Renderer | None = getattr(self._local, "renderer", None)
        if renderer is None:
            renderer = self._local.renderer = Renderer(self._recipe.interpolation, self._finish)
        pixels = renderer.chunk(1, *task.shape)
        out = torch.empty((1, 3, *task.shape), dtype=self._finish.dtype)
        left = renderer.render(data, task.job, task.size, pixels, out)
        self._finish.store(pixels, (pixels,), (left,), out)
        return out[0]


def _upright_size(data: Buffer | Exception) -> tuple[int, int] | Exception:
    if isinstance(data, Exception):
        return data
    try:
        header = read_header(data)
    except BadSampleError as error:
        return error
    return upright_size(header.height, header.width, header.orientation)


def _with_positions(indices: Sequence[int]) -> list[Place]:
    """Plain numbers get an epoch from torch's generator, which seeds other transforms, too."""
    epoch = 0 if all(isinstance(index, Place) for index in indices) else int(torch.randint(1 << 62, ()))
    return [index if isinstance(index, Place) else Place(index, 0, epoch, row) for row, index in enumerate(indices)]
