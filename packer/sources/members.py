"""The members of an archive as the files of a tree: what names they may have, and the order they are packed in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from cache.errors import SourceError
from packer.sources.base import Objects, SourceListing, SplitListing
from packer.sources.folder import TreeListing, list_tree
from readers.tree import SPLIT_NAMES, TreeFiles, has_image_suffix

__all__ = ["ArchiveMember", "inner_name", "list_members"]


class ArchiveMember(NamedTuple):
    """A file in an archive: its name there, its size unpacked, and what its reader needs to find it.

    The first item of `place` is its position, by which members are put in order.
    """

    name: str
    bytes: int
    place: tuple[Any, ...]


def inner_name(name: str) -> tuple[str, str]:
    """(plain name, reason to leave it out or ""): "./a//b.jpg" is "a/b.jpg"."""
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
    """The listing of the tree that `members` (plain names) form, in the order of their positions.

    Raises SourceError for no members, for two of the same name, and for whatever `list_tree` refuses.
    """
    if not members:
        such = f"; {len(left_out)} left out, such as {left_out[0][0]!r}: {left_out[0][1]}" if left_out else ""
        raise SourceError(f"{root}: no files found{such}")
    names = set()
    for member in members:
        if member.name in names:
            raise SourceError(
                f"{root}: two members are called {member.name!r}; unpack the archive and pack it again, which keeps "
                f"the later one"
            )
        names.add(member.name)
    members = sorted(_without_common_folder(members, left_out), key=_position)
    files = TreeFiles.of([member.name for member in members], [member.bytes for member in members])
    listing = list_tree(files, split, str(root), left_out, layout)
    for name, part in listing.splits.items():
        listing.splits[name] = _in_order(cast(TreeListing, part), members)
    return listing


def _position(member: ArchiveMember) -> int:
    return int(member.place[0])


def _in_order(part: TreeListing, members: Sequence[ArchiveMember]) -> SplitListing:
    """The split with its samples in the order of the archive, and their places in it."""
    rows = np.asarray(part.part.files.rows, np.int64)
    order = np.argsort(rows)
    found = part.take(order)
    places = Objects.of(members[row].place for row in rows[order].tolist())
    stamps = np.zeros(len(found), np.int64)
    return SplitListing(found.root, found.keys, found.labels, found.names, found.bytes, places, stamps)


def _without_common_folder(members: list[ArchiveMember], left_out: list[tuple[str, str]]) -> list[ArchiveMember]:
    """Take away the folder that holds all images, unless it is a split; files beside that folder are left out.

    Images are told by their suffix here; where no name has one, every member counts.
    """
    images = [member for member in members if has_image_suffix(member.name)] or members
    tops = {member.name.partition("/")[0] if "/" in member.name else "" for member in images}
    top = tops.pop()
    if tops or not top or top in SPLIT_NAMES:
        return members
    inside = []
    for member in members:
        if member.name.startswith(top + "/"):
            inside.append(member._replace(name=member.name[len(top) + 1 :]))
        else:
            left_out.append((member.name, f"beside the folder {top!r} of all images"))
    return inside
