"""The benefit of a cache: images/s of whole loaders, memory, the cost of a hit and of a miss, and slow sources.

    epochs   a DataLoader (--workers), or ImageLoader with --threads: images/s of the first and of later epochs
    memory   --workers processes after each has read every sample: growth of their PSS relative to the cached bytes
    reads    one process: a hit against slices of a map and pread; a miss against a read of the source
    slow     a source with a delay per sample: first and second epoch by the cached share of the set
    fill     1, 2 and 4 processes fill a cache from that source: samples/s, reads and copies of each sample

All modes use a packed set (--set), whose shards are read into the page cache first.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Benchmark, Contender, NotHere, contender, keep_rows, main
from machine import prime, pss_of_tree, warm
from pipeline_job import random_box
from report import Claim, Column

from cache.stores import Buffer, Extents, Store, StoreOver
from readers import Ranks

# Rows of `caching.py`: data sets and readers without a cache, with our cache, with a cache in each worker, and with
# stocaching.
#
# A row is a function of a `Job`. All rows apply RandomResizedCrop(224) and a flip. Rows that cache decoded images cache
# 256 x 256 pixels, because stocaching needs one shape for all images.


NONE = "no cache"
PER_WORKER = "a dictionary in each worker"
STOCACHING = "stocaching, decoded"
CROP, KEPT = 224, 256


@dataclass(frozen=True)
class Job:
    """The arguments of a row: the packed set, and the consumer of the data set."""

    path: Path
    split: str | None
    name: str

    def base(self) -> Any:
        import readers

        return readers.open(self.path, self.split)

    def cached(self, base: Any = None, capacity: Any = 1.0, keep: Any = "encoded") -> Any:
        import readers

        return readers.cached(base or self.base(), capacity, keep, job=f"benchmark-{os.getpid()}-{self.name}")


class DictReader:
    """A common pattern: a dictionary in the data set, which every worker fills separately."""

    def __init__(self, base: Any) -> None:
        self.base, self.kept = base, {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("base", "kept"):
            raise AttributeError(name)
        return getattr(self.base, name)

    def __len__(self) -> int:
        return len(self.base)

    def read(self, index: int, field: str = "image") -> Any:
        return self.read_many([index], field)[0]

    def read_many(self, indices: Any, field: str = "image") -> list[Any]:
        missing = [int(i) for i in indices if int(i) not in self.kept]
        for index, data in zip(missing, self.base.read_many(missing, field), strict=True):
            self.kept[index] = bytes(data)
        return [self.kept[int(i)] for i in indices]


class SlowStore(StoreOver):
    """A store that takes `seconds` per sample, like a remote file system with one request at a time. It counts the
    samples that all processes have requested."""

    def __init__(self, source: Store, seconds: float) -> None:
        self.source, self.seconds = source, seconds
        self.reads = multiprocessing.get_context("fork").Value("q", 0)

    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        self._wait(1)
        return self.source.read_one(row, shard, offset, length)

    def read(self, extents: Extents) -> list[Buffer]:
        self._wait(len(extents.length))
        return self.source.read(extents)

    def _wait(self, samples: int) -> None:
        with self.reads.get_lock():
            self.reads.value += samples
        time.sleep(self.seconds * samples)


class StoreInMemory(StoreOver):
    """A store that holds all samples in memory, to measure the cost of a cache in front of it."""

    def __init__(self, source: Store) -> None:
        self.source, self.kept = source, {}

    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        if row not in self.kept:
            self.kept[row] = bytes(self.source.read_one(row, shard, offset, length))
        return self.kept[row]

    def read(self, extents: Extents) -> list[Buffer]:
        return [self.read_one(*map(int, extent)) for extent in zip(*extents, strict=True)]


def over(base: Any, store: Store) -> Any:
    """A reader of the same samples from another store."""
    import readers

    return readers.Reader(base.table, store)


def augmented(reader: Any) -> Any:
    from readers.augment import RandomHorizontalFlip, RandomResizedCrop
    from readers.torch import ImageDataset

    return ImageDataset(reader, [RandomResizedCrop(CROP), RandomHorizontalFlip()])


@contender(NONE, imports="torch", modes=["epochs"])
def no_cache(job: Job) -> Any:
    return augmented(job.base())


for _name, _keep, _note in (
    ("ours: encoded", "encoded", ""),
    ("ours: coefficients", "coefficients", "of the JPEGs, for the same pixels"),
    ("ours: recoded", f"recoded:{KEPT}@90", "short side 256, JPEG quality 90"),
    ("ours: decoded", f"decoded:{KEPT}", "short side 256"),
):
    contender(_name, imports="torch", note=_note)(lambda job, keep=_keep: augmented(job.cached(keep=keep)))


@contender("ours: decoded, square", imports="torch", note="256 x 256, as for stocaching")
def square(job: Job) -> Any:
    import readers
    from readers.augment import Resize

    return augmented(job.cached(keep=readers.Decoded([Resize((KEPT, KEPT))])))


@contender(PER_WORKER, imports="torch", note="encoded bytes; every worker fills its own dictionary")
def per_worker(job: Job) -> Any:
    return augmented(DictReader(job.base()))


@contender(STOCACHING, imports="torch stocaching", note="our decoder, its cache, torchvision's arithmetic")
def stochastic(job: Job) -> Any:
    import torch
    from stocaching import SharedCache

    from readers.decode import decode_image

    base = job.base()
    cache = SharedCache(size_limit_gib=64, dataset_len=len(base), data_dims=(3, KEPT, KEPT), dtype=torch.uint8)

    class Stochastic(torch.utils.data.Dataset):  # type: ignore[type-arg]
        reader = base

        def __len__(self) -> int:
            return len(base)

        def __getitem__(self, index: int) -> Any:
            image = cache.get_slot(index)
            if image is None:
                whole = torch.from_numpy(decode_image(base.read(index)).copy()).permute(2, 0, 1)
                image = resized(whole, KEPT)
                cache.set_slot(index, image, allow_overwrite=True)  # two workers may decode the same image at once
            return changed(image), int(base.labels[index])

    return Stochastic()


def resized(image: Any, side: int) -> Any:
    """Resize uint8 [3, h, w] to a square: bilinear with antialiasing, as torchvision.transforms.v2."""
    import torch

    options = {"mode": "bilinear", "antialias": True, "align_corners": False}
    return torch.nn.functional.interpolate(image[None], (side, side), **options)[0]


def changed(image: Any) -> Any:
    """RandomResizedCrop and a flip, as in torchvision.transforms.v2."""
    top, left, h, w = random_box(*image.shape[1:])
    image = resized(image[:, top : top + h, left : left + w], CROP)
    return image.flip(-1) if random.random() < 0.5 else image


_BATCH = 64
_PASSES = 5
_WAIT = 240.0  # seconds until a missing process is an error
_MB = 1e6
_PLAIN, _PREAD = "limit: slices of a map", "limit: os.pread loop"


# --- epochs -------------------------------------------------------------------------------------------------------
def epochs(chosen: Contender, arguments: argparse.Namespace, job: Job) -> dict[str, Any]:
    """Images/s of the first epoch, of the best later one, and the growth of all processes' PSS."""
    import torch

    torch.manual_seed(1)
    before = pss_of_tree()
    dataset = chosen.function(job)
    loader = _loader(dataset, arguments)
    rates, grown = [], 0.0
    for _ in range(arguments.epochs):
        started, count = time.perf_counter(), 0
        for images, _labels in loader:
            count += len(images)
        rates.append(count / (time.perf_counter() - started))
        grown = max(grown, pss_of_tree() - before)
    del loader, images, _labels  # ends the workers, so that they leave the cache
    _close(dataset)
    return {"first": rates[0], "later": max(rates[1:]), "pss_mb": grown}


