"""`apply`: advised changes are made on a copy of the loader, measured, kept if they help, and leave nothing behind."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diagnosis_loaders import BATCH, FAST, STEP, Images, loader
from suites.programs import run_packer
from suites.samples import Samples
from torch.utils.data import DataLoader, Dataset

import readers
from cache.errors import PackerError, PipelineError
from cache.stores import Buffer, StoreOver
from readers.augment import CenterCrop, Normalize, Resize
from readers.diagnosis import Advice, Change, Diagnosis, Pipeline, Stage
from readers.diagnosis.apply import apply_advice
from readers.diagnosis.changed_imageloader import change_imageloader
from readers.diagnosis.dataloader import DataLoaderPipeline
from readers.diagnosis.evidence import Evidence
from readers.diagnosis.facts import gather
from readers.diagnosis.imageloader import ImageLoaderPipeline
from readers.diagnosis.payload import inspect_payload
from readers.diagnosis.pipeline import IterablePipeline, leaves
from readers.diagnosis.text import applied_lines
from readers.diagnosis.training import Training
from readers.loader import ImageLoader
from readers.torch import ImageDataset

# More workers than CPUs are right for work that waits.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
OPS = [Resize(16), CenterCrop(16)]
NORMALIZED = [*OPS, Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]


@pytest.fixture(scope="module")
def packed(samples: Samples) -> Path:
    return samples.packed()


@pytest.fixture(scope="module")
def batches(packed: Path) -> list[Any]:
    """The first batches of the loaders that are changed."""
    return list(itertools.islice(data_loader(readers.open(packed, "train"), NORMALIZED), 2))


@pytest.fixture(scope="module", params=["ImageLoader", "DataLoader"])
def pipeline(request: pytest.FixtureRequest, packed: Path) -> Pipeline:
    """Of one of our loaders."""
    reader = readers.open(packed, "train")
    if request.param == "ImageLoader":
        return ImageLoaderPipeline(image_loader(reader, NORMALIZED))
    return DataLoaderPipeline(data_loader(reader, NORMALIZED))


def image_loader(reader: readers.Reader, ops: Any = OPS, **options: Any) -> ImageLoader:
    return ImageLoader(reader, 4, augment=ops, shuffle=False, **{"threads": 1, **options})


def data_loader(reader: readers.Reader, ops: Any = OPS, **options: Any) -> DataLoader[Any]:
    return DataLoader(ImageDataset(reader, ops), batch_size=4, **options)


def first(pipeline: Pipeline, count: int = 2) -> list[Any]:
    batches = pipeline.cached(0)
    try:
        return list(itertools.islice(batches, count))
    finally:
        getattr(batches, "close", lambda: None)()


def same(one: Any, other: Any, tolerance: float) -> bool:
    pairs = list(zip(leaves(one), leaves(other), strict=True))
    return all(torch.allclose(a.float(), b.float(), atol=1e-5 + tolerance) for a, b in pairs)


# --- the seam ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "tolerance"),
    [
        (Change("workers", 2, "two workers"), 0.0),
        (Change("pin_memory", 0, "not pinned"), 0.0),
        (Change("cache", "encoded", "cached"), 0.0),
        (Change("cache", "decoded", "pixels"), 5.0),  # scaled decoding is of encoded images only
        (Change("stage", "", "staged"), 0.0),
    ],
    ids=lambda value: f"{value.kind}-{value.value}" if isinstance(value, Change) else "",
)
def test_a_changed_loader_gives_the_same_batches(
    pipeline: Pipeline, batches: list[Any], change: Change, tolerance: float, tmp_path: Path
) -> None:
    if change.kind == "stage":
        change = replace(change, value=str(tmp_path))
    changed = pipeline.changed(change)
    assert changed is not None
    assert same(first(changed), batches, tolerance)
    again = changed.changed(Change("workers", 3, "three workers"))  # changes add up
    assert again is not None and again.workers == 3 and same(first(again), batches, tolerance)
    changed.close()
    assert not list(tmp_path.iterdir())


def test_batches_become_larger(pipeline: Pipeline) -> None:
    changed = pipeline.changed(Change("batch_size", 8, "8"))
    assert changed is not None and len(first(changed)[0][1]) == 8


def test_8_bit_batches_become_what_they_were(pipeline: Pipeline, batches: list[Any]) -> None:
    (field, _) = inspect_payload(batches).fields
    assert field.facts[0].kind == "uint8", field
    changed = pipeline.changed(Change("uint8", field.path, "uint8", field))
    assert changed is not None and changed.convert is not None
    small = first(changed)
    assert small[0][0].dtype == torch.uint8 and same([changed.convert(each) for each in small], batches, 0.01)


def test_a_change_that_a_loader_does_not_know_is_none(packed: Path) -> None:
    foreign = DataLoaderPipeline(loader(Images(0.0, (0.0, 0.0, 0.0)), 0))
    assert (
        foreign.changed(Change("cache", "encoded", "")) is None and foreign.changed(Change("prefetch", 4, "")) is None
    )
    assert IterablePipeline([1]).changed(Change("workers", 2, "")) is None
    ours = image_loader(readers.open(packed, "train"))
    assert change_imageloader(ours, Change("uint8", "[0]", ""), 4) is None  # it is that already
    batches = DataLoader(Images(), batch_sampler=[[0, 1]] * 8)
    with pytest.raises(PipelineError, match="batches by list"):
        DataLoaderPipeline(batches).changed(Change("batch_size", 8, ""))


def test_a_copy_without_room_is_an_error_and_leaves_nothing(pipeline: Pipeline, tmp_path: Path) -> None:
    for target in (tmp_path / "missing", Path("/proc")):
        with pytest.raises((PackerError, OSError)):
            pipeline.changed(Change("stage", str(target), "staged"))
    assert not list(tmp_path.iterdir())


# --- applying ---------------------------------------------------------------------------------------------------------
class Dealt(Pipeline):
    """Takes the seconds that are left of each stage, by what was changed; nothing really runs but a sleep."""

    stages = (Stage("storage"), Stage("read", "", 0.06, 0.0))
    workers, more_workers = 2, True

    def __init__(self, seconds: float = 0.03, effects: Any = (), closed: list[str] | None = None) -> None:
        self.seconds, self.effects, self.closed = seconds, dict(effects), [] if closed is None else closed
        self.kind = ""

    def cached(self, count: int) -> Iterator[Any]:
        while True:
            time.sleep(max(0.0, (self.seconds - STEP) if count < 2 else 0.0))
            yield torch.rand(2, 3)

    def changed(self, change: Change) -> Pipeline | None:
        effect = self.effects.get(change.kind)
        if isinstance(effect, Exception):
            raise effect
        if effect is None:
            return None
        other = Dealt(self.seconds * effect, self.effects, self.closed)
        other.kind = change.kind
        return other

    def close(self) -> None:
        self.closed.append(self.kind)


def advice_for(kind: str, seconds: float | None, gain: float) -> Advice:
    return Advice(kind, kind, (), "", "", seconds, gain, Change(kind, 4, kind, share=(("read", 0.0),)))


def applied_to(pipeline: Dealt, advice: list[Advice], **findings: str) -> Any:
    training = Training(lambda batch: time.sleep(STEP), simulated=True)
    result = replace(readers.diagnose(pipeline, simulate_step=STEP, seconds=0.5), **findings)
    evidence = Evidence.of(result, gather(pipeline, result))
    return apply_advice(pipeline, evidence, advice, training, seconds=1)


def test_what_helps_is_kept_and_everything_is_released() -> None:
    effects = {"cache": 0.6, "workers": 2.0, "stage": OSError("no room"), "prefetch": 0.2}
    pipeline = Dealt(0.08, effects)
    tried = ["workers", "stage", "cache", "uint8", "prefetch"]
    applied = applied_to(pipeline, [advice_for(kind, None, 1.0 - n / 10) for n, kind in enumerate(tried)])
    assert [(each.change.kind, each.kept) for each in applied] == [
        ("workers", False),
        ("stage", False),
        ("cache", True),
        ("prefetch", True),
    ]
    assert applied[1].measured is None and "no room" in applied[1].problem
    assert applied[3].before == applied[2].measured < applied[0].before
    assert sorted(pipeline.closed) == ["cache", "prefetch", "workers"]
    lines = "\n".join(applied_lines(applied))
    assert "not possible here" in lines and "not kept" in lines and "ms measured" in lines


def test_changes_that_cannot_help_are_not_tried() -> None:
    """Where nothing waits any more, and where the prediction with what was kept is no better than what there is."""
    assert applied_to(Dealt(STEP, {"cache": 0.5}), [advice_for("cache", None, 1.0)], culprit="") == ()
    again = Change("cache", 8, "other", share=(("read", 0.0),))
    twice = [advice_for("cache", 0.02, 1.0), Advice("other", "", (), "", "", 0.02, 0.5, again)]
    assert [each.advice for each in applied_to(Dealt(0.08, {"cache": 0.6}), twice)] == ["cache"]


class SlowStore(StoreOver):
    """Waits before each read, as a disk far away."""

    def __init__(self, source: Any, seconds: float) -> None:
        self.source, self.seconds = source, seconds

    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        time.sleep(self.seconds)
        return self.source.read_one(row, shard, offset, length)

    def read(self, extents: Any) -> list[Buffer]:
        time.sleep(self.seconds * len(extents.row))
        return self.source.read(extents)


class Floats(Dataset[Any]):
    """Normalised 8-bit values."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> Any:
        pixels = np.random.default_rng(index).integers(0, 256, (3, 64, 64)).astype(np.float32)
        return torch.from_numpy((pixels / 255 - 0.5) / 0.25), index


