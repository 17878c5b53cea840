"""One position in the epochs, for loaders, samplers and streams: a state machine against a model.

Loops, states, epochs, copies, other ranks and batches come in any order, also as Lightning and accelerate call them: a
state before the first loop, a state from inside a step, recreated loaders, one loader for two uses, an epoch that
max_steps has cut short. STEPS (default 20,000, of all kinds together) is the length of the long run. The DataLoaders
have no workers; `test_loops` and `test_trainers` test workers.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg, tree_of
from hypothesis import HealthCheck, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from loader_options import grouped
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from trainer_cases import QUIET

import readers
from cache.errors import TrainerError
from readers.loader import ImageLoader
from readers.order import Shuffled
from readers.torch import EpochBatchSampler, EpochSampler, ImageDataset, ImageStream

pytestmark = QUIET
COUNT = 13
ORDER = Shuffled(COUNT, 5)
KINDS = ["loader", "sampler", "batches", "stream", "stateful", "stateful stream"]
STEPS = int(os.environ.get("STEPS", "20000"))
STEPS_OF_RUN = 40
SHAPES = strategies.sampled_from([(batch, world) for batch in (1, 2, 4) for world in (1, 2, 3)])
EPOCHS = strategies.integers(0, 4)
WHICH = strategies.integers(0, 9)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[readers.Reader]:
    root = tmp_path_factory.mktemp("positions")
    with readers.open_folder(tree_of(root, {f"{i:02d}.jpg": make_jpeg(i, (8, 8)) for i in range(COUNT)})) as opened:
        yield opened


# --- as Lightning calls -------------------------------------------------------------------------------------------
FIT: dict[str, Any] = {"__name__": "lightning.pytorch.loops.fit_loop"}
exec("def call(self, function): return function()", FIT)


def in_fit(function: Callable[[], Any], epoch: int, done: int = 0, in_step: bool = False, resumes: bool = False) -> Any:
    """Call a function from a loop that is in this epoch and has finished this many of its batches."""
    counts = SimpleNamespace(completed=0, processed=0, started=0)
    progress = SimpleNamespace(ready=done + in_step, processed=done)
    total = SimpleNamespace(ready=done + in_step, processed=done, completed=done)
    batches = SimpleNamespace(current=progress, total=total, is_last_batch=False)
    loop = SimpleNamespace(
        restarting=resumes,
        epoch_progress=SimpleNamespace(current=SimpleNamespace(processed=epoch), total=counts),
        epoch_loop=SimpleNamespace(batch_progress=batches),
        _combined_loader=SimpleNamespace(limits=[]),
        _combined_loader_states_to_load=[],
    )
    return FIT["call"](loop, function)


# --- the model ----------------------------------------------------------------------------------------------------
class Loop:
    """A loop of the model: its start, and the number of batches it has handed out; it begins with its first batch."""

    def __init__(self, made: Any) -> None:
        self.made = made
        self.start: tuple[int, int] | None = None
        self.taken, self.finished, self.ended = 0, False, False


class Machine(RuleBasedStateMachine):
    kind: str
    reader: Any
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.batch, self.world, self.rank = 2, 1, 0
        # With the position, the batch and the world, and whether the iterator of a StatefulDataLoader was at its end.
        self.states: list[tuple[Any, tuple[int, int], tuple[int, int], bool]] = []
        self.renew()

    def renew(self) -> None:
        """A new loader at the start."""
        self.open(None)
        self.next, self.is_loaded = (0, 0), False
        self.current: Loop | None = None

    def open(self, position: Any) -> None:
        """Make the iterable `loader` and the object with the position, which is a copy or a new one."""
        self.loops: list[Loop] = []
        self.last: Loop | None = None  # for a StatefulDataLoader, whose state is that of the latest iterator
        dataset = ImageDataset(self.reader, fields=("index",))
        ranks = {"rank": self.rank, "world_size": self.world}
        kind = StatefulDataLoader if self.kind.startswith("stateful") else DataLoader
        if self.kind == "loader":
            options: dict[str, Any] = {"fields": ("index",), "threads": 1, "tail": "drop_last", **ranks}
            self.position = position or ImageLoader(self.reader, self.batch, order=ORDER, **grouped(options))
            self.loader = self.position
        elif self.kind == "batches":
            self.position = position or EpochBatchSampler(ORDER, dataset, self.batch, **ranks)
            self.loader = kind(dataset, batch_sampler=self.position)
        elif self.kind.endswith("stream"):
            self.position = position or ImageStream(dataset, EpochSampler(ORDER, dataset, **ranks), self.batch)
            self.loader = kind(self.position, batch_size=None)
        else:
            self.position = position or EpochSampler(ORDER, dataset, **ranks)
            self.loader = kind(dataset, self.batch, sampler=self.position, drop_last=True)

    @property
    def is_stateful(self) -> bool:
        return self.kind.startswith("stateful")

    @property
    def step_size(self) -> int:
        return self.batch * self.world

    def left(self, cursor: int) -> int:
        return (COUNT - cursor) // self.step_size

    def normal(self, epoch: int, cursor: int) -> tuple[int, int]:
        """A position at the end of an epoch is the start of the next one."""
        least = self.step_size if self.kind in ("loader", "batches") else self.world
        return (epoch, cursor) if COUNT - cursor >= least else (epoch + 1, 0)

    def after(self, loop: Loop) -> tuple[int, int]:
        """The position of a loop."""
        if loop.finished or loop.start is None:
            return (loop.start[0] + 1, 0) if loop.start else self.next
        return self.normal(loop.start[0], loop.start[1] + loop.taken * self.step_size)

    def expected(self, loop: Loop) -> list[int]:
        assert loop.start is not None
        epoch, cursor = loop.start
        cursor += loop.taken * self.step_size
        if self.kind in ("loader", "batches"):
            positions = cursor + self.rank * self.batch + np.arange(self.batch)
        else:
            positions = cursor + self.rank + self.world * np.arange(self.batch)
        return list(ORDER.indices(epoch, positions).tolist())

    def put(self, epoch: int, cursor: int = 0, is_loaded: bool = False) -> None:
        self.next, self.current, self.is_loaded = (epoch, cursor), None, is_loaded
        self.interrupt()

    def interrupt(self) -> None:
        """End the unfinished loops of a loader with a single position."""
        for loop in self.loops if self.kind == "loader" else ():
            loop.ended |= loop.start is not None and not loop.finished and loop.taken < self.left(loop.start[1])

    def begin(self, loop: Loop, start: tuple[int, int] | None = None) -> None:
        self.interrupt()
        loop.start = start or self.next
        self.next, self.current, self.is_loaded = (loop.start[0] + 1, 0), loop, False

    def hand_out(self, loop: Loop, take: Callable[[], Any]) -> None:
        """The next batch of a loop must be that of the model."""
        if loop.start is None:
            self.begin(loop)
        assert loop.start is not None
        if loop.ended:
            with pytest.raises(TrainerError, match="which ended this loop"):
                take()
            return
        if loop.finished or loop.taken == self.left(loop.start[1]):
            with pytest.raises(StopIteration):
                take()
            loop.finished = True
            return
        (indices,) = take()
        assert indices.tolist() == self.expected(loop)
        loop.taken += 1

    # --- rules ----------------------------------------------------------------------------------------------------
    @precondition(lambda self: len(self.loops) < 3)
    @rule()
    def make_iterator(self) -> None:
        type(self).steps += 1
        self.last = Loop(iter(self.loader))
        self.loops.append(self.last)

    @precondition(lambda self: self.loops)
    @rule(which=WHICH, batches=strategies.integers(1, 8))
    def iterate(self, which: int, batches: int) -> None:
        type(self).steps += 1
        loop = self.loops[which % len(self.loops)]
        for _ in range(batches):
            self.hand_out(loop, lambda: next(loop.made))

    @precondition(lambda self: self.loops)
    @rule(which=WHICH)
    def stop(self, which: int) -> None:
        type(self).steps += 1
        del self.loops[which % len(self.loops)]

    @rule(epoch=EPOCHS)
    def set_epoch(self, epoch: int) -> None:
        type(self).steps += 1
        self.position.set_epoch(epoch)
        if self.current is not None or epoch != self.next[0]:
            self.put(epoch)

    @rule()
    def save(self) -> None:
        type(self).steps += 1
        position = self.next if self.current is None else self.after(self.current)
        if self.is_stateful:
            state = self.loader.state_dict()
            last = self.last
            position = self.next
            if last is not None and last.start is not None:
                position = (last.start[0], last.start[1] + last.taken * self.step_size)
            is_over = last is not None and last.finished
            self.states.append((copy.deepcopy(state), position, (self.batch, self.world), is_over))
            return
        state = self.position.state_dict()
        token = state.get("sampler", state)
        assert self.normal(token["epoch"], token["cursor"]) == position
        self.states.append((json.loads(json.dumps(state)), position, (self.batch, self.world), False))

    @precondition(lambda self: self.states)
    @rule(which=WHICH, shape=SHAPES, rank=WHICH, moves=strategies.booleans())
    def load(self, which: int, shape: tuple[int, int], rank: int, moves: bool) -> None:
        """Load a state into this loader, or into a new one, possibly with another world and other batches."""
        type(self).steps += 1
        state, position, saved_by, is_over = self.states[which % len(self.states)]
        if self.is_stateful:
            shape = saved_by
        if moves or (self.is_stateful and shape != (self.batch, self.world)):
            self.batch, self.world = shape
            self.rank = rank % self.world
            self.renew()
        if not self.is_stateful:
            self.position.load_state_dict(state)
            self.put(*self.normal(*position), is_loaded=True)
            return
        self.loops.clear()
        self.restore(state, position, is_over)

    def restore(self, state: Any, position: tuple[int, int], is_over: bool = False) -> None:
        """A StatefulDataLoader restores a loaded state when it makes an iterator, which is a loop that has begun.

        If the iterator of the state was exhausted, it makes another one.
        """
        self.loader.load_state_dict(copy.deepcopy(state))
        self.last = loop = Loop(iter(self.loader))
        self.loops.append(loop)
        if is_over:
            self.put(position[0] + 1)
        else:
            self.begin(loop, position)

    @precondition(lambda self: not self.is_stateful)
    @rule(by_pickle=strategies.booleans())
    def copy_it(self, by_pickle: bool) -> None:
        """The copy has the position of the original, and no loops."""
        type(self).steps += 1
        before = self.position.state_dict()
        self.open(pickle.loads(pickle.dumps(self.position)) if by_pickle else copy.deepcopy(self.position))
        after = self.position.state_dict()
        assert after.get("sampler", after) == before.get("sampler", before)

    # --- frameworks -----------------------------------------------------------------------------------------------
    @rule(epoch=EPOCHS)
    def train_an_epoch_in_lightning(self, epoch: int) -> None:
        """Lightning makes two iterators, sets the epoch of loaders and samplers, and takes a batch."""
        type(self).steps += 1
        if self.is_loaded and self.next[0] != epoch:
            return
        self.loops.clear()

        def train() -> Loop:
            iter(self.loader)
            self.last = loop = Loop(iter(self.loader))
            if not self.kind.endswith("stream"):
                self.position.set_epoch(epoch)
            if self.next[0] != epoch or self.current is not None:
                self.put(epoch)
            self.hand_out(loop, lambda: next(loop.made))
            return loop

        self.loops.append(in_fit(train, epoch))

    @precondition(lambda self: self.kind in ("loader", "stateful", "stateful stream"))
    @rule()
    def resume_a_state_from_inside_a_step(self) -> None:
        """As Slurm's requeue and OnExceptionCheckpoint save it: the batch under way is repeated."""
        type(self).steps += 1
        loop = self.current
        if loop is None or loop.start is None or loop.start[1] or not loop.taken or loop.finished:
            return
        if self.is_stateful and loop is not self.last:
            return
        state = self.loader.state_dict()
        epoch, done = loop.start[0], loop.taken - 1
        self.renew()

        def resume() -> None:
            if self.is_stateful:
                self.restore(state, (epoch, done * self.step_size))
            else:
                self.position.load_state_dict(state)
                self.put(epoch, done * self.step_size, is_loaded=True)

        in_fit(resume, epoch, done, in_step=True, resumes=True)

    @precondition(lambda self: self.kind == "loader" and self.is_loaded and self.next[1] % self.step_size == 0)
    @rule(more=strategies.integers(1, 3))
    def resume_an_epoch_that_max_steps_has_cut_short(self, more: int) -> None:
        """Lightning counts the epoch as finished, but not its batches."""
        type(self).steps += 1
        epoch, cursor = self.next
        if cursor:
            in_fit(lambda: self.position.set_epoch(epoch + more), epoch + more, cursor // self.step_size, resumes=True)


def run(reader: Any, kind: str, steps: int) -> int:
    machine = type("Run", (Machine,), {"kind": kind, "reader": reader})
    quiet = list(HealthCheck)
    examples = max(1, steps // STEPS_OF_RUN)
    options: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": quiet}
    while machine.steps < steps:  # type: ignore[attr-defined]
        run_state_machine_as_test(
            machine, settings=settings(max_examples=examples, stateful_step_count=STEPS_OF_RUN, **options)
        )
    return int(machine.steps)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS)
def test_positions_equal_those_of_the_model(reader: Any, kind: str) -> None:
    assert run(reader, kind, 400) >= 400


@pytest.mark.faults
@pytest.mark.parametrize("kind", KINDS)
def test_positions_equal_those_of_the_model_in_a_long_run(reader: Any, kind: str) -> None:
    print(f"\n{run(reader, kind, -(-STEPS // len(KINDS)))} steps of a position, {kind}: 0 against the model")
