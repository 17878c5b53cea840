"""`RocalSource`: an external source of rocAL over any reader, for the mode EXTSOURCE_RAW_COMPRESSED.

    source = external_source(reader, 128, seed=1)
    encoded, _ = fn.external_source(source, mode=types.EXTSOURCE_RAW_COMPRESSED,
                                    max_height=source.max_height, max_width=source.max_width)

    next(source) -> images, labels, lengths
        images    list of exactly batch_size contiguous uint8 arrays, each a whole JPEG that rocAL decodes
        labels    int32 [batch_size]; -1 for samples without a label, and for padding
        lengths   list of batch_size ints: the size of each image in bytes

rocAL does not accept partial batches. The first rows of a batch are samples of the epoch, without gaps for skipped
samples. The remaining rows are repeats, which `RocalLoader` removes.

rocAL keeps addresses of arrays but no references, so the source keeps the last batches. The batches of an epoch are
followed by padding batches, so that the images that rocAL drops or mixes up at the end of an epoch are padding. `n`
includes PADDING_BATCHES of them. `RocalLoader` removes these as well.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import simplejpeg

from cache.errors import BadSampleError, DatasetError
from readers.batch import Fields
from readers.decode import decode_image
from readers.decode.region import has_clean_header
from readers.feed import BadSample, Feed, OnError, Start
from readers.headers import MEDIA, ImageHeader, read_frame
from readers.headers.base import shrunk, upright_size
from readers.loop import Ahead, FeedPosition, Progress
from readers.options import Ranks, accepts_old_names
from readers.order import Order
from readers.order.base import Int64s
from readers.reader import SAMPLE_ERRORS, Reader
from readers.table import NO_LABEL, Buffer, ImageInfo, upright_sides

# rocAL may only get JPEGs that its decoder can decode.
#
# rocAL decodes external sources with TurboJPEG and does not report errors: an image without a readable header becomes
# another image of the batch, under the original label; truncated and CMYK images become garbage; EXIF orientation is
# ignored. So each image is checked first:
#
#     complete JPEG, 8 bits, 1 or 3 components, upright, common subsampling    passed on unchanged, without a copy
#     any other complete image    decoded, and encoded again as a baseline JPEG, 4:4:4
#     bad header, no end marker, size not that of the index, or not decodable    BadSampleError
#
# As in `readers.decode`, these checks do not find damage inside the entropy-coded data; the CRC32C of the index does
# (`readers.open(…, verify=True)`).


_PROCESSES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive: every version of TurboJPEG decodes these
_LUMA_SAMPLING = (0x11, 0x21, 0x22, 0x12, 0x41)  # 4:4:4, 4:2:2, 4:2:0, 4:4:0, 4:1:1
_LEAST_SCALE = 8  # TurboJPEG scales down to 1/8 at most; rocAL crops larger images


class Limits(NamedTuple):
    """The largest size of decoded images, in pixels. rocAL scales each image to fit it best."""

    height: int
    width: int


class Vetted(NamedTuple):
    """An image for rocAL. data: a JPEG, contiguous, uint8 [n]. reason: why it was encoded again, "" if it was not."""

    data: npt.NDArray[np.uint8]
    reason: str


def vet(data: Buffer, limits: Limits, *, size: tuple[int, int], convert: bool, quality: int) -> Vetted:
    """Check an image for rocAL, and convert it to a JPEG that rocAL decodes if necessary.

    limits: the largest size of decoded images.
    size: (height, width) in the index, as stored; 0 if unknown.
    convert: encode images again that rocAL cannot decode.
    quality: of the JPEGs that are encoded again.

    Raises BadSampleError for an incomplete image, and, without `convert`, for one that rocAL cannot decode.
    """
    header, frame = read_frame(data)
    if all(size) and (header.height, header.width) != size:
        raise BadSampleError(
            f"{header.media} image: the index says {size[0]} x {size[1]} pixels, found {header.height} x {header.width}"
        )
    reason = _obstacle(header, limits) or (_unusual(data, frame, header.components) if frame else "")
    if not reason:
        return Vetted(np.frombuffer(data, np.uint8), "")
    if not convert:
        raise BadSampleError(f"rocAL does not decode {reason}; convert=True encodes such images again")
    return Vetted(np.frombuffer(_encode(data, header, limits, quality), np.uint8), reason)


def blank(size: Limits) -> npt.NDArray[np.uint8]:
    """A uniform grey JPEG, for rows of padding."""
    grey = np.full((size.height, size.width, 3), 128, np.uint8)
    return np.frombuffer(simplejpeg.encode_jpeg(grey, 95, "RGB", "444"), np.uint8)


def limits_of(reader: Reader, *, cap: int) -> Limits:
    """The largest upright height and width in the index of a set, at most `cap` each. Raises DatasetError."""
    height, width = upright_sides(reader.info)
    if not len(height) or not height.any():
        raise DatasetError("the index does not know the size of any image: give max_height and max_width")
    return Limits(min(int(height.max()), cap), min(int(width.max()), cap))


def decodable(info: ImageInfo) -> npt.NDArray[np.bool_]:
    """Which images rocAL decodes without conversion, by the header values of the index: bool [n]."""
    jpeg = (info.media == MEDIA.index("jpeg")) & np.isin(info.components, (1, 3)) & np.isin(info.process, _PROCESSES)
    return np.asarray(jpeg & (info.orientation == 1))


def _obstacle(header: ImageHeader, limits: Limits) -> str:
    """Why rocAL must not get an image with this header unchanged; "" if it may."""
    if header.media != "jpeg":
        return f"{header.media} images"
    if header.components not in (1, 3):
        return f"JPEGs of {header.components} components"
    if header.process not in _PROCESSES:
        return f"JPEGs of process 0x{header.process:02X}"
    if header.orientation != 1:
        return "JPEGs to be turned upright"
    if header.height > _LEAST_SCALE * limits.height or header.width > _LEAST_SCALE * limits.width:
        return f"JPEGs over {_LEAST_SCALE} times {limits.height} x {limits.width} pixels"
    return ""


def _unusual(data: Buffer, frame: int, components: int) -> str:
    """Why TurboJPEG cannot decode a JPEG although it reads the header; "" if it can. frame: position of the height.

    T.81, B.2.2: the precision comes before the height; after height, width and the number of components, each component
    has three bytes: its identifier, its sampling factors and its table.
    """
    if data[frame - 1] != 8:
        return f"JPEGs of {data[frame - 1]} bits"
    factors = tuple(data[frame + 6 + 3 * i] for i in range(components))
    if components == 3 and (factors[0] not in _LUMA_SAMPLING or factors[1:] != (0x11, 0x11)):
        return "JPEGs of unusual colour sampling"
    return "" if has_clean_header(data) else "JPEGs with damage before their pixels"


def _encode(data: Buffer, header: ImageHeader, limits: Limits, quality: int) -> bytes:
    pixels = decode_image(data)
    height, width = upright_size(header.height, header.width, header.orientation)
    factor = min(_LEAST_SCALE * limits.height / height, _LEAST_SCALE * limits.width / width)
    if factor < 1:
        from PIL import Image

        small = Image.fromarray(pixels).resize(shrunk(width, height, factor), Image.Resampling.BOX, reducing_gap=2.0)
        pixels = np.asarray(small)
    try:
        encoded: bytes = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality, "RGB", "444")
    except ValueError as error:  # more than 65,500 pixels per side
        raise BadSampleError(f"{header.media} image of {height} x {width} pixels as a JPEG: {error}") from error
    return encoded


DECODER = "rocal"
# With deeper queues, rocAL's reset deadlocks: it holds the GIL and waits for a thread that waits for input.
PREFETCH = 2
# In about 120 epochs on the CPU backend, every wrong batch was one of the last two.
PADDING_BATCHES = 2
# More than rocAL can hold: its queues before and after the decoder, and the batch in the decoder.
_KEPT_BATCHES = 2 * PREFETCH + 2
_MAX_SIDE = 1024
_SMALL = Limits(16, 16)
_INT32 = np.iinfo(np.int32)
_Fed: TypeAlias = tuple[list[npt.NDArray[np.uint8]], npt.NDArray[np.int32], list[int]]


@partial(accepts_old_names, dropped={"prefetch": PREFETCH})
def external_source(
    reader: Reader,
    batch_size: int,
    *,
    order: Order | None = None,
    shuffle: bool = True,
    seed: int | None = None,
    ranks: Ranks | None = None,
    on_error: OnError = "raise",
    convert: bool = True,
    quality: int = 95,
    max_height: int | None = None,
    max_width: int | None = None,
    ahead: int = 3,
) -> RocalSource:
    """The samples of `reader` for rocAL, in batches of exactly `batch_size`, 2 or more. Works without rocAL.

    order, shuffle, seed, ranks, on_error: as in `readers.loader.ImageLoader`, with the same samples in the same order.
    convert: encode images that rocAL cannot decode (PNG and other media, CMYK, EXIF-rotated, very large) again as
        JPEGs, 4:4:4. If False, they are bad samples.
    quality: of these JPEGs, 95 to 100.
    max_height, max_width: the largest size of decoded images, in pixels; by default that of the set, at most 1024.
        rocAL enlarges smaller images, and allocates batch_size x max_height x max_width x 3 bytes several times.
    ahead: number of batches that a thread reads ahead.

    Raises ValueError, and DatasetError if the index has no sizes and max_height or max_width is missing.
    """
    if batch_size < 2:
        raise ValueError(f"rocAL needs a batch_size of 2 or more, not {batch_size}")
    ordering = {"order": order, "shuffle": shuffle, "seed": seed, "ranks": ranks, "on_error": on_error}
    made = {"ops": "rocAL's operators draw by themselves", "on_error": on_error}
    feed = Feed.of(reader, batch_size, DECODER, **ordering, made=made).ranked()  # type: ignore[arg-type]
    Fields(("label",), reader).refuse_targets("rocAL")
    if max_height is None or max_width is None:
        largest = limits_of(reader, cap=_MAX_SIDE)
        max_height = largest.height if max_height is None else max_height
        max_width = largest.width if max_width is None else max_width
    limits = Limits(max_height, max_width)
    return RocalSource(feed, SourceOptions(limits, convert, quality, ahead))


@dataclass(frozen=True)
class SourceOptions:
    """The options of `external_source` that are not those of a feed. Raises ValueError."""

    limits: Limits
    convert: bool
    quality: int
    ahead: int

    def __post_init__(self) -> None:
        if not 95 <= self.quality <= 100:
            raise ValueError(f"quality is 95 to 100, not {self.quality}: re-encoding must not show")
        if self.ahead < 1:
            raise ValueError(f"ahead is 1 or more, not {self.ahead}")
        if min(self.limits) < 1:
            raise ValueError(f"max_height and max_width are 1 or more, not {self.limits}")


class RocalSource(FeedPosition):
    """An iterator over batches for rocAL; made by `external_source`. For one thread at a time."""

    def __init__(self, feed: Feed, options: SourceOptions) -> None:
        super().__init__(feed)
        self.options = options
        self.grey_is_grey = False  # whether the results are normalised, and grey images remain grey
        self._converted: Counter[str] = Counter()
        self._ahead: Ahead[SourceBatch] | None = None  # only during an epoch
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._steps = self._untaken = 0  # batches of the current epoch, and how many of them are left
        self._ready: SourceBatch | None = None
        # Grey images of the largest size, so that any box of another image fits into them.
        self._padding = _fill([], [], feed.batch_size, blank(options.limits))
        self._kept: deque[_Fed] = deque(maxlen=_KEPT_BATCHES)
        feed.schedule()

    # --- what rocAL asks ------------------------------------------------------------------------------------------
    @property
    def n(self) -> int:
        """Number of images for rocAL: those of the current or next epoch, and the padding."""
        return (len(self) + PADDING_BATCHES) * self.batch_size

    @property
    def max_height(self) -> int:
        """The largest height of decoded images, for `fn.external_source`."""
        return self.options.limits.height

    @property
    def max_width(self) -> int:
        """The largest width of decoded images, for `fn.external_source`."""
        return self.options.limits.width

    def __iter__(self) -> RocalSource:
        return self

    def __next__(self) -> _Fed:
        """The next batch, or padding after the last batch of an epoch; starts an epoch if necessary."""
        if self._ahead is None and self._place.begun is None:
            self.start()
        batch, fed = self.prepare(), self._padding
        self._ready = None
        if batch is not None and self._progress is not None:
            fed = batch.fed
            self._bad.extend(batch.bad)
            self._converted.update(batch.converted)
            self._progress.taken += 1
        self._kept.append(fed)
        return fed

    # --- epochs ---------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Begin the next epoch, or continue at the position of `load_state_dict`; abandons the current epoch."""
        self.stop()
        run, first = self._join(self._place.next)
        feed = replace(self._feed.at(self._place.next), run=run)
        self._place.begin(lambda: feed.start)
        self._progress, self._bad, self._converted = Progress(feed, first=first), [], Counter()
        self._steps = self._untaken = feed.steps()
        self._ahead = Ahead(_Work(feed, self.options).make, self._steps, self.options.ahead, "packer-rocal-ahead")
        self._finalizer = weakref.finalize(self, self._ahead.stop)

    def prepare(self) -> SourceBatch | None:
        """The batch that `next` will return, None for padding. Errors of the batch are raised here, outside rocAL."""
        if self._ready is None and self._untaken and self._ahead is not None:
            self._ready = self._ahead.take()
            self._untaken -= 1
        return self._ready

    def finish(self) -> None:
        """End an epoch after its last batch; the next `start` begins the epoch after it."""
        self.stop()
        self._warn(stacklevel=3)
        self._put(self._place.next)

    def stop(self) -> None:
        """End the reading thread; after this, `next` returns padding. Idempotent."""
        if self._finalizer is not None:
            self._finalizer()
        self._ahead = self._finalizer = self._ready = None
        self._untaken = 0

    # --- where it is ----------------------------------------------------------------------------------------------
    @property
    def converted(self) -> dict[str, int]:
        """Number of images of the current or last epoch that were encoded again for rocAL, by reason."""
        return dict(self._converted)

    def __len__(self) -> int:
        """Batches of the current epoch on this rank, used ones included, or of the next epoch; without padding."""
        if self._ahead is not None:
            return self._steps
        return self._feed.at(self._place.next).steps()

    def close(self) -> None:
        """Join the reading thread and release the kept batches. Idempotent."""
        self.stop()
        self._kept.clear()

    def _put(self, start: Start) -> None:
        self.stop()
        super()._put(start)


