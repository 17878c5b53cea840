"""Tar archives of image trees, plain or compressed as a whole (gzip, bzip2, xz, zstd), read without extracting them.

Members are found by walking the headers; for a compressed archive, this is one pass over all of it in constant memory.
A hard or symbolic link to a file in the archive is that file under another name. Hidden files, names that lead out of
the archive, devices, and links to anything other than a file in it are left out and reported.

If the first file in a tar is a tar, the archive holds one tar per class, as that of ImageNet does: the members of
n01440764.tar count as files in a folder n01440764, and are read directly from the outer archive.

A tar with the labels of samples in separate members is a WebDataset shard: see `packer.sources.shards`. So is a tar
with all images in one folder, if most of them have a file of the same name next to them, such as a caption: 0.jpg,
0.txt. Without images, audio or .npy files are the samples.

Place: (offset of the data in the unpacked archive, bytes, whether another sample has the same data).
"""

from __future__ import annotations

import os
import posixpath
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from cache.errors import FormatError, SourceError
from packer.formats.base import Arena, Window
from packer.formats.tar import Member, walk
from packer.registry import HEAD_BYTES
from packer.sources.base import FileSource, SourceListing, SourceReader
from packer.sources.folder import ArchiveMember, inner_name, list_members
from packer.sources.layouts import main_of, shows_main
from packer.sources.shards import ShardSource
from packer.sources.streams import PlainFile, StreamKeeper, StreamWindow, UnpackedStream, compression_of
from readers.table import Buffer

__all__ = ["TarSource"]

_REGULAR = "07"  # 7: a contiguous file, treated as a regular one
_HARD_LINK, _SYMBOLIC_LINK, _FOLDER = "1", "2", "5"
_SPECIAL = {"3": "a device", "4": "a device", "6": "a named pipe"}
_MAX_LINKS = 40
_WEBDATASET_EXTENSIONS = ("cls", "__name__")  # the label, and the key if it cannot be a file name


class TarSource(FileSource):
    """The images in the tar archive at `root`, plain or compressed."""

    kind = "archive"

    def __init__(self, root: str | os.PathLike[str], layout: str = "auto", **keys: Any) -> None:
        """keys: options of `ShardSource`, for a WebDataset shard."""
        super().__init__(root)
        self.layout, self._keys = layout, keys
        self._shard: ShardSource | None = None
        self._keeper = StreamKeeper(self.root)

    def list_files(self, split: str | None) -> SourceListing:
        left_out: list[tuple[str, str]] = []
        warnings: list[str] = []
        members = _members(self.root, left_out, warnings, may_pair=self.layout != "tree")
        if members is None:
            self._shard = ShardSource(self.root, **self._keys)
            listing = self._shard.list_files(split)
            listing.warnings += warnings
            return listing
        if self._keys:
            raise SourceError(
                f"{self.root}: {', '.join(sorted(self._keys))} can be given for shards only, and this archive holds "
                f"files: their labels are their folders"
            )
        listing = list_members(members, split, self.root, left_out, self.layout)
        listing.warnings += warnings
        listing.shuffles = not compression_of(self.root)
        return listing

    def open_files(self) -> AbstractContextManager[SourceReader]:
        return self._shard.open() if self._shard is not None else self._open_members()

    @contextmanager
    def _open_members(self) -> Iterator[TarReader]:
        with self._keeper.open() as file:
            yield TarReader(file)


def _members(
    root: Path, left_out: list[tuple[str, str]], warnings: list[str], may_pair: bool
) -> list[ArchiveMember] | None:
    """The files in an archive, including the targets of links; None if it is a WebDataset shard.

    may_pair: whether a tar without labels can be such a shard. Raises SourceError for a damaged archive.
    """
    compression = compression_of(root)
    strays: list[int] = []
    try:
        if not compression:
            with Window(root) as window:
                members = _Members(_walk_all(window, strays))
        else:
            with StreamWindow(stream := UnpackedStream(root, compression)) as window:
                members = _Members(_walk_all(window, strays))
                stream.read_to_end()
    except FormatError as error:
        raise SourceError(str(error)) from error
    if strays:
        warnings.append(f"{root}: the bytes after the end of the archive, from byte {strays[0]:,} on, are ignored")
    names = members.names()
    return None if _is_webdataset(names) or (may_pair and _has_pairs(names)) else members.files(left_out)


def _walk_all(window: Window, strays: list[int]) -> Iterator[Member]:
    """Every member of an archive; in an archive of archives, the members of the inner ones instead of these."""
    is_nested: bool | None = None
    for member in walk(window, strays):
        is_tar = member.type in _REGULAR and member.name.endswith(".tar")
        if is_nested is None and member.type in _REGULAR:
            is_nested = is_tar
        if not (is_nested and is_tar):
            yield member
            continue
        for inner in walk(_InnerWindow(window, member)):
            folder = member.name[: -len(".tar")]
            link = f"{folder}/{inner.linkname}" if inner.type == _HARD_LINK else inner.linkname
            yield inner._replace(name=f"{folder}/{inner.name}", offset=member.offset + inner.offset, linkname=link)


class _InnerWindow(Window):
    """A window on a tar inside of another."""

    def __init__(self, window: Window, member: Member) -> None:
        self.path, self.size = window.path / member.name, member.size
        self._outer, self._first = window, member.offset

    def read(self, offset: int, length: int) -> bytes:
        if offset + length > self.size:
            raise FormatError(f"{self.path}: ends at byte {self.size}, {length} were expected at {offset}: truncated?")
        return self._outer.read(self._first + offset, length)