def _loader(dataset: Any, arguments: argparse.Namespace) -> Any:
    if arguments.threads:
        from readers.loader import ImageLoader

        if not hasattr(dataset, "transform"):
            raise NotHere("has no reader for ImageLoader")
        ops = dataset.transform
        return ImageLoader(
            dataset.reader, _BATCH, augment=ops, threads=arguments.threads, ranks=Ranks(rank=0, world_size=1)
        )
    from torch.utils.data import DataLoader

    workers = arguments.workers
    return DataLoader(dataset, _BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)


# --- memory -------------------------------------------------------------------------------------------------------
def memory(chosen: Contender, arguments: argparse.Namespace, job: Job) -> dict[str, Any]:
    """Growth of the PSS of all processes, relative to the cached bytes, after each has read every sample."""
    import torch

    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    made = pss_of_tree()
    dataset = chosen.function(job)
    made = pss_of_tree() - made
    context = multiprocessing.get_context("fork")
    ready, done, end = context.Barrier(arguments.workers + 1), context.Barrier(arguments.workers + 1), context.Event()

    def read_all() -> None:
        ready.wait(_WAIT)
        ready.wait(_WAIT)
        for index in range(len(dataset)):
            _touch(dataset, index)
        done.wait(_WAIT)
        end.wait(_WAIT)

    workers = _forked(read_all, arguments.workers)
    ready.wait(_WAIT)
    before = pss_of_tree()
    ready.wait(_WAIT)
    done.wait(_WAIT)
    grown = pss_of_tree() - before + made
    end.set()
    for worker in workers:
        worker.join()
    kept = _stored_mb(dataset)
    _close(dataset)
    return {"kept_mb": kept, "pss_mb": grown, "pss_of_kept": grown / kept}


