"""Trees of image files, on disk or in an archive. Workers decide by content which files are images."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError, SourceError
from cache.node import usable_cpus
from cache.system import READ, pread
from packer.formats.base import Arena
from packer.registry import HEAD_BYTES
from packer.sources.base import FieldNames, NumberPlaces, SourceListing, SplitListing, check_names
from packer.sources.contents import advice, is_stray, reason_of
from packer.sources.layouts import MainField, check_layout, is_no_class, main_named, main_of
from readers.coefficients.compiled import codec_if_built
from readers.opening.tree import SPLIT_NAMES, Keys, TreeFiles, TreeSplit, arrange, has_image_suffix, scan, unique_keys

__all__ = [
    "ArchiveMember",
    "FolderReader",
    "FolderSource",
    "TreeListing",
    "inner_name",
    "list_members",
    "list_tree",
    "read_file",
    "read_named",
]

_LARGE_BYTES = 64 << 20


class FolderSource:
    """The files below `root`."""

    def __init__(
        self, root: str | os.PathLike[str], layout: str = "auto", fields: Mapping[str, str] | None = None
    ) -> None:
        """layout: "tree" takes all folders as classes; see `packer.sources.layouts`. fields: {"name:kind": ".suffix"}
        if files with this suffix are the samples; by default see `main_of`."""
        self.root, self.layout, self.fields = Path(root), layout, dict(fields or {})
        self._main = main_named(self.fields, self.root)

    @property
    def title(self) -> str:
        return f"folder {self.root}"

    @property
    def identity(self) -> str:
        kind = type(self)
        fields = f", fields {self.fields}" if self.fields else ""
        return f"{kind.__module__}.{kind.__qualname__} {os.path.abspath(self.root)}, layout {self.layout}{fields}"

    def list(self, split: str | None) -> SourceListing:
        left_out: list[tuple[str, str]] = []
        files = scan(self.root, left_out, usable_cpus())
        watched = files.folders, files.folder_times
        main = self._main or main_of(files.paths())
        if main.name == "image":
            files = _without_large_strays(self.root, files, left_out)
        listing = list_tree(files, split, str(self.root), left_out, self.layout, main)
        listing.watched = watched
        return listing

    def open(self) -> FolderReader:
        return FolderReader(os.fspath(self.root))

    def paths(self, listing: SourceListing) -> Iterator[str]:
        prefix = os.fspath(self.root).rstrip("/") + "/"
        return (prefix + place[0] for part in listing.splits.values() for place in part.places)


def _without_large_strays(root: Path, files: TreeFiles, left_out: list[tuple[str, str]]) -> TreeFiles:
    """Leave out very large files that are not images, so that they are neither planned nor given room."""
    strays = []
    for i in np.flatnonzero(files.column(0) > _LARGE_BYTES).tolist():
        path = files[i].path
        with suppress(BadSampleError):  # the worker reports the problem
            head = read_head(os.path.join(root, path), HEAD_BYTES)
            if is_stray(head, path):
                strays.append(i)
                left_out.append((path, reason_of(head, path)))
    return files.take(np.delete(np.arange(len(files)), strays)) if strays else files


def list_tree(
    files: TreeFiles,
    split: str | None,
    where: str,
    left_out: list[tuple[str, str]],
    layout: str = "auto",
    main: MainField | None = None,
) -> SourceListing:
    """The listing of a tree of files; the place of a sample is (path relative to the root, bytes).

    main: the main field of the samples; by default determined by the names of the files.
    """
    main = main or main_of(files.paths())
    if main.suffixes:
        chosen = np.fromiter((path.lower().endswith(main.suffixes) for path in files.paths()), np.bool_, len(files))
        others = files.take(np.flatnonzero(~chosen)).paths()
        left_out += [(path, f"not {' or '.join(main.suffixes)}, like the samples") for path in others]
        files = files.take(np.flatnonzero(chosen))
    splits, classes = arrange(files, split, where, left_out)
    warnings: list[str] = []
    if layout == "auto":
        whole = split is None or not any(part.root for part in splits.values())
        is_sample = has_image_suffix if main.name == "image" else bool  # all remaining files are samples
        warnings = check_layout(files, splits, classes, where, whole, is_sample)
    strays = main.name == "image"
    listing = SourceListing({}, {main.name: main.kind}, classes, left_out, warnings, skip_strays=strays)
    for name, part in splits.items():
        if len(part.files):
            check_names(part.names, where)
            listing.splits[name] = TreeListing(part, unique_keys(part.names).whole)
    if not listing.splits:
        seen = advice(where, left_out, Counter(reason for _, reason in left_out))
        raise SourceError(
            f"{where}: no files found" + (f" but\n  {seen}" if seen else "; name the folder or archive with the images")
        )
    return listing


class TreeListing(SplitListing):
    """A split of a tree: keys, names and places are views of its files. whole: see `readers.opening.tree.Keys`.

    stamped: whether files are read only if they have the listed modification time.
    """

    def __init__(self, part: TreeSplit, whole: npt.NDArray[np.bool_], stamped: bool = False) -> None:
        files, names = part.files, part.names
        self.part, self.whole = part, whole
        sizes = files.column(0)
        super().__init__(
            root=part.root,
            keys=Keys(names, whole),
            labels=part.labels,
            names=FieldNames(names),
            bytes=np.maximum(sizes, 0) if (sizes < 0).any() else sizes,
            places=StampedPlaces(files) if stamped else TreePlaces(files),
            stamps=files.column(1),
        )

    def take(self, indices: npt.NDArray[np.int64]) -> TreeListing:
        part = TreeSplit(self.root, self.part.files.take(indices), self.labels[indices].astype(np.int32))
        return TreeListing(part, self.whole[indices])

    def __reduce__(self) -> tuple[Any, ...]:
        return TreeListing, (TreeSplit(self.root, self.part.files, self.labels.astype(np.int32)), self.whole)


class TreePlaces(Sequence["tuple[str, int]"]):
    """(path, bytes) of files; -1 bytes: the file could not be examined."""

    def __init__(self, files: TreeFiles) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return self._files[index][:2]
        first, stop, step = index.indices(len(self))
        pairs = zip(self._files.paths(first, stop), self._files.column(0)[first:stop].tolist(), strict=True)
        return list(pairs)[::step]

    def take(self, indices: npt.NDArray[np.int64]) -> TreePlaces:
        return TreePlaces(self._files.take(indices))


class StampedPlaces(TreePlaces):
    """(path, bytes, modification time in ns) of files that may have changed since they were listed."""

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return self._files[index][:3]
        first, stop, step = index.indices(len(self))
        facts = (self._files.column(number)[first:stop].tolist() for number in (0, 1))
        return list(zip(self._files.paths(first, stop), *facts, strict=True))[::step]


class FolderReader:
    """Reads files of a tree."""

    def __init__(self, root: str) -> None:
        self._prefix = root.rstrip("/") + "/"

    def read(self, place: tuple[str, int] | tuple[str, int, int], arena: Arena) -> Sequence[memoryview]:
        return (read_file(self._prefix + place[0], place[1], arena, *place[2:]),)

    def head(self, place: tuple[str, int] | tuple[str, int, int]) -> bytes:
        return read_head(self._prefix + place[0], HEAD_BYTES)

    def __enter__(self) -> FolderReader:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def read_named(folder: str | os.PathLike[str], path: str, expected_bytes: int, arena: Arena) -> memoryview:
    """`read_file` for a file in a folder; errors name the file."""
    try:
        return read_file(os.path.join(folder, path), expected_bytes, arena)
    except BadSampleError as error:
        raise BadSampleError(f"{path!r} {error}") from error


def read_head(path: str, count: int) -> bytes:
    """The first bytes of a file, up to `count`. Raises BadSampleError if it cannot be read."""
    try:
        descriptor = os.open(path, READ)
        try:
            return pread(descriptor, count, 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise BadSampleError(f"cannot be read: {error.strerror}") from error


def read_file(path: str, expected_bytes: int, arena: Arena, stamp: int | None = None) -> memoryview:
    """The content of a file that was listed with `expected_bytes` (-1: could not be examined).

    The arena must have room for expected_bytes + 1. stamp: the listed modification time in ns, if the listing may be
    old. Raises BadSampleError if the file cannot be read, or has another size now, since another process writes to it;
    SourceError if it has another modification time.
    """
    codec = codec_if_built()
    if codec is not None and codec.read_file(path, arena.rest(), expected_bytes, stamp):
        return arena.take(expected_bytes)
    try:
        descriptor = os.open(path, READ)
    except OSError as error:
        raise BadSampleError(f"cannot be opened: {error.strerror}") from error
    try:
        if stamp is not None and os.fstat(descriptor).st_mtime_ns != stamp:
            raise SourceError(
                f"{path}: has changed since it was listed, and shards may contain its old bytes; pass overwrite=True "
                f"to start over (tasks of an array: remove the output)"
            )
        window = arena.rest()
        if expected_bytes < 0 or len(window) <= expected_bytes:
            raise BadSampleError("appeared while the source was being listed; run the same command again")
        count = os.readv(descriptor, (window,))
        while 0 < count < expected_bytes:
            more = os.readv(descriptor, (window[count:],))
            if not more:
                break
            count += more
    except OSError as error:
        raise BadSampleError(f"cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    if count != expected_bytes:
        raise BadSampleError(f"has changed: {expected_bytes} bytes when it was listed, {count} or more now")
    return arena.take(count)


# --- members of an archive, as the files of a tree ---
class ArchiveMember(NamedTuple):
    """A file in an archive: its name, its unpacked size, and the argument for its reader.

    The first item of `place` is its position, by which members are ordered.
    """

    name: str
    bytes: int
    place: tuple[Any, ...]


def inner_name(name: str) -> tuple[str, str]:
    """(plain name, reason to leave it out or ""): "./a//b.jpg" becomes "a/b.jpg"."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    reason = ""
    if name.startswith("/"):
        reason = "an absolute name"
    elif ".." in parts:
        reason = "a name that leads out of the archive"
    elif not parts:
        reason = "no name"
    elif "__MACOSX" in parts:
        reason = "metadata of macOS"
    elif any(part[0] == "." for part in parts):
        reason = "hidden"
    return "/".join(parts), reason


