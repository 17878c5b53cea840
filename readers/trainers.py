"""The training framework that is asking for batches, as seen from inside a loader or a sampler.

Frameworks take over loaders without saying so. accelerate deals the batches of a sampler out to its processes a second
time; Lightning counts the batches of an epoch by itself, and the first indices are asked for before it says which epoch
it is in. A loader can learn that from its callers only, so the call stack is examined, once an epoch:

    accelerate   BatchSamplerShard, IterableDatasetShard, DataLoaderDispatcher: share out among `num_processes`
                 DataLoaderShard, DataLoaderDispatcher: `iteration` is the epoch
    Lightning    _FitLoop: `epoch_progress.current.processed` is the epoch, `batch_progress.current.processed` its
                 batches so far, and `ready` one more inside a step; what runs inside an _EvaluationLoop is not counted
    torch        _MultiProcessingDataLoaderIter asks for indices long before training has their samples
    torchdata    its iterators do so too, and save a state with each batch; StatefulDataLoader makes the first one for
                 a state that it is asked for before its first loop

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

LIGHTNING = ("lightning", "pytorch_lightning")  # begins with an epoch that has no batch left, and then ends it
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
    """The framework that asks for the samples of an iteration.

    epoch: the one that the framework is in; None where it has not said.
    at_end: whether it is there because the epoch of the state that it resumes from had no batch left.
    batches: of that epoch, trained on before, of the `limit` that it will run.
    under_way: whether the checkpoint that it resumes from was saved inside the step of one more.
    counted: the batches of this epoch that Lightning has seen, where it saves a checkpoint and is in no step.
    processes: among how many it shares out the samples.
    repeats: whether it repeats samples to share out a last part that is too small, and of how many batches a part is.
    batch_size: of the DataLoader; partial: whether its last batch may be smaller.
    keeps_account: whether a state of the sampler is saved with each batch.
    asks_ahead: whether samples are asked for before training has them.
    early: a StatefulDataLoader that makes its first iterator for a state.
    states: resume tokens that Lightning has read from a checkpoint and not loaded.
    """

    name: str = ""
    epoch: int | None = None
    at_end: bool = False
    batches: int = 0
    limit: float = math.inf
    under_way: bool = False
    counted: int | None = None
    processes: int = 1
    repeats: int = 0
    batch_size: int = 1
    partial: bool = True
    keeps_account: bool = False
    asks_ahead: bool = False
    early: Any = None
    states: tuple[Mapping[str, Any], ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "early": None}

    def missed_state(self, epoch: int, samples: int) -> Mapping[str, Any] | None:
        """The state of a checkpoint that Lightning has not loaded, since it takes the epoch for one that begins.

        That happens in a run that was resumed at an epoch's end. None where no such state is of this epoch; the end of
        the epoch of `samples` where the state is the one after it.
        """
        last = max(self.states, key=lambda state: (state["epoch"], state["cursor"]), default=None)
        if last is None or self.epoch != epoch:
            return None
        if (last["epoch"], last["cursor"]) == (epoch + 1, 0):
            return {**last, "epoch": epoch, "cursor": samples}
        return last if last["epoch"] == epoch and last["cursor"] else None

    def has_left(self, epoch: int, state: int, done: int) -> bool:
        """Whether limit_train_batches of Lightning, now in `epoch`, ended that of a state after `done` batches."""
        return self.name == "Lightning" and epoch == state + 1 and done >= self.limit

    def counts_on(self, epoch: int, state: int, done: int) -> bool:
        """Whether Lightning, in `epoch`, goes on after the `done` batches of a state.

        It counts an epoch that max_steps has cut short as done, but not its batches: the rest has the next number.
        """
        return self.name == "Lightning" and epoch > state and 0 < done == self.batches

    def has_done(self, total: int) -> bool:
        """Whether Lightning resumes after all of the `total` batches of an epoch.

        After max_steps it counts that epoch as done, but not its batches: it takes one of the next epoch and ends that.
        """
        return self.batches > 0 and self.batches >= min(self.limit, total)

    def check_sharing(self, world_size: int, line: str) -> None:
        """Raises TrainerError where samples of one rank of `world_size` would be shared out once more."""
        if self.processes > 1 and world_size > 1:
            raise TrainerError(
                f"accelerate shares the batches of this loader out among {self.processes} processes, but they are "
                f"those of one rank of {world_size} already: samples would be lost; leave the sharing to accelerate, "
                f"with  {line}"
            )

    def check_resume(self, left: int, total: int, line: str = "") -> None:
        """Raises TrainerError where `left` of the `total` batches of an epoch are not those that Lightning waits for.

        line: what to write where the loader stands at the start because nothing keeps its state.
        """
        if not self.batches or self.has_done(total):
            return
        if line and left == total and self.keeps_account:
            raise TrainerError(
                f"Lightning resumes after batch {self.batches} of epoch {self.epoch}, but the state in the checkpoint "
                f"is that of an epoch's start: a StatefulDataLoader forgets where it was at the end of fit; resume "
                f"from a checkpoint that was saved during fit, as by ModelCheckpoint"
            )
        if line and left == total:
            raise TrainerError(
                f"Lightning resumes after batch {self.batches} of epoch {self.epoch}, but a DataLoader has no state: "
                f"it would begin with the first batches again and leave out the last; write  {line}"
            )
        waits_for = min(self.limit, total) - self.batches
        if left > waits_for and self.limit >= total:  # where fewer are left, the epoch just ends with them
            raise TrainerError(
                f"{left} of the {total} batches of epoch {self.epoch} are left, but Lightning has counted "
                f"{self.batches} and would leave out all but {waits_for:.0f}: a batch stands for other samples with "
                f"another batch size or number of ranks; resume with those of the checkpoint, or from an epoch's end:  "
                f"ModelCheckpoint(save_on_train_epoch_end=True)"
            )

    def batches_of(self, samples: int) -> int:
        """How many batches the DataLoader makes of the samples of one rank."""
        full, rest = divmod(samples, self.batch_size)
        return full + (self.partial and rest > 0)


def find_trainer() -> Trainer:
    """The framework in whose calls this one is."""
    found: dict[str, Any] = {}
    for frame in _callers():
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("torchdata.stateful_dataloader"):
            myself = frame.f_locals.get("self")
            found.update(keeps_account=True, asks_ahead=True, **_batches(myself))
            if frame.f_code.co_name == "state_dict" and hasattr(myself, "_initial_iter_for_state_dict"):
                found.update(early=weakref.ref(myself))
        elif module == "torch.utils.data.dataloader":
            kind = type(frame.f_locals.get("self"))
            if kind.__name__ == "_MultiProcessingDataLoaderIter":
                found.update(asks_ahead=True)
            elif kind.__module__.startswith("torchdata."):
                found.update(keeps_account=True)
        elif module == "readers.torch.prefetcher":
            found.update(asks_ahead=True)
        elif module in ("torch.utils.data.sampler", "torchdata.nodes.batch"):
            found.update(_batches(frame.f_locals.get("self")))
        elif module == "accelerate.data_loader":
            found.update(name="accelerate", asks_ahead=True, **_accelerate(frame.f_locals.get("self")))
        elif module.endswith(".loops.evaluation_loop"):
            break
        elif module.endswith(".loops.fit_loop"):
            found.update(_lightning(frame.f_locals.get("self"), frame.f_code.co_name == "on_save_checkpoint"))
            break
    return Trainer(**found)


def calling_package() -> str:
    """The package whose code called into this project: "lightning", "torchdata", "__main__", …"""
    for frame in _callers():
        top = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if top != "readers":
            return top
    return ""


def check_epoch(wanted: int, loaded: int | None, trainer: str = "") -> None:
    """Raise TrainerError where a framework sets epoch `wanted`, but a state that was just loaded is in `loaded`.

    Such a framework counts from 0 again and knows nothing of the state.
    """
    name = trainer or _FRAMEWORKS.get(calling_package(), "")
    if loaded is None or wanted == loaded or not name:
        return
    raise TrainerError(
        f"{name} begins epoch {wanted}, but the state that was loaded is in epoch {loaded}: samples would be "
        f"repeated; say where training is, with  {_LINES[name].format(epoch=loaded)}"
    )


def check_persistent(stream: Any) -> None:
    """Raise TrainerError where Lightning's epochs are not the iterations of a stream's persistent workers.

    Only their first iteration sees what Lightning does; each one after it is the next epoch.
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
            f"this stream {why}, and its persistent workers would take each iteration for the next epoch: samples of "
            f"whole epochs would be left out; leave out persistent_workers=True"
            + (", or make another stream for validation" if val else "")
        )


