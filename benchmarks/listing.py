"""What listing a tree of many files takes: memory and time a file, from the walk to the tasks of a conversion.

    python benchmarks/listing.py --files 1000000 [--per-folder 1000] [--shuffle] [--in /dev/shm]

Makes a tree of empty files (train/n00000001/n00000001_123.JPEG), lists and plans it as 8 shards in a fresh process, and
prints the peak of its memory over what it had before, in bytes a file, and the time of each step. Two figures of
memory: RSS is what the kernel gave; tracemalloc counts what Python and NumPy allocate, and slows the steps down, so it
is a run of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def make_tree(root: Path, files: int, per_folder: int) -> None:
    """Empty files with names as long as ImageNet's."""
    for number, first in enumerate(range(0, files, per_folder)):
        folder = root / "train" / f"n{number:08d}"
        folder.mkdir(parents=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        for i in range(first, min(first + per_folder, files)):
            name = f"n{number:08d}_{i * 7919 % 100_000}.JPEG" if per_folder <= 10_000 else f"{i:09d}.JPEG"
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=descriptor))
        os.close(descriptor)


def measure(root: str, per_shard: int, shuffle: bool, traced: bool) -> dict[str, float]:
    """Seconds of each step, and the peak of memory in bytes."""
    from packer.conversion.plan import ConvertOptions, check_listing, make_plan
    from packer.formats import format_named
    from packer.sources.base import SomeSamples
    from packer.sources.folder import FolderSource
    from packer.workers import without_gc

    options = ConvertOptions("tar", shuffle=0 if shuffle else None, samples_per_shard=per_shard)
    container = format_named("tar")
    found: dict[str, float] = {}
    if traced:
        tracemalloc.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    with without_gc():
        listing = FolderSource(root).list(None)
        found["list_s"] = time.perf_counter() - started
        for part in listing.splits.values():
            check_listing(part, root)
        plan = make_plan(listing, options, container)
        found["plan_s"] = time.perf_counter() - started - found["list_s"]
        sent = 0
        for shard in plan.shards:
            sent += len(pickle.dumps(SomeSamples(listing.splits[shard.split], shard.indices)))
        found["tasks_s"] = time.perf_counter() - started - found["list_s"] - found["plan_s"]
    found["files"], found["task_bytes"] = plan.samples, sent
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found["peak_bytes"] = tracemalloc.get_traced_memory()[1] if traced else (peak_rss - before) * 1024
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=200_000)
    parser.add_argument("--per-folder", type=int, default=1000)
    parser.add_argument("--shuffle", action="store_true", help="plan a shuffled set")
    parser.add_argument("--in", dest="folder", default=None, help="where the tree is made (default: the temporary one)")
    parser.add_argument("--child", nargs=2, metavar=("ROOT", "TRACED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        root, traced = arguments.child
        print(json.dumps(measure(root, -(-arguments.files // 8), arguments.shuffle, traced == "1")))
        return
    root = Path(tempfile.mkdtemp(prefix="listing-", dir=arguments.folder))
    try:
        make_tree(root, arguments.files, arguments.per_folder)
        for traced, name in (("0", "RSS"), ("1", "tracemalloc")):
            child = ["--child", str(root), traced, "--files", str(arguments.files), *["--shuffle"] * arguments.shuffle]
            command = [sys.executable, __file__, *child]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            n = found["files"]
            times = ", ".join(f"{step} {found[f'{step}_s'] / n * 1e6:.2f}" for step in ("list", "plan", "tasks"))
            print(f"{name:12} {found['peak_bytes'] / n:6.1f} bytes a file at the peak; µs a file: {times}")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
