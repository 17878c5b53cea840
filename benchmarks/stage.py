"""Stage: shards to a directory of this node, against cp; and against cp -r of the small files they were made of.

    python benchmarks/stage.py --tree TREE --work DIR --target DIR [--strace] [--rounds 3] …

Packs the tree once into DIR/set (outside the clock). The clock stops when the copier returns, and again when all is on
the disk: ours has synced by then, cp has not. `--strace` counts system calls in a further run outside the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import REPOSITORY, Benchmark, Contender, NotHere, base_parser, contender, main, slug
from machine import cpu_seconds, files_below, folder_bytes, prime, sync_below, warm
from report import Claim, Column

__all__ = ["measure"]

CP = "limit: cp -r of the shards"
CP_SYNC = "limit: cp -r of the shards, each synced"
TREE = "cp -r of the tree of files"
OURS, RANKS = "ours: stage", "ours: stage, 8 ranks"
RANK_COUNT = 8
_STAGE = "import sys, readers\nwith readers.stage(*sys.argv[1:]) as local: pass"
_MOVED = (
    "import sys, readers\nwith (staging := readers.stage(*sys.argv[1:])) as local: print(staging.counts.copied_bytes)"
)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}


@contender(CP, command=lambda tree, made, to: ["cp", "-r", made, to])
def cp(tree: str, made: str, to: str) -> None:
    subprocess.run(["cp", "-r", made, to], check=True)


@contender(CP_SYNC, note="cp -r, then fsync of every file: what ours does too")
def cp_sync(tree: str, made: str, to: str) -> None:
    subprocess.run(["cp", "-r", made, to], check=True)
    sync_below(to)


@contender(
    OURS,
    imports="readers crc32c",
    note="one process: CRC32C of every shard against dataset.json, fsync of every file, records",
    command=lambda tree, made, to: [sys.executable, "-c", _STAGE, made, to],
)
def stage(tree: str, made: str, to: str) -> dict[str, float]:
    import readers

    with (staging := readers.stage(made, to)) as local:
        return {"moved": staging.counts.copied_bytes / folder_bytes(made), "files": len(files_below(local))}


@contender(RANKS, note="8 processes at once, Python's start and imports of all of them included")
def ranks(tree: str, made: str, to: str) -> dict[str, float]:
    command = [sys.executable, "-c", _MOVED, made, to]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) for _ in range(RANK_COUNT)]
    moved = [int(process.communicate()[0]) for process in started]
    return {"moved": sum(moved) / folder_bytes(made)}


@contender(TREE, command=lambda tree, made, to: ["cp", "-r", tree, to], note="the source files, one by one")
def cp_tree(tree: str, made: str, to: str) -> None:
    subprocess.run(["cp", "-r", tree, to], check=True)


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """One copier: MB/s, seconds until it returned and until all was on the disk, bytes moved, system calls."""
    made, target = _set_of(arguments), _target(arguments, chosen.name)
    size = folder_bytes(arguments.tree if chosen.name == TREE else made)
    target.mkdir(parents=True)
    prime(2 * size + (1 << 28))
    cpu = cpu_seconds()
    more, returned, synced = _clock(chosen.function, str(arguments.tree), str(made), str(target))
    figures = {
        "mb_s": size / 1e6 / returned,
        "synced_mb_s": size / 1e6 / synced,
        "s": returned,
        "synced_s": synced,
        "cpu_s": cpu_seconds() - cpu,
        **more,
    }
    shutil.rmtree(target)
    if arguments.strace and "command" in chosen.options and shutil.which("strace"):
        target.mkdir()
        figures["syscalls"] = _syscalls(chosen.options["command"](str(arguments.tree), str(made), str(target)))
        shutil.rmtree(target)
    return figures


def _clock(function: Callable[..., Any], tree: str, made: str, to: str) -> tuple[dict[str, Any], float, float]:
    started = time.perf_counter()
    more = function(tree, made, to)
    returned = time.perf_counter() - started
    sync_below(to)
    return more or {}, returned, time.perf_counter() - started


def _syscalls(command: list[str]) -> int:
    done = subprocess.run(
        ["strace", "-f", "-c", "-o", "/dev/stderr", *command], capture_output=True, text=True, env=environment()
    )
    total = [line.split() for line in done.stderr.splitlines() if line.endswith(" total")]
    if done.returncode or not total:
        raise NotHere(f"strace failed: {done.stderr[-200:]}")
    return int(total[0][3 if len(total[0]) > 4 else 2])


def before(chosen: Contender, arguments: argparse.Namespace) -> None:
    """The set exists and is in the page cache; nothing of earlier runs is left or still being written."""
    made = _set_of(arguments)
    if not (made / "dataset.json").exists():
        options = json.dumps({"to": "hdf5", "output": str(made)})
        script = "import json, sys, packer\npacker.convert(sys.argv[1], **json.loads(sys.argv[2]))"
        subprocess.run([sys.executable, "-c", script, str(arguments.tree), options], check=True, env=environment())
    shutil.rmtree(_target(arguments, chosen.name), ignore_errors=True)
    os.sync()
    warm([arguments.tree if chosen.name == TREE else made])


def _set_of(arguments: argparse.Namespace) -> Path:
    return Path(arguments.work) / "set"


def _target(arguments: argparse.Namespace, name: str) -> Path:
    return Path(arguments.target) / f"staging-benchmark-{slug(name)}"


BENCHMARK = Benchmark(
    title="Stage, source in the page cache",
    columns=(
        Column("mb_s", "MB/s (min–max)"),
        Column("synced_mb_s", "MB/s to disk"),
        Column("s", "s", "{:.2f}"),
        Column("synced_s", "s to disk", "{:.2f}"),
        Column("cpu_s", "CPU s", "{:.2f}"),
        Column("moved", "bytes moved / set", "{:.3f}"),
        Column("syscalls", "system calls"),
    ),
    key="mb_s",
    limits=(("mb_s", CP), ("synced_mb_s", CP)),
    measure=measure,
    before=before,
    claims=(
        Claim(OURS, "synced_mb_s", 0.9, CP),
        Claim(RANKS, "moved", at_most=1.0),
    ),
)


def parser() -> argparse.ArgumentParser:
    options = base_parser(__doc__)
    options.add_argument("--tree", required=True, type=Path, help="folder of class folders of image files")
    options.add_argument("--work", required=True, type=Path, help="folder for the packed set")
    options.add_argument("--target", required=True, type=Path, help="folder to stage to, best on another filesystem")
    options.add_argument("--strace", action="store_true", help="count system calls, in a run of its own")
    return options


if __name__ == "__main__":
    chosen = parser()
    if chosen.parse_args().strace and shutil.which("strace") is None:
        print("system calls are not counted: strace is not installed", file=sys.stderr)
    main(BENCHMARK, chosen)
