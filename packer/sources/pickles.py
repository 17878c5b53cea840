"""Lists, names and arrays of uint8 in a pickled file, read without running anything of it.

Unpickling calls what a file names. Here a call is kept as what it says, a name and arguments, and nothing is looked up,
imported or called. Only the instructions are known that lists, dicts, tuples, numbers, strings and arrays of NumPy
take; any other is an error. Long strings stay in the file: an array is where its bytes are.

(Lib/pickletools.py of CPython documents the instructions.)
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cache.errors import FormatError, SourceError
from packer.formats.files import Window

__all__ = ["PickledArray", "read_pickle"]

_MAX_BYTES = 1 << 31
_MAX_INSTRUCTIONS = 1 << 24
_SHORT_BYTES = 1 << 16
_MAX_LINE = 1 << 12
_RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
_DTYPE = "numpy dtype"
_UINT8 = ("u1", "|u1", "uint8")
_NUMBERS = {b"K": "<B", b"M": "<H", b"J": "<i", b"G": ">d"}
_STRINGS = {b"U": "<B", b"T": "<i", b"X": "<I", b"C": "<B", b"B": "<I", b"\x8c": "<B", b"\x8d": "<Q", b"\x8e": "<Q"}
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
        return {str(key): _value(value) for key, value in found.items()}
    except (FormatError, IndexError, TypeError, ValueError, AttributeError, struct.error) as error:
        raise SourceError(f"{path}: a pickled file that is not read without running it: {error}") from error


def _value(value: Any) -> Any:
    """A value, with the call that makes an array as that."""
    if not isinstance(value, _Call):
        return value
    if value.name not in _RECONSTRUCT:
        raise FormatError(f"it calls {value.name!r:.80}")
    _, shape, dtype, is_fortran, data = value.state
    kind = dtype.arguments[0] if isinstance(dtype, _Call) and dtype.name == _DTYPE else None
    sides = all(type(side) is int and side > 0 for side in shape)
    if kind not in _UINT8 or is_fortran or not sides or not isinstance(data, _Long) or math.prod(shape) != data.length:
        raise FormatError("it has an array that is not of uint8, or not of the size that it says")
    return PickledArray(shape, data.start)


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
        else:
            self._memo[key] = self._stack[-1]

    def _call(self, code: bytes) -> None:
        stack = self._stack
        if code == b"c":
            stack.append(_Call(f"{self._line()} {self._line()}", None))
        elif code == b"\x93":
            name, module = stack.pop(), stack.pop()
            stack.append(_Call(f"{module} {name}", None))
        elif code == b"R":
            arguments, called = stack.pop(), _checked(stack.pop(), _Call)
            stack.append(_Call(called.name, arguments))
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

    def _string(self, length: int) -> str | _Long:
        if not 0 <= length <= self._window.size - self._at:
            raise FormatError(f"a string of {length:,} bytes at byte {self._at}, more than the file has")
        if length > _SHORT_BYTES:
            self._at += length
            return _Long(self._at - length, length)
        return self._take(length).decode("latin-1")

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


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise FormatError(f"a {type(value).__name__} where a {kind.__name__} must be")
    return value


def _pairs(items: list[Any]) -> dict[Any, Any]:
    """Names and values in turn."""
    if len(items) % 2 or not all(isinstance(key, str | int) for key in items[::2]):
        raise FormatError("a dict with other keys than names")
    return dict(zip(items[::2], items[1::2], strict=True))
