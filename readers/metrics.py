"""Metrics of loaders for monitoring: for the logger of a training framework, and for Prometheus and Grafana.

    loader.metrics()                                   a flat dictionary, for any logger
    Meter(other).metrics()                             the same for a DataLoader or any other iterable of batches
    with write_every("/var/lib/node_exporter/packer.prom", loader): …
    with serve(9400, loader): …                        http://…:9400/metrics

An `ImageLoader` has its own counters and clocks. A `Meter` adds them to other loaders; around an `ImageLoader` it only
remembers its last call of `metrics`, so that several meters of one loader do not affect each other. `text`, `write`,
`write_every` and `serve` need `pip install 'packer-vision[prometheus]'`. Their metrics are

    packer_{images,batches,reads,cache_hits,decoded_images,device_decoded_images,bad_samples}_total
    packer_{loop,wait,busy,cpu}_seconds_total, packer_read_bytes_total, packer_stage_seconds_total{stage}
    packer_batch_seconds, packer_batch_wait_seconds       histograms: time per batch, and time waited for a batch

All metrics have the labels `loader` and `rank`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from cache.errors import MissingExtraError
from cache.files import atomic_write
from cache.node import detect_ranks
from readers.loader.stats import LoopTimers, Totals, bucket_ns, lengths_of, metrics_of, stage_ns
from readers.trace import TraceSlot

__all__ = ["Meter", "Watched", "images_of", "serve", "text", "write", "write_every"]

_COUNTS = {
    "images": ("images", "Images handed out to training."),
    "batches": ("batches", "Batches handed out to training."),
    "reads": ("reads", "Images read; with a plain DataLoader, payloads read through the cache of the node."),
    "cache_hits": ("hits", "Of these, from a cache."),
    "decoded_images": ("decoded", "Images of batches finished on a device."),
    "device_decoded_images": ("by device", "Of these, decoded by the device."),
    "bad_samples": ("bad", "Samples skipped or replaced."),
    "read_bytes": ("bytes read", "Bytes of images read."),
}
_SECONDS = {
    "loop": ("seconds", "Time of loops over the loader."),
    "wait": ("wait", "Of it, training waited for a batch."),
    "busy": ("busy", "Threads of the loader worked, summed."),
    "cpu": ("cpu", "CPU time of the threads of the loader."),
}
_HISTOGRAMS = {"batch": ("packer_batch", "From one batch to the next."), "wait": ("packer_batch_wait", "Waiting.")}
_EDGES_NS = [1 << power for power in range(17, 37)]  # 0.1 ms to 69 s
_log = logging.getLogger(__name__)


class Meter:
    """The metrics of any loop over batches; `for batch in Meter(loader)` measures its times.

    loader: an `ImageLoader`, whose own clocks are used, or any iterable of batches. For a DataLoader over an
        `ImageDataset` or `ImageStream`, bad samples are counted as well; over `readers.cached`, so are cache hits.

    Code that cannot iterate over the meter, for example a callback of a framework, calls `ask`, `took` and `end`.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._own = None if hasattr(type(loader), "totals") else LoopTimers(0, -1, 0, 1, TraceSlot())
        self.threads = getattr(loader, "threads", 0) if self._own is None else 0
        self._looping = False
        self._seen = self._begin = self.totals()

    def __iter__(self) -> Iterator[Any]:
        if self._own is None:
            yield from self.loader
            return
        self.ask()
        try:
            for batch in self.loader:
                self.took(images_of(batch))
                yield batch
                self.ask()
        finally:
            self.end()

    def __len__(self) -> int:
        return len(self.loader)

    def ask(self) -> None:
        """Start the clock of waiting: training asks for its next batch."""
        if self._own is not None:
            if not self._looping:
                self._own, self._looping = LoopTimers(0, -1, 0, 1, self._own.slot, self._own), True
            self._own.ask(0)

    def took(self, images: int) -> None:
        """Stop the clock of waiting: training has its next batch, of this many images."""
        if self._own is not None and self._looping:
            self._own.hand_out(images)

    def end(self) -> None:
        """End the loop: the time until the next `ask` is not counted."""
        if self._own is not None and self._looping:
            self._own.end()
            self._looping = False

    def totals(self) -> Totals:
        """All sums since the loader or the meter was made: counts, and times in nanoseconds."""
        if self._own is None:
            totals: Totals = self.loader.totals()
            return totals
        dataset = getattr(self.loader, "dataset", None)
        dataset = getattr(dataset, "dataset", dataset)  # the data set of an ImageStream
        bad: int = getattr(dataset, "all_bad_samples", 0)
        reader: Any = getattr(dataset, "reader", None)
        cache = reader.stats() if hasattr(reader, "stats") else None
        reads = Counter() if cache is None else Counter(hits=cache.hits, reads=cache.hits + cache.misses + cache.passed)
        return self._own.lifetime() + Counter(bad=bad) + reads

    def metrics(self, *, total: bool = False, prefix: str = "packer/") -> dict[str, float]:
        """A flat dictionary as of `ImageLoader.metrics`, without metrics of threads and devices for other loaders.

        total: count from when the meter was made, not from the last call. prefix: put before each name.
        """
        now = self.totals()
        since, self._seen = (now - self._begin, self._seen) if total else (now - self._seen, now)
        return metrics_of(since, self.threads, prefix)


Watched: TypeAlias = Any  # a loader, a Meter, or a mapping of names to these