def _forked(target: Callable[[], None], count: int) -> list[Any]:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=target, daemon=True) for _ in range(count)]
    for worker in workers:
        worker.start()
    return workers


def _touch(dataset: Any, index: int) -> None:
    """Read every byte that the row caches of a sample."""
    if hasattr(dataset, "transform"):
        bytes(dataset.reader.read(index))
    else:
        dataset[index]


def _stored_mb(dataset: Any) -> float:
    reader = dataset.reader
    if hasattr(reader, "stats"):
        return float(reader.stats().used_bytes) / _MB
    if hasattr(dataset, "transform"):
        return float(reader.sizes().sum()) / _MB
    return len(dataset) * 3 * 256 * 256 / _MB


# --- reads --------------------------------------------------------------------------------------------------------
def reads(chosen: Contender, arguments: argparse.Namespace, job: Job) -> dict[str, Any]:
    """Microseconds per sample, with one copy into a buffer: the best of `_PASSES` passes in random order."""
    return dict(chosen.function(job))


def _timed(read: Callable[[int], Any], samples: int, passes: int = _PASSES) -> float:
    order = list(range(samples))
    random.Random(1).shuffle(order)
    target = memoryview(bytearray(1 << 24))
    best = float("inf")
    for _ in range(passes):
        started = time.perf_counter()
        for index in order:
            data = read(index)
            target[: len(data)] = data
        best = min(best, time.perf_counter() - started)
    return 1e6 * best / samples


@contender(_PLAIN, modes=["reads"], note="a file in /dev/shm with all samples end to end")
def slices(job: Job) -> dict[str, float]:
    base = job.base()
    path = Path(f"/dev/shm/benchmark-{os.getpid()}")
    ends = [0]
    try:
        with open(path, "w+b") as file:
            for data in base.read_many(range(len(base))):
                file.write(data)
                ends.append(ends[-1] + len(data))
            file.flush()
            view = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    finally:
        path.unlink(missing_ok=True)
    return _rates(lambda index: view[ends[index] : ends[index + 1]], len(base))


