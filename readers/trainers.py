"""Detection of the training framework that runs a loader or a sampler.

Frameworks change how a loader is used without telling it. accelerate distributes the batches of a sampler among its
processes a second time; Lightning keeps its own count of batches, and requests the first indices before it sets the
epoch. A loader can see this only on the call stack, which is examined once an epoch:

    accelerate   BatchSamplerShard, IterableDatasetShard, DataLoaderDispatcher: shard among `num_processes`
                 DataLoaderShard, DataLoaderDispatcher: `iteration` is the epoch
    Lightning    _FitLoop: `epoch_progress.current.processed` is the epoch, `batch_progress.current.processed` its
                 batches so far, and `ready` is one more inside a step; frames inside an _EvaluationLoop do not count
    torch        _MultiProcessingDataLoaderIter requests indices long before training uses their samples
    torchdata    its iterators do so too, and save a state with each batch; StatefulDataLoader makes its first iterator
                 early if its state is requested before its first loop

No framework is imported here. A version that lacks these names is not recognised.
"""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from cache.errors import TrainerError

LIGHTNING = ("lightning", "pytorch_lightning")  # resumes from an epoch's end by beginning that epoch without batches
_FRAMEWORKS = {
    "accelerate": "accelerate",
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "transformers": "transformers",
}
_LINES = {
    "accelerate": "loader.set_epoch({epoch})",
    "Lightning": "trainer.fit(model, loader, ckpt_path=…)",
    "transformers": "trainer.train(resume_from_checkpoint=True)",
}
_SHARING = ("BatchSamplerShard", "IterableDatasetShard")
_MOST_FRAMES = 100
_ACCELERATE_SETS = "PYTORCH_NVML_BASED_CUDA_CHECK"


