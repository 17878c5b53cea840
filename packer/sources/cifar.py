"""CIFAR-10 and CIFAR-100 as published, in the binary version and in the Python version.

    cifar-10-batches-bin    data_batch_1.bin to data_batch_5.bin (train), test_batch.bin (test), batches.meta.txt
    cifar-100-binary        train.bin, test.bin, fine_label_names.txt, coarse_label_names.txt
    cifar-10-batches-py     data_batch_1 to data_batch_5, test_batch, batches.meta; pickled, as torchvision has them
    cifar-100-python        train, test, meta

A record is its label (of CIFAR-100 the coarse and the fine label), one byte each, and the pixels: 32 x 32 of red, then
of green, then of blue. The images become PNG, in the order of the files, like in torchvision. For CIFAR-100, the fine
label is used, unless label_column="coarse" selects the other, and both are in the field json.

Unpickling looks up names in a file: here only those that NumPy arrays, numbers and bytes need, so that nothing else is
imported or called. It runs in a separate process, limited to a minute and 1 GiB. Images are then read from their
positions in a file.
"""

from __future__ import annotations

import _codecs
import json
import mmap
import os
import pickle
import re
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.errors import SourceError
from cache.files import open_regular
from packer.sources.base import SourceListing, read_text, refusing
from packer.sources.pixels import PixelBlock, PixelSource

__all__ = ["CifarSource"]

_SIDE, _CHANNELS = 32, 3
_PIXEL_BYTES = _SIDE * _SIDE * _CHANNELS
_MAX_NAMES_BYTES, _MAX_PICKLE_BYTES = 1 << 16, 1 << 31
_SHAPES = ((_PIXEL_BYTES,), (_CHANNELS, _SIDE, _SIDE))
_BATCHES = 5  # of CIFAR-10
_BATCH = re.compile(r"data_batch_(\d+)(?:\.bin)?")
_LABELS = ("coarse", "fine")  # their order in a record of CIFAR-100


_CALLED = {"_codecs encode": _codecs.encode, "numpy ndarray": np.ndarray, "numpy dtype": np.dtype}
for _value, _protocol in ((np.zeros(1), 2), (np.int64(1), 2), (np.zeros(1), 5)):  # the constructors that NumPy pickles
    _made: Any = _value.__reduce_ex__(_protocol)[0]
    _module = _made.__module__.replace("_core", "core")
    _CALLED |= {f"{_module} {_made.__name__}": _made, f"{_module.replace('core', '_core')} {_made.__name__}": _made}


