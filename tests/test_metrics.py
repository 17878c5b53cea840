"""Metrics of loaders: their definitions, as a dictionary, in the loggers of trainers, and for Prometheus."""

from __future__ import annotations

import json
import logging
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_jpeg, tree_of
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from trainer_cases import QUIET, module_of, trainer_of

import readers
from readers import metrics
from readers.loader import ImageLoader
from readers.loader.stats import LoopTimers, bucket_ns, bucket_of, metrics_of
from readers.metrics import Meter
from readers.order import Shuffled
from readers.torch import DevicePrefetcher, EpochSampler, ImageDataset, ImageStream
from readers.trace import TraceSlot

pytestmark = QUIET
COUNT, BATCH, MS = 24, 4, 1_000_000
DASHBOARD = Path(__file__).parent.parent / "examples/grafana.json"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, pack: Callable[..., Path]) -> Path:
    files = {f"class{i % 3}/{i:02d}.jpg": make_jpeg(i, (16, 16)) for i in range(COUNT)}
    return pack(tree_of(tmp_path_factory.mktemp("metrics") / "images", files))


def loader_of(reader: Any, **options: Any) -> ImageLoader:
    return ImageLoader(reader, BATCH, threads=1, **options)


class Clock:
    now = 1

    def __call__(self) -> int:
        return self.now


# --- the dictionary -----------------------------------------------------------------------------------------------
def test_shares_rates_and_percentiles_follow_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter_ns", clock)
    timers = LoopTimers(0, 200, 2, 1, TraceSlot())
    for number in range(200):
        clock.now += 30 * MS  # training
        timers.ask(0)
        clock.now += (10 if number < 198 else 970) * MS
        timers.hand_out(8, bad=number % 2)
    figures = metrics_of(timers.lifetime(), 2)
    assert figures["packer/wait_share"] == pytest.approx((198 * 10 + 2 * 970) / (200 * 30 + 198 * 10 + 2 * 970))
    assert figures["packer/images_per_s"] == pytest.approx(1600 / 9.92)
    assert figures["packer/bad_samples"] == 100
    for name, ms in {"batch_ms_p50": 40, "batch_ms_p95": 40, "batch_ms_p99": 40, "wait_ms_p50": 10}.items():
        assert figures[f"packer/{name}"] == pytest.approx(ms, rel=0.035), name
    late = metrics_of(timers.lifetime() + timers.lifetime() - timers.lifetime(), 2)
    assert late == figures and {type(value) for value in figures.values()} == {float}


def test_each_duration_is_in_its_bucket() -> None:
    for ns in [0, 1, 15, 16, 31, 32, 33, 1000, 12_345_678, 1 << 40]:
        first, end = bucket_ns(bucket_of(ns))
        assert first <= ns < end and (end - first <= 1 or (end - first) / first <= 1 / 16)


