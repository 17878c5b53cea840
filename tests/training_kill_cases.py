"""The example of each training framework, killed and restarted: no sample lost or repeated, the losses of one run. Not
collected: `test_training_kills.py` runs this file in a separate process.

Each example is the unchanged script of examples/ (`suites.training_runs`). TRIALS (default 200) is the number of kills
of each, on 1 to 4 ranks with the same samples in a step; SEED makes a run repeatable.
"""

from __future__ import annotations

import importlib
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_jpeg, tree_of
from suites.training_runs import Step, continues_at, disturb, run_ranks
from trainer_cases import QUIET

import packer
import readers
from readers.order import Shuffled

pytestmark = QUIET
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TRIALS, SEED = int(os.environ.get("TRIALS", "200")), int(os.environ.get("SEED", "1"))
COUNT, BATCH, EPOCHS = 64, 12, 3  # 5 steps an epoch
STEPS = COUNT // BATCH * EPOCHS
NEEDS = {
    "distributed": ["torch.distributed.checkpoint.state_dict"],
    "accelerate": ["accelerate"],
    "lightning": ["readers.frameworks.lightning"],
    "transformers": ["readers.frameworks.transformers"],
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each sample is a separate class, so that labels identify samples; 8 samples also validate."""
    root = tmp_path_factory.mktemp("kills")
    files = {f"train/class{i:02d}/{i:02d}.jpg": make_jpeg(i, (8, 8)) for i in range(COUNT)}
    tree_of(root / "images", files | {f"val/class{i:02d}/{i:02d}.jpg": make_jpeg(i, (8, 8)) for i in range(8)})
    packer.convert(root / "images", to="tar", output=root / "set", run=packer.Run(workers=1))
    return root / "set"


def test_a_classifier_of_two_ranks_is_finished_by_one(packed: Path, tmp_path: Path) -> None:
    program, checkpoint = EXAMPLES / "train_imagenette.py", tmp_path / "run.pt"
    options = ["--model", "small", "--size", "8", "--batch-size", str(BATCH), "--epochs", "1"]
    arguments = [str(packed), *options, "--checkpoint", str(checkpoint)]
    first = run_ranks(program, [*arguments, "--stop-after", "1", "--trace", str(tmp_path / "traced")], 2)
    state = torch.load(checkpoint, weights_only=True)
    assert (state["step"], state["loader"]["epoch"], state["loader"]["cursor"]) == (1, 0, 2 * BATCH)
    rest = run_ranks(program, arguments, 1)
    order = Shuffled(COUNT, 0).indices(0, np.arange(5 * BATCH)).tolist()
    assert [sample for step in [*first, *rest] for sample in step.samples] == order
    traced = sorted(line for path in tmp_path.glob("traced.*") for line in path.read_text().splitlines())
    assert traced == sorted(f"0 {sample}" for sample in order[: 2 * BATCH])


def test_a_diffusion_model_of_two_ranks_is_continued_by_one(packed: Path, tmp_path: Path) -> None:
    program, losses = EXAMPLES / "train_ddpm.py", tmp_path / "losses.txt"
    options = ["--tiny", "--crop", "middle", "--size", "8", "--epochs", "1", "--samples", "0", "--losses", str(losses)]
    arguments = [str(packed), *options, "--batch-size", str(BATCH), "--checkpoint", str(tmp_path / "run.pt")]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        run_ranks(program, [*arguments, "--stop-after", "1"], 2)
        assert torch.load(tmp_path / "run.pt", weights_only=True)["loader"]["cursor"] == 2 * BATCH
        run_ranks(program, arguments, 1)
    assert [line.split()[0] for line in losses.read_text().splitlines()] == ["1", "2", "3", "4"], "not the other 36"


@pytest.fixture(params=list(NEEDS))
def framework(request: pytest.FixtureRequest) -> str:
    for name in ["torch._dynamo", *NEEDS[request.param]]:
        try:
            importlib.import_module(name)  # once, before ranks are forked
        except (ImportError, RuntimeError) as error:
            pytest.skip(f"{request.param} cannot be imported: {error}")
    return str(request.param)


def arguments_of(framework: str, packed: Path, folder: Path, *more: str) -> list[str]:
    options = {"--epochs": EPOCHS, "--batch-size": BATCH, "--size": 8, "--save-every": 1, "--folder": folder}
    if framework == "lightning":
        options |= {"--classes": COUNT}
    return [str(packed), *(str(part) for option in options.items() for part in option), *more]


def undisturbed(framework: str, packed: Path, folder: Path, ranks: int) -> list[Step]:
    """A run without kills: every sample of each epoch once, in order."""
    steps = run_ranks(EXAMPLES / f"train_{framework}.py", arguments_of(framework, packed, folder / str(ranks)), ranks)
    with readers.open(packed, "train") as reader:
        labels = np.asarray(reader.labels)
    used = COUNT // BATCH * BATCH
    expected = [labels[Shuffled(COUNT, 0).indices(epoch, np.arange(used))].tolist() for epoch in range(EPOCHS)]
    samples = [sample for step in steps for sample in step.samples]
    assert samples == [sample for epoch in expected for sample in epoch] and len(steps) == STEPS
    return steps


def test_an_example_continues_where_it_was_killed(framework: str, packed: Path, tmp_path: Path) -> None:
    """Killed on two ranks, and finished by one."""
    program = EXAMPLES / f"train_{framework}.py"
    assert len(program.read_text(encoding="utf-8").splitlines()) < 60
    arguments, whole = arguments_of(framework, packed, tmp_path / "kept"), undisturbed(framework, packed, tmp_path, 2)
    first = run_ranks(program, arguments, 2, kill=(7, 0.0))
    assert continues_at(whole, first, 0) == 0
    if framework == "transformers":  # the checkpoint records the samples of both ranks
        from readers.frameworks.transformers import last_checkpoint

        with readers.open(packed, "train") as reader:
            replayed = readers.replay(str(last_checkpoint(tmp_path / "kept")), reader)
            steps = [replayed.step(number).samples for number in range(replayed.done)]
        past = [[part.label for part in sorted(step, key=lambda part: part.rank)] for step in steps]
        assert len(past) > 5 and past == [step.samples for step in first[: len(past)]]
    rest = run_ranks(program, arguments, 1)
    end = continues_at(whole, rest, len(first), exact=False)
    assert end > 0 and end + len(rest) == STEPS


@pytest.mark.faults
@pytest.mark.parametrize("worlds", [(1,), (2,), (1, 2, 3, 4)], ids=str)
def test_examples_killed_at_random(framework: str, packed: Path, tmp_path: Path, worlds: tuple[int, ...]) -> None:
    program, draw = EXAMPLES / f"train_{framework}.py", random.Random(SEED)
    whole = {ranks: undisturbed(framework, packed, tmp_path, ranks) for ranks in worlds}
    kills = runs = steps = 0
    while kills < TRIALS * len(worlds) / 6:
        tally = disturb(program, arguments_of(framework, packed, tmp_path / f"run{runs}"), whole, worlds, draw)
        kills, runs, steps = kills + tally.kills, runs + 1, steps + tally.steps
    print(f"\n{framework} on {worlds} ranks: {kills} kills in {runs} runs, {steps} steps made: 0 lost, 0 twice")
