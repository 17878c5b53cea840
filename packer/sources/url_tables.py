"""Tables of addresses: which column is what, and whether a table is one."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cache.errors import PackerError, SourceError
from cache.files import open_regular
from packer.sources.manifest_columns import NamedColumns
from packer.sources.tables import TABLE_SUFFIXES, Row, Table, open_table

__all__ = ["URL_COLUMNS", "UrlTable", "is_url_list", "open_url_table"]

URL_COLUMNS = ("url", "image_url", "img_url", "uri", "link", "urls")
PATHS = ("path", "file", "filename", "file_name", "image", "image_path", "filepath", "file_path", "img")
_LABELS = ("label", "class", "target", "category", "class_id", "label_id", "class_name", "label_name")
_CAPTIONS = ("caption", "text", "alt_text")
_KEYS, _SPLITS = ("key", "__key__"), ("split", "subset")
_MAX_LINE = 64 << 10
_is_url = re.compile(r"\s*https?://", re.IGNORECASE).match


@dataclass(frozen=True)
class UrlTable:
    """The columns by part, None for one that there is not."""

    table: Table
    url: str
    label: str | None
    split: str | None
    key: str | None
    caption: str | None
    metadata: tuple[str, ...]

    def rows(self) -> Iterator[tuple[int, Row]]:
        """(number from 1, row) of each."""
        return self.table.rows()


@dataclass(frozen=True, slots=True)
class _TextTable(Table):
    """A text file with an address a line; blank lines, and those that begin with #, are passed over."""

    def rows(self) -> Iterator[tuple[int, Row]]:
        try:
            with open_regular(self.path) as file:
                number = 0
                while line := file.readline(_MAX_LINE):
                    number += 1
                    text = line.decode().strip()
                    if len(line) == _MAX_LINE:
                        raise SourceError(f"{self.where(number)}: longer than {_MAX_LINE:,} bytes")
                    if text and not text.startswith("#"):
                        yield number, {"url": text}
        except OSError as error:
            raise SourceError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise SourceError(f"{self.path}: not UTF-8 text; not a list of addresses") from error


def _open(path: Path) -> Table:
    return open_table(path) if path.suffix.lower() in TABLE_SUFFIXES else _TextTable(path, ("url",))


def is_url_list(path: Path) -> bool:
    """Whether a file has addresses where the paths of images could be."""
    try:
        is_table = path.suffix.lower() in TABLE_SUFFIXES
        table = Table(path, ()) if is_table else _TextTable(path, ())
        row = next((row for _, row in table.rows()), {})
        table = Table(path, tuple(row))
        column = _first(table, PATHS) or _first(table, URL_COLUMNS)  # a manifest may name where its files are from
    except PackerError:  # opening it as a manifest says what is wrong
        return False
    return column is not None and isinstance(row[column], str) and _is_url(row[column]) is not None


def open_url_table(path: Path, named: NamedColumns) -> UrlTable:
    """The table, with its columns; those of addresses, labels and splits may be named. Raises SourceError."""
    table = _open(path)
    url, label, split = named
    for name, option in zip(named, ("path_column", "label_column", "split_column"), strict=True):
        if name is not None and name not in table.columns:
            its = ", ".join(map(repr, table.columns))
            raise SourceError(f"{path}: no column {name!r} ({option}={name!r}); it has {its}")
    url = url or _first(table, URL_COLUMNS) or _first(table, PATHS)
    if url is None:
        raise SourceError(
            f"{path}: no column of addresses ({', '.join(URL_COLUMNS)}); name it with  path_column='COLUMN'"
        )
    taken: set[str | None] = {url, split}
    taken.add(label := label or _first(table, _LABELS, taken))
    split = split or _first(table, _SPLITS, taken)
    key, caption = (_first(table, names, taken) for names in (_KEYS, _CAPTIONS))
    rest = tuple(name for name in table.columns if name not in {*taken, split, key, caption})
    return UrlTable(table, url, label, split, key, caption, rest)


def _first(table: Table, candidates: Iterable[str], taken: Collection[str | None] = ()) -> str | None:
    folded = {column.casefold(): column for column in reversed(table.columns) if column not in taken}
    return next((folded[name] for name in candidates if name in folded), None)
