"""Advice: each tip of the table is given for its evidence alone, and its commands and code work."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from packer.cli.group import cli
from packer.tools.diagnose import Advice, Diagnosis, Rung, StageCost, StepTime
from packer.tools.diagnose.evidence import Evidence, Facts, Member, Model, fit
from packer.tools.diagnose.ladder import advice_lines
from packer.tools.diagnose.tips import TIPS, advise

GB = 1 << 30
BY_ID = {tip.id: tip for tip in TIPS}
READ, COMPUTE = {"read": (0.16, 0.01)}, {"read": (0.16, 0.15)}
OURS = {"read": (0.002, 0.001), "decode": (0.14, 0.14), "augment": (0.02, 0.02)}
ON_SSD: dict[str, Any] = {"place": "/data/set", "files": "shards", "filesystem": "ext4", "local": True, "ours": True}
ON_LUSTRE: dict[str, Any] = {**ON_SSD, "filesystem": "lustre", "local": False}
AT_ADDRESS: dict[str, Any] = {**ON_SSD, "place": "s3://bucket/set", "files": "remote", "filesystem": "", "local": None}
LOOSE: dict[str, Any] = {**ON_SSD, "files": "loose"}
SET: dict[str, Any] = {"samples": 10_000, "mean_bytes": 1e5, "media": "jpeg", "short_side": 400, "long_side": 500}
ROOM: dict[str, Any] = {"shm_bytes": 64 * GB, "memory_bytes": 100 * GB, "faster": (("/dev/shm", 64 * GB),)}
JOB: dict[str, Any] = {"loader": "DataLoader", "workers": 2, "prefetch": 4, "batch_size": 64, "crop": 224}
OUR_JOB: dict[str, Any] = {**JOB, "loader": "ImageLoader", **ON_SSD, **SET}


def of(
    work: dict[str, tuple[float, float]] | None = None,
    *,
    storage: float = 0.0,
    copy: float = 0.0,
    collate: float = 0.0,
    step: float = 0.02,
    cpus: int = 4,
    spread: float = 0.0,
    busy: float | None = 0.5,
    culprit: str | None = None,
    workers: int = 2,
    **facts: Any,
) -> Evidence:
    """Evidence of a diagnosis: stages with (seconds, CPU seconds) of a batch in a worker, with two workers."""
    stages = dict(work or {})
    if collate:
        stages["collate"] = (collate, collate)
    seconds, rungs, costs = step, list[Rung](), list[StageCost]()

    def line(stage: str, time: float, freed: float, each: tuple[float, float] | None) -> None:
        added = time - (rungs[-1].time.seconds if rungs else 0.0)
        within = StepTime(time, time * (1 - spread), time * (1 + spread), 0.0, 9, busy)
        rungs.append(Rung(stage, stage, within))
        costs.append(StageCost(stage, stage, added, freed, True, *(each or (None, None))))

    line("step", step, 0.0, None)
    if copy:
        seconds += copy
        line("copy", seconds, copy, None)
    total, below = sum(each[0] for each in stages.values()), 0.0
    for stage, each in reversed(stages.items()):
        below += each[0]
        warm = max(seconds, below / workers)
        line(stage, warm, max(0.0, max(seconds, total / workers) - max(seconds, (total - each[0]) / workers)), each)
    full = rungs[-1].time.seconds + storage
    line("storage", full, storage, None)
    named = culprit if culprit is not None else "" if full < 1.1 * step else max(costs[1:], key=lambda c: c.freed).stage
    needed = sum(each[1] for each in stages.values()) / step
    result = Diagnosis(tuple(rungs), tuple(costs), named, "", step, 64, workers, None, cpus, needed, batch_bytes=1000)
    return Evidence.of(result, Facts(**{**JOB, "workers": workers, **facts}))


def member(name: str, module: str, stage: str = "transform 1") -> tuple[Member, ...]:
    return (Member(stage, name, module),)


T1 = {"read": (0.001, 0.001), "transform 1": (0.15, 0.15)}
TWO = {**T1, "transform 2": (0.001, 0.001)}
BLUR_FIRST = (Member("transform 1", "GaussianBlur", "my.ops"), Member("transform 2", "RandomCrop", "torchvision"))

# For each tip: evidence that calls for it, and similar evidence that does not.
CASES: dict[str, tuple[Evidence, Evidence]] = {
    "network": (of(READ, storage=0.1, **AT_ADDRESS, **SET), of(READ, storage=0.1, **AT_ADDRESS, **SET, **ROOM)),
    "stage": (of(READ, storage=0.1, **ON_LUSTRE, **SET, **ROOM), of(READ, storage=0.1, **ON_LUSTRE, **SET)),
    "node-local": (of(READ, storage=0.1, spread=0.3, **ON_LUSTRE), of(READ, storage=0.1, spread=0.3, **ON_SSD)),
    "concurrency": (of(READ, storage=0.1, **AT_ADDRESS), of(READ, storage=0.1, workers=32, **AT_ADDRESS)),
    "requests": (of(READ, storage=0.1, shuffled=True, **ON_LUSTRE), of(READ, storage=0.1, shuffled=False, **ON_LUSTRE)),
    "fewer-readers": (of(READ, storage=0.1, workers=32, **ON_LUSTRE), of(READ, storage=0.1, **ON_LUSTRE)),
    "transfer": (of(READ, storage=0.1, **AT_ADDRESS), of(READ, storage=0.1, **ON_LUSTRE)),
    "compress": (of(READ, **ON_SSD, **{**SET, "mean_bytes": 6e5}), of(READ, **ON_SSD, **SET)),
    "pack": (of(READ, **LOOSE, **SET), of(READ, **ON_SSD, **SET)),
    "cache": (of(READ, **ON_SSD, **SET, **ROOM), of(READ, **ON_SSD, **SET, **ROOM, cached="encoded")),
    "cache-part": (of(READ, **ON_SSD, **SET, shm_bytes=GB // 2), of(READ, **ON_SSD, **SET, **ROOM)),
    "cache-elsewhere": (
        of(READ, **ON_SSD, **SET, shm_bytes=1 << 26, memory_bytes=GB * 9),
        of(READ, **ON_SSD, **SET, **ROOM),
    ),
    "clean": (of(READ, unused_cache_bytes=GB), of(READ)),
    "node-shuffle": (of(READ, nodes=4, **ON_SSD), of(READ, **ON_SSD)),
    "workers": (of(READ), of(READ, workers=9)),
    "prefetch": (of({"read": (0.03, 0.01)}, storage=0.02, spread=0.2), of({"read": (0.03, 0.01)}, storage=0.02)),
    "shrink": (of(COMPUTE, **LOOSE, **SET), of(COMPUTE, **LOOSE, **{**SET, "short_side": 256})),
    "decoded": (of(OURS, **OUR_JOB, **ROOM), of(OURS, **OUR_JOB)),
    "prepare": (
        of(T1, members=member("Resize", "torchvision.transforms")),
        of(T1, members=member("RandomCrop", "torchvision.transforms")),
    ),
    "cpus": (of(COMPUTE), of(COMPUTE, cpus=6)),
    "servers": (of(COMPUTE), of(COMPUTE, cpus=6)),
    "order": (of(TWO, members=BLUR_FIRST), of(TWO, members=BLUR_FIRST[::-1])),
    "compile": (of(T1, members=member("Mine", "train")), of(T1, members=member("Blur", "torchvision.transforms"))),
    "library": (of(T1, members=member("Blur", "torchvision.transforms")), of(T1, members=member("Mine", "train"))),
    "decoder": (of(COMPUTE, decoder="pillow", **LOOSE, **SET), of(COMPUTE, decoder="cpu", **LOOSE, **SET)),
    "codec": (
        of(OURS, **OUR_JOB, no_codec="no compiler"),
        of(OURS, **OUR_JOB),
    ),
    "balance": (of(COMPUTE, **{**LOOSE, **SET, "media": "png"}), of(COMPUTE, **LOOSE, **SET)),
    "gpu-decode": (of(OURS, gpus=1, **OUR_JOB), of(OURS, **OUR_JOB)),
    "gpu-transforms": (
        of(T1, gpus=1, members=member("Normalize", "torchvision")),
        of(T1, members=member("Normalize", "torchvision")),
    ),
    "gpu-decompress": (of(COMPUTE, gpus=1, **{**LOOSE, **SET, "media": "png"}), of(COMPUTE, gpus=1, **LOOSE, **SET)),
    "generate": (of(COMPUTE, files="none", dataset="Fake"), of(COMPUTE, **LOOSE)),
    "threads": (of(COMPUTE, busy=0.99), of(COMPUTE, busy=0.99, omp_threads="1")),
    "pin-memory": (of(READ, copy=0.09, gpus=1, copies=True), of(READ, copy=0.09)),
    "batch-size": (of(copy=0.02, batch_size=8), of(copy=0.02, batch_size=256)),
    "gpu-memory": (
        of(OURS, **OUR_JOB, device="cuda:0", gpu_bytes=10 * GB, gpu_free_bytes=GB),
        of(OURS, **OUR_JOB, device="cuda:0", gpu_bytes=10 * GB, gpu_free_bytes=5 * GB),
    ),
    "real-step": (of(READ, simulated=True), of(READ)),
    "watch": (of(READ, spread=0.3), of(READ)),
}
PROSE = ("network", "servers")  # tips for another machine, which no command of packer carries out


def found(evidence: Evidence) -> dict[str, Advice]:
    return {each.id: each for each in advise(evidence)}


@pytest.mark.parametrize("tip", TIPS, ids=lambda tip: tip.id)
def test_a_tip_is_given_for_its_evidence_alone(tip: Any) -> None:
    yes, no = CASES[tip.id]
    assert tip.id in found(yes) and tip.id not in found(no)
    advice = found(yes)[tip.id]
    assert re.search(r"\d|no file|crop", advice.why), f"no figure: {advice.why}"
    assert advice.gain >= 0 and (advice.seconds is None or advice.gain == yes.diagnosis.full.seconds - advice.seconds)


def test_gpu_decoding_is_not_advised_where_a_gpu_decodes() -> None:
    for decoder in ("torchcodec/cuda", "torchcodec/cuda, cpu_share=auto", "torchvision/cuda"):
        assert "gpu-decode" not in found(of(OURS, gpus=1, **OUR_JOB, device="cuda:0", decoder=decoder))


def test_every_tip_has_its_cases() -> None:
    assert len(BY_ID) == len(TIPS) and CASES.keys() == BY_ID.keys()


@pytest.mark.parametrize("id", [id for id in CASES if id not in PROSE])
def test_commands_and_code_of_tips_exist(id: str) -> None:
    """Commands have the flags, code compiles, and the names of this project in it exist."""
    lines = found(CASES[id][0])[id].how
    code = list[str]()
    for line in lines.split("\n"):
        words = shlex.split(line) if line.startswith(("packer ", "sbatch ", "OMP_")) else []
        if words[:1] == ["packer"]:
            check_command(words[1:])
        elif not words:
            code.append(line)
    ast.parse("\n".join(code))
    for name in re.findall(r"readers(?:\.\w+)+", "\n".join(code)):
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
    for comment in re.findall(r"# (packer .*)", lines):
        check_command(shlex.split(comment)[1:])


def check_command(words: list[str]) -> None:
    """Check a packer command with its flags without running it: the help of the command names the flags."""
    words = words[: words.index("--")] if "--" in words else words
    name = 2 if words[0] == "cache" else 1
    done = CliRunner().invoke(cli, [*words[:name], "--help"])
    assert done.exit_code == 0, words
    for flag in (word for word in words if word.startswith("--")):
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", done.output), f"packer {words[0]} has no {flag}"


def test_advice_is_ordered_by_its_gain() -> None:
    evidence = of(OURS, storage=0.05, **OUR_JOB, **ROOM)
    gains = [each.gain for each in advise(evidence)]
    assert gains == sorted(gains, reverse=True) and gains[0] > 0
    assert len(advice_lines(advise(evidence))) >= 3 * len(gains)
    assert not advice_lines(())


def test_no_advice_where_the_data_keep_up() -> None:
    facts = {**OUR_JOB, **ROOM, "gpus": 1, "simulated": True, "unused_cache_bytes": GB, "nodes": 4}
    assert not found(of({"read": (0.001, 0.001)}, **facts))


def test_the_model_reproduces_the_figures_that_it_was_fitted_to() -> None:
    for evidence in (of(READ), of(COMPUTE, cpus=1), of(OURS, storage=0.05), of({"read": (0.03, 0.03)}, storage=0.01)):
        model = evidence.model
        assert model is not None and model.seconds() == pytest.approx(evidence.diagnosis.full.seconds)
        assert model.seconds(share=dict.fromkeys(model.work, 0.0)) == pytest.approx(model.floor)
    assert fit(of().diagnosis) is None


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({"workers": 4}, 0.04),
        ({"workers": 16}, 0.02),  # the floor
        ({"share": {"read": 0.5}}, 0.04),
        ({"workers": 0}, 0.18),
    ],
)
def test_the_model_predicts(options: dict[str, Any], seconds: float) -> None:
    assert Model(0.02, {"read": 0.16}, {"read": 0.01}, 2, 4).seconds(**options) == pytest.approx(seconds)


def test_the_model_respects_the_number_of_cpus() -> None:
    model = Model(0.02, {"read": 0.16}, {"read": 0.16}, 2, 4)
    assert model.seconds(workers=8) == pytest.approx(0.04) and model.enough_workers() == 4


def test_a_diagnosis_with_advice_is_plain_values() -> None:
    evidence = CASES["stage"][0]
    result = replace(evidence.diagnosis, advice=advise(evidence))
    assert result.to_dict()["advice"][0]["id"]
    assert any("packer stage /data/set --target /dev/shm" in line for line in advice_lines(result.advice))