@contender(_PREAD, modes=["reads"], note="our shards at our offsets, from the page cache")
def preads(job: Job) -> dict[str, float]:
    base = job.base()
    ranges = [base.byte_range(index) for index in range(len(base))]
    files = {path: os.open(path, os.O_RDONLY) for path, _, _ in ranges}
    places = [(files[path], length, offset) for path, offset, length in ranges]
    return _rates(lambda index: os.pread(*places[index]), len(base))


@contender("ours: hit", modes=["reads"])
def hits(job: Job) -> dict[str, float]:
    with job.cached() as reader:
        reader.prefill()
        return _rates(reader.read, len(reader))


def _over(job: Job, capacity: float, passes: int) -> dict[str, float]:
    base = job.base()
    source = over(base, StoreInMemory(base.store))
    own = _timed(source.read, len(source))
    with job.cached(source, capacity) as reader:
        return {"over_us": _timed(reader.read, len(source), passes) - own}


@contender("ours: miss", modes=["reads"], note="a source in memory; the time beyond a read of the source")
def misses(job: Job) -> dict[str, float]:
    return _over(job, 1.0, 1)


@contender("ours: passed through", modes=["reads"], note="1 % cached; the time beyond a read of the source")
def passed(job: Job) -> dict[str, float]:
    return _over(job, 0.01, _PASSES)


def _rates(read: Callable[[int], Any], samples: int) -> dict[str, float]:
    seconds = _timed(read, samples)
    return {"read_us": seconds, "samples_s": 1e6 / seconds}


# --- a slow source ------------------------------------------------------------------------------------------------
def slow(chosen: Contender, arguments: argparse.Namespace, job: Job) -> dict[str, Any]:
    """Seconds of two epochs in random order, and the difference between the second epoch's hit rate and the share."""
    share = chosen.options["share"]
    base = job.base()
    reader = job.cached(over(base, SlowStore(base.store, arguments.delay / 1e3)), share)
    seconds, hits = [], [0]
    for epoch in range(2):
        order = list(range(len(reader)))
        random.Random(epoch).shuffle(order)
        started = time.perf_counter()
        for start in range(0, len(order), _BATCH):
            reader.read_many(order[start : start + _BATCH])
        seconds.append(time.perf_counter() - started)
        hits.append(reader.stats().hits)
    rate = (hits[2] - hits[1]) / len(reader)
    reader.close()
    return {"first_s": seconds[0], "second_s": seconds[1], "hit_rate": rate, "off_share": abs(rate - share)}


for percent in (0, 25, 50, 100):
    contender(f"ours: {percent} %", modes=["slow"], share=percent / 100)(lambda job: None)


# --- filling ------------------------------------------------------------------------------------------------------
def fill(chosen: Contender, arguments: argparse.Namespace, job: Job) -> dict[str, Any]:
    """Samples/s until all samples are cached, and reads and copies per sample. Raises if a sample is lost or wrong."""
    base = job.base()
    expected = [bytes(data) for data in base.read_many(range(len(base)))]
    source = SlowStore(base.store, arguments.delay / 1e3)
    reader = job.cached(over(base, source))
    count = chosen.options["processes"]
    ready = multiprocessing.get_context("fork").Barrier(count + 1)

    def fill_up() -> None:
        ready.wait(_WAIT)
        reader.prefill()

    workers = _forked(fill_up, count)
    ready.wait(_WAIT)
    started = time.perf_counter()
    for worker in workers:
        worker.join(_WAIT)
    seconds = time.perf_counter() - started
    stats, reads = reader.stats(), source.reads.value
    if any(worker.exitcode for worker in workers) or stats.present != len(base):
        raise RuntimeError(f"{stats.present} of {len(base)} samples are cached")
    if [bytes(data) for data in reader.read_many(range(len(base)))] != expected:
        raise RuntimeError("the cache returned wrong bytes for a sample")
    reader.close()
    return {
        "fill_s": len(base) / seconds,
        "reads_each": reads / len(base),
        "kept_of_set": stats.used_bytes / sum(map(len, expected)),
    }


