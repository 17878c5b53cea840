"""Reads/s of device and page cache at a block size and a queue depth: fio, and packer's readers on the same shards.

    ours.py IMAGES [--set SET] [--depths 1,8,32,256]

Blocks have the size of the mean sample. Cold: O_DIRECT for fio; for packer the pages are dropped before every pass (as
root, the whole page cache).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from machine import chill, fio, warm

import readers
from readers.order import Shuffled


def ours(reader: readers.Reader, depth: int) -> Iterator[Any]:
    """A shuffled epoch: `read` one by one, `read_many` of `depth`, or `stream` at depth 0."""
    order = Shuffled(len(reader), seed=1)
    rows = order.indices(0, range(len(reader)))
    if depth == 0:
        yield from reader.stream(order)
    elif depth == 1:
        yield from map(reader.read, rows.tolist())
    else:
        for start in range(0, len(rows), depth):
            yield from reader.read_many(rows[start : start + depth])


def rate(samples: Callable[[], Iterable[Any]]) -> float:
    start = time.perf_counter()
    return sum(1 for data in samples() if bytes(data)) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("--set", type=Path, help="a packed set (default: IMAGES, packed into HDF5)")
    parser.add_argument("--depths", default="1,8,32,256")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.images.parent) as folder:
        root = options.set or Path(folder) / "set"
        if not options.set:
            subprocess.run(
                [f"{sys.prefix}/bin/packer", "convert", options.images, "--to", "hdf5", "-o", root], check=True
            )
        with readers.open(root) as reader:
            files = sorted({Path(str(reader.byte_range(i)[0])) for i in range(len(reader))})
            block = int(reader.sizes().mean())
            print(f"{len(reader):,} samples of {block:,} bytes in {len(files)} shards")
            warm(files)
            rows = [("page cache", rate(lambda: ours(reader, 1)), fio(files, block))]
            for name, depth in (("cold, one by one", 1), ("cold, a stream in known order", 0)):
                chill(files)
                own = rate(lambda: ours(reader, depth))
                chill(files)
                rows.append((name, own, fio(files, block)))
            for depth in map(int, options.depths.split(",")):
                chill(files)
                own = rate(lambda: ours(reader, depth))
                rows.append(
                    (f"cold, {depth} at once; fio without page cache", own, fio(files, block, depth, direct=True))
                )
        for case, own, other in rows:
            print(f"| fio | reads/s, {case} | {own:,.0f} | {other:,.0f} | {own / other:.2f} |")


if __name__ == "__main__":
    main()
