"""Costs of a cache of DCT coefficients besides decoding: filling, starting a process, and several processes.

    python benchmarks/coefficient_cache.py --set SET [--directory DIR] [--rounds 3] [--only fill,training,…]

fill      CPU time per sample against a plain decode of the same bytes (simplejpeg, exact), both with the read
training  images/s of a loop over ImageLoader by epoch: while the cache fills, and when it is full
start     a new process over a cache on a disk: seconds until it is open, to the first batch, to the end of an epoch
ranks     two processes at once: rates, encodings per sample, memory
workers   a DataLoader with forked and with spawned workers

Every figure comes from a separate process that runs a step: a function from options to figures. Compared ways take
turns, ratios are taken within a round, and the printed figures are medians over rounds. The samples are in the page
cache, except for "cold".
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import machine
from report import table

sys.path.append(str(Path(__file__).resolve().parent.parent))

from cache import clean_caches
from readers import Ranks

KEEP = "coefficients"
_BATCH, _BLOCK = 64, 64
_WAIT, _TIMEOUT = 300.0, 600
Options = dict[str, Any]
Figures = dict[str, Any]


# --- steps ----------------------------------------------------------------------------------------------------------
def step_fill(options: Options) -> Figures:
    """Milliseconds per sample of a plain decode and of filling, both with the read: CPU time and wall time by round."""
    import simplejpeg

    import readers

    base = readers.open(options["set"])
    samples, memory = len(base), bytearray(3 * int((base.info.height.astype(int) * base.info.width).max()))
    machine.prime(1 << 30)

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


def step_beside(options: Options) -> Figures:
    """Images/s and CPU milliseconds per image, by epoch, of a loop that pauses for `pause` seconds after each batch in
    place of a GPU's work.

    kept: the share of the set that the cache has room for. filled: the share that is cached before the first epoch.
    ahead: also fill in the background.
    """
    import readers
    from readers.order import Sequential

    base = reader = readers.open(options["set"])
    if options["kept"]:
        reader = readers.cached(base, options["kept"], KEEP, backend="memfd")
        if options["filled"]:
            reader.prefill(order=Sequential(round(len(base) * options["filled"])))
    loader = _loader(reader, options["threads"])
    if options["ahead"]:
        reader.fill_ahead(loader.order, 0)
    figures = _epochs(loader, options["epochs"], each=lambda: time.sleep(options["pause"]))
    reader.close()
    return figures


def _epochs(loader: Any, epochs: int, each: Callable[[], object] = int) -> Figures:
    """Images/s and CPU milliseconds per image of each epoch. each: called after every batch."""
    rates, spent = [], []
    for _ in range(epochs):
        started, cpu, count = time.perf_counter(), time.process_time(), 0
        for images, _ in loader:
            count += len(images)
            each()
        rates.append(count / (time.perf_counter() - started))
        spent.append(1e3 * (time.process_time() - cpu) / count)
    return {"images_s": rates, "cpu_ms": spent}


def _loader(reader: Any, threads: int, **ranks: Any) -> Any:
    from readers.loader import ImageLoader

    where = Ranks(**{"rank": 0, "world_size": 1, **ranks})
    return ImageLoader(reader, _BATCH, augment=_ops(), threads=threads, seed=1, ranks=where)


def _ops() -> list[Any]:
    from readers.augment import RandomHorizontalFlip, RandomResizedCrop

    return [RandomResizedCrop(224), RandomHorizontalFlip()]


# --- starting -------------------------------------------------------------------------------------------------------
def step_warm(options: Options) -> Figures:
    """Fill a cache that outlives the process."""
    with _reader(options) as reader:
        reader.prefill()
        return {"used_mb": reader.stats().used_bytes / 1e6, "samples": len(reader)}


def step_first_batch(options: Options) -> Figures:
    """Seconds from the start of the process until the set is open, the first batch is made, and an epoch has ended."""
    with _reader(options) as reader:
        opened = time.time() - options["started"]
        loader = _loader(reader, options["threads"])
        times = [time.time() - options["started"] for _ in loader]
    return {"open_s": opened, "first_s": times[0], "epoch_s": times[-1]}


@contextmanager
def _reader(options: Options) -> Iterator[Any]:
    """A reader with a permanent cache in `directory`; without `directory`, a reader without a cache."""
    import readers

    reader = readers.open(options["set"])
    if options.get("directory"):
        reader = readers.cached(reader, 1.0, KEEP, directory=options["directory"], persist=True)
    with reader:
        yield reader


# --- several processes ----------------------------------------------------------------------------------------------
def step_ranks(options: Options) -> Figures:
    """Two ranks at once over one cache: total images/s by epoch, encodings per sample, and memory."""
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_rank, args=(options, rank, barrier, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=_WAIT) for _ in processes]
    for process in processes:
        process.join(_WAIT)
    rates = [sum(pair) for pair in zip(*(result.pop("images_s") for result in results), strict=True)]
    return {"images_s": rates, **{key: max(result[key] for result in results) for key in results[0]}}


def _rank(options: Options, rank: int, barrier: Any, queue: Any) -> None:
    with _reader(options) as reader:
        loader, rates = _loader(reader, 1, rank=rank, world_size=2, tail="exact"), []
        for _ in range(options["epochs"]):
            barrier.wait(_WAIT)
            rates += _epochs(loader, 1)["images_s"]
        barrier.wait(_WAIT)
        figures = {"images_s": rates, **_memory()}
        if options.get("directory"):
            stats = reader.stats()
            figures |= {"encodings": stats.misses / len(reader), "used_mb": stats.used_bytes / 1e6}
        barrier.wait(_WAIT)
    queue.put(figures)


def _memory() -> Figures:
    kilobytes = machine.kilobytes_of("/proc/self/smaps_rollup")
    private = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
    return {"rss_mb": kilobytes["Rss"] / 1e3, "pss_mb": kilobytes["Pss"] / 1e3, "private_mb": private / 1e3}


def step_workers(options: Options) -> Figures:
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
        firsts: list[float] = []
        rates = _epochs(loader, options["epochs"], each=lambda: firsts.append(time.perf_counter() - started))
        del loader
    return {"first_s": firsts[0], "images_s": rates["images_s"]}


# --- parts: runs of steps, and their tables ---------------------------------------------------------------------------
class Steps:
    """Runs steps over the set in separate processes."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder

    def run(self, step: str, **options: Any) -> Figures:
        """The figures of a step. Raises SystemExit if the step failed."""
        step_options = {"set": str(self.arguments.set), "threads": 2, "started": time.time(), **options}
        command = [sys.executable, __file__, "--step", step, json.dumps(step_options)]
        how: dict[str, Any] = {"capture_output": True, "text": True}
        done = subprocess.run(command, check=False, timeout=_TIMEOUT, start_new_session=True, **how)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        return dict(json.loads(done.stdout.splitlines()[-1]))

    def rounds(self, ways: dict[str, Callable[[], Figures]]) -> dict[str, list[Figures]]:
        """The figures of each way, by round; every other round runs the ways in reverse."""
        figures: dict[str, list[Figures]] = {name: [] for name in ways}
        for number in range(self.arguments.rounds):
            for name in reversed([*ways]) if number % 2 else [*ways]:
                figures[name].append(ways[name]())
                print(
                    f"[{number + 1}/{self.arguments.rounds}] {name}: {json.dumps(figures[name][-1])[:300]}",
                    file=sys.stderr,
                )
        return figures