@dataclass(frozen=True)
class Trainer:
    """The framework that runs an iteration.

    epoch: the framework's epoch; None if unknown.
    at_end: whether this epoch was reached because the epoch of the resumed state had no batches left.
    batches: batches of the epoch that were trained on before the resume; limit: batches that an epoch will run.
    under_way: whether the resumed checkpoint was saved inside the step of the next batch.
    counted: batches of this epoch that Lightning has processed, if it is saving a checkpoint outside a step.
    miscounted: `batches`, at the end of a step, if Lightning will go back by one: a run before died in a step.
    processes: number of processes among which it shards the samples.
    repeats: 0, or the batches of a part if it repeats samples to fill up the last part that it distributes.
    batch_size: of the DataLoader; partial: whether its last batch may be smaller.
    keeps_account: whether a state of the sampler is saved with each batch.
    asks_ahead: whether samples are requested before training uses them.
    early: a StatefulDataLoader that makes its first iterator only to take a state.
    states: resume tokens that Lightning has read from a checkpoint but not loaded.
    too_early: whether a Trainer that will resume makes iterators before it reads its checkpoint.
    """

    name: str = ""
    epoch: int | None = None
    at_end: bool = False
    batches: int = 0
    limit: float = math.inf
    under_way: bool = False
    counted: int | None = None
    miscounted: int = 0
    processes: int = 1
    repeats: int = 0
    batch_size: int = 1
    partial: bool = True
    keeps_account: bool = False
    asks_ahead: bool = False
    early: Any = None
    states: tuple[Mapping[str, Any], ...] = ()
    too_early: bool = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "early": None}

    def missed_state(self, epoch: int, samples: int) -> Mapping[str, Any] | None:
        """The state of a checkpoint that Lightning did not load because it considers the epoch new; None if none.

        This happens in a run that was resumed at an epoch's end, and after `Trainer.estimated_stepping_batches`, which
        makes the loaders before the checkpoint is read (pytorch-lightning#20550). If the state is at the start of the
        next epoch, the end of this epoch of `samples` samples is returned.
        """
        last = max(self.states, key=lambda state: (state["epoch"], state["cursor"]), default=None)
        if last is None or self.epoch != epoch:
            return None
        if (last["epoch"], last["cursor"]) == (epoch + 1, 0):
            return last if self.under_way else {**last, "epoch": epoch, "cursor": samples}
        return last if last["epoch"] == epoch and last["cursor"] else None

    def has_left(self, epoch: int, state: int, done: int) -> bool:
        """Whether Lightning, now in `epoch`, left epoch `state` after `done` batches because of limit_train_batches."""
        return self.name == "Lightning" and epoch == state + 1 and done >= self.limit

    def counts_on(self, epoch: int, state: int, done: int) -> bool:
        """Whether Lightning, now in `epoch`, continues after the `done` batches of epoch `state`.

        Lightning counts an epoch cut short by max_steps as done, but not its batches: the rest gets the next number.
        """
        return self.name == "Lightning" and epoch > state and 0 < done == self.batches

    def has_done(self, total: int, miscounted: int = 0) -> bool:
        """Whether Lightning resumes after all of the `total` batches of an epoch; miscounted: when it set the epoch.

        After max_steps Lightning counts the epoch as done, but not its batches: it takes one batch of the next epoch
        and ends it.
        """
        return max(self.batches, miscounted) >= max(1, min(self.limit, total))

    def check_sharing(self, world_size: int, line: str) -> None:
        """Raise TrainerError if the samples of one rank of `world_size` would be sharded a second time."""
        if self.processes > 1 and world_size > 1:
            raise TrainerError(
                f"accelerate distributes the batches of this loader among {self.processes} processes, but they already "
                f"are those of one rank of {world_size}: samples would be lost; leave the sharding to accelerate, "
                f"with  {line}"
            )

    def check_resume(self, left: int, total: int, line: str = "") -> None:
        """Raise TrainerError if `left` of the `total` batches of an epoch are not what Lightning expects.

        line: the code to use if the loader is at the start because nothing keeps its state.
        """
        if not self.batches or self.has_done(total):
            return
        if line and left == total and self.keeps_account:
            raise TrainerError(
                f"Lightning resumes after batch {self.batches} of epoch {self.epoch}, but the state in the checkpoint "
                f"is at an epoch's start: a StatefulDataLoader loses its position at the end of fit; resume from a "
                f"checkpoint that was saved during fit, such as by ModelCheckpoint"
            )
        if line and left == total:
            raise TrainerError(
                f"Lightning resumes after batch {self.batches} of epoch {self.epoch}, but a DataLoader has no state: "
                f"it would repeat the first batches and leave out the last; write  {line}"
            )
        waits_for = min(self.limit, total) - self.batches
        if left > waits_for and self.limit >= total:  # with fewer left, the epoch simply ends
            raise TrainerError(
                f"{left} of the {total} batches of epoch {self.epoch} are left, but Lightning has counted "
                f"{self.batches} and would leave out all but {waits_for:.0f}: batches have other samples with another "
                f"batch size or number of ranks; resume with those of the checkpoint, or from an epoch's end:  "
                f"ModelCheckpoint(save_on_train_epoch_end=True)"
            )

    def began_too_early(self) -> TrainerError:
        """The error for workers that began an epoch before Lightning said where it resumes."""
        return TrainerError(
            "trainer.estimated_stepping_batches lets the workers of this DataLoader begin before Lightning reads the "
            "checkpoint (pytorch-lightning#20550): samples would be repeated; in configure_optimizers, count the steps "
            "without it, or give the Trainer an ImageLoader"
        )

    def no_batch_before(self, epoch: int) -> TrainerError:
        """The error for a state that is not at the end of the current batch."""
        return TrainerError(
            f"Lightning saved this checkpoint inside the step of batch {self.batches} of epoch {epoch} and will "
            f"repeat that batch, but the state is not at the end of a batch of this size: resume with the batch "
            f"size and number of ranks of the checkpoint, or from another checkpoint"
        )

    def batches_of(self, samples: int) -> int:
        """Number of batches that the DataLoader makes of `samples` samples."""
        full, rest = divmod(samples, self.batch_size)
        return full + (self.partial and rest > 0)


