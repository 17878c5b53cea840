"""Writers of other projects, each used as its documentation shows, storing the given bytes and the label.

All of them list the tree with `machine.list_tree` within the clock, run in one process unless the note says
otherwise, leave the fsync to the kernel, and keep neither checksums of samples nor anything parsed from the images,
unless the note says so.
"""

from __future__ import annotations

import os
import subprocess
from typing import Any

from harness import contender
from machine import list_tree

__all__: list[str] = []

ROWS_PER_GROUP = 500


def _content(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


@contender("GNU tar", note="tar cf of the folder; names only, no labels, no index")
def gnu_tar(tree: str, output: str) -> None:
    subprocess.run(["tar", "cf", os.path.join(output, "a.tar"), "-C", tree, "."], check=True)


@contender("lmdb", imports="lmdb", note="append=True, 1,000 puts a transaction, sync=False; no label stored")
def lmdb_writer(tree: str, output: str) -> None:
    import lmdb

    items = list_tree(tree)
    environment = lmdb.open(os.path.join(output, "db"), map_size=1 << 36, sync=False)
    for start in range(0, len(items), 1000):
        with environment.begin(write=True) as transaction:
            for number, (path, _) in enumerate(items[start : start + 1000], start):
                transaction.put(b"%08d" % number, _content(path), append=True)
    environment.close()


@contender("array_record", imports="array_record.python.array_record_module", note="group_size:1,uncompressed")
def array_record(tree: str, output: str) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(os.path.join(output, "a.array_record"), "group_size:1,uncompressed")
    for path, label in list_tree(tree):
        writer.write(_content(path) + label.to_bytes(4, "little"))
    writer.close()


class _IndexedFiles:
    """What FFCV's writer wants: a sequence of (uint8 array, label)."""

    def __init__(self, tree: str) -> None:
        self.items = list_tree(tree)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import numpy as np

        path, label = self.items[index]
        return np.frombuffer(_content(path), np.uint8), label


@contender(
    "FFCV BytesField",
    python="ffcv",
    imports="ffcv.writer ffcv.fields numpy",
    note="2 worker processes, whose memory and CPU time are not counted",
)
def ffcv_bytes(tree: str, output: str) -> None:
    from ffcv.fields import BytesField, IntField
    from ffcv.writer import DatasetWriter

    fields = {"image": BytesField(), "label": IntField()}
    writer = DatasetWriter(os.path.join(output, "a.beton"), fields, num_workers=2)
    writer.from_indexed_dataset(_IndexedFiles(tree))


@contender("Parquet (pyarrow)", imports="pyarrow.parquet", note="uncompressed, no dictionary, groups of 500 rows")
def parquet(tree: str, output: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    items = list_tree(tree)
    schema = pa.schema([("image", pa.binary()), ("label", pa.int32())])
    path = os.path.join(output, "a.parquet")
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for start in range(0, len(items), ROWS_PER_GROUP):
            part = items[start : start + ROWS_PER_GROUP]
            images = pa.array([_content(path) for path, _ in part], pa.binary())
            labels = pa.array([label for _, label in part], pa.int32())
            writer.write_table(pa.table({"image": images, "label": labels}, schema=schema))


@contender(
    "h5py flat",
    imports="h5py numpy",
    note="one uint8 data set of known size, offsets, labels; files examined twice",
)
def h5py_flat(tree: str, output: str) -> None:
    import h5py
    import numpy as np

    items = list_tree(tree)
    ends = np.cumsum([os.path.getsize(path) for path, _ in items])
    offsets = np.concatenate(([0], ends)).astype(np.int64)
    with h5py.File(os.path.join(output, "a.h5"), "w") as file:
        data = file.create_dataset("data", (int(offsets[-1]),), np.uint8)
        file.create_dataset("offsets", data=offsets)
        file.create_dataset("labels", data=np.array([label for _, label in items]))
        for number, (path, _) in enumerate(items):
            data[offsets[number] : offsets[number + 1]] = np.frombuffer(_content(path), np.uint8)


@contender("h5py vlen", imports="h5py numpy", note="one variable-length uint8 data set, labels")
def h5py_vlen(tree: str, output: str) -> None:
    import h5py
    import numpy as np

    items = list_tree(tree)
    with h5py.File(os.path.join(output, "a.h5"), "w") as file:
        data = file.create_dataset("images", (len(items),), dtype=h5py.vlen_dtype(np.uint8))
        file.create_dataset("labels", data=np.array([label for _, label in items]))
        for number, (path, _) in enumerate(items):
            data[number] = np.frombuffer(_content(path), np.uint8)


@contender(
    "tfrecord package",
    imports="tfrecord tfrecord.tools.tfrecord2idx",
    note="features image and label; record CRCs; index",
)
def tfrecord_package(tree: str, output: str) -> None:
    import tfrecord
    from tfrecord.tools import tfrecord2idx

    path = os.path.join(output, "a.tfrecord")
    writer = tfrecord.TFRecordWriter(path)
    for name, label in list_tree(tree):
        writer.write({"image": (_content(name), "byte"), "label": (label, "int")})
    writer.close()
    tfrecord2idx.create_index(path, os.path.join(output, "a.index"))


@contender("MosaicML MDS", imports="streaming", note="columns bytes and int, no hashes, no compression")
def mds(tree: str, output: str) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=os.path.join(output, "mds"), columns={"image": "bytes", "label": "int"}) as writer:
        for path, label in list_tree(tree):
            writer.write({"image": _content(path), "label": label})


@contender("webdataset ShardWriter", imports="webdataset", note="members jpg and cls, 1,000 samples a shard")
def webdataset_writer(tree: str, output: str) -> None:
    import webdataset

    pattern = os.path.join(output, "a-%06d.tar")
    with webdataset.ShardWriter(pattern, maxcount=1000, maxsize=1 << 40, verbose=0) as writer:
        for number, (path, label) in enumerate(list_tree(tree)):
            writer.write({"__key__": f"{number:08d}", "jpg": _content(path), "cls": label})


def _litdata_sample(item: tuple[str, int]) -> dict[str, Any]:
    return {"image": _content(item[0]), "label": item[1]}


@contender("litdata optimize", imports="litdata", note="2 worker processes, chunks of 64 MB")
def litdata_optimize(tree: str, output: str) -> None:
    import litdata

    # It empties the folders that these variables name before it starts; without them, two in the system's TMPDIR.
    for variable, name in (
        ("DATA_OPTIMIZER_CACHE_FOLDER", "chunks"),
        ("DATA_OPTIMIZER_DATA_CACHE_FOLDER", "data"),
    ):
        os.environ[variable] = os.path.join(output, "cache", name)
        os.makedirs(os.environ[variable])
    litdata.optimize(
        fn=_litdata_sample,
        inputs=list_tree(tree),
        output_dir=os.path.join(output, "lit"),
        num_workers=2,
        chunk_bytes="64MB",
        verbose=False,
    )