def _print(title: str, rows: list[tuple[str, str]]) -> None:
    print(f"\n**{title}**\n\n{table(['', ''], rows)}", flush=True)


def _rates(runs: list[Figures], key: str = "images_s", form: str = "{:,.0f}") -> str:
    """Medians by epoch."""
    return ", ".join(form.format(median(epoch)) for epoch in zip(*(run[key] for run in runs), strict=True))


def fill(steps: Steps) -> None:
    rows = []
    for threads in (1, 2):
        rounds = steps.run("fill", threads=threads, rounds=max(5, steps.arguments.rounds))
        decoded, filled = rounds["decode"], rounds["fill"]
        ratio = median(filling[0] / decoding[0] for filling, decoding in zip(filled, decoded, strict=True))
        rate = median(1e3 / seconds for _, seconds in filled)
        plain, filling = (median(cpu for cpu, _ in times) for times in (decoded, filled))
        text = f"{filling:.2f} ms CPU a sample, {rate:,.0f} samples/s; a plain decode {plain:.2f} ms: {ratio:.2f} of it"
        rows.append((f"filling, {threads} thread{'s' if threads > 1 else ''}", text))
    _print("Filling; wanted: at most 1.2 plain decodes", rows)


def training(steps: Steps) -> None:
    whole = {"kept": 1.0, "filled": 0, "ahead": False}
    ways = {
        "no cache": {"kept": 0, "filled": 0, "ahead": False},
        "filled before": {**whole, "filled": 1.0},
        "filled by the first epoch": whole,
        "filled by the first epoch, and ahead": {**whole, "ahead": True},
        "half filled before": {**whole, "filled": 0.5},
        "half filled before, and ahead": {**whole, "filled": 0.5, "ahead": True},
        "a place for half, filled before": {**whole, "kept": 0.5, "filled": 1.0},
    }
    for pause in (0.0, steps.arguments.pause):
        runs: dict[str, Callable[[], Figures]] = {
            name: functools.partial(steps.run, "training", epochs=3, pause=pause, **way) for name, way in ways.items()
        }
        figures = steps.rounds(runs)
        rows = []
        for name, each in figures.items():
            pairs = zip(each, figures["filled before"], strict=True)
            later = median(max(run["images_s"][1:]) / max(full["images_s"][1:]) for run, full in pairs)
            rates, spent = _rates(each), _rates(each, "cpu_ms", "{:.2f}")
            rows.append((name, f"{rates} images/s; {spent} ms CPU; later epochs {later:.2f} of a full cache"))
        _print(f"During training, epochs 1, 2, 3; {1000 * pause:.0f} ms of a GPU's work a batch; 2 threads", rows)


