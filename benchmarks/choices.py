"""Shard formats and sizes compared: bytes, files, CPU time of packing and of random reads.

    python benchmarks/choices.py --tree FOLDER --work DIR

FOLDER is a folder of images with a split `train`. Each round measures all sets in turn, so that other load on the
machine affects all of them; the figures are medians of CPU time with a warm page cache.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import packer
import readers


def cpu_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def measure(source: Any, to: str, place: Path, order: list[int], shards: int) -> tuple[float, float, float]:
    """CPU seconds of packing, of reading all samples in `order` one by one, and of reading them 64 at a time."""
    shutil.rmtree(place, ignore_errors=True)
    options: dict[str, Any] = {"shards": packer.Shards(samples=-(-len(order) // shards)), "run": packer.Run(workers=1)}
    pack = cpu_seconds(lambda: packer.convert(source, to, place, **options))
    parts = [order[start : start + 64] for start in range(0, len(order), 64)]
    with readers.open(place, "train") as reader:
        reader.read_many(order)  # opens every shard and brings its pages into memory
        single = cpu_seconds(lambda: [len(reader.read(row)) for row in order])
        many = cpu_seconds(lambda: [len(reader.read_many(part)) for part in parts])
    return pack, single, many


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tree", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 8, 64])
    options = parser.parse_args()
    source = packer.open_source(options.tree)
    samples = len(readers.open_folder(options.tree, "train"))
    sets = {(to, n): options.work / f"{to}-{n}" for to in ("hdf5", "tfrecord", "tar") for n in options.shards}
    figures: dict[tuple[str, int], list[tuple[float, float, float]]] = {name: [] for name in sets}
    for number in range(options.rounds):
        order = np.random.default_rng(number).permutation(samples).tolist()
        for (to, shards), place in sets.items():
            figures[to, shards].append(measure(source, to, place, order, shards))
    with readers.open_folder(options.tree, "train") as folder:
        payload = int(folder.sizes().sum())
    print(f"{samples:,} images of {payload / samples / 1e3:.1f} kB; CPU time, medians of {options.rounds} rounds\n")
    print("| format | shards | bytes over the images | packing, µs an image | `read`, µs | `read_many` of 64, µs |")
    print("|---|--:|--:|--:|--:|--:|")
    for (to, shards), rows in figures.items():
        pack, single, many = (statistics.median(row[k] for row in rows) for k in range(3))
        info = readers.open(sets[to, shards], "train").split_info
        over = sum(shard.bytes for shard in info.shards) / payload - 1
        per = 1e6 / samples
        print(f"| {to} | {len(info.shards)} | {over:.2%} | {pack * per:.0f} | {single * per:.1f} | {many * per:.1f} |")


if __name__ == "__main__":
    main()
