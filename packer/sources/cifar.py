"""CIFAR-10 and CIFAR-100 in their binary version, as they are published.

    cifar-10-batches-bin    data_batch_1.bin to data_batch_5.bin (train), test_batch.bin (test), batches.meta.txt
    cifar-100-binary        train.bin, test.bin, fine_label_names.txt, coarse_label_names.txt

A record is its label, of CIFAR-100 the coarse and the fine label, a byte each, and the pixels: 32 x 32 of red, then of
green, then of blue. The images become PNG, in the order of the files, which is that of torchvision. Of CIFAR-100 the
fine label is the label, unless label_column="coarse" asks for the other, and both are in the field json.

The version for Python, which is what torchvision downloads, is pickled, and unpickling runs what a file says. It is
read by `packer.sources.pickles`, which runs nothing:

    cifar-10-batches-py     data_batch_1 to data_batch_5, test_batch, batches.meta
    cifar-100-python        train, test, meta
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cache.errors import SourceError
from cache.files import read_regular
from packer.sources.file_sets import PixelBlock, PixelSets, PixelSource, PixelSplit
from packer.sources.pickles import PickledArray, read_pickle

__all__ = ["CifarSource"]

_SIDE, _CHANNELS = 32, 3
_PIXEL_BYTES = _SIDE * _SIDE * _CHANNELS
_MAX_NAMES_BYTES = 1 << 16
_READ_RECORDS = 1000
_SHAPES = ((_PIXEL_BYTES,), (_CHANNELS, _SIDE, _SIDE))
_BATCHES = 5  # of CIFAR-10
_BATCH = re.compile(r"data_batch_(\d+)(?:\.bin)?")
_LABELS = ("coarse", "fine")  # as they are in a record of CIFAR-100


class CifarSource(PixelSource):
    """The images in the folder at `root`. label_column: "fine" or "coarse", of CIFAR-100."""

    def __init__(self, root: str | os.PathLike[str], label_column: str | None = None) -> None:
        super().__init__(Path(root))
        names = {entry.name for entry in self.root.iterdir()}
        self.is_pickled = not any(name.endswith(".bin") for name in names)
        self.has_json = self.is_hundred = bool({"fine_label_names.txt", "meta"} & names)
        self.kind = "CIFAR-100" if self.is_hundred else "CIFAR-10"  # type: ignore[misc]
        if label_column is not None and not (self.is_hundred and label_column in _LABELS):
            raise SourceError(
                f"{self.root}: no labels called {label_column!r} (label_column={label_column!r}); CIFAR-100 has "
                f"{' and '.join(_LABELS)}, CIFAR-10 has one label"
            )
        self.label_column = label_column or "fine"
        self._names: tuple[tuple[str, ...], ...] = ()
        self._heads: dict[Path, npt.NDArray[np.uint8]] = {}

    def find(self, split: str | None) -> PixelSets:
        self._heads = {}
        metas, self._names = self._read_names()
        column = _LABELS.index(self.label_column) if self.is_hundred else 0
        splits = {}
        files = self._files()
        for name, its in files.items():
            blocks = [self._block(self.note(self.root / file)) for file in its if (self.root / file).exists()]
            if blocks:
                labels = [self._heads[block.path][:, column].astype(np.int64) for block in blocks]
                splits[name] = PixelSplit(blocks, np.concatenate(labels))
        if not splits:
            raise SourceError(f"{self.root}: no files of CIFAR; expected {', '.join(chain(*files.values()))}")
        known = {file for its in files.values() for file in its} | set(metas)
        left_out = [(name, "not a file of CIFAR") for name in sorted(os.listdir(self.root)) if name not in known]
        expected = {*chain(*files.values()), *([] if self.is_hundred else self._batches())}
        missing = sorted(name for name in expected if not (self.root / name).exists())
        warnings = [f"{self.root}: files of {self.kind} are missing: {', '.join(missing)}"] if missing else []
        return PixelSets(splits, self._names[column], left_out, warnings)

    def _files(self) -> dict[str, list[str]]:
        suffix = self._suffix
        if self.is_hundred:
            return {"train": [f"train{suffix}"], "test": [f"test{suffix}"]}
        found = (match for path in self.root.iterdir() if (match := _BATCH.fullmatch(path.name)))
        names = [match[0] for match in sorted(found, key=lambda match: int(match[1])) if match[0].endswith(suffix)]
        return {"train": names, "test": [f"test_batch{suffix}"]}

    @property
    def _suffix(self) -> str:
        return "" if self.is_pickled else ".bin"

    def _batches(self) -> list[str]:
        """The files of train as they are published."""
        return [f"data_batch_{number}{self._suffix}" for number in range(1, _BATCHES + 1)]

    def json_of(self, block: PixelBlock, index: int) -> bytes:
        labels = self._heads[block.path][index].tolist()
        found: dict[str, int | str] = {}
        for kind, label, names in zip(_LABELS, labels, self._names, strict=True):
            found |= {f"{kind}_label": label, kind: names[label]}
        return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()

    def _read_names(self) -> tuple[list[str], tuple[tuple[str, ...], ...]]:
        """The files with the names of classes; the names, of each label in a record."""
        if self.is_pickled:
            path = self.note(self.root / ("meta" if self.is_hundred else "batches.meta"))
            meta = read_pickle(path)
            keys = [f"{kind}_label_names" for kind in _LABELS] if self.is_hundred else ["label_names"]
            return [path.name], tuple(_checked(meta.get(key), path) for key in keys)
        files = [f"{kind}_label_names.txt" for kind in _LABELS] if self.is_hundred else ["batches.meta.txt"]
        return files, tuple(self._names_in(name) for name in files)

    def _names_in(self, name: str) -> tuple[str, ...]:
        path = self.note(self.root / name)
        try:
            text = read_regular(path, _MAX_NAMES_BYTES).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SourceError(f"{path}: cannot be read as the names of classes: {error}") from error
        return _checked([line.strip() for line in text.splitlines() if line.strip()], path)

    def _block(self, path: Path) -> PixelBlock:
        """A file of images, whose labels are kept."""
        block, heads = self._pickled(path) if self.is_pickled else self._binary(path)
        wrong = np.flatnonzero((heads >= [len(names) for names in self._names]).any(axis=1))
        if len(wrong):
            labels = " and ".join(map(str, heads[wrong[0]].tolist()))
            counts = " and ".join(str(len(names)) for names in self._names)
            raise SourceError(f"{path}: record {wrong[0]} has the label {labels}, but there are {counts} classes")
        self._heads[path] = heads.astype(np.uint8)
        return block

    def _binary(self, path: Path) -> tuple[PixelBlock, npt.NDArray[np.int64]]:
        head = len(self._names)
        count, rest = divmod(path.stat().st_size, head + _PIXEL_BYTES)
        if rest or not count:
            raise SourceError(
                f"{path}: has {path.stat().st_size:,} bytes, expected a whole number of records of "
                f"{head + _PIXEL_BYTES}: truncated, or not of CIFAR"
            )
        heads = np.concatenate(list(_heads(path, head + _PIXEL_BYTES, head))).astype(np.int64)
        if len(heads) != count:
            raise SourceError(f"{path}: changes while it is read")
        return PixelBlock(path, count, _SIDE, _SIDE, _CHANNELS, head=head, planes=True), heads

    def _pickled(self, path: Path) -> tuple[PixelBlock, npt.NDArray[np.int64]]:
        found = read_pickle(path)
        keys = [f"{kind}_labels" for kind in _LABELS] if self.is_hundred else ["labels"]
        data, labels = found.get("data"), [found.get(key) for key in keys]
        if not isinstance(data, PickledArray) or data.shape[1:] not in _SHAPES:
            raise SourceError(f"{path}: no array 'data' of {_PIXEL_BYTES} bytes an image")
        for key, its in zip(keys, labels, strict=True):
            whole = isinstance(its, list) and all(type(label) is int and 0 <= label < 1 << 31 for label in its)
            if not whole or len(its or ()) != data.shape[0]:
                raise SourceError(f"{path}: {key!r} is not a list of {data.shape[0]:,} labels")
        block = PixelBlock(path, data.shape[0], _SIDE, _SIDE, _CHANNELS, start=data.start, planes=True)
        return block, np.array(labels, np.int64).T


def _checked(names: object, path: Path) -> tuple[str, ...]:
    """The names of classes. Raises SourceError where they cannot be."""
    good = isinstance(names, list) and 0 < len(names) <= 256 and all(isinstance(name, str) for name in names)
    found = tuple(map(str, names)) if isinstance(names, list) and good else ()
    if not good or len(set(found)) < len(found) or any(not name or "\0" in name for name in found):
        raise SourceError(f"{path}: expected up to 256 names of classes, each once")
    return found


def _heads(path: Path, record_bytes: int, head: int) -> Iterator[npt.NDArray[np.uint8]]:
    """The first bytes of every record, uint8 [k, head], for some records at a time."""
    try:
        with open(path, "rb") as file:
            while data := file.read(_READ_RECORDS * record_bytes):
                yield np.frombuffer(data, np.uint8).reshape(-1, record_bytes)[:, :head].copy()
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: cannot be read, or changes: {error}") from error
