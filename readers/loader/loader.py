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
from readers.errors import TrainerError, UnknownNameError
from readers.fields import checked_fields
from readers.loader.batch import BadSample, Batch, ImageMemory, checked_dtype
from readers.loader.crew import Crew
from readers.loader.device import DeviceStage, DeviceWork, device_path, numbered
from readers.loader.work import EpochWork, IndexWork, OnError
from readers.order import Order, ResumeToken, Schedule
from readers.order.choice import choose_order, choose_tail
from readers.order.schedule import Tail
from readers.sample import Buffer, Reader
from readers.trainers import LIGHTNING, calling_package, check_epoch, find_trainer

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
    (lists of bytes, None where a sample lacks it). Batches are tuples, or with {"pixel_values": "image", "labels":
    "label"} dictionaries with these names. Without "image" no image is read. dtype: uint8, or float32, float16 or
    bfloat16 in 0..1; Normalize in `augment` makes float32. layout: "channels_last" is [n, 3, h, w] with channels last
    in memory, "NCHW" is contiguous, "NHWC" is [n, h, w, 3].

    order: positions to samples (default: a global shuffle, or as stored with shuffle=False). seed: of the order and of
    the augmentation; by default that of `order`, or 0. rank and world_size: when not given, found in torch.distributed,
    torchrun, Slurm or MPI each time a loop begins. tail: see `readers.order.Schedule`; by default "drop_last" for a
    shuffle and "exact", every sample once, with shuffle=False. on_error: "raise", "skip" (smaller batches) or
    "substitute" (another sample); see `bad_samples`.

    threads: default one per CPU this process may use, shared among the ranks of the node. prefetch: batches made ahead.
    pin_memory: default where CUDA is available. device: where batches are. On a CUDA device they are finished there,
    and `prefetch` of them wait there (`readers.loader.device`). decoder: "torchcodec" or "torchvision" decode what
    they are good at and leave the rest to the CPU; "auto" takes the first of them that there is on a CUDA device, and
    the CPU elsewhere.

    A loop begins with its first batch; a loop that is left early ends its epoch: the next loop begins the next one.
    `state_dict` names the first batch that has not been handed out; `load_state_dict` lets the next loop begin there,
    on any number of ranks. TrainerError: two loops run at once, or a framework would lose or repeat batches.
    """

    def __init__(
        self,
        reader: Reader,
        batch_size: int,
        *,
        augment: Sequence[Op] = (),
        order: Order | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        tail: Tail | None = None,
        fields: Sequence[str] | Mapping[str, str] = ("image", "label"),
        dtype: torch.dtype | None = None,
        layout: Layout = "channels_last",
        on_error: OnError = "raise",
        threads: int | None = None,
        prefetch: int = 3,
        pin_memory: bool | None = None,
        device: torch.device | str = "cpu",
        decoder: DecoderName = "auto",
    ) -> None:
        self.reader, self.batch_size = reader, batch_size
        self.recipe = Recipe(augment)
        self.order = choose_order(len(reader), order, shuffle, seed)
        self.seed = self.order.seed
        self._given = (rank, world_size)
        self.tail: Tail = choose_tail(tail, self.order)
        self.fields, self._named = checked_fields(fields, reader)
        self.dtype = checked_dtype(dtype, self.recipe)
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
            self.device, decoder, dtype=self.dtype, planar=planar, recipe=self.recipe, ahead=prefetch
        )
        if self._path is not None:
            stored: tuple[torch.dtype, bool, Normalize | None] = (torch.uint8, False, None)
        else:
            stored = (self.dtype, planar, normalize)
        self._finish = Finish(*stored)
        self._memory = ImageMemory(*stored[:2], pinned, prefetch + 2)
        self._epoch = self._cursor = 0
        self._begun = self._loaded = False
        self._resumed: Order | None = None
        self._bad: list[BadSample] = []
        self._running: weakref.ref[_Epoch] | None = None
        _check_batches(self)

    # --- where it is --------------------------------------------------------------------------------------------
    @property
    def rank(self) -> int:
        return self._ranks()[0]

    @property
    def world_size(self) -> int:
        return self._ranks()[1]

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._epoch

    @property
    def sampler(self) -> ImageLoader:
        """What trainers call `set_epoch` of."""
        return self

    @property
    def batch_sampler(self) -> None:
        """None: for trainers that look for one."""

    @property
    def bad_samples(self) -> tuple[BadSample, ...]:
        """The samples skipped or replaced in the current or, between loops, the last epoch, on this rank."""
        return tuple(sorted(self._bad, key=lambda sample: sample.position))

    @property
    def decoder(self) -> str:
        """What decodes the images, as resume tokens name it."""
        return self._path.decoder.name if self._path is not None else DECODER

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop be of `epoch`: from where a state that was loaded has put it, or else from its start.

        Raises TrainerError where it is a framework that calls, and would leave the place of a state unused.
        """
        if epoch < 0:
            raise ValueError(f"an epoch is 0 or more, not {epoch}")
        ended = epoch + 1 == self._epoch and not self._cursor  # Lightning names it once more after a validation
        if self._loaded and ended and calling_package() in LIGHTNING:
            return self._seek(epoch, len(self.order), None)
        if self._loaded and epoch == self._epoch:
            return None
        check_epoch(epoch, self._epoch if self._loaded else None)
        return self._seek(epoch, 0, None)

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
        resumed = token.resumed(self.order)
        if token.cursor and not self._schedule(resumed).steps(token.cursor):  # too few are left for these ranks
            self._seek(token.epoch + 1, 0, None)
        else:
            self._seek(token.epoch, token.cursor, resumed)
        self._loaded = True

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank, also in an epoch that was resumed; see `left`."""
        return self._schedule(self.order).steps()

    @property
    def left(self) -> int:
        """Batches of the loop under way, or else of the next one, that have not been handed out on this rank."""
        return self._schedule(self._resumed or self.order).steps(self._cursor)

    # --- one epoch ----------------------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[Any]:
        return _Epoch(self)

    def _begin(self, epoch: _Epoch) -> None:
        """Make `epoch` the loop under way. Raises TrainerError."""
        running = self._running() if self._running else None
        if self._begun:
            if running is not None:
                running.overtaken()
            self._seek(self._epoch + 1, 0, None)
        _check_batches(self)
        trainer = find_trainer()
        missed = trainer.place_in(self._epoch, len(self.order)) if not self._cursor else None
        if missed is not None:
            self.load_state_dict(missed)
            self._seek(missed["epoch"], missed["cursor"], self._resumed)
        trainer.check_resume(self.left, len(self))
        self._begun, self._loaded, self._running, self._bad = True, False, weakref.ref(epoch), []

    def _ranks(self) -> tuple[int, int]:
        """As given, or as the launcher says now."""
        return rank_and_world_size(*self._given, self.order.groups)

    def _schedule(self, order: Order) -> Schedule:
        return Schedule(order, self.batch_size, self.rank, self.world_size, self.tail)

    def _seek(self, epoch: int, cursor: int, order: Order | None) -> None:
        """Let the next loop begin there; a loop under way ends."""
        running = self._running() if self._running else None
        if running is not None:
            running.close()
        self._epoch, self._cursor, self._resumed, self._begun, self._loaded = epoch, cursor, order, False, False

    def _collect(self, batch: Batch) -> Any:
        """The fields of a finished batch."""
        rows = batch.kept()
        images, indices = batch.images, batch.indices
        if rows is not None:
            images, indices = images[rows], indices[rows]
        values = (self._field(name, images, indices) for name in self.fields)
        return tuple(values) if self._named is None else dict(zip(self._named, values, strict=True))

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


class _Epoch(Iterator[Any]):
    """One run through the rest of an epoch, from its first batch on: an iterator that nobody uses takes no epoch.

    Closed at its end, on any exception, and when dropped.
    """

    def __init__(self, loader: ImageLoader) -> None:
        self._loader = loader
        self._crew: Crew | DeviceStage | IndexWork | None = None
        self._begun = self._overtaken = False

    def __next__(self) -> Any:
        if not self._begun:
            self._begin()
        if self._overtaken:
            raise TrainerError(
                "another loop over this loader has begun, which ended this one: a loader has one place in one epoch; "
                "for two loops at once make two loaders:  ImageLoader(reader, …)"
            )
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
        if self._step == self._steps:
            self._report()  # with the last batch: trainers that count batches ask for no other
        return result

    def close(self) -> None:
        """Stop the threads; there are no more batches."""
        self._begun = True
        if self._crew is not None:
            self._crew = None
            self._finalizer()

    def overtaken(self) -> None:
        """Another loop begins: this one, if there are batches left in it, cannot go on."""
        self._overtaken = self._crew is not None and self._step < self._steps
        self.close()

    def _begin(self) -> None:
        loader = self._loader
        loader._begin(self)
        self._begun = True
        order = loader._resumed or loader.order
        schedule, cursor = loader._schedule(order), loader._cursor
        self._schedule, self._first, self._steps, self._step = schedule, cursor, schedule.steps(cursor), 0
        if "image" not in loader.fields:
            self._crew = IndexWork(order, loader._epoch, lambda step: schedule.positions(step, cursor))
            self._finalizer = weakref.finalize(self, self._crew.stop)
            return
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
        self._crew = crew
        if path is not None:
            self._crew = DeviceStage(crew, work, path, self._steps)
        self._finalizer = weakref.finalize(self, self._crew.stop)

    def _end(self) -> None:
        self.close()
        self._loader._seek(self._loader._epoch + 1, 0, None)

    def _report(self) -> None:
        loader = self._loader
        if loader._bad:
            first = loader.bad_samples[0]
            done = "skipped" if loader.on_error == "skip" else "replaced"
            warnings.warn(
                f"epoch {loader._epoch}: {len(loader._bad)} bad samples were {done}, the first is sample "
                f"{first.index} ({first.key}): {first.reason}; see loader.bad_samples",
                stacklevel=3,
            )


def _check_batches(loader: ImageLoader) -> None:
    """An epoch of no batch at all is nobody's wish. Raises ValueError."""
    if len(loader):
        return
    if not len(loader.order):
        raise ValueError("there are no samples to load: the set, the selection or the order is empty")
    whole, ranks = loader.batch_size * loader.world_size, loader.world_size
    raise ValueError(
        f"an epoch of {len(loader.order)} samples has no batch of {loader.batch_size} on each of {ranks} ranks "
        f"({whole} samples) and tail='drop_last' leaves out smaller ones: give tail='exact', or a smaller batch_size"
    )


def _rows_at_once(loader: ImageLoader) -> int:
    height, width = loader.recipe.out_size or (224, 224)
    rows = max(_LEAST_ROWS, min(_MOST_ROWS, _VALUES_AT_ONCE // (height * width * 3)))
    return max(1, min(rows, -(-loader.batch_size // loader.threads)))


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is one of {', '.join(allowed)}, not {value!r}")
