"""Names as others wrote them, made safe to pack: relative, and never leading out of their folder."""

from __future__ import annotations

import posixpath
import re

from readers.tree import SPLIT_NAMES

__all__ = ["RESERVED_FIELDS", "is_field_name", "name_in_folder", "safe_name", "split_of_file"]

RESERVED_FIELDS = ("image", "json", "label", "key", "shard", "cls")  # the containers use these themselves


def is_field_name(name: str) -> bool:
    """Whether a further field can be called so in every container: in a tar it is an extension, which has no case."""
    return re.fullmatch(r"[a-z0-9][a-z0-9_]*", name) is not None and name not in RESERVED_FIELDS


def safe_name(path: str) -> str:
    """`path` without `.`, `//` and inner `..`, a leading "/" and leading `..`; "" where nothing is left.

    "./a//b.jpg" -> "a/b.jpg", "/data/b.jpg" -> "data/b.jpg", "../../b.jpg" -> "b.jpg", "a/../b.jpg" ->
    "b.jpg".
    """
    parts = posixpath.normpath(path).split("/")
    return "/".join(part for part in parts if part not in ("", ".", ".."))


def name_in_folder(path: str, folder: str) -> str:
    """The name of a file relative to `folder` (absolute, normalised) where it lies below, else its
    `safe_name`.
    """
    whole = posixpath.normpath(posixpath.join(folder, path))
    prefix = folder.rstrip("/") + "/"
    return whole[len(prefix) :] if whole.startswith(prefix) else safe_name(path)


def split_of_file(name: str) -> str:
    """The split that a file name begins with: val for "val-00000-of-00008.tfrecord", and train for any other name."""
    first = re.split(r"[-_.]", name, maxsplit=1)[0].lower()
    return first if first in SPLIT_NAMES else "train"
