"""A folder of images with tables of metadata, as read by Hugging Face's `load_dataset("imagefolder")`.

    metadata.csv, metadata.jsonl, metadata.parquet     in the folder, or in each of its splits (train, val, …); each row
                                                       names an image in its column file_name, relative to the table

It is read like a manifest (`packer.sources.manifest`): the label is in a column with a usual name, columns of further
files (mask_file_name) are fields, and all others are in the field json. A table in the folder of a split describes the
images of that split; in a table above them, the split is the first folder of file_name. Names that lead out of the
folder are refused. As in Hugging Face, folders are not classes; layout="tree" takes them as classes, and ignores the
metadata. Files that no row names are left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cache.errors import SourceError
from cache.messages import listed
from cache.node import usable_cpus
from packer.sources.base import SourceListing
from packer.sources.layouts import metadata_files
from packer.sources.manifest import ManifestListing, ManifestSource
from packer.sources.tables import NamedColumns, Row, Table, choose_columns, is_missing, open_table
from readers.opening.tree import SPLIT_NAMES, scan

__all__ = ["ImageFolderSource"]

_PATH, _MORE, _SPLIT = "file_name", "_file_name", "split"


class ImageFolderSource(ManifestSource):
    """An imagefolder; see the module."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        label_column: str | None = None,
        split_column: str | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(root, label_column=label_column, split_column=split_column, fields=fields, folder=root)

    kind = "image folder"

    def list_files(self, split: str | None) -> SourceListing:
        tables = tuple(open_table(self.note(path)) for path in metadata_files(self.root))
        if not tables:
            raise SourceError(f"{self.root}: no table of metadata with a column {_PATH!r}")
        for table in tables:
            if _PATH not in table.columns:
                raise SourceError(f"{table.path}: no column {_PATH!r}; it has {listed(list(table.columns), 20)}")
        every = _Tables.of(self.root, tables)
        named = {column.removesuffix(_MORE): column for column in every.columns if column.endswith(_MORE)}
        columns = NamedColumns(_PATH, self.label_column, self.split_column)
        chosen = choose_columns(every, columns, named | self.fields, self.folder)
        listing = ManifestListing(every, chosen, self.folder, split).listing()
        self._leave_out(listing, every, tuple(chosen.files.values()))
        if chosen.label is None:
            listing.warnings.append(
                f"{self.root}: no column of labels in {tables[0].path.name}, so no image has one; name it with  "
                f"label_column='COLUMN', or take folders for classes with  layout='tree'"
            )
        return listing

    def _leave_out(self, listing: SourceListing, every: _Tables, more: tuple[str, ...]) -> None:
        """Record the files that no row names as left out."""
        named = {os.path.relpath(table.path, self.root) for table in every.tables}
        for _, row in every.rows():
            named.update(str(row[column]) for column in (_PATH, *more) if row.get(column))
        reason = f"not in {every.tables[0].path.name}"
        left_out: list[tuple[str, str]] = []
        files = scan(self.root, left_out, usable_cpus())
        listing.left_out += [*left_out, *((path, reason) for path in files.paths() if path not in named)]


@dataclass(frozen=True, slots=True)
class _Tables(Table):
    """Several tables as one, whose paths are relative to the folder `root` above them."""

    root: Path
    tables: tuple[Table, ...]

    @classmethod
    def of(cls, root: Path, tables: tuple[Table, ...]) -> _Tables:
        """The tables with a column of splits, if every row is in the folder of a split."""
        path = tables[0].path if len(tables) == 1 else root
        columns = tuple(dict.fromkeys(column for table in tables for column in table.columns))
        made = cls(path, columns, root, tables)
        if _SPLIT not in columns and all(row[_SPLIT] is not None for _, row in made.rows()):
            return cls(path, (*columns, _SPLIT), root, tables)
        return made

    def rows(self) -> Iterator[tuple[int, Row]]:
        for table in self.tables:
            folder = PurePosixPath(os.path.relpath(table.path.parent, self.root))
            own = folder.parts[0] if folder.parts else None
            for number, row in table.rows():
                paths = {
                    column: str(folder / _inner_path(row[column], table.where(number)))
                    for column in row
                    if column == _PATH or (column.endswith(_MORE) and not is_missing(row[column]))
                }
                if _PATH not in paths:
                    raise SourceError(f"{table.where(number)}: no {_PATH!r}")
                first, _, rest = paths[_PATH].partition("/")
                yield number, {_SPLIT: own or (first if rest and first in SPLIT_NAMES else None), **row, **paths}


def _inner_path(name: object, where: str) -> PurePosixPath:
    """Check a name in a table. Raises SourceError if it leads out of the table's folder."""
    path = PurePosixPath(name) if isinstance(name, str) else None
    if path is None or not path.parts or path.is_absolute() or ".." in path.parts or "\0" in str(name):
        raise SourceError(f"{where}: {name!r:.200} does not name a file below the folder of the table")
    return path