def check_skipping() -> None:
    """Raise TrainerError in accelerate's skip_first_batches, which would make a DataLoader out of a loader's parts."""
    if any(frame.f_code.co_name == "skip_first_batches" for frame in _callers()):
        raise TrainerError(
            "skip_first_batches of accelerate skips the batches of a DataLoader, not of this loader, which needs none "
            "skipped: write  loader.load_state_dict(state)  or, for the Trainer of transformers, "
            "LoaderTrainer(…, train_loader=loader)  or  ignore_data_skip=True  with LoaderCallback(loader)"
        )


def keep_environment() -> None:
    """Let accelerate replace a variable of the environment while threads decode, where it would add and remove it.

    It does so each time it looks for a GPU, also in save_state. What is added moves the environment, in which libjpeg
    looks for JPEGMEM with every image. glibc before 2.41 lets it read memory that was freed: a segmentation fault.
    """
    if "accelerate" in sys.modules:
        os.environ.setdefault(_ACCELERATE_SETS, "0")  # as where it is not set


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
        # Saved with the last batch of an epoch, which Lightning counts as done after it has made the iterator.
        at_end = bool(
            loop.restarting
            and progress.is_last_batch
            and progress.total.completed == progress.total.processed - 1
            and epochs.total.processed == epochs.total.started - 1
        )
        limit = max(loop._combined_loader.limits or [math.inf])
        states = () if loop.restarting else tuple(_tokens(loop._combined_loader_states_to_load))
    except (AttributeError, TypeError):
        return {}
    place = {"epoch": epoch + 1, "batches": 0} if at_end else {"epoch": epoch, "batches": batches}
    counted = int(now.processed) if is_saving and not in_step else None
    counts = {"under_way": bool(loop.restarting and in_step), "counted": counted}
    return {"name": "Lightning", "at_end": at_end, "limit": limit, "states": states, **place, **counts}


def _tokens(states: Any) -> Iterator[Mapping[str, Any]]:
    """The resume tokens somewhere in the states of loaders."""
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