def find_trainer() -> Trainer:
    """The framework on the call stack."""
    facts: dict[str, Any] = {}
    for frame in _callers():
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("torchdata.stateful_dataloader"):
            myself = frame.f_locals.get("self")
            facts.update(keeps_account=True, asks_ahead=True, **_batches(myself))
            if frame.f_code.co_name == "state_dict" and hasattr(myself, "_initial_iter_for_state_dict"):
                facts.update(early=weakref.ref(myself))
        elif module == "torch.utils.data.dataloader":
            kind = type(frame.f_locals.get("self"))
            if kind.__name__ == "_MultiProcessingDataLoaderIter":
                facts.update(asks_ahead=True)
            elif kind.__module__.startswith("torchdata."):
                facts.update(keeps_account=True)
        elif module == "readers.torch.prefetcher":
            facts.update(asks_ahead=True)
        elif module in ("torch.utils.data.sampler", "torchdata.nodes.batch"):
            facts.update(_batches(frame.f_locals.get("self")))
        elif module == "accelerate.data_loader":
            facts.update(name="accelerate", asks_ahead=True, **_accelerate(frame.f_locals.get("self")))
        elif module.endswith(".loops.evaluation_loop"):
            break
        elif module.endswith(".loops.fit_loop"):
            loop, caller = frame.f_locals.get("self"), frame.f_back
            facts.update(_lightning(loop, frame.f_code.co_name == "on_save_checkpoint"))
            if caller is not None and caller.f_code.co_name == "estimated_stepping_batches":
                facts.update(too_early=getattr(getattr(loop, "trainer", None), "ckpt_path", None) is not None)
            break
    return Trainer(**facts)


def calling_package() -> str:
    """The package that called into this project: "lightning", "torchdata", "__main__", …"""
    for frame in _callers():
        top = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if top != "readers":
            return top
    return ""


def check_epoch(begun: int, loaded: int | None, trainer: str = "") -> None:
    """Raise TrainerError if a framework sets epoch `begun` after a state in epoch `loaded` was loaded.

    Such a framework counts from 0 again and ignores the state.
    """
    name = trainer or _FRAMEWORKS.get(calling_package(), "")
    if loaded is None or begun == loaded or not name:
        return
    raise TrainerError(
        f"{name} begins epoch {begun}, but the loaded state is in epoch {loaded}: samples would be repeated; set the "
        f"position of training with  {_LINES[name].format(epoch=loaded)}"
    )


def check_persistent(stream: Any) -> None:
    """Raise TrainerError if Lightning's epochs are not the iterations of a stream's persistent workers.

    The workers see Lightning only in their first iteration; each further iteration is the next epoch.
    """
    names = (".loops.fit_loop", ".loops.evaluation_loop")
    frames = (frame for frame in _callers() if str(frame.f_globals.get("__name__", "")).endswith(names))
    trainer: Any = getattr(next((frame.f_locals.get("self") for frame in frames), None), "trainer", None)
    try:
        fit, reloads = trainer.fit_loop, trainer.reload_dataloaders_every_n_epochs
        both = [getattr(loop._combined_loader, "flattened", ()) for loop in (fit, fit.epoch_loop.val_loop)]
    except AttributeError:
        return
    train, val = ([loader for loader in loaders if getattr(loader, "dataset", None) is stream] for loaders in both)
    if (val or reloads) and any(getattr(loader, "persistent_workers", False) for loader in train):
        why = "is used for training and for validation" if val else "is reloaded (reload_dataloaders_every_n_epochs)"
        raise TrainerError(
            f"this stream {why}, but its persistent workers take each iteration for the next epoch: samples of "
            f"whole epochs would be left out; leave out persistent_workers=True"
            + (", or make another stream for validation" if val else "")
        )