def test_metrics_cover_the_time_since_the_last_call_or_all_loops(reader: readers.Reader) -> None:
    loader = loader_of(reader)
    assert loader.metrics()["packer/images_per_s"] == 0.0, "images without a loop"
    watching = Meter(loader)
    for _ in range(2):
        assert len(list(loader)) == COUNT // BATCH
        assert loader.metrics(prefix="data/")["data/images_per_s"] > 0
    assert (loader.totals()["images"], loader.totals()["batches"]) == (2 * COUNT, 2 * COUNT // BATCH)
    since = loader.metrics()
    assert since["packer/images_per_s"] == 0 and np.isnan(since["packer/batch_ms_p50"]), "images since the last call"
    assert loader.metrics(total=True)["packer/images_per_s"] > 0 and loader.stats().images == COUNT
    assert watching.metrics()["packer/images_per_s"] > 0, "a meter shares the last call of the loader"


def test_cache_hits_and_bad_samples(tmp_path: Path, pack: Callable[..., Path]) -> None:
    files = {f"{i:02d}.jpg": make_jpeg(i, (16, 16)) for i in range(COUNT)}
    path = pack(tree_of(tmp_path / "images", files))
    shard = next(path.glob("*.tar"), None) or next(path.glob("*.h5"))
    with readers.open(path) as opened:
        damaged = opened.read(5)
    shard.write_bytes(shard.read_bytes().replace(bytes(damaged), b"\0" * len(damaged)))
    place = {"directory": str(tmp_path), "job": "metrics"}
    with readers.open(path) as opened, readers.cached(opened, **place) as cached:
        loader = loader_of(cached, on_error="substitute")
        for hits in (0.0, 1.0):
            with pytest.warns(UserWarning, match="1 bad sample"):
                list(loader)
            figures = loader.metrics()
            assert figures["packer/cache_hit_share"] == pytest.approx(hits, abs=0.1)
            assert figures["packer/bad_samples"] == 1
        dataset = ImageDataset(cached, on_error="substitute")
        meter = Meter(DataLoader(dataset, BATCH, num_workers=1))
        assert sum(len(batch[0]) for batch in meter) == COUNT
        figures = meter.metrics()
        assert figures["packer/bad_samples"] == 1 and figures["packer/cache_hit_share"] > 0.8, "not of the worker"
        assert "packer/threads_busy_share" not in figures
        dataset.report()
        assert meter.metrics()["packer/bad_samples"] == 0


@pytest.mark.parametrize(
    "kind", ["DataLoader", "StatefulDataLoader", "ImageStream", "DevicePrefetcher", "dict", "list"]
)
def test_a_meter_of_any_loader(reader: readers.Reader, kind: str) -> None:
    names: Any = {"x": "image", "y": "label"} if kind == "dict" else ("image", "label")
    dataset = ImageDataset(reader, fields=names)
    sampler = EpochSampler(Shuffled(COUNT, 1), dataset)
    made: dict[str, Callable[[], Any]] = {
        "StatefulDataLoader": lambda: StatefulDataLoader(dataset, BATCH, sampler=sampler),
        "ImageStream": lambda: DataLoader(ImageStream(dataset, sampler, BATCH), batch_size=None),
        "DevicePrefetcher": lambda: DevicePrefetcher(DataLoader(dataset, BATCH, sampler=sampler), "cpu"),
        "list": lambda: [["a", "b", "c", "d"]] * 6,
    }
    meter = Meter(made.get(kind, lambda: DataLoader(dataset, BATCH, sampler=sampler))())
    assert len(meter) == len(list(meter)) == COUNT // BATCH and meter.totals()["images"] == COUNT
    for _ in meter:
        break
    assert meter.totals()["images"] == COUNT + BATCH
    assert 0 < meter.metrics()["packer/wait_share"] <= 1 and meter.metrics()["packer/wait_share"] == 0


# --- trainers' loggers --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["loader", "plain", "two"])
def test_lightning_logs_metrics(
    reader: readers.Reader, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.loggers import CSVLogger

    from readers.frameworks.lightning import MetricsCallback

    fields = ("index", "image")
    loader: Any = loader_of(reader, fields=fields)
    if kind == "plain":
        dataset = ImageDataset(reader, fields=fields)
        loader = DataLoader(dataset, BATCH, sampler=EpochSampler(Shuffled(COUNT, 1), dataset), drop_last=True)
    module, logger = module_of(lightning), CSVLogger(tmp_path)
    if kind == "two":
        step = module.training_step
        module.training_step = lambda batch, batch_idx: step(batch["a"], batch_idx)
        loader = {"a": loader, "b": loader_of(reader, fields=fields)}
    logged: list[tuple[dict[str, float], int]] = []
    monkeypatch.setattr(logger, "log_metrics", lambda values, step=None: logged.append((values, step)))
    trainer = trainer_of(lightning, tmp_path, logger=logger, max_epochs=2, log_every_n_steps=3)
    trainer.callbacks.append(MetricsCallback("data/"))
    validation = loader_of(reader, shuffle=False, fields=fields)
    trainer.fit(module, loader, validation)
    entries = [(values, step) for values, step in logged if any(name.startswith("data/") for name in values)]
    assert [step for _, step in entries] == [2, 5, 8, 11]
    names = ["data/a/", "data/b/"] if kind == "two" else ["data/"]
    for values, _ in entries:
        assert all(values[f"{name}images_per_s"] > 0 and values[f"{name}batch_ms_p50"] > 0 for name in names)


@pytest.mark.parametrize("kind", ["loader", "plain"])
def test_the_trainer_of_transformers_logs_metrics(reader: readers.Reader, tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    from readers.frameworks.transformers import LoaderTrainer, MetricsCallback

    class Tiny(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, pixel_values: Any, labels: Any) -> Any:
            return {"loss": self.layer(pixel_values.float().mean().view(1, 1)).sum()}

    fields = {"pixel_values": "image", "labels": "label"}
    options: dict[str, Any] = {"disable_tqdm": True, "report_to": "none", "save_strategy": "no", "use_cpu": True}
    options |= {"num_train_epochs": 2, "logging_steps": 3, "per_device_train_batch_size": BATCH}
    arguments = transformers.TrainingArguments(str(tmp_path), **options)
    if kind == "loader":
        trainer = LoaderTrainer(Tiny(), arguments, train_loader=loader_of(reader, fields=fields))
    else:
        trainer = transformers.Trainer(Tiny(), arguments, train_dataset=ImageDataset(reader, fields=fields))
    trainer.add_callback(MetricsCallback(trainer))
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "packer/wait_share" in entry]
    assert [entry["step"] for entry in entries] == [3, 6, 9, 12]
    assert all(entry["packer/images_per_s"] > 0 and entry["packer/wait_ms_p95"] > 0 for entry in entries)


# --- Prometheus ---------------------------------------------------------------------------------------------------
def samples_of(text: str) -> dict[str, float]:
    """The samples by name and labels, as the client library parses them."""
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    families = parser.text_string_to_metric_families(text)
    return {f"{s.name}{sorted(s.labels.values())}": s.value for family in families for s in family.samples}


def test_text_for_prometheus(reader: readers.Reader) -> None:
    pytest.importorskip("prometheus_client")
    loader, plain = loader_of(reader), Meter(DataLoader(ImageDataset(reader), BATCH))
    list(loader), list(plain)
    samples = samples_of(metrics.text({"train": loader, "val": plain}))
    for name in ("train", "val"):
        assert samples[f"packer_images_total['0', '{name}']"] == COUNT
        assert samples[f"packer_batch_seconds_count['0', '{name}']"] == COUNT // BATCH
    assert samples["packer_stage_seconds_total['0', 'decode', 'train']"] > 0
    before = samples
    list(loader)
    samples = samples_of(metrics.text({"train": loader, "val": plain}))
    assert all(samples[name] >= value for name, value in before.items()), "counters restarted in the second epoch"
    assert samples["packer_images_total['0', 'train']"] == 2 * COUNT


def test_the_panel_queries_existing_metrics(reader: readers.Reader) -> None:
    pytest.importorskip("prometheus_client")
    known = set(re.findall(r"^packer_\w+", metrics.text(loader_of(reader)), re.MULTILINE))
    queries = [target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]]
    assert len(queries) == 5 and all(re.findall(r"packer_\w+", query) for query in queries)
    assert {name for query in queries for name in re.findall(r"packer_\w+", query)} <= known
    labels = {
        label for query in queries for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")
    }
    assert labels == {"loader", "le"}


def test_files_and_a_port(
    reader: readers.Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("prometheus_client")
    loader, folder = loader_of(reader), tmp_path / "textfiles"
    folder.mkdir()
    with metrics.write_every(folder / "packer.prom", loader, seconds=0.01):
        list(loader)
    assert f'packer_images_total{{loader="train",rank="0"}} {COUNT}.0' in (folder / "packer.prom").read_text()
    assert "# TYPE packer_images_total counter" in (folder / "packer.prom").read_text(), "for node_exporter"
    assert metrics.write(folder / "packer.txt", loader).read_text().endswith("# EOF\n")
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert metrics.write(folder / "packer.prom", loader).name == "packer.rank3.prom"
    assert 'rank="3"' in (folder / "packer.rank3.prom").read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["packer.prom", "packer.rank3.prom", "packer.txt"]
    with metrics.serve(0, {"train": loader}) as port:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
        with pytest.raises(OSError, match=r"in use"), metrics.serve(port - 1, loader):
            pass  # local rank 1 takes the port after it
    assert f'packer_images_total{{loader="train",rank="3"}} {COUNT}.0' in text
    with pytest.raises(OSError):
        metrics.write(tmp_path / "nowhere/packer.prom", loader)
    with pytest.raises(ValueError, match="seconds=0"), metrics.write_every(folder / "a.prom", loader, seconds=0):
        pass
    with caplog.at_level(logging.WARNING), metrics.write_every(folder / "packer.prom", loader, seconds=60):
        monkeypatch.setattr(metrics, "atomic_write", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
    assert "could not be written: disk full" in caplog.text
