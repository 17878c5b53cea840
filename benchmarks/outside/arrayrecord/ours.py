"""The benchmark of ArrayRecord's performance guide (docs/performance.md): 65,536 texts of 200 words."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from lorem_text import lorem

import packer
import readers

RECORDS, WORDS = 65536, 200


def rate(read: Callable[[], Iterable[Any]]) -> float:
    """Records/s; every record is copied once, as in use."""
    start = time.perf_counter()
    count = sum(1 for record in read() if bytes(record))
    return count / (time.perf_counter() - start)


def main(folder: Path) -> None:
    records = [lorem.words(WORDS).encode() for _ in range(RECORDS)]
    order = np.random.default_rng(42).permutation(RECORDS)
    indices = order.tolist()
    rates: dict[str, dict[str, float]] = {}
    sizes: dict[str, int] = {}
    for name in ("zstd:3", "uncompressed"):
        path = str(folder / name)
        writer = ArrayRecordWriter(path, f"group_size:1,{name}")
        for record in records:
            writer.write(record)
        writer.close()
        reader, source, sizes[name] = ArrayRecordReader(path), ArrayRecordDataSource(path), Path(path).stat().st_size
        rates[name] = {
            "one by one": max(
                rate(lambda: (source[i] for i in indices)), rate(lambda: (reader.read([i])[0] for i in indices[:2000]))
            ),
            "in one call": max(rate(lambda: source.__getitems__(indices)), rate(lambda: reader.read(indices))),
            "as stored": max(rate(reader.read_all), rate(lambda: (reader.read() for _ in range(RECORDS)))),
        }
    with packer.writer(folder / "set", "hdf5", fields={"text": "file"}) as out:
        for number, record in enumerate(records):
            out.write(str(number), text=record)
    sizes["ours"] = sum(path.stat().st_size for path in (folder / "set").rglob("*") if path.is_file())
    with readers.open(folder / "set") as packed:
        rates["ours"] = {
            "one by one": rate(lambda: map(packed.read, indices)),
            "in one call": rate(lambda: packed.read_many(order)),
            "as stored": rate(packed.stream),
        }
    data = sum(map(len, records))
    print("bytes stored:", {name: f"{size / data:.1%}" for name, size in sizes.items()})
    for name in ("zstd:3", "uncompressed"):
        for how, other in rates[name].items():
            own = rates["ours"][how]
            print(
                f"| ArrayRecord's, {name} | records/s, {how} | {own:,.0f} | {other:,.0f} | {own / other:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as there:
        main(Path(there))