def bus(batch: Any) -> Any:
    """A copy of 1.6 MB takes 160 ms."""
    time.sleep(sum(leaf.nbytes for leaf in leaves(batch)) * 100e-9)
    return batch


def slow_set(packed: Path) -> readers.Reader:
    reader = readers.open(packed, "train")
    return readers.Reader(reader.table, SlowStore(reader.store, 0.04))


@pytest.mark.timing
@pytest.mark.parametrize(
    ("make", "options", "kind"),
    [
        (lambda _: loader(Images(read=0.02)), {}, "workers"),
        (lambda packed: image_loader(slow_set(packed)), {}, "cache"),
        (lambda packed: data_loader(slow_set(packed), num_workers=1), {}, "cache"),
        (lambda _: DataLoader(Floats(), batch_size=32, num_workers=2), {"copy": bus}, "uint8"),
    ],
    ids=["workers", "cache", "cache-dataloader", "uint8"],
)
def test_the_predicted_gain_is_the_measured_one(
    make: Callable[[Path], Any], options: dict[str, Any], kind: str, packed: Path
) -> None:
    result = readers.diagnose(make(packed), simulate_step=4 * STEP, seconds=6, apply=(kind,), **options)
    (best,) = result.applied
    assert best.kept and best.error is not None and abs(best.error) < 0.2, applied_lines(result.applied)


def test_a_diagnosis_applies_what_it_advises() -> None:
    found: Diagnosis = readers.diagnose(
        loader(Images(FAST, (0.0, 0.006, 0.0))), simulate_step=0.005, seconds=1.5, apply=True
    )
    assert found.payload is not None and found.payload.fields[0].shape == (BATCH, 3, 16, 16)
    changed = {each.change.kind for each in found.applied}
    assert "workers" in changed, applied_lines(found.applied)
    assert json.dumps(found.to_dict())


def test_the_command_applies_and_says_so(packed: Path) -> None:
    arguments = ("--split", "train", "--batch-size", "4", "--image-size", "16", "--threads", "1", "--seconds", "1")
    done = run_packer("diagnose", packed, "--simulate-step", "0.1ms", *arguments, "--apply", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["payload"]["bytes"] and {"advice", "applied"} <= document.keys()
