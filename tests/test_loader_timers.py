"""`ImageLoader.stats()`: planted work is attributed correctly, on clocks that only this work advances; sums are correct
however a loop ends. Traces have the events that happened, in the Trace Event Format, and no others."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch
from conftest import make_jpeg, tree_of
from diagnosis_loaders import plain_loader
from gpu_doubles import install
from loader_options import grouped
from suites.programs import run_packer

import packer
import readers
from cache.errors import BadSampleError
from cache.stores import Extents, StoreOver
from readers import Decode, Ranks, Threads, Views
from readers.augment import GaussianBlur, MixUp, RandomHorizontalFlip, RandomResizedCrop, Resize, cpu
from readers.caching.store import Cached
from readers.decode.device import DecodeStream
from readers.loader import ImageLoader, LoaderStats
from readers.loader.stats import LoopTimers
from readers.table import Buffer
from readers.trace import Trace, TraceSlot

COUNT, BATCH = 60, 5
CROP = [RandomResizedCrop(24), RandomHorizontalFlip()]
MS = 1_000_000


class Clock(threading.local):
    """A clock of each thread that only planted work advances."""

    ns = 1

    def __call__(self) -> int:
        return self.ns

    def advance(self, ns: int) -> None:
        self.ns += ns


class OneClock:
    """One such clock shared by all threads."""

    def __init__(self) -> None:
        self._lock, self._ns = threading.Lock(), 1

    def __call__(self) -> int:
        return self._ns

    def advance(self, ns: int) -> None:
        with self._lock:
            self._ns += ns


class SlowStore(StoreOver):
    """A store in which each payload takes a fixed time. Counts its payloads."""

    def __init__(self, source: Any, clock: Any, ns: int) -> None:
        self.source, self._clock, self._ns = source, clock, ns
        self.payloads = 0

    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        return self.source.read_one(row, shard, offset, length)

    def read(self, extents: Extents) -> list[Buffer]:
        self.payloads += len(extents.row)
        self._clock.advance(self._ns * len(extents.row))
        return self.source.read(extents)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, pack: Callable[..., Path]) -> Path:
    root = tmp_path_factory.mktemp("photos") / "images"
    images = {f"class{i % 5}/photo{i:03d}.jpg": make_jpeg(i, (40 + i % 3, 32)) for i in range(COUNT)}
    return pack(tree_of(root, images), samples_per_shard=20)


def plant(monkeypatch: pytest.MonkeyPatch, clock: Any, decode: int, augment: int = 0) -> None:
    """Plant a decoder and a blur that take fixed nanoseconds an image, on a clock that nothing else advances."""
    real_decode, real_blur = cpu.decode_image, GaussianBlur.apply

    def decode_image(*args: Any, **named: Any) -> Any:
        clock.advance(decode)
        return real_decode(*args, **named)

    def apply(*args: Any) -> Any:
        clock.advance(augment)
        return real_blur(*args)

    monkeypatch.setattr(time, "perf_counter_ns", clock)
    monkeypatch.setattr(cpu, "decode_image", decode_image)
    monkeypatch.setattr(GaussianBlur, "apply", apply)


def seconds(stats: LoaderStats) -> dict[str, float]:
    return {stage: round(spent, 9) for stage, spent in stats.stages.items() if spent}


# --- planted work -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("threads", "decode", "augment", "views"),
    [(1, 7 * MS, 2 * MS, 1), (3, 7 * MS, 2 * MS, 2), (3, 3_000, 1_000, 1)],
    ids=["slow", "two views", "so fast that images are sampled"],
)
def test_each_stage_shows_its_time(
    reader: readers.Reader, monkeypatch: pytest.MonkeyPatch, threads: int, decode: int, augment: int, views: int
) -> None:
    clock = Clock()
    plant(monkeypatch, clock, decode, augment)
    slow = readers.Reader(reader.table, SlowStore(reader.store, clock, 4 * MS))
    ops = [*CROP, GaussianBlur((0.1, 1))]
    loader = ImageLoader(slow, BATCH, augment=Views(ops, views), threads=threads, ranks=Ranks(tail="exact"))
    for epoch in range(2):
        count = sum(len(batch[1]) for batch in loader)
        stats = loader.stats()
        assert (stats.epoch, stats.images, stats.made, stats.reads) == (epoch, count, COUNT, COUNT)
        rendered = {"decode": views * decode * COUNT / 1e9, "augment": views * augment * COUNT / 1e9}
        assert seconds(stats) == pytest.approx({"read": 4e-3 * COUNT, **rendered}, rel=1e-6)
        assert stats.busy_seconds == pytest.approx(sum(stats.stages.values()))
        assert stats.bytes_read == reader.sizes().sum() and stats.cache_hits == 0


def test_a_cache_is_distinguished_from_the_store_below_it(
    reader: readers.Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    plant(monkeypatch, clock, MS)
    convert = Cached.convert

    def slow_convert(*args: Any) -> Any:
        clock.advance(2 * MS)
        return convert(*args)

    monkeypatch.setattr(Cached, "convert", slow_convert)
    below = readers.Reader(reader.table, SlowStore(reader.store, clock, 4 * MS))
    with readers.cached(below, 1 << 20, backend="memfd") as inner:
        between = readers.Reader(inner.table, SlowStore(inner.store, clock, 3 * MS))
        outer = readers.cached(between, 1 << 20, backend="memfd")
        loader = ImageLoader(outer, BATCH, augment=CROP, threads=2, ranks=Ranks(tail="exact"))
        for hits, read, cache in ((0, 7e-3, 2 * 2e-3), (COUNT, 0.0, 0.0)):
            assert sum(1 for _ in loader) == COUNT // BATCH
            stats = loader.stats()
            assert (stats.reads, stats.cache_hits) == (COUNT, hits)
            assert stats.stages["read"] == pytest.approx(read * COUNT)
            assert stats.stages["cache"] == pytest.approx(cache * COUNT)
        outer.close()


def test_waiting_for_slow_data_is_measured(reader: readers.Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, requested = OneClock(), threading.Event()
    plant(monkeypatch, clock, 0)
    planted = cpu.decode_image

    def decode_image(*args: Any, **named: Any) -> Any:
        assert requested.wait(300)
        clock.advance(10 * MS)
        return planted(*args, **named)

    monkeypatch.setattr(cpu, "decode_image", decode_image)
    loader = ImageLoader(reader, BATCH, augment=CROP, threads=Threads(1, prefetch=1), ranks=Ranks(tail="exact"))
    batches = iter(loader)
    for _ in range(len(loader)):
        requested.set()
        next(batches)
        requested.clear()
    stats = loader.stats()
    assert stats.seconds == pytest.approx(COUNT * 10e-3) and stats.wait > 0.5 > stats.idle
    assert str(stats).startswith("training waits ") and " of the time for data: decode " in str(stats)
    assert stats.images_per_second == pytest.approx(100) == stats.possible_images_per_second


def test_waiting_for_slow_training_is_measured(reader: readers.Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = OneClock()
    plant(monkeypatch, clock, 1000)
    loader = ImageLoader(reader, BATCH, augment=CROP, threads=Threads(2, prefetch=2), ranks=Ranks(tail="exact"))
    stop = time.monotonic() + 300
    for _ in loader:
        before = loader.stats()
        while loader.stats().idle_seconds == before.idle_seconds and time.monotonic() < stop:
            time.sleep(0.001)
            clock.advance(1_000)  # until all batches are ready, which takes hardly any time on this clock
            if loader.stats().seconds == before.seconds:  # the epoch has ended with its last batch
                break
        clock.advance(100 * MS)  # a training step
    stats, steps = loader.stats(), COUNT // BATCH
    assert stats.idle_seconds >= 0.1 * (steps - 1) and stats.wait < 0.01
    assert stats.ready == (1, 1, steps - 2) and str(stats).startswith("data wait for training: 2 batches ready on 83 %")


# --- sums ---------------------------------------------------------------------------------------------------------
def check(stats: LoaderStats, batches: int, images: int) -> None:
    assert (stats.batches, stats.images) == (batches, images) and stats.made >= images
    assert 0 <= stats.first_wait_seconds <= stats.wait_seconds <= stats.seconds
    assert 0 <= stats.idle_seconds <= stats.seconds and min(stats.stages.values()) >= 0
    assert stats.busy_seconds <= stats.threads * stats.seconds * 1.001 or stats.threads == 0
    assert json.loads(json.dumps(stats.to_dict()))["images_per_second"] == stats.images_per_second


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "alike": {"augment": [Resize((24, 24))], "shuffle": False},
    "views": {"views": 2},
    "mixed": {"augment": [*CROP, MixUp()]},
    "no image": {"fields": ("label", "key")},
    "device": {"decoder": "torchcodec"},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=list(VARIANTS))
def test_whole_epochs(reader: readers.Reader, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    install(monkeypatch, "torchcodec")
    loader = ImageLoader(reader, 7, **grouped({"augment": CROP, "tail": "exact", "threads": 2, **options}))
    assert loader.stats() == LoaderStats() and str(loader.stats()) == "no batch yet"
    for epoch in range(2):
        batches = iter(loader)
        for _ in range(9):
            next(batches)
        stats = loader.stats()
        if "fields" in options:
            assert (stats.epoch, stats.batches, stats.images, stats.reads) == (epoch, 9, COUNT, 0)
            assert next(batches, None) is None
            continue
        check(stats, 9, COUNT)
        assert stats.epoch == epoch and stats.made == COUNT == stats.reads and sum(stats.ready) == 9
        assert stats == loader.stats(), "the epoch has not ended with its last batch"
        assert next(batches, None) is None and stats == loader.stats()


def test_a_loop_left_early_and_a_reset(reader: readers.Reader) -> None:
    loader = ImageLoader(reader, BATCH, augment=CROP, threads=2)
    for step, _ in enumerate(loader):
        if step == 1:
            check(loader.stats(reset=True), 2, 2 * BATCH)
        if step == 4:
            break
    gc.collect()
    stats = loader.stats()
    assert (stats.batches, stats.images, sum(stats.ready)) == (3, 3 * BATCH, 3) and stats == loader.stats()
    kept = iter(loader)
    next(kept)
    assert loader.stats().epoch == 1 and loader.stats().seconds < loader.stats().seconds, "the loop is not under way"
    assert loader.over(reader, loader.order).stats() == LoaderStats()


@pytest.mark.parametrize("on_error", ["raise", "skip", "substitute"])
def test_bad_samples(reader: readers.Reader, monkeypatch: pytest.MonkeyPatch, on_error: Any) -> None:
    whole, bad = cpu.decode_image, bytes(reader.read(11))

    def decode_image(data: Buffer, *more: Any, **named: Any) -> Any:
        if bytes(data) == bad:
            raise BadSampleError("planted")
        return whole(data, *more, **named)

    monkeypatch.setattr(cpu, "decode_image", decode_image)
    loader = ImageLoader(reader, BATCH, augment=CROP, threads=2, on_error=on_error, shuffle=False)
    if on_error == "raise":
        with pytest.raises(BadSampleError, match="planted"):
            list(loader)
        return check(loader.stats(), 2, 2 * BATCH)
    with pytest.warns(UserWarning, match="1 bad samples"):
        list(loader)
    return check(loader.stats(), COUNT // BATCH, COUNT - (on_error == "skip"))


# --- a device -----------------------------------------------------------------------------------------------------
def test_copies_to_a_device_show_the_time_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread waits 10 ms for the device, whose copy took 4 ms of them, or 12 ms, most of it earlier."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter_ns", clock)
    for copied, augment in ((4 * MS, 6e-3), (12 * MS, 0.0)):
        timers = LoopTimers(0, 1, 1, 1, TraceSlot())
        device = timers.device_clock("device")
        device.start()
        clock.advance(10 * MS)
        device.lap_device(copied)
        device.stop("decode")
        assert seconds(timers.stats()) == pytest.approx(
            {"copy": copied / 1e9} | ({"augment": augment} if augment else {})
        )


def test_the_time_between_two_moments_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([MagicMock(), MagicMock()])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "stream")
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: next(moments) if enable_timing else None)
    stream = DecodeStream(torch.device("cuda", 0))
    start, end = stream.tick(), stream.tick()
    start.elapsed_time.return_value = 1.5  # ms
    assert stream.elapsed(start, end) == 1_500_000
    assert start.elapsed_time.call_args == call(end) and start.record.call_args == end.record.call_args == call(
        "stream"
    )
    assert DecodeStream(torch.device("cpu")).tick() is None and stream.elapsed(None, None) == 0


# --- traces -------------------------------------------------------------------------------------------------------
def events_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The events of a trace file by track, after checks of the format."""
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
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-3, "an event overlaps the previous one"
            ends.append(event["ts"] + event["dur"])
    return tracks


@pytest.mark.parametrize("decoder", ["cpu", "torchcodec"])
def test_a_trace_shows_the_work_of_the_threads(
    reader: readers.Reader, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, decoder: Any
) -> None:
    install(monkeypatch, "torchcodec")
    loader = ImageLoader(reader, BATCH, augment=CROP, threads=2, decode=Decode(decoder=decoder))
    list(loader)
    with loader.trace(tmp_path / "trace.json") as trace:
        assert not trace.events, "an event from before the trace"
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