def start(steps: Steps) -> None:
    folder = steps.folder / "disk"
    folder.mkdir()
    kept = steps.run("warm", directory=str(folder))

    def run(directory: str, cold: bool = False) -> Figures:
        for path in folder.iterdir() if cold else ():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return steps.run("first_batch", directory=directory)

    figures = steps.rounds(
        {
            "no cache": lambda: run(""),
            "coefficients on a disk": lambda: run(str(folder)),
            "coefficients on a disk, cold": lambda: run(str(folder), cold=True),
        }
    )
    rows = [(f"the cache of {kept['samples']:,} samples", f"{kept['used_mb']:,.0f} MB")]
    for name, each in figures.items():
        opened, first, whole = (median(run[key] for run in each) for key in ("open_s", "first_s", "epoch_s"))
        rows.append((name, f"open after {opened:.2f} s, first batch after {first:.2f} s, an epoch after {whole:.2f} s"))
    _print("A new process, since its start", rows)


def ranks(steps: Steps) -> None:
    def run(name: str) -> Figures:
        if not name:
            return steps.run("ranks", epochs=3)
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            return steps.run("ranks", epochs=3, directory=folder)

    figures = steps.rounds({"no cache": lambda: run(""), "coefficients": lambda: run("coefficients")})
    rows = []
    for name, each in figures.items():
        rss, pss, private = (median(result[key] for result in each) for key in ("rss_mb", "pss_mb", "private_mb"))
        made = (
            f"; a sample is encoded {max(result['encodings'] for result in each):.3f} times"
            if name != "no cache"
            else ""
        )
        kept = f"; kept {each[0]['used_mb']:,.0f} MB" if made else ""
        memory = f"MB a process: RSS {rss:.0f}, PSS {pss:.0f}, private {private:.0f}"
        rows.append((name, f"{_rates(each)} images/s{made}; {memory}{kept}"))
    _print("Two ranks at once, a thread each, epochs 1, 2, 3", rows)


def workers(steps: Steps) -> None:
    def run(method: str, has_cache: bool) -> Figures:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            return steps.run("workers", epochs=3, method=method, directory=folder if has_cache else "")

    ways = {
        f"{method}, {'coefficients' if has else 'no cache'}": (method, has)
        for method in ("fork", "spawn")
        for has in (False, True)
    }
    figures = steps.rounds({name: functools.partial(run, *way) for name, way in ways.items()})
    rows = [
        (name, f"first batch after {median(result['first_s'] for result in each):.2f} s; {_rates(each)} images/s")
        for name, each in figures.items()
    ]
    _print("A DataLoader of 2 workers, epochs 1, 2, 3", rows)


_PARTS = {"fill": fill, "training": training, "start": start, "ranks": ranks, "workers": workers}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--set", required=True, type=Path, help="a packed set of JPEGs")
    parser.add_argument("--directory", type=Path, help="directory on a disk for the cache of `start`; default: TMPDIR")
    parser.add_argument("--only", default=",".join(_PARTS), help="parts to run, comma-separated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds of GPU work per batch in `training`")
    arguments = parser.parse_args()
    unknown = set(arguments.only.split(",")) - set(_PARTS)
    if unknown:
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}; expected {', '.join(_PARTS)}")
    machine.warm([str(arguments.set)])
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        try:
            for name in arguments.only.split(","):
                _PARTS[name](Steps(arguments, Path(folder)))
        finally:
            if (Path(folder) / "disk").is_dir():
                clean_caches(Path(folder) / "disk", all=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        figures = globals()[f"step_{sys.argv[2]}"](json.loads(sys.argv[3]))
        sys.stdout.flush()
        os.write(1, f"\n{json.dumps(figures)}\n".encode())
    else:
        main()
