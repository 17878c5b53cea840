"""Training programs on several ranks: run as printed, recorded, killed at random and restarted.

A program is a script of examples/. Its ranks are forked, since the frameworks take seconds to import, and have the
environment of torchrun. A wrapped `cross_entropy` records what they train on: for each batch it writes a line to a
pipe, with the labels, which in these sets identify the samples, and the loss. Data in a pipe survives a SIGKILL.

An attempt continues a run if its steps, with samples and losses, equal those of the undisturbed run from a step on that
the earlier attempts have reached. A loss depends on the weights, so the losses reveal a loader at another position than
the weights, or weights that missed a step. The surviving history of the attempts, in which repeated steps after the
last checkpoint replace the first ones, is then the undisturbed run: no sample lost or repeated.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["Step", "Tally", "check_that_models_end_first", "continues_at", "disturb", "run_ranks"]

_SECONDS = 200.0
_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT
_TOLERANCE = 1e-4  # relative: sums of floats in another order


@dataclass(frozen=True)
class Step:
    """The samples of a step, by rank; its mean loss; the losses of the ranks."""

    samples: list[int]
    loss: float
    losses: tuple[float, ...]


@dataclass
class Tally:
    """Counts of what `disturb` did."""

    kills: int = 0
    attempts: int = 0
    steps: int = 0
    worlds: list[int] = field(default_factory=list)


def run_ranks(program: Path, arguments: Sequence[str], ranks: int, kill: tuple[int, float] | None = None) -> list[Step]:
    """The steps of a program on this number of ranks.

    kill: (steps, seconds): all ranks are killed this many seconds after the first rank has begun this many steps. With
    0 seconds the rank waits there until it is killed, however busy the machine is.

    Raises AssertionError if the program fails by itself or takes too long.
    """
    importlib.import_module("torch._dynamo")  # by optimizers, once, and not in each rank
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    receiver, sender = os.pipe()
    with tempfile.TemporaryFile() as output:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                os.close(receiver)
                last = kill[0] if kill is not None and not kill[1] and rank == 0 else None
                _one_rank(program, arguments, (rank, ranks), port, _Sender(sender, last), output.fileno())
            children.append(child)
        os.close(sender)
        try:
            lines, failure = _receive(receiver, children, kill)
        finally:
            os.close(receiver)
            _kill(children)
            for child in children:
                os.waitpid(child, 0)
        output.seek(0)
        text = output.read().decode(errors="replace")[-6000:]
    assert not failure, f"{program.name} {' '.join(arguments)} on {ranks} ranks:\n{text}\n{failure}"
    parts = [[line for line in lines if line["rank"] == rank] for rank in range(ranks)]
    done = zip(*parts, strict=False) if kill else zip(*parts, strict=True)
    return [_together(step) for step in done]


def disturb(
    program: Path, arguments: Sequence[str], whole: dict[int, list[Step]], worlds: Sequence[int], draw: random.Random
) -> Tally:
    """Run a program to its end, with kills at random moments, each time on a number of ranks from `worlds`.

    whole: the undisturbed run on each number of ranks.

    Raises AssertionError if an attempt does not continue the run.
    """
    tally, reached, first, total = Tally(), 0, draw.choice(worlds), len(whole[min(whole)])
    ranks = first
    while True:
        kill = (draw.randint(0, 7), draw.choice((0.0, draw.uniform(0, 0.02), draw.uniform(0, 0.3))))
        made = run_ranks(program, arguments, ranks, kill)
        tally.attempts += 1
        tally.steps += len(made)
        tally.worlds.append(ranks)
        exact = set(tally.worlds) == {ranks}
        if made:
            begin = continues_at(whole[ranks], made, reached, exact)
            reached = max(reached, begin + len(made))
            if begin + len(made) == total:
                return tally
        tally.kills += 1
        ranks = draw.choice(worlds)


def check_that_models_end_first() -> None:
    """Replace `destroy_process_group` in this process: it raises while a DistributedDataParallel is in use.

    Such a model ends after its group, and its reducer then joins gloo's threads while it holds the GIL, which they may
    need to end their last operation. On a busy machine one run in 150 hung so, at the end of its script.
    """
    destroy = torch.distributed.destroy_process_group

    def checked(*arguments: Any, **options: Any) -> None:
        gc.collect()  # PyTorch's state dicts leave models in cycles, which seldom end just then
        alive = sum(type(part) is torch.nn.parallel.DistributedDataParallel for part in gc.get_objects())
        assert not alive, f"{alive} models of DistributedDataParallel are in use when their process group is destroyed"
        destroy(*arguments, **options)

    torch.distributed.destroy_process_group = checked


def continues_at(whole: Sequence[Step], made: Sequence[Step], reached: int, exact: bool = True) -> int:
    """The step of the undisturbed run, at most `reached`, at which an attempt begins.

    exact: its losses are exactly equal, not only close.

    Raises AssertionError if its steps differ from the undisturbed run after that.
    """
    begins = [step for step in range(min(reached, len(whole) - 1) + 1) if whole[step].samples == made[0].samples]
    assert begins, f"begins with {made[0].samples}, which no step up to {reached} of the undisturbed run has"
    begin = begins[-1]
    rest = whole[begin : begin + len(made)]
    assert [step.samples for step in made] == [step.samples for step in rest], f"other samples from step {begin} on"
    if exact:
        assert [step.losses for step in made] == [step.losses for step in rest], f"other losses from step {begin} on"
    losses, expected = [step.loss for step in made], [step.loss for step in rest]
    assert np.allclose(losses, expected, rtol=_TOLERANCE, atol=0), f"from step {begin} on: {losses}, not {expected}"
    return begin


def _together(lines: Sequence[dict[str, Any]]) -> Step:
    losses = tuple(line["loss"] for line in lines)
    return Step([sample for line in lines for sample in line["samples"]], float(np.mean(losses)), losses)


def _receive(
    receiver: int, children: Sequence[int], kill: tuple[int, float] | None
) -> tuple[list[dict[str, Any]], str]:
    """The lines that the ranks wrote until all of them ended, or one failed, or they were killed; and the failure."""
    lines: list[dict[str, Any]] = []
    rest, deadline, killed = b"", time.monotonic() + _SECONDS, False
    while True:
        if kill is not None and sum(line["rank"] == 0 for line in lines) >= kill[0]:
            time.sleep(kill[1])
            _kill(children)
            kill, killed = None, True
            deadline = min(deadline, time.monotonic() + 60)
        if not select.select([receiver], [], [], 1.0)[0]:
            ends = [] if killed else [os.waitid(os.P_PID, child, _ENDED) for child in children]
            if crashed := [end.si_status for end in ends if end is not None and end.si_status]:
                return lines, f"a rank ended with status or signal {crashed}"
            if time.monotonic() < deadline:
                continue
            for child in children:
                os.kill(child, signal.SIGUSR1)  # prints the stack for the failure message
            time.sleep(1.0)
            return lines, f"not done after {_SECONDS:.0f} s"
        data = os.read(receiver, 1 << 16)
        if not data:
            ends = [] if killed else [os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT) for child in children]
            crashed = [end.si_status for end in ends if end is not None and end.si_status]
            return lines, f"a rank ended with status or signal {crashed}" if crashed else ""
        *whole, rest = (rest + data).split(b"\n")
        for text in map(json.loads, whole):
            if "failure" in text:
                return lines, str(text["failure"])
            lines.append(text)


def _kill(children: Sequence[int]) -> None:
    for child in children:
        os.kill(child, signal.SIGKILL)


def _one_rank(
    program: Path, arguments: Sequence[str], place: tuple[int, int], port: int, sender: _Sender, output: int
) -> None:
    rank, ranks = place
    variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    variables |= {"GROUP_RANK": 0, "NODE_RANK": 0, "TORCHELASTIC_RUN_ID": "tests"}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "1", "CUDA_VISIBLE_DEVICES": ""})
    status = 1
    try:
        gc.freeze()  # modules that the tests have loaded
        warnings.simplefilter("ignore")
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.register(signal.SIGUSR1, output)
        torch.set_num_threads(1)
        check_that_models_end_first()
        torch.nn.functional.cross_entropy = _recorded(torch.nn.functional.cross_entropy, rank, sender)
        sys.argv = [str(program), *arguments]
        runpy.run_path(str(program), run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        sender.send({"failure": f"rank {rank}: {traceback.format_exc()[-3000:]}"})
    finally:
        os._exit(status)


def _recorded(function: Any, rank: int, sender: _Sender) -> Any:
    def cross_entropy(scores: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
        loss = function(scores, labels, **options)
        if torch.is_grad_enabled():
            sender.send({"rank": rank, "samples": labels.tolist(), "loss": loss.item()})
        return loss

    return cross_entropy


@dataclass
class _Sender:
    """Writes lines shorter than PIPE_BUF (4096 bytes), which lines of other ranks cannot interrupt. left: the number of
    lines after which it waits."""

    pipe: int
    left: int | None = None

    def send(self, content: dict[str, Any]) -> None:
        os.write(self.pipe, json.dumps(content).encode()[:4000] + b"\n")
        if self.left is not None:
            self.left -= 1
            while self.left <= 0:
                signal.pause()
