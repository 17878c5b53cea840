"""Open: the time and memory until a set of ten million samples can be read.

    python benchmarks/open_index.py --work DIR [--samples 10000000] [--rounds 3] …

The sets are synthetic: valid for opening, with shards that are holes. They are made once under DIR (about 3 GB) and
kept. Imports are not timed; `import_time.py` measures them. Memory is what opening adds: private memory of the process,
and mapped pages of files, which belong to the page cache and are shared.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Benchmark, Contender, contender, main, make_once, slug
from index_set import MEAN_BYTES, build_index, synthetic_columns
from machine import folder_bytes, memory_of_self, prime, warm
from report import Claim, Column

# Making and opening the indexes of a synthetic set.
#
# A contender takes (folder, samples) and returns a look-up, `i -> anything`, of the place, length and label of sample
# i. Its option `build` makes the index in an empty folder.


LookUp = Callable[[int], Any]
SAMPLES_PER_CHUNK = 1000


@contender(
    "ours: readers.open",
    imports="readers",
    build=build_index,
    warm=["dataset.json", "train.index"],
    note="dataset.json, all classes and shards; a look-up also decodes the key",
)
def ours(folder: Path, samples: int) -> LookUp:
    import readers

    reader = readers.open(folder)
    return lambda i: (reader.byte_range(i), int(reader.labels[i]), reader.keys[i])


def _build_npy(folder: Path, samples: int) -> None:
    import numpy as np

    table = np.empty(samples, [("offset", "<u8"), ("length", "<u4"), ("label", "<u4")])
    table["offset"], table["length"], table["label"] = synthetic_columns(samples)
    np.save(folder / "index.npy", table)


@contender("limit: one mapped .npy", imports="numpy", build=_build_npy, note="16 bytes a sample, no keys, one shard")
def mapped_npy(folder: Path, samples: int) -> LookUp:
    import numpy as np

    table = np.load(folder / "index.npy", mmap_mode="r")
    return lambda i: table[i].item()


def _build_mds(folder: Path, samples: int) -> None:
    columns = {"column_encodings": ["bytes", "int"], "column_names": ["image", "label"], "column_sizes": [None, 8]}
    shard = {**columns, "compression": None, "format": "mds", "hashes": [], "samples": SAMPLES_PER_CHUNK,
             "size_limit": 1 << 26, "version": 2, "zip_data": None}  # fmt: skip
    data = {"bytes": SAMPLES_PER_CHUNK * MEAN_BYTES, "hashes": {}}
    names = (f"shard.{number:05d}.mds" for number in range(samples // SAMPLES_PER_CHUNK))
    shards = [{**shard, "raw_data": {"basename": name, **data}} for name in names]
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))


@contender(
    "MosaicML MDS",
    imports="streaming",
    build=_build_mds,
    note="1,000 samples a shard; a look-up finds the shard only",
)
def mds(folder: Path, samples: int) -> LookUp:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    opened = StreamingDataset(local=os.fspath(folder), shuffle=False, batch_size=64)
    return lambda i: opened.spanner[i]


def _build_litdata(folder: Path, samples: int) -> None:
    leaf = {"type": None, "context": None, "children_spec": []}
    keys = json.dumps(["image", "label"])
    spec = json.dumps([1, {"type": "builtins.dict", "context": keys, "children_spec": [leaf, leaf]}])
    chunk = {"chunk_bytes": SAMPLES_PER_CHUNK * MEAN_BYTES, "chunk_size": SAMPLES_PER_CHUNK, "dim": None}
    chunks = [{**chunk, "filename": f"chunk-0-{number}.bin"} for number in range(samples // SAMPLES_PER_CHUNK)]
    config = {"chunk_bytes": chunk["chunk_bytes"], "chunk_size": None, "compression": None, "encryption": None,
              "data_format": ["bytes", "int"], "data_spec": spec, "item_loader": "PyTreeLoader"}  # fmt: skip
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config, "updated_at": "0"}))


@contender(
    "litdata",
    imports="litdata",
    build=_build_litdata,
    note="1,000 samples a chunk; offsets are stored in the chunks, so a look-up does no work",
)
def litdata(folder: Path, samples: int) -> LookUp:
    import litdata

    opened = litdata.StreamingDataset(os.fspath(folder), shuffle=False)
    assert len(opened) == samples // SAMPLES_PER_CHUNK * SAMPLES_PER_CHUNK
    return lambda i: None


LOOKUPS = 1000
_PRIME_BYTES = 1 << 28


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Open once in this new process, then look up the place, length and label of samples."""
    folder = _folder(chosen, arguments)
    warm([folder / name for name in chosen.options.get("warm", ["."])])
    prime(_PRIME_BYTES)
    gc.collect()
    start = memory_of_self()
    started = time.perf_counter()
    look_up = chosen.function(folder, arguments.samples)
    opened = time.perf_counter() - started
    after = memory_of_self()
    chance = random.Random(1)
    indices = [chance.randrange(arguments.samples) for _ in range(LOOKUPS)]
    started = time.perf_counter()
    for i in indices:
        look_up(i)
    looked_up = time.perf_counter() - started
    end = memory_of_self()
    places = chosen.options.get("warm", ["."])
    return {
        "open_ms": 1e3 * opened,
        "lookup_us": 1e6 * looked_up / LOOKUPS,
        **{key: round(after[key] - start[key], 3) + 0.0 for key in start},  # no "-0.0"
        **{key.replace("_", "_after_"): round(end[key] - start[key], 3) + 0.0 for key in start},
        "process_private_mb": end["private_mb"],
        "index_mb": sum(folder_bytes(folder / name) for name in places) / 1e6,
    }


def before(chosen: Contender, arguments: argparse.Namespace) -> None:
    """Make the contender's set unless it exists."""
    folder = _folder(chosen, arguments)
    make_once(folder, lambda unfinished: chosen.options["build"](unfinished, arguments.samples))


def _folder(chosen: Contender, arguments: argparse.Namespace) -> Path:
    return Path(arguments.work) / f"{slug(chosen.name)}-{arguments.samples}"


OURS = "ours: readers.open"
BENCHMARK = Benchmark(
    title="Open an index, warm page cache",
    columns=(
        Column("open_ms", "open ms (min–max)", "{:,.2f}"),
        Column("private_mb", "private MB", "{:,.1f}"),
        Column("file_mb", "mapped MB", "{:,.1f}"),
        Column("lookup_us", "µs/lookup", "{:,.2f}"),
        Column("private_after_mb", f"private MB after {LOOKUPS:,} lookups", "{:,.1f}"),
        Column("file_after_mb", "mapped MB after lookups", "{:,.1f}"),
        Column("process_private_mb", "private MB of the process", "{:,.1f}"),
        Column("index_mb", "index MB", "{:,.1f}"),
    ),
    key="open_ms",
    limits=(("open_ms", "limit: one mapped .npy"),),
    measure=measure,
    less_is_better=True,
    before=before,
    claims=(Claim(OURS, "open_ms", at_most=10), Claim(OURS, "private_after_mb", at_most=30)),
)


if __name__ == "__main__":
    main(
        BENCHMARK,
        __doc__,
        work="folder for the sets, which are kept",
        samples=(10_000_000, "samples of each set"),
    )
