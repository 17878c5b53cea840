"""Indexes of a synthetic set: how each is made, and how it is opened.

A contender's function takes (folder, samples) and returns a look-up, `i -> anything`, that finds the place of sample i,
how long it is, and its label. Its `build` option makes the index in an empty folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import contender
from index_set import MEAN_BYTES, build_index, synthetic_columns

__all__: list[str] = []

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
    shards = [
        {
            "column_encodings": ["bytes", "int"],
            "column_names": ["image", "label"],
            "column_sizes": [None, 8],
            "compression": None,
            "format": "mds",
            "hashes": [],
            "raw_data": {
                "basename": f"shard.{k:05d}.mds",
                "bytes": SAMPLES_PER_CHUNK * MEAN_BYTES,
                "hashes": {},
            },
            "samples": SAMPLES_PER_CHUNK,
            "size_limit": 1 << 26,
            "version": 2,
            "zip_data": None,
        }
        for k in range(samples // SAMPLES_PER_CHUNK)
    ]
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
    chunks = [
        {
            "chunk_bytes": SAMPLES_PER_CHUNK * MEAN_BYTES,
            "chunk_size": SAMPLES_PER_CHUNK,
            "dim": None,
            "filename": f"chunk-0-{k}.bin",
        }
        for k in range(samples // SAMPLES_PER_CHUNK)
    ]
    config = {
        "chunk_bytes": SAMPLES_PER_CHUNK * MEAN_BYTES,
        "chunk_size": None,
        "compression": None,
        "data_format": ["bytes", "int"],
        "data_spec": spec,
        "encryption": None,
        "item_loader": "PyTreeLoader",
    }
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config, "updated_at": "0"}))


@contender(
    "litdata",
    imports="litdata",
    build=_build_litdata,
    note="1,000 samples a chunk; offsets lie in the chunks, so a look-up is nothing",
)
def litdata(folder: Path, samples: int) -> LookUp:
    import litdata

    opened = litdata.StreamingDataset(os.fspath(folder), shuffle=False)
    assert len(opened) == samples // SAMPLES_PER_CHUNK * SAMPLES_PER_CHUNK
    return lambda i: None
