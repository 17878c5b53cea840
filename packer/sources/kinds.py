"""What kind of source a file is: by its content, and where that says nothing, by its name.

The name decides for tables alone, which have no signature. A compressed file is what it unpacks to.
"""

from __future__ import annotations

from pathlib import Path

from packer.formats.checksum import starts_record
from packer.sources.tables import TABLE_SUFFIXES
from readers.errors import SourceError

__all__ = ["KNOWN", "kind_of", "plain_name"]

KNOWN = (
    "an image folder, a packed set, a manifest (.csv, .tsv, .jsonl, .ndjson, .parquet), an archive (.tar, "
    ".tar.gz, .tar.bz2, .tar.xz, .tar.zst, .zip), an HDF5 file, a TFRecord file"
)

_SUFFIXES = {
    **dict.fromkeys(TABLE_SUFFIXES, "manifest"),
    **dict.fromkeys((".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tzst", ".zip"), "archive"),
    **dict.fromkeys((".h5", ".hdf5", ".hdf", ".he5"), "hdf5"),
    **dict.fromkeys((".tfrecord", ".tfrecords", ".tfrec"), "tfrecord"),
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
_ZIP_MAGIC = (b"PK\3\4", b"PK\5\6")
_HEAD_BYTES = 512


def plain_name(path: Path) -> str:
    """The name of a source without the suffixes that tell its kind: x.tar.gz, x.csv and x.h5 are x."""
    name = path.name
    stem, dot, suffix = name.rpartition(".")
    if stem and (dot + suffix).lower() in _COMPRESSED:
        name = stem
        stem, dot, suffix = name.rpartition(".")
    return stem if stem and (dot + suffix).lower() in _SUFFIXES else name


def kind_of(path: Path) -> str:
    """ "manifest", "archive", "hdf5", "tfrecord", or "" for a file of no kind we know."""
    by_name = _by_name(path)
    if by_name == "manifest":
        return by_name
    return _by_content(path) or by_name


def _by_name(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if len(suffixes) == 2 and suffixes[1] in _COMPRESSED:
        kind = _SUFFIXES.get(suffixes[0], "")
        return kind if kind in ("archive", "tfrecord") else ""
    return _SUFFIXES.get(suffixes[-1], "") if suffixes else ""


def _by_content(path: Path) -> str:
    from packer.sources.streams import UnpackedStream, compression_of

    compression = compression_of(path)
    target = bytearray(_HEAD_BYTES)
    if compression:
        try:
            stream = UnpackedStream(path, compression)
            try:
                count = stream.read_up_to(0, memoryview(target))
            finally:
                stream.close()
        except SourceError:  # whoever reads it in earnest says what is wrong
            return ""
    else:
        with open(path, "rb") as file:
            count = file.readinto(target)
    head = bytes(target[:count])
    if not compression and head.startswith(_HDF5_MAGIC):
        return "hdf5"
    if (not compression and head.startswith(_ZIP_MAGIC)) or _is_tar_header(head):
        return "archive"
    return "tfrecord" if starts_record(head) else ""


def _is_tar_header(block: bytes) -> bool:
    """Whether the header's checksum is right: the sum of all bytes, its own eight taken as blanks."""
    field = block[148:156].strip(b" \0")
    if len(block) < _HEAD_BYTES or not field.isdigit() or field.strip(b"01234567"):
        return False
    return int(field, 8) == sum(block) - sum(block[148:156]) + 8 * ord(" ")
