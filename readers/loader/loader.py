"""`ImageLoader`: batches of decoded, augmented images from any reader, in an order that can be resumed exactly."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch

from cache.node import usable_cpus
from cache.ranks import rank_and_world_size
from readers.augment.cpu import Finish
from readers.augment.ops import Normalize, Op
from readers.augment.recipe import Recipe
from readers.decode import DECODER
from readers.decode.choice import DecoderName
from readers.errors import UnknownNameError
from readers.loader.batch import BadSample, Batch, ImageMemory
from readers.loader.crew import Crew
from readers.loader.device import DeviceStage, DeviceWork, device_path, numbered
from readers.loader.work import EpochWork, OnError
from readers.order import Order, ResumeToken, Schedule, Sequential, Shuffled
from readers.order.schedule import Tail
from readers.sample import Buffer, Reader

__all__ = ["ImageLoader", "Layout"]

Layout: TypeAlias = Literal["channels_last", "NCHW", "NHWC"]
_LAYOUTS = ("channels_last", "NCHW", "NHWC")
_ON_ERROR = ("raise", "skip", "substitute")
# A thread takes some milliseconds of work at a time: fewer small images would cost more in handing over than they do.
_VALUES_AT_ONCE = 2 << 20
_MOST_ROWS, _LEAST_ROWS = 64, 8


class ImageLoader:
    """Iterate over a reader in batches; each `for` loop is one epoch.

        loader = ImageLoader(reader, 256, augment=[RandomResizedCrop(224), RandomHorizontalFlip()], seed=1)
        for images, labels in loader:       # uint8 [256, 3, 224, 224], int64 [256]
            ...

    augment: ops of `readers.augment`, drawn by (seed, epoch, position). fields: what a batch is made of, in this order:
    "image"; "label" (int64 [n], -1 without one); "key" (list of str); "index" (int64 [n]); other fields of the set
    (lists of bytes, None where a sample lacks it). dtype: uint8, or float32, float16 or bfloat16 in 0..1; Normalize in
    `augment` makes float32.
    layout: "channels_last" is [n, 3, h, w] with channels last in memory, "NCHW" is contiguous, "NHWC" is [n, h, w, 3].

    order: positions to samples (default: a global shuffle by `seed`, or as stored with shuffle=False). rank and
    world_size: found in torch.distributed, torchrun, Slurm or MPI when not given. tail: see `readers.order.Schedule`.
    on_error: "raise", "skip" (smaller batches) or "substitute" (another sample); see `bad_samples`.

    threads: default one per CPU this process may use, shared among the ranks of the node. prefetch: batches made ahead.
    pin_memory: default where CUDA is available. device: where batches are. On a CUDA device they are finished there,
    and `prefetch` of them wait there (`readers.loader.device`). decoder: "torchcodec" or "torchvision" decode what
    they are good at and leave the rest to the CPU; "auto" takes the first of them that there is on a CUDA device, and
    the CPU elsewhere.

    A loop that is left early ends its epoch: the next loop begins the next one. `state_dict` names the first batch that
    has not been handed out; `load_state_dict` lets the next loop begin there, on any number of ranks.
    """

    def __init__(
        self,
        reader: Reader,
        batch_size: int,
        *,
        augment: Sequence[Op] = (),
        order: Order | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        tail: Tail = "drop_last",
        fields: Sequence[str] = ("image", "label"),
        dtype: torch.dtype | None = None,
        layout: Layout = "channels_last",
        on_error: OnError = "raise",
        threads: int | None = None,
        prefetch: int = 3,
        pin_memory: bool | None = None,
        device: torch.device | str = "cpu",
        decoder: DecoderName = "auto",
    ) -> None:
        self.reader, self.batch_size, self.seed = reader, batch_size, seed
        self.recipe = Recipe(augment)
        if order is None:
            order = Shuffled(len(reader), seed) if shuffle else Sequential(len(reader))
        self.order = order
        self.rank, self.world_size = rank_and_world_size(rank, world_size, order.groups)
        self.tail: Tail = tail
        self.fields = _checked_fields(fields, reader)
        self.dtype = _dtype(dtype, self.recipe)
        _one_of("layout", layout, _LAYOUTS)
        _one_of("on_error", on_error, _ON_ERROR)
        self.layout, self.on_error = layout, on_error
        self.threads = usable_cpus() if threads is None else threads
        if self.threads < 1 or prefetch < 1:
            raise ValueError(f"threads and prefetch are at least 1, not {self.threads} and {prefetch}")
        self.prefetch = prefetch
        self.device = numbered(device)
        pinned = torch.cuda.is_available() if pin_memory is None else pin_memory
        planar, normalize = layout == "NCHW", self.recipe.normalize
        self._path = device_path(
            self.device, decoder, dtype=self.dtype, planar=planar, normalize=normalize, ahead=prefetch
        )
        if self._path is not None:
            stored: tuple[torch.dtype, bool, Normalize | None] = (torch.uint8, False, None)
        else:
            stored = (self.dtype, planar, normalize)
        self._finish = Finish(*stored)
        self._memory = ImageMemory(*stored[:2], pinned, prefetch + 2)
        self._epoch = self._cursor = 0
        self._begun = False
        self._resumed: Order | None = None
        self._bad: list[BadSample] = []
        self._running: weakref.ref[_Epoch] | None = None
        self._schedule(order)

    # --- where it is --------------------------------------------------------------------------------------------
    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._epoch

    @property
    def bad_samples(self) -> tuple[BadSample, ...]:
        """The samples skipped or replaced in the current or, between loops, the last epoch, on this rank."""
        return tuple(sorted(self._bad, key=lambda sample: sample.position))

    @property
    def decoder(self) -> str:
        """What decodes the images, as resume tokens name it."""
        return self._path.decoder.name if self._path is not None else DECODER

    def set_epoch(self, epoch: int) -> None:
        """Begin the next loop at the start of `epoch`."""
        if epoch < 0:
            raise ValueError(f"an epoch is 0 or more, not {epoch}")
        self._seek(epoch, 0, None)

    def state_dict(self) -> dict[str, Any]:
        """A small dictionary of plain values; the same on every rank, and good for any number of ranks."""
        order = self._resumed or self.order
        epoch, cursor = self._epoch, self._cursor
        if not self._schedule(order).steps(cursor):
            order, epoch, cursor = self.order, epoch + 1, 0
        fingerprint, samples = self.reader.fingerprint, len(self.reader)
        return ResumeToken(self.seed, epoch, cursor, fingerprint, self.decoder, order.spec(), samples).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next loop begin where `state` was taken.

        Raises ResumeError for a token of another set or another kind of order; warns where another decoder made it.
        """
        token = ResumeToken.from_dict(state)
        spec, samples = self.order.spec(), len(self.reader)
        token.check(fingerprint=self.reader.fingerprint, order_spec=spec, decoder=self.decoder, samples=samples)
        self.seed = token.seed
        self.order = self.order.with_seed(token.seed)
        self._seek(token.epoch, token.cursor, self.order.resumed(token.order))

    def __len__(self) -> int:
        """Batches of the next loop on this rank: of a whole epoch, or what is left of a resumed one."""
        return self._schedule(self._resumed or self.order).steps(self._cursor)

    # --- one epoch ----------------------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        if self._begun:
            self._seek(self._epoch + 1, 0, None)
        epoch = _Epoch(self)
        self._begun, self._running = True, weakref.ref(epoch)
        return epoch

    def _schedule(self, order: Order) -> Schedule:
        return Schedule(order, self.batch_size, self.rank, self.world_size, self.tail)

    def _seek(self, epoch: int, cursor: int, order: Order | None) -> None:
        """Let the next loop begin there; a loop under way ends."""
        running = self._running() if self._running else None
        if running is not None:
            running.close()
        self._epoch, self._cursor, self._resumed, self._begun = epoch, cursor, order, False

    def _collect(self, batch: Batch) -> tuple[Any, ...]:
        """The fields of a finished batch."""
        rows = batch.kept()
        images, indices = batch.images, batch.indices
        if rows is not None:
            images, indices = images[rows], indices[rows]
        return tuple(self._field(name, images, indices) for name in self.fields)

    def _field(self, name: str, images: torch.Tensor, indices: Any) -> Any:
        if name == "image":
            images = images.permute(0, 2, 3, 1) if self.layout == "NHWC" else images
            return images.to(self.device, non_blocking=True)
        if name == "label":
            return torch.from_numpy(self.reader.labels[indices]).to(self.device, non_blocking=True)
        if name == "index":
            return torch.from_numpy(indices).to(self.device, non_blocking=True)
        if name == "key":
            keys = self.reader.keys
            return [keys[i] for i in indices.tolist()]
        try:
            return list(self.reader.read_many(indices, name))
        except UnknownNameError:
            return [self._value(i, name) for i in indices.tolist()]

    def _value(self, index: int, name: str) -> Buffer | None:
        try:
            return self.reader.read(index, name)
        except UnknownNameError:
            return None  # this sample lacks it


