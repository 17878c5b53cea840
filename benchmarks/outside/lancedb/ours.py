"""LanceDB's bench_streaming_dataloader.py unchanged, then its functions over a packed set.

A set of files in HDF5 replaces its table of rows of 4 KiB; shuffled `read_many` of the same number of rows per request,
which yields the same dictionaries, replaces its StreamingDataset.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import packer
import readers
from readers.order import Shuffled

sys.path.insert(0, f"{sys.prefix}/lancedb/python/benchmarks")
import bench_streaming_dataloader as bench


class Streaming:
    def __init__(self, reader: readers.Reader, *, num_splits: int, shuffle_seed: int, read_batch_size: int) -> None:
        self.reader, self.size, self.order = reader, read_batch_size, Shuffled(len(reader), seed=shuffle_seed)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self.reader), self.size):
            rows = self.order.indices(0, range(start, min(start + self.size, len(self.reader))))
            for row, payload in zip(rows.tolist(), self.reader.read_many(rows), strict=True):
                yield {"id": row, "payload": payload}


def make_table(folder: str) -> readers.Reader:
    start = time.perf_counter()
    with packer.writer(Path(folder) / "set", "hdf5", fields={"payload": "file"}) as out:
        for number in range(bench.NUM_ROWS):
            out.write(str(number), payload=b"x" * bench.ROW_BYTES)
    print(f"packed in {time.perf_counter() - start:.1f} s")
    return readers.open(Path(folder) / "set")


def timed(name: str) -> dict[int, float]:
    """Run the benchmark's main; returns rows/s by size of request."""
    rates: dict[int, float] = {}
    measure = bench.bench_chunk

    def kept(table: Any, size: int, steps: int) -> tuple[int, float]:
        rows, seconds = measure(table, size, steps)
        rates[size] = rows / seconds
        return rows, seconds

    bench.bench_chunk = kept
    print(f"=== {name}", flush=True)
    bench.main()
    bench.bench_chunk = measure
    return rates


if __name__ == "__main__":
    theirs = timed("StreamingDataset of LanceDB")
    bench.make_table, bench.StreamingDataset = make_table, Streaming
    for size, rate in timed("a packed set").items():
        other = theirs[size]
        print(f"| LanceDB's | rows/s, requests of {size} | {rate:,.0f} | {other:,.0f} | {rate / other:.1f} |")
