"""Tar shards in the WebDataset convention: adjacent members `stem.ext`, one group per sample, extensions sorted.

    stem.__name__   only where needed: {"key": …, "names": {field: file name}} as JSON; WebDataset shows it as text
    stem.cls        the label + label_offset, ASCII
    stem.jpg        the image, by what it is (jpg, png, webp, gif, bmp, tif)
    stem.json       the `json` field
    stem.mask.png   further fields: their name, and the suffix of the file they came from

WebDataset splits a name at the first dot of its last component, so a stem must have no dot there; blanks would
break DALI's index, and names over 100 bytes need header extensions that several readers lack. Such a key gets a
stem of its own (percent-escaped, or its BLAKE2b hash) and a `__name__` member that tells the real one. A file whose
name is not `key.ext` (say "x.JPEG") gets a `__name__` member too, so the original tree can always be rebuilt. Behind
the end of the archive stands what the shard says of its set: see `packer.formats.tar_record`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from crc32c import crc32c

from packer.formats.base import Located, LocateOptions, PackedSample, Payloads, ShardSpec, WrittenShard
from packer.formats.gather import GatherFile
from packer.formats.tar_record import end_with_record, read_record
from packer.formats.ustar import BLOCK_BYTES, MAX_NAME_BYTES, Member, member_header, walk
from packer.formats.window import Window
from readers.errors import FormatError
from readers.headers import SUFFIX
from readers.index import ABSENT
from readers.sample import NO_LABEL, Buffer

__all__ = ["FORMAT", "TarFormat", "member_stem", "sample_members"]

IMAGE_EXTENSIONS = "jpg;jpeg;png;webp;gif;bmp;tif;tiff"
_NAME_EXTENSION = "__name__"
_LABEL_EXTENSION = "cls"
_NAME_SUFFIX, _LABEL_SUFFIX = b".__name__", b".cls"
_SPLIT_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$", re.DOTALL)  # webdataset/tariterators.py, base_plus_ext
_SKIPPED = re.compile(r"__[^/]*__($|/)")  # webdataset skips these names
_PLAIN = re.compile(r"[A-Za-z0-9_/+=~@,:()\[\]{}-]+")
_MAX_NAME_MEMBER_BYTES = 1 << 20
_ZEROS = bytes(BLOCK_BYTES)
_LONGEST_EXTENSION_BYTES = 24


def member_stem(key: str) -> str:
    """The member name, without extension, for a key; equal to it for nearly all, distinct for distinct keys."""
    plain = _PLAIN.fullmatch(key) and "__" not in key and key[0] != "~" and key[-1] != "/"
    if plain and len(key) <= MAX_NAME_BYTES - _LONGEST_EXTENSION_BYTES:
        return key
    folder, slash, name = key.rpartition("/")
    stem = _escape(folder, "") + slash + _escape(name, ".")
    if stem.startswith(("__", "~")):  # readers skip names like __x__, and ~ marks a hash
        stem = f"%{ord(stem[0]):02X}{stem[1:]}"
    if not name or len(stem.encode()) > MAX_NAME_BYTES - _LONGEST_EXTENSION_BYTES:
        return "~" + hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    return stem


def _escape(text: str, also: str) -> str:
    return "".join(
        "".join(f"%{byte:02X}" for byte in c.encode()) if c <= " " or c == "\x7f" or c == "%" or c in also else c
        for c in text
    )


class TarWriter:
    """Writes one shard. Members of a sample are contiguous; payloads are not copied."""

    def __init__(self, path: Path, spec: ShardSpec) -> None:
        for field in spec.fields:
            if field != field.lower():
                raise FormatError(f"{path}: tar shards need field names in lower case, found {field!r}")
        self._file = GatherFile(path)
        self._spec = spec
        self._fields = tuple(spec.fields.items())
        self._payloads = {name: Payloads() for name in spec.fields}
        self._columns = tuple(self._payloads.values())

    def add(self, sample: PackedSample) -> None:
        stem = member_stem(sample.key)
        members: list[tuple[bytes, int, Buffer]] = []
        derived = stem == sample.key
        for number, (field, kind) in enumerate(self._fields):
            payload = sample.payloads[number]
            if payload is None:
                self._columns[number].append(ABSENT, 0, 0)
                continue
            extension = _extension(field, kind, sample, number)
            members.append((b"." + extension.encode(), number, payload))
            if kind != "json" and sample.names[number] != f"{sample.key}.{extension}":
                derived = False
            elif kind == "file" and extension.endswith(".json"):
                derived = False  # a reader would take it for a json field, which comes from no file
        if sample.label != NO_LABEL:
            members.append((_LABEL_SUFFIX, -1, b"%d" % (sample.label + self._spec.label_offset)))
        if not derived or not members:
            members.append((_NAME_SUFFIX, -1, _name_payload(sample, self._fields)))
        members.sort(key=_by_extension)
        self._write(stem.encode(), members)

    def _write(self, stem: bytes, members: list[tuple[bytes, int, Buffer]]) -> None:
        checksum, start = self._file.checksum, self._file.position
        position = start
        pieces: list[Buffer] = []
        small = b""  # headers, padding and members of our own making, up to the next payload
        for extension, number, payload in members:
            size = len(payload)
            small += member_header(stem + extension, size)
            position += BLOCK_BYTES
            if number >= 0:
                crc = crc32c(payload)
                self._columns[number].append(position, size, crc)
                checksum.add(small, crc, size)
                pieces += (small, payload)
                small = b""
            else:
                small += payload
            padding = -size % BLOCK_BYTES
            small += _ZEROS[:padding]
            position += size + padding
        if small:
            checksum.add(small)
            pieces.append(small)
        self._file.append(tuple(pieces), position - start)

    def flush(self) -> None:
        self._file.flush()

    def finish(self) -> WrittenShard:
        end = end_with_record(self._file.position, self._spec)
        self._file.checksum.add(end)
        self._file.append((end,), len(end))
        self._file.sync_and_close()
        return WrittenShard(self._file.position, self._file.checksum.value(), self._payloads)

    def abort(self) -> None:
        self._file.abort()


def _by_extension(member: tuple[bytes, int, Buffer]) -> bytes:
    return member[0]


def _extension(field: str, kind: str, sample: PackedSample, number: int) -> str:
    if kind == "json":
        return "json" if field == "json" else f"{field}.json"
    if field == "image":
        media = sample.header.media if sample.header else ""
        if media:
            return SUFFIX[media]
        suffix = PurePosixPath(sample.names[number]).suffix[1:].lower()
        return suffix if suffix in IMAGE_EXTENSIONS.split(";") else "jpg"
    suffix = PurePosixPath(sample.names[number]).suffix[1:].lower()
    if not suffix.isalnum() or not suffix.isascii() or len(suffix) > 8:
        suffix = "bin"
    return f"{field}.{suffix}"


def _name_payload(sample: PackedSample, fields: tuple[tuple[str, str], ...]) -> bytes:
    names = {field: name for (field, _), name in zip(fields, sample.names, strict=True) if name}
    return json.dumps({"key": sample.key, "names": names}, ensure_ascii=False).encode()


class TarFormat:
    """WebDataset tars."""

    name = "tar"

    def shard_name(self, split: str, number: int, count: int) -> str:
        return f"{split}-{number:06d}.tar"

    def open_writer(self, path: Path, spec: ShardSpec) -> TarWriter:
        return TarWriter(path, spec)

    def describe(self, path: Path) -> ShardSpec | None:
        return read_record(path)

    def locate(self, path: Path, options: LocateOptions) -> Iterator[Located]:
        with Window(path) as window:
            stem, seen = "", set[str]()
            group: list[tuple[str, Member]] = []
            for member, member_stem_, extension in sample_members(window):
                if member_stem_ != stem:
                    if group:
                        yield _sample(window, stem, group, options)
                    if member_stem_ in seen:
                        raise FormatError(
                            f"{path}: the members of {member_stem_!r} are not adjacent (again at byte "
                            f"{member.offset}); repack it with  packer convert"
                        )
                    seen.add(member_stem_)
                    stem, group = member_stem_, []
                group.append((extension, member))
            if group:
                yield _sample(window, stem, group, options)


def sample_members(window: Window) -> Iterator[tuple[Member, str, str]]:
    """(member, stem, extension in lower case) of all that WebDataset sees in a shard, in file order.

    Raises FormatError for links, and for names that its readers would drop or cannot hold.
    """
    for member in walk(window):
        if member.type == "5" or _SKIPPED.match(member.name):
            continue
        if member.type not in "07":
            raise FormatError(
                f"{window.path}: member {member.name!r} is a link or device (type {member.type!r}), not a file"
            )
        if not _is_utf8(member.name):
            raise FormatError(
                f"{window.path}: member {member.name!r} at byte {member.offset - BLOCK_BYTES} has a name that is not "
                f"UTF-8; rename the original (convmv does whole trees) and repack it"
            )
        match = _SPLIT_NAME.match(member.name)
        if match is None:
            raise FormatError(
                f"{window.path}: member {member.name!r} has no extension, so WebDataset readers drop it; "
                f"repack it with  packer convert {window.path} --to tar"
            )
        yield member, match[1], match[2].lower()


def _sample(window: Window, stem: str, group: list[tuple[str, Member]], options: LocateOptions) -> Located:
    members: dict[str, Member] = {}
    for extension, member in group:
        if extension in members:
            raise FormatError(
                f"{window.path}: sample {stem!r} has two members .{extension} (at byte {member.offset}): a dot in "
                f"a file name splits it wrongly; repack the originals with  packer convert"
            )
        members[extension] = member
    label = NO_LABEL
    label_member = members.pop(options.label_key or _LABEL_EXTENSION, None)
    if label_member is not None:
        label = _label(window, label_member) - options.label_offset
    named = _NAME_EXTENSION in members
    key, names = _read_name(window, members.pop(_NAME_EXTENSION, None), stem)
    ranges = {}
    image_extension = next((e for e in (options.image_key or IMAGE_EXTENSIONS).split(";") if e in members), None)
    for extension, member in members.items():
        field = "image" if extension == image_extension else _field_of(extension, options)
        if field in ranges:
            raise FormatError(f"{window.path}: sample {stem!r} has two members for the field {field!r}")
        ranges[field] = (member.offset, member.size)
        if not named and not extension.endswith("json"):
            names[field] = f"{key}.{member.name.rpartition('/')[2].split('.', 1)[1]}"
    return Located(key, label, ranges, names)


def _field_of(extension: str, options: LocateOptions) -> str:
    for field, key in options.extra_fields.items():
        if key == extension:
            return field
    return extension.rpartition(".")[0] or extension


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _label(window: Window, member: Member) -> int:
    text = window.read(member.offset, min(member.size, 64)).strip()
    try:
        if member.size > 64 or not -(1 << 63) <= int(text) < 1 << 63:
            raise ValueError(f"{member.size} bytes are too many for an int64")
        return int(text)
    except ValueError as error:
        raise FormatError(
            f"{window.path}: label {member.name!r} at byte {member.offset} is {text[:32]!r}, expected a whole number"
        ) from error


def _read_name(window: Window, member: Member | None, stem: str) -> tuple[str, dict[str, str]]:
    if member is None:
        return stem, {}
    if member.size > _MAX_NAME_MEMBER_BYTES:
        raise FormatError(f"{window.path}: {member.name!r} of {member.size} bytes is too large for a name")
    try:
        content: Any = json.loads(window.read(member.offset, member.size))
        key, names = content["key"], content["names"]
        if not isinstance(key, str) or not all(isinstance(x, str) for pair in names.items() for x in pair):
            raise ValueError("key and names must be strings")
        if not all(map(_is_utf8, (key, *names.values()))):
            raise ValueError("key and names must be encodable as UTF-8")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(f"{window.path}: {member.name!r} at byte {member.offset} is no name: {error}") from error
    return key, names


FORMAT = TarFormat()
