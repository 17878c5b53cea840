"""Traces of loaders and diagnoses: what happened is in them, in the Trace Event Format, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import make_jpeg, tree_of
from diagnosis_loaders import plain_loader
from gpu_doubles import install
from suites.programs import run_packer

import packer
import readers
from readers import Decode
from readers.augment import RandomHorizontalFlip, RandomResizedCrop
from readers.loader import ImageLoader
from readers.trace import Trace

COUNT, BATCH = 40, 5
CROP = [RandomResizedCrop(24), RandomHorizontalFlip()]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, pack: Callable[..., Path]) -> Path:
    root = tmp_path_factory.mktemp("photos") / "images"
    return pack(tree_of(root, {f"class/photo{i:03d}.jpg": make_jpeg(i, (40, 32)) for i in range(COUNT)}))


@pytest.fixture
def reader(packed: Path) -> Iterator[readers.Reader]:
    with readers.open(packed) as opened:
        yield opened


def events_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The events of a file by track, after checks of what the format demands."""
    content = json.loads(path.read_text())
    names = {e["tid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"}
    tracks: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in content["traceEvents"]:
        assert event["ph"] in "MX" and {"name", "pid", "tid"} <= event.keys()
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            tracks[names[event["tid"]]].append(event)
    for events in tracks.values():
        ends: list[float] = []
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            while ends and ends[-1] <= event["ts"] + 1e-3:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-3, "inside the one before, or after it"
            ends.append(event["ts"] + event["dur"])
    return tracks


@pytest.mark.parametrize("decoder", ["cpu", "torchcodec"])
def test_a_trace_has_what_the_threads_did(
    reader: readers.Reader, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, decoder: Any
) -> None:
    install(monkeypatch, "torchcodec")
    loader = ImageLoader(reader, BATCH, augment=CROP, threads=2, decode=Decode(decoder=decoder))
    list(loader)
    with loader.trace(tmp_path / "trace.json") as trace:
        assert not trace.events, "nothing of before"
        list(loader)
        assert not any(tmp_path.iterdir())
    list(loader)
    tracks = events_of(tmp_path / "trace.json")
    crew = [event for name, events in tracks.items() if name[:-1] == "packer-loader-" for event in events]
    steps = COUNT // BATCH
    assert sum(e["args"]["images"] for e in crew if e["name"] == "render") == COUNT
    assert sorted(e["args"]["batch"] for e in crew if e["name"] == "plan") == list(range(steps))
    counts = {name: sum(e["name"] == name for e in tracks["training"]) for name in ("wait for data", "step", "collate")}
    assert counts == {"wait for data": steps, "step": steps - 1, "collate": steps}
    assert ("packer-loader-device" in tracks) == (decoder == "torchcodec")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_trace_keeps_the_last_events(reader: readers.Reader, tmp_path: Path) -> None:
    loader = ImageLoader(reader, BATCH, augment=CROP, threads=2)
    with loader.trace(tmp_path / "trace.json", limit=10) as trace, pytest.raises(ValueError, match="already"):
        list(loader)
        assert len(trace.events) == 10 < trace.dropped
        with loader.trace(tmp_path / "other.json"):
            pass
    assert sum(map(len, events_of(tmp_path / "trace.json").values())) == 10
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["dropped"] == trace.dropped
    with pytest.raises(ZeroDivisionError), loader.trace(tmp_path / "failed.json"):
        _ = len(next(iter(loader))) / 0
    assert len(events_of(tmp_path / "failed.json")["training"]) == 2
    with pytest.raises(ValueError, match="at least 1"):
        Trace(limit=0)


def test_a_diagnosis_of_any_loader_has_lines_waits_copies_and_steps(tmp_path: Path) -> None:
    trace, copied = Trace(), []
    result = packer.diagnose(
        plain_loader(), lambda batch: None, copy=lambda batch: copied.append(0) or batch, seconds=0.3, trace=trace
    )
    trace.save(tmp_path / "trace.json")
    tracks = events_of(tmp_path / "trace.json")
    lines = {event["name"]: event for event in tracks["diagnosis: lines"]}
    assert {rung.stage for rung in result.rungs if rung.measured} <= lines.keys()
    assert 0 < len(tracks["diagnosis: copy"]) <= len(copied)
    whole = [lines[name] for name in ("storage", "storage again") if name in lines]  # on busy CPUs the shorter counts
    for kind in ("wait", "step"):
        starts = [event["ts"] for event in tracks[f"diagnosis: {kind}"]]
        inside = [sum(line["ts"] <= start < line["ts"] + line["dur"] for start in starts) for line in whole]
        assert max(inside) >= result.full.steps


def test_the_command_writes_a_trace(packed: Path, tmp_path: Path) -> None:
    arguments = ("--simulate-step", "1ms", "--batch-size", 5, "--threads", 1, "--trace", tmp_path / "trace.json")
    done = run_packer("diagnose", packed, *arguments, "--seconds", 0.2)
    assert done.returncode == 0, done.stderr
    tracks = events_of(tmp_path / "trace.json")
    assert {"diagnosis: lines", "diagnosis: step", "packer-loader-0", "training"} <= tracks.keys()
