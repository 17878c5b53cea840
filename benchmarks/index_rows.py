"""Indexes of a synthetic set: how each is made, and how it is opened.

A contender's function takes (folder, samples) and returns a look-up, `i -> anything`, that finds where sample i lies,
how long it is, and its label. Its `build` option makes the index in an empty folder.
"""

from __future__ import annotations

import json
import os
import pickle
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import contender

__all__: list[str] = []

LookUp = Callable[[int], Any]
SHARDS = 100
CLASSES = 1000
MEAN_BYTES = 110_000
KEY_DIGITS = 12
SAMPLES_PER_CHUNK = 1000


def _columns(samples: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """(offset, length, label) of samples that lie one after the other."""
    import numpy as np

    lengths = np.random.default_rng(seed).integers(MEAN_BYTES // 2, MEAN_BYTES * 3 // 2, samples)
    return np.cumsum(lengths) - lengths, lengths, np.arange(samples) % CLASSES


def _our_part(first: int, samples: int) -> dict[str, Any]:
    """The index columns of one shard, with the keys "000000000000", "000000000001", …"""
    import numpy as np

    offset, length, label = _columns(samples, first)
    digits = (np.arange(first, first + samples)[:, None] // 10 ** np.arange(KEY_DIGITS - 1, -1, -1)) % 10 + ord("0")
    suffix = b"+.jpg"
    return {
        "label": label.astype("<i8"),
        "height": np.full(samples, 375, "<u4"),
        "width": np.full(samples, 500, "<u4"),
        "components": np.full(samples, 3, "u1"),
        "process": np.full(samples, 0xC0, "u1"),
        "orientation": np.full(samples, 1, "u1"),
        "media": np.full(samples, 1, "u1"),
        "key": digits.astype("u1").ravel(),
        "key.offset": np.arange(samples + 1, dtype="<u8") * KEY_DIGITS,
        "image.offset": offset.astype("<u8"),
        "image.length": length.astype("<u8"),
        "image.crc32c": np.arange(samples, dtype="<u4"),
        "image.name": np.tile(np.frombuffer(suffix, "u1"), samples),
        "image.name.offset": np.arange(samples + 1, dtype="<u8") * len(suffix),
    }


def _build_ours(folder: Path, samples: int) -> None:
    from packer.columns import PartMeta, save_part
    from packer.index_writer import write_index
    from readers.layout import DATASET_FILE, DatasetInfo, ShardInfo, SplitInfo

    counts = [samples * (k + 1) // SHARDS - samples * k // SHARDS for k in range(SHARDS)]
    parts, shards = [], []
    for number, count in enumerate(counts):
        columns = _our_part(sum(counts[:number]), count)
        size = int(columns["image.length"].sum())
        shards.append(ShardInfo(f"train-{number:05d}.bin", size, count, 0))
        parts.append(folder / f"{number}.part")
        save_part(parts[-1], columns, PartMeta(shards[-1], size))
        with open(folder / shards[-1].path, "wb") as file:
            file.truncate(size)
    write_index(folder / "train.index", parts, counts, ["image"])
    for part in parts:
        part.unlink()
    split = SplitInfo(samples, tuple(shards), "train.index")
    classes = tuple(f"class {number}" for number in range(CLASSES))
    info = DatasetInfo("hdf5", {"image": "image"}, classes, {"train": split})
    (folder / DATASET_FILE).write_text(info.to_json())


@contender(
    "ours: readers.open",
    imports="readers",
    build=_build_ours,
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
    table["offset"], table["length"], table["label"] = _columns(samples)
    np.save(folder / "index.npy", table)


@contender("limit: one mapped .npy", imports="numpy", build=_build_npy, note="16 bytes a sample, no keys, one shard")
def mapped_npy(folder: Path, samples: int) -> LookUp:
    import numpy as np

    table = np.load(folder / "index.npy", mmap_mode="r")
    return lambda i: table[i].item()


def _build_sqlite(folder: Path, samples: int) -> None:
    columns = [column.tolist() for column in _columns(samples)]
    with sqlite3.connect(folder / "index.db") as connection:
        connection.execute("create table sample(id integer primary key, offset int, length int, label int)")
        connection.executemany("insert into sample values(?,?,?,?)", zip(range(samples), *columns, strict=True))


@contender("sqlite", imports="sqlite3", build=_build_sqlite)
def sqlite(folder: Path, samples: int) -> LookUp:
    connection = sqlite3.connect(folder / "index.db")
    connection.execute("select count(*) from sample where id < 1").fetchone()
    query = "select offset, length, label from sample where id = ?"
    return lambda i: connection.execute(query, (i,)).fetchone()


def _build_parquet(folder: Path, samples: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = ("offset", "length", "label")
    pq.write_table(pa.table(dict(zip(names, _columns(samples), strict=True))), folder / "index.parquet")


@contender("Parquet, read whole", imports="pyarrow.parquet", build=_build_parquet)
def parquet(folder: Path, samples: int) -> LookUp:
    import pyarrow.parquet as pq

    columns = pq.read_table(folder / "index.parquet").columns
    return lambda i: [column[i].as_py() for column in columns]


def _build_pickle(folder: Path, samples: int) -> None:
    names = [(f"train/{i % CLASSES:04d}/{i:0{KEY_DIGITS}d}.jpg", i % CLASSES) for i in range(samples)]
    (folder / "samples.pickle").write_bytes(pickle.dumps(names))


@contender("pickled (path, label) list", build=_build_pickle, note="what ImageFolder keeps in each process")
def pickled_list(folder: Path, samples: int) -> LookUp:
    with open(folder / "samples.pickle", "rb") as file:
        names = pickle.load(file)
    return lambda i: names[i]


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
