"""Copies of files that could not be packed, put aside under their own names."""

from __future__ import annotations

import hashlib
import posixpath

from cache.files import Folder
from readers.names import QUARANTINE_FOLDER, RelativePath
from readers.sample import Buffer

__all__ = ["set_aside"]

_MAX_BYTES = 255
_MAX_SUFFIX_BYTES = 16


def set_aside(work: Folder, split: str, name: str, payload: Buffer) -> None:
    """Write `payload` to quarantine/split/name below `work`; archives have names that no file can have: see `_fitting`.

    Raises BadNameError for a name that leads out, PathError where something is in the way.
    """
    place = RelativePath("/".join(map(_fitting, name.split("/"))))
    folder, _, last = f"{QUARANTINE_FOLDER}/{split}/{place}".rpartition("/")
    with work.folder(folder, create=True) as opened:
        opened.write(last, payload)


def _fitting(part: str) -> str:
    """A part of a name, cut to the length that a file name may have, with a mark of all of it before the suffix."""
    encoded = part.encode()
    if len(encoded) <= _MAX_BYTES:
        return part
    suffix = posixpath.splitext(part)[1].encode()
    suffix = suffix if len(suffix) <= _MAX_SUFFIX_BYTES else b""
    tail = b"~" + hashlib.blake2b(encoded, digest_size=4).hexdigest().encode() + suffix
    return (encoded[: _MAX_BYTES - len(tail)].decode(errors="ignore").encode() + tail).decode()
