"""A cache of DCT coefficients besides what decoding takes: filling it, starting with it, and several processes.

    python benchmarks/coefficient_cache.py --set SET [--directory DIR] [--rounds 3] [--only fill,beside,…]

fill      CPU time of a sample against a plain decode of the same bytes (simplejpeg, exact), both with the read
beside    images/s of a loop over ImageLoader by epoch: while the cache is filled, and when it is full
compile   the first use on a machine, the next ones, and two processes at once
start     a new process over a cache on a disk: until it is open, to the first batch, to the end of an epoch
ranks     two processes at once: rates, how often a sample is encoded, memory
workers   a DataLoader whose workers are forked, and spawned
cpu       a CPU without AVX2 and BMI2

Every figure comes from a process of its own (`coefficient_steps.py`); ways that are compared take turns, ratios are
taken within a round, and what is printed are medians over rounds. The samples are in the page cache, but for "cold".
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from machine import warm

sys.path.append(str(Path(__file__).resolve().parent.parent))

from cache import clean_caches

_STEPS = Path(__file__).with_name("coefficient_steps.py")
_TIMEOUT = 600
Figures = dict[str, Any]


class Steps:
    """Runs steps of the set, and collects the lines of the table."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder

    def start(self, step: str, environ: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        given = {"set": str(self.arguments.set), "threads": 2, "started": time.time(), **options}
        command = [sys.executable, str(_STEPS), step, json.dumps(given)]
        environment = {**os.environ, **(environ or {})}
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def run(self, step: str, environ: dict[str, str] | None = None, **options: Any) -> Figures:
        return self.end(self.start(step, environ, **options))

    @staticmethod
    def end(process: subprocess.Popen[str]) -> Figures:
        """Its figures, and what it logged as "log". Raises SystemExit for a step that failed."""
        out, log = process.communicate(timeout=_TIMEOUT)
        if process.returncode:
            raise SystemExit(log[-2000:])
        return {**json.loads(out.splitlines()[-1]), "log": log}

    def rounds(self, ways: dict[str, Callable[[], Figures]]) -> dict[str, list[Figures]]:
        """What each way gave, by round; every other round runs backwards."""
        found: dict[str, list[Figures]] = {name: [] for name in ways}
        for number in range(self.arguments.rounds):
            for name in reversed([*ways]) if number % 2 else [*ways]:
                found[name].append(ways[name]())
                print(f"[{number + 1}/{self.arguments.rounds}] {name}: {_brief(found[name][-1])}", file=sys.stderr)
        return found


def _brief(figures: Figures) -> str:
    return json.dumps({key: value for key, value in figures.items() if key != "log"})[:300]


def _print(title: str, rows: Iterable[tuple[str, str]]) -> None:
    print(f"\n**{title}**\n\n| | |\n|---|---|")
    for name, found in rows:
        print(f"| {name} | {found} |", flush=True)


def _rates(runs: list[Figures], key: str = "images_s", form: str = "{:,.0f}") -> str:
    """Medians by epoch."""
    return ", ".join(form.format(median(epoch)) for epoch in zip(*(run[key] for run in runs), strict=True))


def fill(steps: Steps) -> None:
    rows = []
    for threads in (1, 2):
        rounds = steps.run("fill", threads=threads, rounds=max(5, steps.arguments.rounds))
        decoded, filled = rounds["decode"], rounds["fill"]
        ratio = median(ours[0] / theirs[0] for ours, theirs in zip(filled, decoded, strict=True))
        rate = median(1e3 / seconds for _, seconds in filled)
        plain, ours = (median(cpu for cpu, _ in one) for one in (decoded, filled))
        found = f"{ours:.2f} ms CPU a sample, {rate:,.0f} samples/s; a plain decode {plain:.2f} ms: {ratio:.2f} of it"
        rows.append((f"filling, {threads} thread{'s' if threads > 1 else ''}", found))
    _print("Filling; wanted: at most 1.2 plain decodes", rows)


def beside(steps: Steps) -> None:
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
            name: (lambda way=way: steps.run("beside", epochs=3, pause=pause, **way)) for name, way in ways.items()
        }
        found = steps.rounds(runs)
        rows = []
        for name, each in found.items():
            pairs = zip(each, found["filled before"], strict=True)
            later = median(max(ours["images_s"][1:]) / max(theirs["images_s"][1:]) for ours, theirs in pairs)
            rates, spent = _rates(each), _rates(each, "cpu_ms", "{:.2f}")
            rows.append((name, f"{rates} images/s; {spent} ms CPU; later epochs {later:.2f} of a full cache"))
        _print(f"Beside training, epochs 1, 2, 3; {1000 * pause:.0f} ms of a GPU's work a batch; 2 threads", rows)


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

    found = steps.rounds(
        {
            "no cache": lambda: run(""),
            "coefficients on a disk": lambda: run(str(folder)),
            "coefficients on a disk, cold": lambda: run(str(folder), cold=True),
        }
    )
    rows = [(f"what is kept of {kept['samples']:,} samples", f"{kept['used_mb']:,.0f} MB")]
    for name, each in found.items():
        opened, first, whole = (median(run[key] for run in each) for key in ("open_s", "first_s", "epoch_s"))
        rows.append((name, f"open after {opened:.2f} s, first batch after {first:.2f} s, an epoch after {whole:.2f} s"))
    _print("A new process, since its start", rows)


def ranks(steps: Steps) -> None:
    def run(name: str) -> Figures:
        if not name:
            return steps.run("ranks", epochs=3)
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            return steps.run("ranks", epochs=3, directory=folder)

    found = steps.rounds({"no cache": lambda: run(""), "coefficients": lambda: run("coefficients")})
    rows = []
    for name, each in found.items():
        rss, pss, private = (median(one[key] for one in each) for key in ("rss_mb", "pss_mb", "private_mb"))
        made = f"; a sample is encoded {max(one['encodings'] for one in each):.3f} times" if name != "no cache" else ""
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
    found = steps.rounds({name: (lambda way=way: run(*way)) for name, way in ways.items()})
    rows = [
        (name, f"first batch after {median(one['first_s'] for one in each):.2f} s; {_rates(each)} images/s")
        for name, each in found.items()
    ]
    _print("A DataLoader of 2 workers, epochs 1, 2, 3", rows)


def cpu(steps: Steps) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        found = steps.run("refused", {"NUMBA_CPU_FEATURES": "+sse2"}, directory=folder)
    _print(
        "NUMBA_CPU_FEATURES=+sse2 hides AVX2 and BMI2",
        [("kept", f"{found['kept_bytes']} bytes"), ("it warns", found["said"][0])],
    )


_PARTS = {
    "fill": fill,
    "beside": beside,
    "start": start,
    "ranks": ranks,
    "workers": workers,
    "cpu": cpu,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--set", required=True, type=Path, help="a packed set of JPEGs")
    parser.add_argument(
        "--directory", type=Path, help="on a disk, for the cache of `start`; default: that of temporary files"
    )
    parser.add_argument("--only", default=",".join(_PARTS), help="some of these, comma between")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds of a GPU's work a batch, in `beside`")
    arguments = parser.parse_args()
    unknown = set(arguments.only.split(",")) - set(_PARTS)
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(_PARTS)}")
    warm([str(arguments.set)])
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        try:
            for name in arguments.only.split(","):
                _PARTS[name](Steps(arguments, Path(folder)))
        finally:
            if (Path(folder) / "disk").is_dir():
                clean_caches(Path(folder) / "disk", all=True)


if __name__ == "__main__":
    main()