for _processes in (1, 2, 4):
    contender(f"ours: {_processes} processes", modes=["fill"], processes=_processes)(lambda job: None)


# --- the driver ---------------------------------------------------------------------------------------------------
MODES: dict[str, tuple[Callable[..., dict[str, Any]], dict[str, Any]]] = {
    "epochs": (epochs, {
        "columns": (Column("first", "first epoch, images/s"), Column("later", "later epochs, images/s"),
                    Column("pss_mb", "growth of PSS, MB")),
        "key": "later", "limits": (("later", NONE),),
        "claims": (Claim("ours: decoded, square", "later", against=STOCACHING),
                   Claim("ours: recoded", "later", 2.5, NONE)),
    }),
    "memory": (memory, {
        "columns": (Column("kept_mb", "cached, MB"), Column("pss_mb", "growth of PSS, MB"),
                    Column("pss_of_kept", "growth / cached", "{:.2f}")),
        "key": "pss_of_kept", "limits": (), "less_is_better": True,
        "claims": (Claim("ours: encoded", "pss_of_kept", at_most=1.2),),
    }),
    "reads": (reads, {
        "columns": (Column("read_us", "µs", "{:.2f}"), Column("samples_s", "samples/s"),
                    Column("over_us", "µs over the source", "{:.1f}")),
        "key": "samples_s", "limits": (("samples_s", _PLAIN), ("samples_s", _PREAD)),
        "claims": (Claim("ours: hit", "samples_s", 1 / 1.2, _PLAIN), Claim("ours: hit", "samples_s", 0.9, _PREAD),
                   Claim("ours: miss", "over_us", at_most=20)),
    }),
    "slow": (slow, {
        "columns": (Column("first_s", "first epoch, s", "{:.2f}"), Column("second_s", "second epoch, s", "{:.2f}"),
                    Column("hit_rate", "hits, second epoch", "{:.3f}"), Column("off_share", "hits - share", "{:.3f}")),
        "key": "second_s", "limits": (), "less_is_better": True,
        "claims": [Claim(f"ours: {percent} %", "off_share", at_most=0.001) for percent in (0, 25, 50, 100)],
    }),
    "fill": (fill, {
        "columns": (Column("fill_s", "samples/s"), Column("reads_each", "reads per sample", "{:.3f}"),
                    Column("kept_of_set", "cached bytes / set", "{:.4f}")),
        "key": "fill_s", "limits": (("fill_s", "ours: 1 processes"),),
        "claims": (Claim("ours: 4 processes", "fill_s", 3.0, "ours: 1 processes"),
                   Claim("ours: 4 processes", "kept_of_set", at_most=1.001)),
    }),
}  # fmt: skip


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one row in one mode."""
    prime(1 << 30)
    job = Job(arguments.set, arguments.split, "".join(filter(str.isalnum, chosen.name)))
    return MODES[arguments.mode][0](chosen, arguments, job)


def _close(dataset: Any) -> None:
    close = getattr(dataset.reader, "close", None)
    if close is not None:
        close()


def _benchmark(arguments: argparse.Namespace) -> Benchmark:
    mode = arguments.mode
    keep_rows(lambda row: mode in row.options.get("modes", ("epochs", "memory")))
    of = f", {arguments.threads} threads" if arguments.threads else f", {arguments.workers} workers"
    title = f"Cache, {mode}{of if mode in ('epochs', 'memory') else ''}"
    warmed = {"before": lambda chosen, given: warm([given.set])}
    return Benchmark(title=title, measure=measure, **warmed, **MODES[mode][1])


if __name__ == "__main__":
    main(
        _benchmark,
        __doc__,
        set="a packed set",
        split=(None, "split of the set"),
        mode=(str, "the measurement", tuple(MODES)),
        workers=(2, "DataLoader workers, or reading processes"),
        threads=(0, "use ImageLoader with this many threads instead"),
        epochs=(3, "epochs"),
        delay=(2.0, "milliseconds per sample of the slow source"),
    )
