"""`ImageLoader`: batches of decoded, augmented images from any reader, in an order that can be resumed exactly."""

from __future__ import annotations

import copy
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import torch

from cache.node import own_gpu, usable_cpus
from cache.stores.ranges import BlockPool
from readers.augment.cpu import Finish, check_unchanged, dtype_of, kind_of_first
from readers.augment.ops import Normalize, Op
from readers.augment.recipe import Recipe, made_of, recipes_of_views
from readers.batch import Fields
from readers.decode import DECODER
from readers.feed import (
    BadSample,
    Feed,
    OnError,
    check_choice,
    decoder_name,
)
from readers.loader.crew import Crew
from readers.loader.stats import LoaderStats, LoopTimers, Totals, metrics_of
from readers.loader.work import Batch, EpochWork, FieldWork, IndexWork, UnchangedWork, without_memory
from readers.loop import FeedLoader, Maker
from readers.options import Compose, Decode, FieldOptions, Images, Ranks, Threads, Views, accepts_old_names
from readers.order import Order
from readers.reader import Reader, depth_warning
from readers.trace import Trace, TraceSlot

if TYPE_CHECKING:
    from readers.decode.batch import DecoderName
    from readers.decode.device import CpuShare
    from readers.loader.device import DevicePath, DeviceStage

_LAYOUTS = ("channels_last", "NCHW", "NHWC")
# A thread takes a few milliseconds of work at a time: with fewer small images, the hand-over would cost more.
_VALUES_AT_ONCE = 2 << 20
_MOST_ROWS, _LEAST_ROWS = 64, 8


