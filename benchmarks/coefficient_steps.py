"""What `coefficient_cache.py` measures, each in a process of its own: a function of options to figures.

python coefficient_steps.py STEP '{"set": …}'      prints the figures, as JSON, in its last line
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from readers import Ranks

sys.path.append(str(Path(__file__).resolve().parent.parent))

__all__ = ["STEPS"]

KEEP = "coefficients"
_BATCH, _BLOCK = 64, 64
_WAIT = 300.0
Options = dict[str, Any]
Figures = dict[str, Any]
STEPS: dict[str, Callable[[Options], Figures]] = {}


def step(function: Callable[[Options], Figures]) -> Callable[[Options], Figures]:
    STEPS[function.__name__] = function
    return function


# --- filling --------------------------------------------------------------------------------------------------------
@step
def fill(options: Options) -> Figures:
    """Milliseconds a sample of a plain decode and of filling, both with the read, by round: CPU time and time."""
    import simplejpeg
    from machine import prime

    import readers

    base = readers.open(options["set"])
    samples, memory = len(base), bytearray(3 * int((base.info.height.astype(int) * base.info.width).max()))
    prime(1 << 30)

    def decode() -> None:
        for start in range(0, samples, _BLOCK):
            for data in base.read_many(range(start, min(start + _BLOCK, samples))):
                simplejpeg.decode_jpeg(data, "RGB", fastdct=False, fastupsample=False, buffer=memory)

    rounds: dict[str, list[tuple[float, float]]] = {"decode": [], "fill": []}
    for number in range(options["rounds"] + 1):
        with readers.cached(base, 1.0, KEEP, backend="memfd") as reader:
            ways = {"decode": decode, "fill": lambda reader=reader: reader.prefill(options["threads"])}
            for name, way in ways.items():
                started, cpu = time.perf_counter(), time.process_time()
                way()
                cpu, seconds = time.process_time() - cpu, time.perf_counter() - started
                if number:  # the first round warms up
                    rounds[name].append((1e3 * cpu / samples, 1e3 * seconds / samples))
    return rounds


@step
def beside(options: Options) -> Figures:
    """Images/s and CPU milliseconds an image, by epoch, of a loop that pauses for `pause` seconds after each batch, as
    if a GPU trained.

    kept, filled: the share of the set that has a place, and that is there before; ahead: filled in the background, too.
    """
    import readers
    from readers.loader import ImageLoader
    from readers.order import Sequential

    base = reader = readers.open(options["set"])
    if options["kept"]:
        reader = readers.cached(base, options["kept"], KEEP, backend="memfd")
        if options["filled"]:
            reader.prefill(order=Sequential(round(len(base) * options["filled"])))
    loader = ImageLoader(
        reader, _BATCH, augment=_ops(), threads=options["threads"], seed=1, ranks=Ranks(rank=0, world_size=1)
    )
    rates, spent = [], []
    for epoch in range(options["epochs"]):
        if options["ahead"] and not epoch:
            reader.fill_ahead(loader.order, 0)
        started, cpu, count = time.perf_counter(), time.process_time(), 0
        for images, _ in loader:
            count += len(images)
            time.sleep(options["pause"])
        rates.append(count / (time.perf_counter() - started))
        spent.append(1e3 * (time.process_time() - cpu) / count)
    reader.close()
    return {"images_s": rates, "cpu_ms": spent}


def _ops() -> list[Any]:
    from readers.augment import RandomHorizontalFlip, RandomResizedCrop

    return [RandomResizedCrop(224), RandomHorizontalFlip()]


# --- starting -------------------------------------------------------------------------------------------------------
@step
def warm(options: Options) -> Figures:
    """Fill a cache that stays."""
    with _reader(options) as reader:
        reader.prefill()
        return {"used_mb": reader.stats().used_bytes / 1e6, "samples": len(reader)}


@step
def first_batch(options: Options) -> Figures:
    """Seconds since the process was started: until the set is open, until the first batch, and for an epoch."""
    from readers.loader import ImageLoader

    with _reader(options) as reader:
        opened = time.time() - options["started"]
        loader = ImageLoader(
            reader, _BATCH, augment=_ops(), threads=options["threads"], seed=1, ranks=Ranks(rank=0, world_size=1)
        )
        times = [time.time() - options["started"] for _ in loader]
    return {"open_s": opened, "first_s": times[0], "epoch_s": times[-1]}


@contextmanager
def _reader(options: Options) -> Iterator[Any]:
    """Over the cache in `directory`, which stays; over none without it."""
    import readers

    reader = readers.open(options["set"])
    if options.get("directory"):
        reader = readers.cached(reader, 1.0, KEEP, directory=options["directory"], persist=True)
    with reader:
        yield reader


# --- several processes ----------------------------------------------------------------------------------------------
@step
def ranks(options: Options) -> Figures:
    """Two ranks at once over one cache: images/s of both together by epoch, encodings of a sample, and memory."""
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_rank, args=(options, rank, barrier, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=_WAIT) for _ in processes]
    for process in processes:
        process.join(_WAIT)
    rates = [sum(pair) for pair in zip(*(one.pop("images_s") for one in found), strict=True)]
    return {"images_s": rates, **{key: max(one[key] for one in found) for key in found[0]}}


def _rank(options: Options, rank: int, barrier: Any, queue: Any) -> None:
    from readers.loader import ImageLoader

    with _reader(options) as reader:
        loader = ImageLoader(
            reader, _BATCH, augment=_ops(), threads=1, seed=1, ranks=Ranks(rank=rank, world_size=2, tail="exact")
        )
        rates = []
        for _ in range(options["epochs"]):
            barrier.wait(_WAIT)
            started, count = time.perf_counter(), 0
            for images, _ in loader:
                count += len(images)
            rates.append(count / (time.perf_counter() - started))
        barrier.wait(_WAIT)
        figures = {"images_s": rates, **_memory()}
        if options.get("directory"):
            stats = reader.stats()
            figures |= {"encodings": stats.misses / len(reader), "used_mb": stats.used_bytes / 1e6}
        barrier.wait(_WAIT)
    queue.put(figures)


def _memory() -> Figures:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    private = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
    return {"rss_mb": kilobytes["Rss"] / 1e3, "pss_mb": kilobytes["Pss"] / 1e3, "private_mb": private / 1e3}


@step
def workers(options: Options) -> Figures:
    """A DataLoader with two workers, forked or spawned: seconds to the first batch, images/s by epoch."""
    import torch

    from readers.torch import ImageDataset

    with _reader(options) as reader:
        started = time.perf_counter()
        loader = torch.utils.data.DataLoader(
            ImageDataset(reader, _ops()),
            _BATCH,
            shuffle=True,
            num_workers=2,
            multiprocessing_context=options["method"],
            persistent_workers=True,
        )
        rates, first = [], 0.0
        for _ in range(options["epochs"]):
            began, count = time.perf_counter(), 0
            for images, _ in loader:
                first = first or time.perf_counter() - started
                count += len(images)
            rates.append(count / (time.perf_counter() - began))
        del loader
    return {"first_s": first, "images_s": rates}


@step
def refused(options: Options) -> Figures:
    """What is said where the CPU cannot decode coefficients."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with _reader(options) as reader:
            kept = reader.stats().capacity_bytes
    return {"said": [str(one.message) for one in found], "kept_bytes": kept}


if __name__ == "__main__":
    figures = STEPS[sys.argv[1]](json.loads(sys.argv[2]))
    sys.stdout.flush()
    os.write(1, f"\n{json.dumps(figures)}\n".encode())