class _Unpickler(pickle.Unpickler):
    """Unpickles lists, names, numbers and arrays only."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module} {name}" not in _CALLED:
            raise pickle.UnpicklingError(f"it calls {module} {name}")
        return _CALLED[f"{module} {name}"]


def read_pickle(path: Path) -> dict[str, Any]:
    """The dict in a pickled file: of lists, numbers, strings and arrays. Raises SourceError for anything else."""
    problem = "a pickled file that cannot be read without running code from it"
    with refusing(path, problem), open_regular(path) as file:
        try:
            content = _Unpickler(file, encoding="latin-1").load()
        except (pickle.PickleError, MemoryError) as error:
            raise SourceError(f"{path}: {problem}: {str(error) or 'it takes too much memory'}") from error
        return {key.decode("latin-1") if isinstance(key, bytes) else str(key): value for key, value in content.items()}


class CifarSource(PixelSource):
    """The images in the folder at `root`. label_column: "fine" or "coarse", of CIFAR-100."""

    def __init__(self, root: str | os.PathLike[str], label_column: str | None = None) -> None:
        super().__init__(root)
        names = {entry.name for entry in self.root.iterdir()}
        self.is_pickled = not any(name.endswith(".bin") for name in names)
        self.seconds = 60.0 if self.is_pickled else None
        self.has_json = self.is_hundred = bool({"fine_label_names.txt", "meta"} & names)
        self.kind = "CIFAR-100" if self.is_hundred else "CIFAR-10"
        if label_column is not None and not (self.is_hundred and label_column in _LABELS):
            raise SourceError(
                f"{self.root}: no labels called {label_column!r} (label_column={label_column!r}); CIFAR-100 has "
                f"{' and '.join(_LABELS)}, CIFAR-10 has one label"
            )
        self.label_column = label_column or "fine"
        self._names: tuple[tuple[str, ...], ...] = ()
        self._labels: dict[Path, npt.NDArray[np.uint8]] = {}  # [images, 1 or 2]

    def list_files(self, split: str | None) -> SourceListing:
        listing, self._labels = self.begin(), {}
        metas, self._names = self._read_names()
        column = _LABELS.index(self.label_column) if self.is_hundred else 0
        listing.classes = self._names[column]
        there = {entry.name for entry in self.root.iterdir()}
        files, expected = self._files(sorted(there))
        for name, paths in files.items():
            blocks = [self._block(self.note(self.root / file)) for file in paths if file in there]
            if blocks:
                labels = np.concatenate([self._labels[block.path][:, column] for block in blocks])
                self.add(listing, name, blocks, labels.astype(np.int64))
        if not listing.splits:
            raise SourceError(f"{self.root}: no files of CIFAR; expected {', '.join(expected)}")
        known = {*metas, *chain(*files.values())}
        listing.left_out = [(name, "not a file of CIFAR") for name in sorted(there - known)]
        missing = sorted({*expected} - there)
        if missing:
            listing.warnings.append(f"{self.root}: files of {self.kind} are missing: {', '.join(missing)}")
        return listing

    def _files(self, there: list[str]) -> tuple[dict[str, list[str]], list[str]]:
        """(the files of each split; the published files)."""
        suffix = "" if self.is_pickled else ".bin"
        if self.is_hundred:
            return {"train": [f"train{suffix}"], "test": [f"test{suffix}"]}, [f"train{suffix}", f"test{suffix}"]
        batches = [match for name in there if (match := _BATCH.fullmatch(name)) and name.endswith(suffix)]
        train = [match[0] for match in sorted(batches, key=lambda match: int(match[1]))]
        published = [f"data_batch_{number}{suffix}" for number in range(1, _BATCHES + 1)]
        return {"train": train, "test": [f"test_batch{suffix}"]}, [*published, f"test_batch{suffix}"]

    def json_of(self, block: PixelBlock, index: int) -> bytes:
        labels = self._labels[block.path][index].tolist()
        content: dict[str, int | str] = {}
        for kind, label, names in zip(_LABELS, labels, self._names, strict=True):
            content |= {f"{kind}_label": label, kind: names[label]}
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()

    def _read_names(self) -> tuple[list[str], tuple[tuple[str, ...], ...]]:
        """The files with class names; the names, for each label in a record."""
        if self.is_pickled:
            path = self.note(self.root / ("meta" if self.is_hundred else "batches.meta"))
            meta = read_pickle(path)
            keys = [f"{kind}_label_names" for kind in _LABELS] if self.is_hundred else ["label_names"]
            return [path.name], tuple(_checked(meta.get(key), path) for key in keys)
        files = [f"{kind}_label_names.txt" for kind in _LABELS] if self.is_hundred else ["batches.meta.txt"]
        texts = {path: read_text(self.note(path), _MAX_NAMES_BYTES) for path in map(self.root.joinpath, files)}
        return files, tuple(_checked(text.split("\n"), path) for path, text in texts.items())

    def _block(self, path: Path) -> PixelBlock:
        """Open a file of images; its labels are kept."""
        if self.is_pickled:
            keys = [f"{kind}_labels" for kind in _LABELS] if self.is_hundred else ["labels"]
            start, labels = _read_batch(path, keys)
            head = 0
        else:
            start, head = 0, len(self._names)
            labels = _read_labels(path, head).astype(np.int64)
        wrong = np.flatnonzero((labels >= [len(names) for names in self._names]).any(axis=1))
        if len(wrong):
            raise SourceError(
                f"{path}: record {wrong[0]} has the label {' and '.join(map(str, labels[wrong[0]].tolist()))}, but "
                f"there are {' and '.join(str(len(names)) for names in self._names)} classes"
            )
        self._labels[path] = labels.astype(np.uint8)
        return PixelBlock(path, len(labels), _SIDE, _SIDE, _CHANNELS, start=start, head=head, planes=True)


def _checked(names: object, path: Path) -> tuple[str, ...]:
    """Check class names. Raises SourceError."""
    with refusing(path, "expected up to 256 names of classes, each once"):
        checked = tuple(name.strip() for name in names if name.strip())  # type: ignore[attr-defined]
        if not 0 < len(checked) == len(set(checked)) <= 256 or any("\0" in name for name in checked):
            raise ValueError(f"{len(checked)} names")
        return checked


def _read_labels(path: Path, head: int) -> npt.NDArray[np.uint8]:
    """The labels in a file of the binary version, uint8 [images, head]."""
    with refusing(path):
        count, rest = divmod(path.stat().st_size, head + _PIXEL_BYTES)
        if rest or not count:
            raise SourceError(
                f"{path}: has {path.stat().st_size:,} bytes, expected a whole number of records of "
                f"{head + _PIXEL_BYTES}: truncated, or not of CIFAR"
            )
        return np.array(np.memmap(path, np.uint8, "r", shape=(count, head + _PIXEL_BYTES))[:, :head])


def _read_batch(path: Path, keys: list[str]) -> tuple[int, npt.NDArray[np.int64]]:
    """(start of the pixels in a pickled file, labels int64 [images, 1 or 2])."""
    batch = read_pickle(path)
    data = batch.get("data")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] not in _SHAPES:
        raise SourceError(f"{path}: no array 'data' of {_PIXEL_BYTES} bytes an image")
    with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = content.find(data.tobytes())
    if start < 0:
        problem = "its arrays are written as text; load it with Python, and pickle it again with protocol=4"
        raise SourceError(f"{path}: {problem}")
    with refusing(path, f"{' and '.join(keys)} are not lists of {len(data):,} labels"):
        labels = np.array([[int(label) for label in batch[key]] for key in keys], np.int64).T
        if labels.shape != (len(data), len(keys)) or (labels.size and labels.min() < 0):
            raise ValueError(f"{list(labels.shape)}")
    return start, labels