class ImageLoader(FeedLoader):
    """Iterate over a reader in batches; each `for` loop is one epoch.

        loader = ImageLoader(reader, 256, augment=[RandomResizedCrop(224), RandomHorizontalFlip()], seed=1)
        for images, labels in loader:       # uint8 [256, 3, 224, 224], int64 [256]
            ...

    augment: ops of `readers.augment`, drawn by (seed, epoch, position). With MixUp or CutMix labels are soft, float32
        [n, classes]. With `Views`, "image" is a tuple of tensors, one for each view.
    order: the order of the samples (default: a global shuffle, or as stored with shuffle=False).
    seed: seed of the order and the augmentation; default: that of `order`, or 0.
    ranks: `Ranks`, how ranks share an epoch.
    fields: the fields of a batch, in this order: "image"; "label" (int64 [n], -1 without one); "key" (list of str);
        "index" (int64 [n]); other fields of the set, decoded by their kind and moved with the image (`readers.batch`):
        masks as [n, h, w], all others as lists, None if a sample lacks one. Batches are tuples, or dictionaries if
        fields is a mapping, as {"pixel_values": "image", "labels": "label"}. Without "image" no image is read. Use
        `FieldOptions` to set how masks and boxes follow the image.
    decode: "RGB", "unchanged", or a `Decode`, which also sets the decoder and the dtype and layout of tensors.
    on_error: "raise", "skip" (smaller batches) or "substitute" (another sample); see `bad_samples`.
    threads: default: one per CPU that this process may use, divided among the ranks of the node; `Threads` also sets
        the number of batches ahead and their memory.
    device: the device of the batches, "cpu" or "cuda". On a CUDA device batches are finished and queued there
        (`readers.loader.device`). "cuda" is the device chosen by torch.cuda.set_device, or that of the local rank.

    A loop begins with its first batch. Leaving a loop early ends its epoch; the next loop begins the next epoch.
    `state_dict` gives the position of the first batch that has not been returned; `load_state_dict` begins the next
    loop there, on any number of ranks. Raises DeviceError if a named decoder or engine, or the device in mid-epoch,
    fails; TrainerError if two loops run at once, or if a framework would lose or repeat batches.
    """

    @accepts_old_names
    def __init__(
        self,
        reader: Reader,
        batch_size: int,
        *,
        augment: Sequence[Op] | Views = (),
        order: Order | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        ranks: Ranks | None = None,
        fields: Sequence[str] | Mapping[str, str] | FieldOptions = ("image", "label"),
        decode: Images | Decode = "RGB",
        on_error: OnError = "raise",
        threads: int | Threads | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        decoding = decode if isinstance(decode, Decode) else Decode(decode)
        check_choice("decode", decoding.images, ("RGB", "unchanged"))
        self.decode, decoder, dtype, layout = decoding.images, decoding.decoder, decoding.dtype, decoding.layout
        own = self.decode == "unchanged"
        images = _check_for_unchanged(reader, decoder) if own else ("uint8", 3)
        views = augment.lists if isinstance(augment, Views) else [augment]
        check_choice("compose", decoding.compose, get_args(Compose))
        self._recipes = recipes_of_views(views, images, compose=decoding.compose == "auto")
        self.recipe = self._recipes[0]
        self._classes = _count_classes(reader) if self.recipe.batch_ops else 0
        self._fields = Fields(fields, reader)
        for recipe in self._recipes:
            self._fields.check_ops(recipe.ops)
        self.dtype = _choose_dtype(dtype, self.recipe, images, own=own)
        self._own_dtype = dtype is None
        check_choice("layout", layout, _LAYOUTS)
        self.layout = layout
        crew = threads if isinstance(threads, Threads) else Threads(threads)
        self.threads, self.prefetch = usable_cpus() if crew.number is None else crew.number, crew.prefetch
        if self.threads < 1 or self.prefetch < 1:
            raise ValueError(f"threads and prefetch are at least 1, not {self.threads} and {self.prefetch}")
        self.exact_colours = decoding.exact_colours
        self.device = find_device(device)
        self._compiled = decoding.uses_codec()
        pinned = torch.cuda.is_available() if crew.pin_memory is None else crew.pin_memory
        planar, normalize = layout == "NCHW", self.recipe.normalize
        made = {
            "dtype": self.dtype,
            "planar": planar,
            "recipe": self.recipe,
            "ahead": self.prefetch,
            "reader": reader,
            "engine": decoding.engine,
        }
        self._path = None
        if not own:
            name = "cpu" if decoder == "compiled" else decoder
            self._path = device_path(self.device, name, decoding.cpu_share, self.threads, **made)
        if self._path is not None:
            stored: tuple[torch.dtype, bool, Normalize | None] = (torch.uint8, False, None)
        else:
            stored = (self.dtype, planar, normalize)
        self._finish_images = Finish(*stored)
        self._memory = _ImageMemory(*stored[:2], pinned, (self.prefetch + 2) * len(self._recipes))
        self._timers: LoopTimers | None = None
        self._seen: Totals = Counter()
        self._slot, self._notes_depth = TraceSlot(), True
        ordering = {"order": order, "shuffle": shuffle, "seed": seed, "ranks": ranks, "on_error": on_error}
        made_by = made_of([recipe.ops for recipe in self._recipes], self.decode, on_error)
        super().__init__(Feed.of(reader, batch_size, self.decoder, **ordering, made=made_by))  # type: ignore[arg-type]

    @property
    def fields(self) -> tuple[str, ...]:
        return self._fields.wanted

    @property
    def decoder(self) -> str:
        """The decoder's name in resume tokens."""
        name = self._path.name if self._path is not None else DECODER
        geometry = next(filter(None, (recipe.geometry for recipe in self._recipes)), "")
        return decoder_name(name, self.exact_colours, geometry)

    def with_options(self, **options: Any) -> ImageLoader:
        """A loader with some arguments replaced, at the start of its first epoch. Raises as the constructor does."""
        return ImageLoader(**{**self._arguments, **options})

    def over(self, reader: Reader, order: Order, *, threads: int | None = None) -> ImageLoader:
        """A loader with the same options over another reader, at the start of its first epoch.

        It shares memory with this loader: do not use both at the same time. threads: default: those of this loader.
        """
        other = copy.copy(self)
        other.threads = self.threads if threads is None else threads
        crew = self._arguments["threads"]
        crew = replace(crew, number=other.threads) if isinstance(crew, Threads) else other.threads
        other._arguments = {**self._arguments, "reader": reader, "order": order, "threads": crew}
        other._timers, other._seen = None, Counter()
        other._path = None if self._path is None else self._path.unmeasured(other.threads)
        FeedLoader.__init__(other, Feed(reader, order, self.batch_size, self._feed.options))
        return other

    # --- where its time goes --------------------------------------------------------------------------------------
    def stats(self, *, reset: bool = False) -> LoaderStats:
        """Times of the current or last loop by stage; `print(loader.stats())` shows the bottleneck.

        reset: restart counting now.
        """
        return LoaderStats() if self._timers is None else self._timers.stats(reset=reset)

    def metrics(self, *, total: bool = False, prefix: str = "packer/") -> dict[str, float]:
        """Figures of this rank for a logger, since the last call; with total=True since the loader was made.

            wait_share             of the time of its loops, in which training waited for a batch, 0 to 1
            images_per_s           handed out
            batch_ms_p50 p95 p99   from one batch to the next, within 3 %; NaN where there was none
            wait_ms_p50 p95 p99    of that, waiting
            threads_busy_share     of the threads, 0 to 1
            read_bytes_per_s       of images
            cache_hit_share        of images read, those from a cache
            device_decode_share    of images decoded where batches are finished on a device; 0 on the CPU
            bad_samples            skipped or replaced

        Names begin with `prefix`. Clocks are the host's: nothing waits for a GPU. A second caller that wants its own
        "since the last call" makes a `readers.metrics.Meter` of the loader.
        """
        now = self.totals()
        since, self._seen = (now, self._seen) if total else (now - self._seen, now)
        return metrics_of(since, self.threads, prefix)

    def totals(self) -> Totals:
        """Sums of all loops so far, for `readers.metrics`."""
        return Counter() if self._timers is None else self._timers.lifetime()

    @contextmanager
    def trace(self, path: str | os.PathLike[str], *, limit: int = 200_000) -> Iterator[Trace]:
        """Record the work of the threads inside the block, and write it to `path` at its end, for Perfetto.

        limit: number of last events to keep. Raises OSError, and ValueError if a trace is already being recorded.
        """
        trace = Trace("ImageLoader", limit=limit)
        with self.record(trace):
            try:
                yield trace
            finally:  # also if the training code fails
                trace.save(path)

    @contextmanager
    def record(self, trace: Trace) -> Iterator[None]:
        """Add the work of the threads inside the block to a trace. Raises ValueError if one is being recorded."""
        if self._slot.trace is not None:
            raise ValueError("a trace of this loader is being recorded already")
        self._slot.trace = trace
        try:
            yield
        finally:
            self._slot.trace = None

    # --- one epoch ------------------------------------------------------------------------------------------------
    def _open(self, feed: Feed) -> Maker:
        timers = LoopTimers(feed.start.epoch, feed.steps(), self.threads, self.prefetch, self._slot, self._timers)
        self._timers = timers
        return _TimedMaker(self._open_maker(feed, timers), timers)

    def _open_maker(self, feed: Feed, timers: LoopTimers) -> Crew | DeviceStage | IndexWork:
        fields = FieldWork(self._fields, feed.reader) if self._fields.stored else None
        if "image" not in self.fields:
            return IndexWork(feed, fields)
        work = self._work(feed, fields)
        fill = timers.fill if self._path is None else None
        stays = self._path is not None
        crew = Crew(work, self.threads, self.prefetch, self._rows_at_once(), timers, fill, stays)
        return crew if self._path is None else self._path.stage(crew, work, timers)

    def _work(self, feed: Feed, fields: FieldWork | None) -> EpochWork:
        """The work of the threads in an epoch."""
        if self.decode == "unchanged":
            arguments = (feed, self._recipes, self._finish_images, without_memory, self._classes, fields)
            return UnchangedWork(*arguments, memory=self._memory.images, dtype=None if self._own_dtype else self.dtype)
        arguments = (feed, self._recipes, self._finish_images, self._memory.images, self._classes, fields)
        work = EpochWork(*arguments) if self._path is None else self._path.work(*arguments)
        work.exact_colours, work.compiled = self.exact_colours, self._compiled
        work.notes_depth = self._notes_depth
        return work

    def _finish(self, batch: Batch) -> tuple[Any, Sequence[BadSample]]:
        """The fields of a finished batch."""
        if batch.error is not None:
            raise batch.error
        if batch.deep >= 0 and self._notes_depth:
            self._notes_depth = False
            warnings.warn(depth_warning(self.reader, batch.deep), stacklevel=3)
        assert self._timers is not None  # a loop is under way
        clock = self._timers.consumer

        def field(name: str) -> Any:
            if name == "image":
                views = [v.permute(0, 2, 3, 1) if self.layout == "NHWC" else v for v in batch.images]
                if self.device.type != "cpu":
                    clock.lap("collate")
                    views = [v.to(self.device, non_blocking=True) for v in views]
                    clock.lap("copy")
                return tuple(views) if len(views) > 1 else views[0]
            if name in batch.columns:
                column = batch.columns[name]
                return _to_device(column, self.device) if self._fields.is_array(name) else column
            if name == "label" and batch.labels is not None:
                value: Any = batch.labels
            else:
                value = Fields.column(self.reader, batch.indices, name)
                if name == "key":
                    return value
                value = torch.from_numpy(value)
            return value.to(self.device, non_blocking=True)

        clock.start()
        made = self._fields.collect(field)
        clock.stop("collate")
        self._timers.hand_out(len(batch.indices), len(batch.bad))
        return made, batch.bad

    def _rows_at_once(self) -> int:
        height, width = self.recipe.out_size or (224, 224)
        rows = max(_LEAST_ROWS, min(_MOST_ROWS, _VALUES_AT_ONCE // (height * width * 3 * len(self._recipes))))
        return max(1, min(rows, -(-self.batch_size // self.threads)))


def device_path(
    device: torch.device, decoder: DecoderName, cpu_share: CpuShare, threads: int, **options: Any
) -> DevicePath | None:
    """The stages that make batches on a device; None if the crew makes them: on the CPU with decoder "auto" or "cpu".

    GPU code is imported only here. Raises MissingExtraError if the decoder is not installed, DeviceError if it or the
    engine does not work, and ValueError, also for cpu_share or engine where the CPU does all the work.
    """
    on_cpu = device.type != "cuda" and decoder in ("auto", "cpu")
    if cpu_share != 0 and (on_cpu or decoder == "cpu"):
        raise ValueError(
            f"cpu_share={cpu_share!r} is the CPU's share of a GPU's decoding, but with device={str(device)!r} and "
            f"decoder={decoder!r} the CPU decodes everything; leave cpu_share= out, or decode on a GPU"
        )
    if on_cpu:
        if options["engine"] != "auto":
            raise ValueError(
                f"engine={options['engine']!r} is for a GPU, but with device={str(device)!r} and decoder={decoder!r} "
                f"the threads crop and resize; leave engine= out"
            )
        return None
    from readers.decode.device import Share
    from readers.loader.device import open_path

    return open_path(device, decoder, share=Share(cpu_share, threads), **options)


class _ImageMemory:
    """Allocates the tensors of batches, reusing the memory of earlier batches.

    Memory is reused only once nothing refers to the earlier batch (see `cache.stores.ranges`), so a batch may be kept.
    Pinned memory comes from torch's pool, which waits for copies under way.
    """

    def __init__(self, dtype: torch.dtype, planar: bool, pinned: bool, kept: int) -> None:
        self._dtype, self._planar, self._pinned = dtype, planar, pinned
        self._blocks = BlockPool(kept)

    def images(
        self, count: int, height: int, width: int, channels: int = 3, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A tensor [count, channels, height, width], contiguous in this order (planar) or channels last."""
        dtype = dtype or self._dtype
        shape = (count, channels, height, width) if self._planar else (count, height, width, channels)
        size = count * height * width * channels
        if self._pinned:
            images = torch.empty(shape, dtype=dtype, pin_memory=True)
        elif not size:
            images = torch.empty(shape, dtype=dtype)
        else:
            block: Any = self._blocks.take(size * dtype.itemsize)
            images = torch.frombuffer(block, dtype=dtype).view(shape)
        return images if self._planar else images.permute(0, 3, 1, 2)


class _TimedMaker:
    """A maker of batches that times the waits of the training loop. Holds no reference to the loader."""

    def __init__(self, maker: Crew | DeviceStage | IndexWork, timers: LoopTimers) -> None:
        self._maker, self._timers = maker, timers

    @property
    def ready(self) -> int:
        return self._maker.ready

    def take(self) -> Batch:
        """The next batch; see `Maker`."""
        self._timers.ask(self._maker.ready)
        batch = self._maker.take()
        self._timers.get()
        return batch

    def stop(self) -> None:
        """Stop making batches."""
        self._timers.end()
        self._maker.stop()


def _count_classes(reader: Reader) -> int:
    """Number of classes, by names and largest label. Raises ValueError if the set has none."""
    labels = reader.labels
    count = max(len(reader.classes), int(labels.max()) + 1 if len(labels) else 0)
    if not count:
        raise ValueError("MixUp and CutMix mix labels, but no sample of this set has one: leave them out of augment")
    return count


def _to_device(value: Any, device: torch.device) -> Any:
    """A field of a batch with its tensors on the device."""
    if isinstance(value, list | tuple):
        return type(value)(_to_device(item, device) for item in value)
    return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value


def _check_for_unchanged(reader: Reader, decoder: str) -> tuple[str, int] | None:
    """(dtype, channels) of the first image. Raises ValueError if images cannot be decoded unchanged."""
    check_unchanged(reader)
    if decoder not in ("auto", "cpu"):
        raise ValueError(f"decode='unchanged' is done by the CPU: leave decoder={decoder!r} out")
    return kind_of_first(reader)


def _choose_dtype(
    dtype: torch.dtype | None, recipe: Recipe, images: tuple[str, int] | None, *, own: bool
) -> torch.dtype:
    """The dtype of the batches; by default the dtype that the recipe makes of the images.

    images: (dtype, channels) of the images, if known. own: whether images keep their dtype. Raises ValueError.
    """
    if dtype is None:
        kind = "uint8" if images is None else images[0]
        return dtype_of(kind) if recipe.normalize is None else torch.float32
    if dtype == torch.uint8 and own:
        raise ValueError(
            "decode='unchanged' gives images in their own dtype: leave dtype out, or ask for a float dtype"
        )
    if dtype not in (torch.uint8, torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"dtype is torch.uint8, float32, float16 or bfloat16, not {dtype}")
    if dtype == torch.uint8 and recipe.normalize is not None:
        raise ValueError("normalised values do not fit into uint8; leave Normalize out, or ask for a float dtype")
    return dtype


def find_device(device: torch.device | str) -> torch.device:
    """The torch device; a CUDA device without a number gets one from `own_gpu`.

    Raises ValueError for another kind of device, and if there is no GPU.
    """
    kind = str(device).partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(
            f"device is 'cpu' or 'cuda' (GPUs of NVIDIA and of AMD, also 'cuda:1'), not {str(device)!r}; for another "
            f"one leave device= out, and write  images.to({str(device)!r})  in the loop"
        )
    named = torch.device(device)
    if named.type != "cuda":
        return named
    if not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r}: torch {torch.__version__} finds no GPU here; leave device= out")
    return torch.device("cuda", own_gpu(torch.cuda.device_count()) if named.index is None else named.index)