# --- one batch --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SourceBatch:
    """A batch for rocAL. fed: (images, labels, lengths). rows: int64 [n], the samples of its first n images. cursor: of
    the epoch after this batch. converted: number of images that were encoded again, by reason."""

    fed: _Fed
    rows: Int64s
    cursor: int
    bad: Sequence[BadSample]
    converted: Counter[str]


@dataclass(frozen=True, slots=True)
class _Work:
    """Makes the batches of the first epoch of a feed."""

    feed: Feed
    options: SourceOptions

    def make(self, step: int) -> SourceBatch:
        """The batch of a step. Raises BadSampleError with on_error="raise", and ValueError for labels beyond int32."""
        epoch = self.feed.start.epoch
        positions, rows = self.feed.rows(epoch, step)
        settled = self.feed.settle(epoch, positions, rows, self._vet(rows), self._vet_one)
        labels = self.feed.reader.labels[settled.rows]
        if labels.size and not _INT32.min <= int(labels.min()) <= int(labels.max()) <= _INT32.max:
            raise ValueError(f"rocAL takes labels of 32 bits, found {labels.min()} to {labels.max()}")
        data = [image.data for image in settled.values]
        fed = _fill(data, labels.tolist(), self.feed.batch_size, data[0] if data else blank(_SMALL))
        converted = Counter(image.reason for image in settled.values if image.reason)
        return SourceBatch(fed, settled.rows, self.feed.after(step + 1).cursor, settled.bad, converted)

    def _vet(self, rows: Int64s) -> Iterator[Vetted | Exception]:
        """The checked image of each row, or its error."""
        info, options = self.feed.reader.image_info(rows), self.options
        sizes = zip(info.height.tolist(), info.width.tolist(), strict=True)
        for data, size in zip(self.feed.read(rows), sizes, strict=True):
            try:
                if isinstance(data, Exception):
                    raise data
                yield vet(data, options.limits, size=size, convert=options.convert, quality=options.quality)
            except SAMPLE_ERRORS as error:
                yield error

    def _vet_one(self, row: int, position: int) -> Vetted:
        (image,) = self._vet(np.array([row], np.int64))
        if isinstance(image, Exception):
            raise image
        return image


def _fill(
    images: list[npt.NDArray[np.uint8]], labels: list[int], batch_size: int, filler: npt.NDArray[np.uint8]
) -> _Fed:
    """A batch of `batch_size` images for rocAL, padded with `filler`."""
    missing = batch_size - len(images)
    images = [*images, *[filler] * missing]
    return images, np.array([*labels, *[NO_LABEL] * missing], np.int32), [len(image) for image in images]
