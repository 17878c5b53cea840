"""The parts of a large JSON file, one at a time: the elements of the arrays at its top, and its other members.

    {"images": [{…}, {…}], "categories": [{…}], "info": {…}}   gives images {…}, images {…}, categories {…}, info {…}

So a file of half a gigabyte takes the memory of its largest part. A part says where its bytes are in the file, by which
it is read again later. Members may come in any order, and one that occurs twice is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from cache.errors import SourceError
from cache.files import PathError, open_regular

__all__ = ["JsonPart", "json_parts", "strict_json"]

_STEP_BYTES = 1 << 20
_MAX_PART_BYTES = 64 << 20
_blanks = re.compile(r"[ \t\r\n]*").match


class JsonPart(NamedTuple):
    """The value of a member, or of an element of a member that is an array; its bytes are [offset, offset + length).

    is_element: which of these it is.
    """

    member: str
    value: Any
    offset: int
    length: int
    is_element: bool


def strict_json(text: str | bytes) -> Any:
    """A value, in which there is no NaN or Infinity: they are not JSON. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def json_parts(path: Path) -> Iterator[JsonPart]:
    """The parts of the object in a file. Raises SourceError where it is not one, or where a part is over 64 MiB."""
    try:
        with open_regular(path) as file:
            yield from _Text(path, file).parts()
    except PathError as error:
        raise SourceError(f"{path}: {error}") from error
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error


class _Text:
    """A window of the file: one letter a byte, so that positions are offsets."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._text, self._start, self._at = "", 0, 0  # letters, offset of the first, position of the next
        self._is_whole = False
        self._decoder = json.JSONDecoder()

    def parts(self) -> Iterator[JsonPart]:
        self._expect("{")
        seen: set[str] = set()
        is_last = self._next_is("}")
        while not is_last:
            name, offset, _ = self._value()
            if not isinstance(name, str) or name in seen:
                raise self._bad(offset, f"{name!r:.40} where a new name of a member should be")
            seen.add(name)
            self._expect(":")
            if self._next_is("["):
                yield from self._elements(name)
            else:
                yield JsonPart(name, *self._value(), False)
            is_last = self._ends("}")
        if self._next():
            raise self._bad(self._start + self._at, "more than one value")

    def _elements(self, member: str) -> Iterator[JsonPart]:
        is_last = self._next_is("]")
        while not is_last:
            yield JsonPart(member, *self._value(), True)
            is_last = self._ends("]")

    def _value(self) -> tuple[Any, int, int]:
        """(value, offset, bytes) of the next value."""
        self._next()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                if end < len(self._text) or self._is_whole:
                    break
                problem: Exception | None = None  # a number may continue behind the window
            except (ValueError, RecursionError) as error:
                problem = error
            if self._is_whole or len(self._text) - self._at > _MAX_PART_BYTES or isinstance(problem, RecursionError):
                what = "is not JSON" if self._is_whole else f"is not JSON, or over {_MAX_PART_BYTES:,} bytes"
                raise self._bad(self._start + self._at, f"a value that {what} ({problem})")
            self._read()
        text, offset = self._text[self._at : end], self._start + self._at
        self._at = end
        if not text.isascii():
            try:
                value = json.loads(text.encode("latin-1").decode())
            except ValueError as error:
                raise self._bad(offset, f"text that is not UTF-8 ({error})") from error
        return value, offset, len(text)

    def _next(self) -> str:
        """The next letter that is not blank, "" at the end; it stays."""
        while True:
            self._at = _blanks(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or self._is_whole:
                return self._text[self._at : self._at + 1]
            self._read()

    def _next_is(self, letter: str) -> bool:
        """Whether the next letter is this one, which is then passed."""
        found = self._next() == letter
        self._at += found
        return found

    def _expect(self, letter: str) -> None:
        if not self._next_is(letter):
            raise self._bad(self._start + self._at, f"{self._next()!r}, expected {letter!r}")

    def _ends(self, letter: str) -> bool:
        """Whether the object or array ends here; else a comma is passed."""
        if self._next_is(letter):
            return True
        self._expect(",")
        return False

    def _read(self) -> None:
        """Drop what is done, and double what is ahead."""
        ahead = self._text[self._at :]
        more = self._file.read(max(_STEP_BYTES, len(ahead)))
        self._is_whole = not more
        self._start, self._at, self._text = self._start + self._at, 0, ahead + more.decode("latin-1")

    def _bad(self, offset: int, found: str) -> SourceError:
        return SourceError(f"{self._path}: byte {offset}: {found}; not a JSON object, or cut short")