def check_skipping() -> None:
    """Raise TrainerError in accelerate's skip_first_batches, which would build a DataLoader from a loader's parts."""
    if any(frame.f_code.co_name == "skip_first_batches" for frame in _callers()):
        raise TrainerError(
            "skip_first_batches of accelerate skips batches of a DataLoader, not of this loader, which resumes by its "
            "state: write  loader.load_state_dict(state)  or, for the Trainer of transformers, "
            "LoaderTrainer(…, train_loader=loader)  or  ignore_data_skip=True  with LoaderCallback(loader)"
        )


def keep_environment() -> None:
    """Define a variable that accelerate sets, so that it replaces the variable instead of adding and removing it.

    accelerate does this each time it looks for a GPU, also in save_state. Adding a variable may move the environment,
    which libjpeg searches for JPEGMEM with every image in other threads; with glibc before 2.41 it may then read freed
    memory, a segmentation fault.
    """
    if "accelerate" in sys.modules:
        os.environ.setdefault(_ACCELERATE_SETS, "0")  # has the same effect as no variable


def _accelerate(myself: Any) -> dict[str, Any]:
    kind = type(myself).__name__
    try:
        if kind in _SHARING:
            return {"processes": int(myself.num_processes)}
        if kind == "DataLoaderDispatcher":
            processes = int(myself.state.num_processes)
            repeats = 0 if myself._drop_last else 1 if myself.split_batches else processes
            return {"processes": processes, "repeats": repeats, "epoch": int(myself.iteration)}
        return {"epoch": int(myself.iteration)} if kind == "DataLoaderShard" else {}
    except (AttributeError, TypeError):
        return {}


def _lightning(loop: Any, is_saving: bool) -> dict[str, Any]:
    try:
        epochs, progress = loop.epoch_progress, loop.epoch_loop.batch_progress
        epoch, now = int(epochs.current.processed), progress.current
        batches, in_step = int(now.processed) if loop.restarting else 0, now.ready > now.processed
        # Saved with an epoch's last batch; Lightning counts the epoch as done only after it has made the iterator, and
        # only by these totals: one that was saved inside a step leaves `total.ready` too large for all later ones.
        batch_total, epoch_total = progress.total, epochs.total
        at_end = bool(
            loop.restarting
            and progress.is_last_batch
            and batch_total.ready == batch_total.processed == batch_total.completed + 1
            and epoch_total.ready == epoch_total.started == epoch_total.processed + 1 == epoch_total.completed + 1
        )
        limit = max(loop._combined_loader.limits or [math.inf])
        # Then Lightning also forgets a batch of the epoch with each resume from the end of a step.
        real, forgotten = batch_total.processed - epoch * limit, batch_total.processed - batch_total.completed
        if loop.restarting and in_step and batches < real <= batches + forgotten:
            batches = int(real)
        states = tuple(_tokens(loop._combined_loader_states_to_load))
    except (AttributeError, TypeError):
        return {}
    place = {"epoch": epoch + 1, "batches": 0} if at_end else {"epoch": epoch, "batches": batches}
    counted = int(now.processed) if is_saving and not in_step else None
    lags = loop.restarting and not in_step and batch_total.ready > batch_total.processed
    counts = {"under_way": bool(loop.restarting and in_step), "counted": counted, "miscounted": batches if lags else 0}
    return {"name": "Lightning", "at_end": at_end, "limit": limit, "states": states, **place, **counts}


def _tokens(states: Any) -> Iterator[Mapping[str, Any]]:
    """The resume tokens nested in the states of loaders."""
    if isinstance(states, Mapping) and states.get("kind") == "packer-resume":
        yield states
    elif isinstance(states, (Mapping, list)):
        for part in states.values() if isinstance(states, Mapping) else states:
            yield from _tokens(part)


def _batches(sampler: Any) -> dict[str, Any]:
    size, drop_last = getattr(sampler, "batch_size", None), getattr(sampler, "drop_last", None)
    return {"batch_size": size, "partial": not drop_last} if isinstance(size, int) and size > 0 else {}


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
