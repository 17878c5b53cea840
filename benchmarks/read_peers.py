"""Readers of other projects over what their own writers packed (`pack_peers`); bytes only, nothing is decoded."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from harness import NotHere, contender
from machine import list_tree
from read_rows import Place, Row

__all__: list[str] = []


class _SequentialOnly(Row):
    """A library that only reads from front to back."""

    def batch(self, indices: Sequence[int]) -> Iterable[Any]:
        raise NotHere("reads from front to back only")

    def random(self, order: Sequence[int]) -> Iterator[Any]:
        raise NotHere("reads from front to back only")


@contender("ImageFolder", data="tree", note="open and read of a listed path, as torchvision's loader does")
class ImageFolder(Row):
    def __init__(self, place: Place) -> None:
        self._items = list_tree(place.tree)
        self.n = len(self._items)

    def get(self, i: int) -> bytes:
        with open(self._items[i][0], "rb") as file:
            return file.read()


@contender("lmdb", imports="lmdb", data="lmdb", note="buffers=True: views of its map, no copy")
class Lmdb(Row):
    def __init__(self, place: Place) -> None:
        import lmdb

        path = os.path.join(place.output("lmdb"), "db")
        self._environment = lmdb.open(path, readonly=True, lock=False)
        self._transaction = self._environment.begin(buffers=True)
        self.n = self._environment.stat()["entries"]

    def get(self, i: int) -> Any:
        return self._transaction.get(b"%08d" % i)


@contender("array_record", imports="array_record.python.array_record_data_source", data="array_record")
class ArrayRecord(Row):
    def __init__(self, place: Place) -> None:
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        self._source = ArrayRecordDataSource(os.path.join(place.output("array_record"), "a.array_record"))
        self.n = len(self._source)

    def get(self, i: int) -> bytes:
        return bytes(self._source[i])

    def batch(self, indices: Sequence[int]) -> Iterable[bytes]:
        found: Iterable[bytes] = self._source.__getitems__(indices)
        return found


@contender("litdata", imports="litdata", data="litdata optimize")
class Litdata(Row):
    def __init__(self, place: Place) -> None:
        import litdata

        self._set = litdata.StreamingDataset(os.path.join(place.output("litdata optimize"), "lit"), shuffle=False)
        self.n = len(self._set)

    def get(self, i: int) -> Any:
        return self._set[i]["image"]

    def sequential(self) -> Iterator[Any]:
        return (sample["image"] for sample in self._set)


@contender("webdataset", imports="webdataset", data="webdataset ShardWriter")
class WebDataset(_SequentialOnly):
    def __init__(self, place: Place) -> None:
        import webdataset

        shards = sorted(glob.glob(os.path.join(place.output("webdataset ShardWriter"), "*.tar")))
        self._set = webdataset.WebDataset(shards, shardshuffle=False, empty_check=False)
        self.n = len(list_tree(place.tree))

    def sequential(self) -> Iterator[Any]:
        return (sample["jpg"] for sample in self._set)


@contender("h5py flat", imports="h5py numpy", data="h5py flat", note="slices of the data set, offsets in a list")
class H5pyFlat(Row):
    def __init__(self, place: Place) -> None:
        import h5py

        self._file = h5py.File(os.path.join(place.output("h5py flat"), "a.h5"), "r")
        self._data = self._file["data"]
        self._offsets = self._file["offsets"][:].tolist()
        self.n = len(self._offsets) - 1

    def get(self, i: int) -> Any:
        return self._data[self._offsets[i] : self._offsets[i + 1]]


@contender(
    "tfrecord indexed",
    imports="tfrecord tfrecord.example_pb2",
    data="tfrecord package",
    note="its index file, pread and its protobuf parser; it has no random access of its own",
)
class TfrecordIndexed(Row):
    def __init__(self, place: Place) -> None:
        from tfrecord import example_pb2

        folder = place.output("tfrecord package")
        with open(os.path.join(folder, "a.index")) as file:
            self._records = [tuple(map(int, line.split())) for line in file]
        self._descriptor = os.open(os.path.join(folder, "a.tfrecord"), os.O_RDONLY)
        self._example = example_pb2.Example
        self.n = len(self._records)

    def get(self, i: int) -> Any:
        start, size = self._records[i]  # of the record with its 12 bytes before and 4 behind
        example = self._example()
        example.ParseFromString(os.pread(self._descriptor, size - 16, start + 12))
        return example.features.feature["image"].bytes_list.value[0]
