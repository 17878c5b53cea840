"""CIFAR-10 and CIFAR-100 in their binary version, as they are published.

    cifar-10-batches-bin    data_batch_1.bin to data_batch_5.bin (train), test_batch.bin (test), batches.meta.txt
    cifar-100-binary        train.bin, test.bin, fine_label_names.txt, coarse_label_names.txt

A record is its label, of CIFAR-100 the coarse and the fine label, a byte each, and the pixels: 32 x 32 of red, then of
green, then of blue. The images become PNG, in the order of the files, which is that of torchvision. Of CIFAR-100 the
fine label is the label, unless label_column="coarse" asks for the other, and both are in the field json.

The version for Python, which is what torchvision downloads, is pickled, and unpickling runs what a file says. It is
read by `packer.sources.cifar`, which runs nothing:

    cifar-10-batches-py     data_batch_1 to data_batch_5, test_batch, batches.meta
    cifar-100-python        train, test, meta
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cache.errors import FormatError, SourceError
from cache.files import read_regular
from packer.formats.base import Window
from packer.sources.file_sets import PixelBlock, PixelSets, PixelSource, PixelSplit

__all__ = []


# ------------------------------------------------------------------------------
# Lists, names and arrays of uint8 in a pickled file, read without running anything of it.
#
# Unpickling calls what a file names. Here a call is kept as what it says, a name and arguments, and nothing is looked
# up, imported or called. Only the instructions are known that lists, dicts, tuples, numbers, strings and arrays of
# NumPy take; any other is an error. Long strings stay in the file: an array is where its bytes are. Only strings are
# names in a dict, since numbers can be chosen so that each look-up takes as long as there are names.
#
# (Lib/pickletools.py of CPython documents the instructions.)


_MAX_BYTES = 1 << 31
_MAX_INSTRUCTIONS = 1 << 22
_MAX_SIDE = 1 << 31
_MAX_PLACE = 1 << 32
_SHORT_BYTES = 1 << 16
_MAX_LINE = 1 << 12
_RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
_FROM_BUFFER = ("numpy.core.numeric _frombuffer", "numpy._core.numeric _frombuffer")
_SCALAR = ("numpy.core.multiarray scalar", "numpy._core.multiarray scalar")
_ENCODE = "_codecs encode"  # how Python 3 writes bytes in protocol 2: as text, from which they are to be made
_DTYPE = "numpy dtype"
_KINDS = {"u1", "u2", "u4", "i1", "i2", "i4", "i8", "uint8"}
_NUMBERS = {b"K": "<B", b"M": "<H", b"J": "<i", b"G": ">d"}
_STRINGS = {b"U": "<B", b"T": "<i", b"X": "<I", b"C": "<B", b"B": "<I", b"\x8c": "<B", b"\x8d": "<Q", b"\x8e": "<Q",
            b"\x96": "<Q"}  # fmt: skip
_PLAIN: dict[bytes, Callable[[], Any]] = {
    b"}": dict,
    b"]": list,
    b")": tuple,
    b"N": lambda: None,
    b"\x88": lambda: True,
    b"\x89": lambda: False,
}


class PickledArray(NamedTuple):
    """An array of uint8: its shape, and the place of its values in the file."""

    shape: tuple[int, ...]
    start: int


class _Long(NamedTuple):
    """A string that stays in the file."""

    start: int
    length: int


class _Short(str):
    """A string, and where it is in the file."""

    start: int


@dataclass
class _Call:
    """What a file would call, and what it would then set."""

    name: str
    arguments: Any
    state: Any = None


class _Mark:
    pass


def read_pickle(path: Path) -> dict[str, Any]:
    """The dict in a pickled file: of lists, numbers, strings and arrays. Raises SourceError for anything else."""
    try:
        with Window(path) as window:
            if window.size > _MAX_BYTES:
                raise FormatError(f"has {window.size:,} bytes, expected at most {_MAX_BYTES:,}")
            found = _Machine(window).run()
            if not isinstance(found, dict):
                raise FormatError(f"holds a {type(found).__name__}, expected a dict")
            return {str(key): _value(value, window) for key, value in found.items()}
    except (FormatError, IndexError, TypeError, ValueError, AttributeError, struct.error) as error:
        raise SourceError(f"{path}: a pickled file that is not read without running it: {error}") from error


def _value(value: Any, window: Window) -> Any:
    """A value, with the calls that make an array, or a number of NumPy, as that; an array [n] is a list."""
    if isinstance(value, list):
        return [_number(item, window) if isinstance(item, _Call) else item for item in value]
    if not isinstance(value, _Call):
        return value
    if value.name in _RECONSTRUCT:
        _, shape, dtype, is_fortran, data = value.state
    elif value.name in _FROM_BUFFER:
        data, dtype, shape, order = value.arguments
        is_fortran = order != "C"
    else:
        raise FormatError(f"it calls {value.name!r:.80}")
    kind = _kind(dtype)
    sides = type(shape) is tuple and 0 < len(shape) <= 4 and all(type(n) is int and 0 < n < _MAX_SIDE for n in shape)
    start, length = _place(data)
    if not sides or is_fortran or math.prod(shape) * np.dtype(kind).itemsize != length:
        raise FormatError("it has an array that is not in the order of C, or not of the size that it says")
    if len(shape) == 1:
        return np.frombuffer(window.read(start, length), kind).tolist()
    if kind != "<u1":
        raise FormatError(f"it has an array of {kind[1:]}, expected uint8")
    return PickledArray(shape, start)


def _number(call: _Call, window: Window) -> int:
    if call.name not in _SCALAR:
        raise FormatError(f"it calls {call.name!r:.80}")
    dtype, data = call.arguments
    (number,) = np.frombuffer(window.read(*_place(data)), _kind(dtype)).tolist()
    return int(number)


def _kind(dtype: Any) -> str:
    """The name of a dtype of whole numbers."""
    kind = dtype.arguments[0] if isinstance(dtype, _Call) and dtype.name == _DTYPE else None
    plain = kind.lstrip("|<=") if isinstance(kind, str) else ""
    is_little = not dtype.state or dtype.state[1] in ("<", "|", "=") if plain else False
    if plain not in _KINDS or not is_little:
        raise FormatError("it has an array that is not of uint8, nor of labels")
    return "<u1" if plain == "uint8" else f"<{plain}"


def _place(data: Any) -> tuple[int, int]:
    """(start, length) of the bytes of an array."""
    if isinstance(data, _Short):
        return data.start, len(data)
    long: _Long = _checked(data, _Long)
    return long


class _Machine:
    """The stack and the memo of one file."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """What the file holds."""
        for _ in range(_MAX_INSTRUCTIONS):
            code = self._take(1)
            if code == b".":
                return self._stack.pop()
            self._do(code)
        raise FormatError(f"it has more than {_MAX_INSTRUCTIONS:,} instructions")

    def _do(self, code: bytes) -> None:
        stack = self._stack
        if code in _NUMBERS:
            stack.append(self._unpack(_NUMBERS[code]))
        elif code in _STRINGS:
            stack.append(self._string(int(self._unpack(_STRINGS[code]))))
        elif code in _PLAIN:
            stack.append(_PLAIN[code]())
        elif code == b"(":
            stack.append(_Mark)
        elif code == b"\x80":
            self._take(1)
        elif code == b"\x95":
            self._take(8)
        elif code in b"ILFSV":
            stack.append(self._text(code, self._line()))
        elif code in b"aesudlt\x85\x86\x87":
            self._build(code)
        elif code in b"pqrghj\x94":
            self._remember(code)
        elif code in b"c\x93Rb":
            self._call(code)
        else:
            raise FormatError(f"the instruction {code!r} at byte {self._at - 1}")

    def _build(self, code: bytes) -> None:
        """Lists, dicts and tuples."""
        stack = self._stack
        if code in b"\x85\x86\x87":
            count = code[0] - 0x84
            if len(stack) < count:
                raise FormatError("its stack is empty")
            stack[-count:] = [tuple(stack[-count:])]
            return
        items = [stack.pop()] if code == b"a" else stack[-2:] if code == b"s" else self._to_mark()
        if code == b"s":
            del stack[-2:]
        if code in b"ae":
            _checked(stack[-1], list).extend(items)
        elif code in b"su":
            _checked(stack[-1], dict).update(_pairs(items))
        else:
            stack.append(_pairs(items) if code == b"d" else items if code == b"l" else tuple(items))

    def _remember(self, code: bytes) -> None:
        key = (
            len(self._memo)
            if code == b"\x94"
            else int(self._line())
            if code in b"pg"
            else int(self._unpack("<B" if code in b"qh" else "<I"))
        )
        if code in b"ghj":
            if key not in self._memo:
                raise FormatError(f"it has no {key} in its memory")
            self._stack.append(self._memo[key])
        elif 0 <= key < _MAX_PLACE:
            self._memo[key] = self._stack[-1]
        else:
            raise FormatError(f"a place in its memory outside of 0 to {_MAX_PLACE:,}")

    def _call(self, code: bytes) -> None:
        stack = self._stack
        if code == b"c":
            stack.append(_Call(f"{self._line()} {self._line()}", None))
        elif code == b"\x93":
            name, module = _checked(stack.pop(), str), _checked(stack.pop(), str)
            stack.append(_Call(f"{module} {name}", None))
        elif code == b"R":
            arguments, called = stack.pop(), _checked(stack.pop(), _Call)
            is_bytes = called.name == _ENCODE
            stack.append(_encoded(*arguments) if is_bytes else _Call(called.name, arguments))
        else:
            state = stack.pop()
            _checked(stack[-1], _Call).state = state

    def _to_mark(self) -> list[Any]:
        """The items above the last mark, which are taken off the stack."""
        for position in range(len(self._stack) - 1, -1, -1):
            if self._stack[position] is _Mark:
                items = self._stack[position + 1 :]
                del self._stack[position:]
                return items
        raise FormatError("it has no mark")

    def _string(self, length: int) -> _Short | _Long:
        if not 0 <= length <= self._window.size - self._at:
            raise FormatError(f"a string of {length:,} bytes at byte {self._at}, more than the file has")
        if length > _SHORT_BYTES:
            self._at += length
            return _Long(self._at - length, length)
        found = _Short(self._take(length).decode("latin-1"))
        found.start = self._at - length
        return found

    def _text(self, code: bytes, line: str) -> Any:
        """A number or a string on a line of its own."""
        if code == b"V":
            return line
        if code == b"S":
            return line[1:-1] if len(line) > 1 and line[0] == line[-1] and line[0] in "'\"" else line
        if code == b"F":
            return float(line)
        return {"00": False, "01": True}.get(line, int(line.rstrip("L")))

    def _line(self) -> str:
        data = self._window.read_up_to(self._at, _MAX_LINE)
        end = data.find(b"\n")
        if end < 0:
            raise FormatError(f"a line at byte {self._at} that does not end")
        self._at += end + 1
        return data[:end].decode("latin-1")

    def _unpack(self, layout: str) -> Any:
        (value,) = struct.unpack(layout, self._take(struct.calcsize(layout)))
        return value

    def _take(self, count: int) -> bytes:
        self._at += count
        return self._window.read(self._at - count, count)


def _encoded(text: Any, *_: Any) -> str:
    """A name that is written as text in place of bytes."""
    if not isinstance(text, str):
        raise FormatError("its arrays are written as text; load it with Python, and pickle it again with protocol=4")
    return str(text)


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise FormatError(f"a {type(value).__name__} where a {kind.__name__} must be")
    return value


def _pairs(items: list[Any]) -> dict[Any, Any]:
    """Names and values in turn."""
    if len(items) % 2 or not all(isinstance(key, str) for key in items[::2]):
        raise FormatError("a dict with other keys than names")
    return dict(zip(items[::2], items[1::2], strict=True))


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
            return [path.name], tuple(_checked_rows(meta.get(key), path) for key in keys)
        files = [f"{kind}_label_names.txt" for kind in _LABELS] if self.is_hundred else ["batches.meta.txt"]
        return files, tuple(self._names_in(name) for name in files)

    def _names_in(self, name: str) -> tuple[str, ...]:
        path = self.note(self.root / name)
        try:
            text = read_regular(path, _MAX_NAMES_BYTES).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SourceError(f"{path}: cannot be read as the names of classes: {error}") from error
        return _checked_rows([line.strip() for line in text.splitlines() if line.strip()], path)

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


def _checked_rows(names: object, path: Path) -> tuple[str, ...]:
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