class _Members:
    """The members found by the walk, sorted into files, links and others."""

    def __init__(self, members: Iterable[Member]) -> None:
        self._data: list[tuple[str, tuple[int, int]]] = []
        self._links: list[tuple[str, Member]] = []
        self._others: list[tuple[str, str]] = []
        for member in members:
            self._add(member)

    def _add(self, member: Member) -> None:
        kind, name = member.type, member.name
        if kind in _REGULAR and not name.endswith("/"):  # archives older than POSIX mark folders by a trailing "/"
            self._data.append((name, (member.offset, member.size)))
        elif kind in (_HARD_LINK, _SYMBOLIC_LINK):
            self._links.append((name, member))
        elif kind != _FOLDER and kind not in _REGULAR:
            self._others.append((name, _SPECIAL.get(kind, f"not a file (tar type {kind!r})")))

    def names(self) -> list[str]:
        return [name for name, _ in self._data]

    def files(self, left_out: list[tuple[str, str]]) -> list[ArchiveMember]:
        """The files that may be packed; all other members are appended to `left_out`."""
        left_out += self._others
        data = {posixpath.normpath(name): place for name, place in self._data}
        pairs = self._data + list(_followed(self._links, data, left_out))
        shared = Counter(offset for _, (offset, _) in pairs)
        members = []
        for name, (offset, size) in pairs:
            plain, reason = inner_name(name)
            if reason:
                left_out.append((name, reason))
            else:
                members.append(ArchiveMember(plain, size, (offset, size, shared[offset] > 1 and size > 0)))
        return members


def _followed(
    links: Sequence[tuple[str, Member]], data: dict[str, tuple[int, int]], left_out: list[tuple[str, str]]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """(name, place of the data) of every link to a file; other links are appended to `left_out`."""
    targets = {posixpath.normpath(name): _target(member) for name, member in links}
    folders = sorted({posixpath.dirname(name) for name in data}) if links else []
    for name, _ in links:
        target = targets[posixpath.normpath(name)]
        for _ in range(_MAX_LINKS):
            if target not in targets:
                break
            target = targets[target]
        if target in data:
            yield name, data[target]
        elif target in targets:
            left_out.append((name, "a link that leads back to itself"))
        elif target.startswith(("/", "..")):
            left_out.append((name, f"a link out of the archive, to {target!r}"))
        elif _is_folder(target, folders):
            left_out.append((name, f"a link to the folder {target!r}"))
        else:
            left_out.append((name, f"a link to {target!r}, which is not in the archive"))


def _is_folder(target: str, folders: Sequence[str]) -> bool:
    """Whether any of the sorted folders is the target or below it."""
    following = (folders[at] for name in (target, f"{target}/") if (at := bisect_left(folders, name)) < len(folders))
    return any(folder == target or folder.startswith(f"{target}/") for folder in following)


def _target(member: Member) -> str:
    """The name of a link's target. Hard links are relative to the root, symbolic ones to the link's folder."""
    base = posixpath.dirname(member.name) if member.type == _SYMBOLIC_LINK else ""
    return posixpath.normpath(posixpath.join(base, member.linkname))


def _is_webdataset(names: Sequence[str]) -> bool:
    """Whether these are the members of a WebDataset shard, with labels in separate members."""
    samples = {_split_name(name)[0] for name in names if _split_name(name)[1] in _WEBDATASET_EXTENSIONS}
    return any(_split_name(name)[0] in samples for name in filter(shows_main(main_of(names)), names))


def _has_pairs(names: Sequence[str]) -> bool:
    """Whether all images are in one folder, and most have another file of the same name next to them."""
    has_main = shows_main(main_of(names))
    images = {_split_name(name)[0] for name in names if has_main(name)}
    others = {_split_name(name)[0] for name in names if not has_main(name)}
    one_folder = len({posixpath.dirname(key) for key in images}) == 1
    return one_folder and 2 * len(images & others) > len(images)


def _split_name(name: str) -> tuple[str, str]:
    """(key, extension) as in WebDataset: split at the first dot of the file name."""
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return folder + slash + stem, extension.lower()


class TarReader:
    """Reads members of an archive."""

    def __init__(self, file: PlainFile | UnpackedStream) -> None:
        self._file = file
        self._last: tuple[int, bytes] = (-1, b"")
        self._head: tuple[int, bytes] = (-1, b"")

    def read(self, place: tuple[int, int, bool], arena: Arena) -> Sequence[Buffer]:
        offset, size, shared = place
        if self._last[0] == offset:
            return (self._last[1],)
        target = arena.rest()[:size]
        seen = len(self._head[1]) if self._head[0] == offset else 0  # so that a stream need not go back to the head
        target[:seen] = self._head[1][:seen]
        self._file.read_into(offset + seen, target[seen:])
        payload = arena.take(size)
        if shared:  # the next sample may have the same data, which a stream has already passed
            self._last = (offset, bytes(payload))
        return (payload,)

    def head(self, place: tuple[int, int, bool]) -> bytes:
        offset, size, _ = place
        if self._last[0] == offset:
            return self._last[1][:HEAD_BYTES]
        head = bytearray(min(size, HEAD_BYTES))
        self._file.read_into(offset, memoryview(head))
        self._head = (offset, bytes(head))
        return self._head[1]
