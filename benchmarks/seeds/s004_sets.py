"""What the rows of `s004.py` read: one tree of JPEGs in each container, made once in a folder and then kept.

tree/class0/000000.jpg …    hdf5/, tfrecord/, tar/: packed, with the indexes that other libraries want
images.h5                   JPEGs of variable length and labels: "the entire train and validation data sets are
pixels.h5                   stored as two HDF5 files" there, without a word on whether decoded; so both
recordio/train.rec, .idx    MXNet's, as im2rec writes it
insightface/train.rec, .idx MXNet's, as InsightFace publishes its sets
lmdb/, coco.json            Caffe's environment; annotations with one box an image, over the tree
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import experiment  # noqa: F401  the packages of this repository
from harness import NotHere
from machine import list_tree

__all__ = ["CENTRE", "EXTENSIVE", "FEW", "JITTER", "LOADS", "TASKS", "Job", "Load", "Scale", "Task", "make_sets"]

Load = Literal["few", "extensive", "centre"]
FEW: Load = "few"  # resize, random crop, flip
EXTENSIVE: Load = "extensive"  # and random brightness, contrast, saturation
CENTRE: Load = "centre"  # resize, the middle: nothing is random, for comparisons
LOADS = (FEW, EXTENSIVE)
JITTER = 0.4  # brightness, contrast and saturation times a factor from 0.6 to 1.4

_LEAST_SHARDS = 4
_SMALL_BATCH = 8
_IMAGES = {"imagenet": 256, "faces": 1024}
_MAGIC = 0xCED7230A
_NO_LABEL_BYTES = struct.Struct("<IfQQ")


@dataclass(frozen=True)
class Task:
    """name; width and height of the images; the short side they are resized to; the side of the crop."""

    name: str
    size: tuple[int, int]
    resize: int
    crop: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


_HALF = (0.5, 0.5, 0.5)
TASKS = {
    "imagenet": Task("imagenet", (500, 375), 256, 224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "faces": Task("faces", (112, 112), 128, 112, _HALF, _HALF),
}


@dataclass(frozen=True)
class Scale:
    """How much of everything: `work` is where the sets are; small: for --smoke."""

    work: Path
    batch: int
    workers: int
    small: bool

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Scale:
        batch = arguments.batch or (_SMALL_BATCH if arguments.smoke else 32)
        return cls(Path(arguments.work), batch, arguments.workers, arguments.smoke)

    @property
    def shards(self) -> int:
        """So many that each worker has as many as the others."""
        return -(-_LEAST_SHARDS // self.workers) * self.workers

    def count(self, task: str) -> int:
        """Images: whole batches of each shard."""
        unit = self.batch * self.shards
        return max(1, round((1 if self.small else _IMAGES[task]) / unit)) * unit

    def folder(self, task: str) -> Path:
        """Where the sets of a task are."""
        return self.work / f"{task}-{self.count(task)}-{self.shards}"

    def job(self, task: str, load: Load) -> Job:
        return Job(TASKS[task], load, self.folder(task), self.batch, self.workers)

    def check_job(self, task: str) -> Job:
        """Over the few images of the checks."""
        return Job(TASKS[task], CENTRE, self.folder(task) / "check", min(_SMALL_BATCH, self.batch), self.workers)


@dataclass(frozen=True)
class Job:
    """What a row is asked for: float32 batches of [batch, 3, crop, crop], normalised, from the sets in `folder`."""

    task: Task
    load: Load
    folder: Path
    batch: int
    workers: int

    @property
    def is_random(self) -> bool:
        return self.load != CENTRE

    @property
    def tree(self) -> Path:
        return self.folder / "tree"

    @property
    def count(self) -> int:
        return len(list_tree(self.tree))

    def require(self, name: str) -> Path:
        """A set; raises NotHere where it was not made, for lack of a package that writes it."""
        path = self.folder / name
        if not path.exists():
            raise NotHere(f"{name} was not made: its writer is not installed")
        return path

    def shards(self, name: str, suffix: str) -> list[str]:
        """The files of a set with this suffix."""
        return sorted(str(path) for path in self.require(name).iterdir() if path.name.endswith(suffix))


def make_sets(folder: Path, shards: int, task: Task) -> None:
    """All sets of `folder/tree`. Needs no package but this project's and torch, lmdb aside."""
    import packer

    items = list_tree(folder / "tree")
    for form in ("hdf5", "tfrecord", "tar"):
        packer.convert(
            folder / "tree",
            form,
            folder / form,
            shards=packer.Shards(samples=-(-len(items) // shards)),
            run=packer.Run(workers=1),
        )
    for form in ("tfrecord", "tar"):
        packer.export_index(folder / form, "dali")
    _write_hdf5(folder, items, task)
    _write_records(folder / "recordio", [_record(label, data) for data, label in _contents(items)])
    _write_records(folder / "insightface", _insightface_records(items))
    for name in ("recordio", "insightface"):
        packer.index(folder / name, workers=1)
    if importlib.util.find_spec("lmdb") is not None:
        _write_lmdb(folder / "lmdb", items)
    _write_coco(folder, items, task)


def _contents(items: Iterable[tuple[str, int]]) -> Iterator[tuple[bytes, int]]:
    for path, label in items:
        yield Path(path).read_bytes(), label


def _write_hdf5(folder: Path, items: Sequence[tuple[str, int]], task: Task) -> None:
    """images.h5: variable-length bytes. pixels.h5: a chunk for each image, resized and cut to a square."""
    import h5py
    import numpy as np
    import pillow_transforms as T

    labels = np.array([label for _, label in items], np.int64)
    with h5py.File(folder / "images.h5", "w") as file:
        images = file.create_dataset("images", (len(items),), h5py.vlen_dtype(np.uint8))
        for number, (data, _) in enumerate(_contents(items)):
            images[number] = np.frombuffer(data, np.uint8)
        file["labels"] = labels
    side, square = task.resize, T.Compose([T.Resize(task.resize), T.CenterCrop(task.resize)])
    with h5py.File(folder / "pixels.h5", "w") as file:
        shape = (len(items), side, side, 3)
        pixels = file.create_dataset("pixels", shape, np.uint8, chunks=(1, *shape[1:]))
        for number, (path, _) in enumerate(items):
            pixels[number] = np.asarray(square(T.read_image(path)))
        file["labels"] = labels


# --- MXNet's RecordIO (dmlc/recordio.h, mxnet.recordio.IRHeader) ------------------------------------------------------
def _record(label: float | Sequence[float], data: bytes, number: int = 0) -> bytes:
    """A record of one label, or of several: then their number stands in place of a flag, and they follow."""
    if isinstance(label, float | int):
        body = _NO_LABEL_BYTES.pack(0, float(label), number, 0) + data
    else:
        body = _NO_LABEL_BYTES.pack(len(label), 0.0, number, 0) + struct.pack(f"<{len(label)}f", *label) + data
    magic = struct.pack("<I", _MAGIC)
    if any(body[place : place + 4] == magic for place in _multiples_of_four(body, magic)):
        raise ValueError("an image has the magic number of RecordIO in it: take other images")
    return magic + struct.pack("<I", len(body)) + body + bytes(-len(body) % 4)


def _multiples_of_four(body: bytes, magic: bytes) -> Iterator[int]:
    place = body.find(magic)
    while place >= 0:
        if place % 4 == 0:
            yield place
        place = body.find(magic, place + 1)


def _insightface_records(items: Sequence[tuple[str, int]]) -> list[bytes]:
    """Record 0: where the records of identities begin and end; the images; a record without an image an identity."""
    images = [_record([float(label), 0.0], data, i) for i, (data, label) in enumerate(_contents(items), 1)]
    firsts = [i for i, (_, label) in enumerate(items, 1) if i == 1 or items[i - 2][1] != label]
    ends = [*firsts[1:], len(items) + 1]
    ranges = [_record([float(first), float(end)], b"") for first, end in zip(firsts, ends, strict=True)]
    head = _record([float(len(items) + 1), float(len(items) + 1 + len(ranges))], b"")
    return [head, *images, *ranges]


def _write_records(folder: Path, records: Sequence[bytes]) -> None:
    folder.mkdir()
    place, lines = 0, []
    with open(folder / "train.rec", "wb") as file:
        for number, record in enumerate(records):
            file.write(record)
            lines.append(f"{number}\t{place}\n")
            place += len(record)
    (folder / "train.idx").write_text("".join(lines))


# --- Caffe's LMDB, COCO -----------------------------------------------------------------------------------------------
def _write_lmdb(folder: Path, items: Sequence[tuple[str, int]]) -> None:
    """A caffe.Datum for each image: data = 4, label = 5, encoded = 7 (caffe.proto)."""
    import lmdb

    from packer.formats.example import varint

    size = sum(Path(path).stat().st_size for path, _ in items)
    with lmdb.open(str(folder), map_size=2 * size + (64 << 20)) as environment, environment.begin(write=True) as write:
        for number, (data, label) in enumerate(_contents(items)):
            datum = varint(4 << 3 | 2) + varint(len(data)) + data + varint(5 << 3) + varint(label)
            write.put(b"%08d" % number, datum + varint(7 << 3) + varint(1))


def _write_coco(folder: Path, items: Sequence[tuple[str, int]], task: Task) -> None:
    width, height = task.size
    images = [
        {"id": i, "file_name": str(Path(path).relative_to(folder / "tree")), "width": width, "height": height}
        for i, (path, _) in enumerate(items)
    ]
    box = {"bbox": [0, 0, width, height], "area": width * height, "iscrowd": 0}
    annotations = [{"id": i, "image_id": i, "category_id": label, **box} for i, (_, label) in enumerate(items)]
    categories = [{"id": label, "name": str(label)} for label in sorted({label for _, label in items})]
    document = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "coco.json").write_text(json.dumps(document))
