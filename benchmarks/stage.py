"""Stage: shards to a directory of this node, against cp of the shards, and cp -r of the original small files.

    python benchmarks/stage.py --tree TREE --work DIR --target DIR [--strace] [--rounds 3] …

Packs the tree once into DIR/set (not timed). Two times: until the copier returns, and until all files are on the disk;
packer has synced when it returns, cp has not. `--strace` counts system calls in a further run that is not timed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import REPOSITORY, Benchmark, Contender, NotHere, contender, main, pack_set, slug
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


def cp_command(tree: str, made: str, to: str) -> list[str]:
    return ["cp", "-r", made, to]


@contender(CP, command=cp_command)
def cp(tree: str, made: str, to: str) -> None:
    subprocess.run(cp_command(tree, made, to), check=True)


@contender(CP_SYNC, note="cp -r, then fsync of every file, as packer does")
def cp_sync(tree: str, made: str, to: str) -> None:
    cp(tree, made, to)
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


@contender(RANKS, note="8 processes at once, with the start of Python and the imports of each")
def ranks(tree: str, made: str, to: str) -> dict[str, float]:
    command = [sys.executable, "-c", _MOVED, made, to]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) for _ in range(RANK_COUNT)]
    moved = [int(process.communicate()[0]) for process in started]
    return {"moved": sum(moved) / folder_bytes(made)}


@contender(TREE, command=lambda tree, made, to: cp_command("", tree, to), note="the source files, one by one")
def cp_tree(tree: str, made: str, to: str) -> None:
    cp("", tree, to)


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one copier: MB/s, seconds until it returns and until all files are on the disk, bytes, system calls."""
    made, target = pack_set(arguments), _target(arguments, chosen.name)
    size = folder_bytes(arguments.tree if chosen.name == TREE else made)
    target.mkdir(parents=True)
    prime(2 * size + (1 << 28))
    cpu, started = cpu_seconds(), time.perf_counter()
    more = chosen.function(str(arguments.tree), str(made), str(target)) or {}
    returned = time.perf_counter() - started
    sync_below(target)
    synced = time.perf_counter() - started
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


def _syscalls(command: list[str]) -> int:
    traced = ["strace", "-f", "-c", "-o", "/dev/stderr", *command]
    done = subprocess.run(traced, capture_output=True, text=True, env=environment())
    total = [line.split() for line in done.stderr.splitlines() if line.endswith(" total")]
    if done.returncode or not total:
        raise NotHere(f"strace failed: {done.stderr[-200:]}")
    return int(total[0][3 if len(total[0]) > 4 else 2])


def before(chosen: Contender, arguments: argparse.Namespace) -> None:
    """Pack the set if needed, bring it into the page cache, and remove and sync the output of earlier runs."""
    made = pack_set(arguments)
    shutil.rmtree(_target(arguments, chosen.name), ignore_errors=True)
    os.sync()
    warm([arguments.tree if chosen.name == TREE else made])


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


if __name__ == "__main__":
    if "--strace" in sys.argv and shutil.which("strace") is None:
        print("system calls are not counted: strace is not installed", file=sys.stderr)
    main(
        BENCHMARK,
        __doc__,
        tree="folder of class folders of image files",
        work="folder for the packed set",
        target="folder to stage to, best on another filesystem",
        strace=(False, "count system calls in a separate run"),
    )