def list_members(
    members: list[ArchiveMember],
    split: str | None,
    root: Path,
    left_out: list[tuple[str, str]],
    layout: str = "auto",
) -> SourceListing:
    """The listing of the tree formed by `members` (plain names), in the order of their positions.

    Raises SourceError if there are no members, or two with the same name, and the errors of `list_tree`.
    """
    if not members:
        detail = f"; {len(left_out)} left out, such as {left_out[0][0]!r}: {left_out[0][1]}" if left_out else ""
        raise SourceError(f"{root}: no files found{detail}")
    names = set()
    for member in members:
        if member.name in names:
            raise SourceError(
                f"{root}: two members are called {member.name!r}; unpack the archive and pack it again, which keeps "
                f"the later one"
            )
        names.add(member.name)
    members = _without_common_folder(members, left_out)
    members = sorted(members, key=lambda member: int(member.place[0]))
    files = TreeFiles.of([member.name for member in members], [member.bytes for member in members])
    listing = list_tree(files, split, str(root), left_out, layout)
    for name, part in listing.splits.items():
        listing.splits[name] = _in_order(cast(TreeListing, part), members)
    return listing


def _in_order(part: TreeListing, members: Sequence[ArchiveMember]) -> SplitListing:
    """The split with its samples, and their places, in the order of the archive."""
    rows = np.asarray(part.part.files.rows, np.int64)
    order = np.argsort(rows)
    ordered = part.take(order)
    places = NumberPlaces(np.array([member.place for member in members], np.int64)[rows[order]])
    return SplitListing(
        ordered.root, ordered.keys, ordered.labels, ordered.names, ordered.bytes, places, ordered.stamps
    )


def _without_common_folder(members: list[ArchiveMember], left_out: list[tuple[str, str]]) -> list[ArchiveMember]:
    """Strip the folder that contains all images, unless it is a split, or their common class; files outside it are left
    out.

    Images are recognised by their suffix; if no name has one, every member counts.
    """
    images = [member for member in members if has_image_suffix(member.name)] or members
    tops = {member.name.partition("/")[0] if "/" in member.name else "" for member in images}
    top = tops.pop()
    is_class = all(member.name.count("/") == 1 for member in images) and not is_no_class(top)
    if tops or not top or top in SPLIT_NAMES or is_class:
        return members
    inside = []
    for member in members:
        if member.name.startswith(top + "/"):
            inside.append(member._replace(name=member.name[len(top) + 1 :]))
        else:
            left_out.append((member.name, f"outside the folder {top!r} of all images"))
    return inside
