"""Lists, names and arrays of uint8 in a pickled file, read without running anything of it.

Unpickling calls what a file names. Here a call is kept as what it says, a name and arguments, and nothing is looked up,
imported or called. Only the instructions are known that lists, dicts, tuples, numbers, strings and arrays of NumPy
take; any other is an error. Long strings stay in the file: an array is where its bytes are. Only strings are names in a
dict, since numbers can be chosen so that each look-up takes as long as there are names.

(Lib/pickletools.py of CPython documents the instructions.)
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cache.errors import FormatError, SourceError
from packer.formats.files import Window

__all__ = ["PickledArray", "read_pickle"]

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