def images_of(batch: Any) -> int:
    """The number of samples in a batch: the length of its first part; 0 if that has no length."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple) and batch and not isinstance(batch[0], str):
        return images_of(batch[0])
    return len(batch) if hasattr(batch, "__len__") else 0


class _Collector:
    """A collector of the metrics of named loaders, for a registry of prometheus_client."""

    def __init__(self, watched: Watched) -> None:
        loaders = watched if isinstance(watched, Mapping) else {"train": watched}
        self._meters = {
            name: loader if isinstance(loader, Meter) else Meter(loader) for name, loader in loaders.items()
        }

    def collect(self) -> Iterable[Any]:
        core = _client().core
        rank, labels = detect_ranks().rank, ("loader", "rank")
        labelled = [
            ((name, str(getattr(meter.loader, "rank", rank))), meter.totals()) for name, meter in self._meters.items()
        ]
        for name, (key, words) in _COUNTS.items():
            family = core.CounterMetricFamily(f"packer_{name}", words, labels=labels)
            for values, totals in labelled:
                family.add_metric(values, totals[key])
            yield family
        for name, (key, words) in _SECONDS.items():
            family = core.CounterMetricFamily(f"packer_{name}_seconds", words, labels=labels, unit="seconds")
            for values, totals in labelled:
                family.add_metric(values, totals[key] / 1e9)
            yield family
        stages = core.CounterMetricFamily(
            "packer_stage_seconds", "Seconds of threads, by stage.", labels=(*labels, "stage"), unit="seconds"
        )
        for values, totals in labelled:
            for stage, ns in stage_ns(totals).items():
                stages.add_metric((*values, stage), ns / 1e9)
        yield stages
        for kind, (name, words) in _HISTOGRAMS.items():
            histogram = core.HistogramMetricFamily(f"{name}_seconds", words, labels=labels, unit="seconds")
            for values, totals in labelled:
                lengths = [(bucket_ns(bucket), count) for bucket, count in lengths_of(totals, kind)]
                buckets = [(repr(edge / 1e9), sum(n for (_, end), n in lengths if end <= edge)) for edge in _EDGES_NS]
                count, spent = sum(n for _, n in lengths), sum(n * (low + end) / 2e9 for (low, end), n in lengths)
                histogram.add_metric(values, [*buckets, ("+Inf", count)], spent)
            yield histogram


def _client() -> Any:
    try:
        import prometheus_client.core
        import prometheus_client.openmetrics.exposition
    except ImportError as error:
        raise MissingExtraError("prometheus_client", "prometheus", "readers.metrics") from error
    return prometheus_client


def _registry(watched: Watched) -> Any:
    registry = _client().CollectorRegistry()
    registry.register(_Collector(watched))
    return registry


def text(watched: Watched, *, openmetrics: bool = True) -> str:
    """The metrics in the OpenMetrics text format, or in the older text format of Prometheus.

    Raises MissingExtraError without prometheus_client.
    """
    return _text(_registry(watched), openmetrics)


def _text(registry: Any, openmetrics: bool) -> str:
    client = _client()
    made: bytes = (client.openmetrics if openmetrics else client).exposition.generate_latest(registry)
    return made.decode()


def write(path: str | os.PathLike[str], watched: Watched) -> Path:
    """Replace a file by the current metrics, atomically; returns its path.

    path: a file with the suffix .prom is in the format of the textfile collector of node_exporter, any other file in
        that of OpenMetrics. With several ranks, the rank becomes part of the name: packer.prom becomes
        packer.rank3.prom.

    Raises MissingExtraError and OSError.
    """
    return _write(Path(path), _registry(watched))


def _write(path: Path, registry: Any) -> Path:
    ranks = detect_ranks()
    if ranks.world_size > 1:
        path = path.with_name(f"{path.stem}.rank{ranks.rank}{path.suffix}")
    atomic_write(path, _text(registry, path.suffix != ".prom").encode())
    return path


@contextmanager
def write_every(path: str | os.PathLike[str], watched: Watched, *, seconds: float = 15.0) -> Iterator[None]:
    """Call `write` in a thread at regular intervals during the block, and once each at its beginning and end.

    Raises ValueError unless `seconds` is positive, and what the first `write` raises. Later failures do not reach
    training; only the first is logged.
    """
    if not seconds > 0:
        raise ValueError(f"seconds={seconds}: expected more than 0")
    registry, ended = _registry(watched), threading.Event()
    _write(Path(path), registry)

    def run() -> None:
        failed = is_last = False
        while not is_last:
            is_last = ended.wait(seconds)
            try:
                _write(Path(path), registry)
            except Exception as error:
                if not failed:
                    _log.warning("%s: the metrics could not be written: %s", path, error)
                failed = True

    thread = threading.Thread(target=run, name="packer-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(seconds)


@contextmanager
def serve(port: int, watched: Watched, *, address: str = "127.0.0.1") -> Iterator[int]:
    """Serve the metrics at http://ADDRESS:PORT/metrics during the block; yields the port.

    port: each rank of a node listens on `port` plus its local rank. With 0, it listens on any free port.
    address: the address to listen on; "0.0.0.0" for a Prometheus on another machine. There is no access control:
        any machine that can reach the port can read the metrics.

    Raises MissingExtraError without prometheus_client, and OSError if the port is in use.
    """
    registry = _registry(watched)
    own_port = port and port + max(0, detect_ranks().local_rank)
    server, thread = _client().start_http_server(own_port, address, registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