class _Epoch(Iterator[tuple[Any, ...]]):
    """One run through the rest of an epoch. Closed at its end, on any exception, and when dropped."""

    def __init__(self, loader: ImageLoader) -> None:
        self._loader = loader
        loader._bad = []
        order = loader._resumed or loader.order
        schedule, cursor = loader._schedule(order), loader._cursor
        self._schedule, self._first, self._steps, self._step = schedule, cursor, schedule.steps(cursor), 0
        given = (
            loader.reader,
            order,
            loader.recipe,
            lambda step: schedule.positions(step, cursor),
            self._steps,
            loader._finish,
            loader._memory,
            loader.seed,
            loader._epoch,
            loader.on_error,
        )
        path, rows = loader._path, _rows_at_once(loader)
        work = EpochWork(*given) if path is None else DeviceWork(*given, decodes=path.decodes)
        crew = Crew(work, loader.threads, self._steps, loader.prefetch, rows)
        self._crew: Crew | DeviceStage | None = crew
        if path is not None:
            self._crew = DeviceStage(crew, work, path, self._steps)
        self._finalizer = weakref.finalize(self, self._crew.stop)

    def __next__(self) -> tuple[Any, ...]:
        if self._crew is None:
            raise StopIteration
        if self._step == self._steps:
            self._end()
            raise StopIteration
        try:
            batch = self._crew.take()
            if batch.error is not None:
                raise batch.error
            result = self._loader._collect(batch)
        except BaseException:
            self.close()
            raise
        loader = self._loader
        loader._bad.extend(batch.bad)
        loader._cursor = self._schedule.cursor_after(self._step, self._first)
        self._step += 1
        return result

    def close(self) -> None:
        """Stop the threads; there are no more batches."""
        self._crew = None
        self._finalizer()

    def _end(self) -> None:
        loader = self._loader
        loader._seek(loader._epoch + 1, 0, None)
        if loader._bad:
            first = loader.bad_samples[0]
            done = "skipped" if loader.on_error == "skip" else "replaced"
            warnings.warn(
                f"epoch {loader._epoch - 1}: {len(loader._bad)} bad samples were {done}, the first is sample "
                f"{first.index} ({first.key}): {first.reason}; see loader.bad_samples",
                stacklevel=3,
            )


def _checked_fields(fields: Sequence[str], reader: Reader) -> tuple[str, ...]:
    known = ["image", "label", "key", "index", *(name for name in reader.fields if name != "image")]
    for name in fields:
        if name not in known:
            raise UnknownNameError(f"no field {name!r}; a batch can have {', '.join(known)}")
    return tuple(fields)


def _dtype(dtype: torch.dtype | None, recipe: Recipe) -> torch.dtype:
    if dtype is None:
        return torch.uint8 if recipe.normalize is None else torch.float32
    if dtype not in (torch.uint8, torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"dtype is torch.uint8, float32, float16 or bfloat16, not {dtype}")
    if dtype == torch.uint8 and recipe.normalize is not None:
        raise ValueError("normalised values do not fit into uint8; leave Normalize out, or ask for a float dtype")
    return dtype


def _rows_at_once(loader: ImageLoader) -> int:
    height, width = loader.recipe.out_size or (224, 224)
    rows = max(_LEAST_ROWS, min(_MOST_ROWS, _VALUES_AT_ONCE // (height * width * 3)))
    return max(1, min(rows, -(-loader.batch_size // loader.threads)))


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is one of {', '.join(allowed)}, not {value!r}")
