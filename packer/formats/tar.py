"""Tar shards in the WebDataset convention: adjacent members `stem.ext`, one group per sample, extensions sorted.

    stem.__name__   only if needed: {"key": …, "names": {field: file name}} as JSON; WebDataset shows it as text
    stem.cls        the label + label_offset, ASCII
    stem.jpg        the image, named by its codec (jpg, png, webp, gif, bmp, tif)
    stem.json       the `json` field
    stem.mask.png   further fields: their name, and the suffix of the file they came from

WebDataset splits a name at the first dot of its last component, so a stem must not contain a dot there; blanks would
break DALI's index, and names over 100 bytes need header extensions that some readers lack. Such a key gets a separate
stem (percent-escaped, or its BLAKE2b hash) and a `__name__` member with the original key. A file whose name is not
`key.ext` (for example "x.JPEG") gets a `__name__` member, too, so the original tree can always be restored. The end of
the archive is followed by a record of the set that the shard belongs to; see below.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from posixpath import splitext
from typing import Any, ClassVar, NamedTuple

from crc32c import crc32c

from cache.errors import BadNameError, FormatError
from cache.messages import quoted
from packer.formats.base import (
    ChainedPayloads,
    GatherFile,
    Located,
    LocateOptions,
    PackedSample,
    ShardSpec,
    WalkedFormat,
    Window,
    WrittenShard,
    is_field,
    without_offset,
)
from readers.headers import SUFFIX, sniff
from readers.layout import FIELD_KINDS, KIND_SUFFIXES, FieldName, SplitName
from readers.table import ABSENT, NO_LABEL, Buffer

__all__ = [
    "BLOCK_BYTES",
    "FORMAT",
    "MAX_NAME_BYTES",
    "MAX_SIZE_BYTES",
    "OTHER_EXTENSIONS",
    "RECORD_NAME",
    "Member",
    "end_of_archive",
    "header_sum",
    "member_header",
    "member_stem",
    "walk",
]


# USTAR member headers: written for packer's shards, and read from archives of any tar program.
#
# A header is 512 bytes (POSIX.1-1988, pax(1) "ustar Interchange Format"):
#
#     0 name[100] · 100 mode[8] · 108 uid[8] · 116 gid[8] · 124 size[12] · 136 mtime[12] · 148 checksum[8] ·
#     156 typeflag · 157 linkname[100] · 257 magic "ustar\0" "00" · 265 uname[32] · 297 gname[32] · 345 prefix[155]
#
# Numbers are octal text; sizes of 8 GiB and more are GNU base-256. The checksum is the sum of all bytes, with its own
# field counted as blanks. Data follow, padded to 512. Two blocks of zeros end the archive. If archives were joined by
# `cat`, another one follows; it is read here, while GNU tar for example needs --ignore-zeros.


BLOCK_BYTES = 512
MAX_NAME_BYTES = 100
MAX_SIZE_BYTES = 8**11 - 1
RECORD_NAME = b"__packer__"  # in the header of the record after the end of the archive
_RECORD_BYTES = 20 * BLOCK_BYTES
_MAX_META_BYTES = 1 << 20
_MAX_GAP_BYTES = 16 << 20  # of zeros between archives

_HEAD = b"0000644\0" + b"0000000\0" + b"0000000\0"
_MTIME = b"\0" + b"00000000000\0"  # preceded by the terminator of the size
_TAIL = b"0" + bytes(100) + b"ustar\x0000" + bytes(BLOCK_BYTES - 265)
_CONSTANT_SUM = sum(_HEAD) + sum(_MTIME) + 8 * ord(" ") + sum(_TAIL)


class Member(NamedTuple):
    """A member found by `walk`: its name, type flag, start of its data, and length."""

    name: str
    type: str
    offset: int
    size: int
    linkname: str


def member_header(name: bytes, size: int) -> bytes:
    """The header of a regular file (mode 0644, owner 0, time 0). Raises FormatError past USTAR's limits."""
    if len(name) > MAX_NAME_BYTES or size > MAX_SIZE_BYTES:
        raise FormatError(f"tar member {name[:120]!r} of {size} bytes does not fit a USTAR header")
    octal = b"%011o" % size
    checksum = b"%06o\0 " % (_CONSTANT_SUM + sum(name + octal))
    return b"".join((name.ljust(MAX_NAME_BYTES, b"\0"), _HEAD, octal, _MTIME, checksum, _TAIL))


def end_of_archive(position: int) -> bytes:
    """The zeros that end an archive of `position` bytes: two blocks, then padding to a full record of 20 blocks."""
    return bytes(2 * BLOCK_BYTES + -(position + 2 * BLOCK_BYTES) % _RECORD_BYTES)


def walk(window: Window, strays: list[int] | None = None) -> Iterator[Member]:
    """Every member in file order, including concatenated archives, with GNU long names, PAX paths and sizes applied.

    strays: the position of data after the end that are not an archive is appended to it.

    Raises FormatError for a wrong checksum, a size that extends past the end, a sparse member or a missing end.
    """
    position, long_name, long_link = 0, "", ""
    pax: dict[str, str] = {}
    while position + BLOCK_BYTES <= window.size:
        block = window.read(position, BLOCK_BYTES)
        if not block.strip(b"\0"):
            following, is_archive = _after_end(window, position)
            if not is_archive:
                if strays is not None and following >= 0:
                    strays.append(following)
                return
            position, long_name, long_link, pax = following, "", "", {}
            continue
        _check_sum(block, window.path, position)
        kind = chr(block[156])
        size = _number(block[124:136], window.path, position)
        if "size" in pax:
            size = _pax_size(pax["size"], window.path, position)
        data = position + BLOCK_BYTES
        if data + size > window.size:
            raise FormatError(
                f"{window.path}: the member at byte {position} has {size} bytes of data, but the file ends at "
                f"{window.size}: truncated?"
            )
        position = data + (size + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES
        if kind == "L":
            long_name = _meta(window, data, size).rstrip(b"\0").decode("utf-8", "surrogateescape")
        elif kind == "K":
            long_link = _meta(window, data, size).rstrip(b"\0").decode("utf-8", "surrogateescape")
        elif kind == "x":
            pax = _parse_pax(_meta(window, data, size), window.path, data)
        elif kind != "g":
            if kind == "S" or any(name.startswith("GNU.sparse") for name in pax):
                raise FormatError(f"{window.path}: sparse member at byte {data - BLOCK_BYTES}; its data is not flat")
            name = pax.get("path") or long_name or _name(block)
            link = pax.get("linkpath") or long_link or _text(block[157:257])
            yield Member(name, kind if kind != "\0" else "0", data, size, link)
            long_name, long_link, pax = "", "", {}
    if position > window.size:
        raise FormatError(f"{window.path}: ends inside the padding of its last member: truncated?")
    raise FormatError(f"{window.path}: ends at byte {window.size} without the two blocks of zeros: truncated?")


def _after_end(window: Window, position: int) -> tuple[int, bool]:
    """(position of the data after the zeros at `position`, whether they are a header); -1 if there are no data.

    The record of a set is skipped.
    """
    stop = position + _MAX_GAP_BYTES
    while position < stop and len(block := window.read_up_to(position, BLOCK_BYTES)) == BLOCK_BYTES:
        stated = block[148:156].strip(b" \0")
        is_header = stated.isdigit() and not stated.strip(b"01234567") and int(stated, 8) == header_sum(block)
        if is_header and not block.startswith(RECORD_NAME + b"\0"):
            return position, True
        if not is_header and block.strip(b"\0"):
            return position, False
        size = _number(block[124:136], window.path, position) if is_header else 0
        position += BLOCK_BYTES + -(-size // BLOCK_BYTES) * BLOCK_BYTES
    return -1, False


def header_sum(block: bytes) -> int:
    """The checksum of a header: the sum of its bytes, with its own field counted as blanks."""
    return sum(block) - sum(block[148:156]) + 8 * ord(" ")


def _check_sum(block: bytes, path: Path, position: int) -> None:
    stated = _number(block[148:156], path, position)
    total = header_sum(block)
    if stated != total:
        raise FormatError(f"{path}: header checksum at byte {position} is {stated}, expected {total}: not a tar?")


def _number(field: bytes, path: Path, position: int) -> int:
    if field[0] & 0x80:  # GNU base-256: the rest of the field is one big-endian number
        value = int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
        if field[0] & 0x40 or value >= 1 << 63:
            raise FormatError(f"{path}: impossible number in the header at byte {position}")
        return value
    text = field.strip(b" \0")
    if text.strip(b"01234567"):  # int() would accept signs, too, and a negative size leads backwards
        raise FormatError(f"{path}: {text!r} is not an octal number in the header at byte {position}")
    return int(text, 8) if text else 0


def _pax_size(text: str, path: Path, position: int) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise FormatError(f"{path}: PAX size {text!r:.40} before byte {position} is not a size")
    return int(text)


def _meta(window: Window, offset: int, size: int) -> bytes:
    if size > _MAX_META_BYTES:
        raise FormatError(f"{window.path}: extended header of {size} bytes at {offset} is too large")
    return window.read(offset, size)


def _parse_pax(data: bytes, path: Path, offset: int) -> dict[str, str]:
    """Records "<length> <keyword>=<value>\\n"."""
    records, position = {}, 0
    while position < len(data) and data[position]:
        blank = data.find(b" ", position, position + 20)
        digits = data[position:blank]
        length = int(digits) if blank > 0 and digits.isdigit() else 0
        record = data[blank + 1 : position + length]
        if length <= len(digits) + 1 or position + length > len(data) or b"=" not in record:
            raise FormatError(f"{path}: malformed PAX record at byte {offset + position}")
        keyword, _, value = record.rstrip(b"\n").partition(b"=")
        records[keyword.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        position += length
    return records


def _name(block: bytes) -> str:
    prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
    return f"{prefix}/{_text(block[:100])}" if prefix else _text(block[:100])


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


# ------------------------------------------------------------------------------
# The record of a set in a tar shard, after the end of the archive, where other readers ignore it.
#
#     … members · two blocks of zeros · header of "__packer__" · the record · zeros up to a full tar record
#
# Tar programs stop at the zeros. The record has two lines: a JSON object with split, fields, classes, label_offset and
# shards (the number of shards of the split); and {"crc32c": "0a1b2c3d", "position": 12345}, the CRC32C of the first
# line and the position of the header, which shows that the record of a shard inside of another is not the outer one's.


_TAIL_BYTES = 16 << 10  # more than the zeros at the end and the second line
_LAST_LINE = re.compile(rb'\n\{"crc32c": "([0-9a-f]{8})", "position": ([0-9]{1,18})\}\n\Z')
_MAX_RECORD_BYTES = 1 << 30


def end_with_record(position: int, spec: ShardSpec) -> bytes:
    """The end of an archive of `position` bytes, with the record of its set."""
    content = {
        "split": spec.split,
        "fields": dict(spec.fields),
        "classes": list(spec.classes),
        "label_offset": spec.label_offset,
        "shards": spec.shards,
    }
    first = json.dumps(content, ensure_ascii=False).encode()
    start = position + 2 * BLOCK_BYTES
    record = first + b'\n{"crc32c": "%08x", "position": %d}\n' % (crc32c(first), start)
    end = bytes(2 * BLOCK_BYTES) + member_header(RECORD_NAME, len(record)) + record + bytes(-len(record) % BLOCK_BYTES)
    return end + end_of_archive(position + len(end))


def read_record(path: Path) -> ShardSpec | None:
    """Read the record of the set from a shard; None if there is none. Raises FormatError if it is damaged."""
    with Window(path) as window:
        tail_start = max(0, window.size - _TAIL_BYTES)
        tail = window.read(tail_start, window.size - tail_start).rstrip(b"\0")
        match = _LAST_LINE.search(tail)
        if match is None:
            return None
        start, stop = int(match[2]), tail_start + match.start()
        size = tail_start + len(tail) - start - BLOCK_BYTES
        if not 0 < size < _MAX_RECORD_BYTES or start < 2 * BLOCK_BYTES:
            return None
        if window.read(start, BLOCK_BYTES) != member_header(RECORD_NAME, size):
            return None  # the record of a shard that is a member of this one
        first = window.read(start + BLOCK_BYTES, stop - start - BLOCK_BYTES)
    try:
        if crc32c(first) != int(match[1], 16):
            raise ValueError(f"its CRC32C is {crc32c(first):08x}, expected {match[1].decode()}")
        return _spec(json.loads(first))
    except (BadNameError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"{path}: its record of the set at byte {start} is damaged: {error}; restore the shard, or adopt it "
            f"without that by naming the image:  image_key='jpg'"
        ) from error


def _spec(content: Any) -> ShardSpec:
    fields: dict[str, str] = {FieldName(name): str(kind) for name, kind in content["fields"].items()}
    classes, offset, shards = content["classes"], content["label_offset"], content["shards"]
    if not fields or not set(fields.values()) <= set(FIELD_KINDS):
        raise ValueError(f"fields are {fields!r:.80}")
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ValueError("classes are not a list of names")
    if not isinstance(offset, int) or abs(offset) >= 1 << 31 or not isinstance(shards, int) or shards < 0:
        raise ValueError(f"label_offset is {offset!r:.40}, shards is {shards!r:.40}")
    return ShardSpec(SplitName(content["split"]), fields, tuple(classes), offset, shards)


IMAGE_EXTENSIONS = "jpg;jpeg;png;webp;gif;bmp;tif;tiff;avif;heic;heif;jxl"
OTHER_EXTENSIONS = {"array": "npy", "audio": "wav;flac;mp3;ogg;opus;m4a;aac;aiff"}  # main fields without an image
_NAME_EXTENSION, _LABEL_EXTENSION = "__name__", "cls"
_NAME_SUFFIX, _LABEL_SUFFIX = b".__name__", b".cls"
_SPLIT_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$", re.DOTALL)  # webdataset/tariterators.py, base_plus_ext
_SKIPPED = re.compile(r"__[^/]*__($|/)")  # webdataset skips these names
_PLAIN = re.compile(r"[A-Za-z0-9_/+=~@,:()\[\]{}-]+")
_MAX_NAME_MEMBER_BYTES = 1 << 20
_INDEX_VERSION = {"dali": "v1.2", "rocal": "v1.0"}  # the only version with names that rocAL reads
_ZEROS = bytes(BLOCK_BYTES)
_LONGEST_EXTENSION_BYTES = 24


def member_stem(key: str) -> str:
    """The member name for a key, without extension. It equals nearly every key, and is distinct for distinct keys."""
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
    """Writes a tar shard. The members of a sample are contiguous; payloads are not copied."""

    def __init__(self, path: Path, spec: ShardSpec) -> None:
        for field in spec.fields:
            if field != field.lower():
                raise FormatError(f"{path}: tar shards need field names in lower case, found {field!r}")
        self._file = GatherFile(path)
        self._spec = spec
        self._fields = tuple(spec.fields.items())
        self._payloads = {name: ChainedPayloads() for name in spec.fields}
        self._columns = tuple(self._payloads.values())
        self._crc = 0  # of the file

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
                derived = False  # readers would take the member for a json field, which has no file
        if sample.label != NO_LABEL:
            members.append((_LABEL_SUFFIX, -1, b"%d" % (sample.label + self._spec.label_offset)))
        if not derived or not members:
            members.append((_NAME_SUFFIX, -1, _name_payload(sample, self._fields)))
        members.sort(key=itemgetter(0))
        self._write(stem.encode(), members)

    def _write(self, stem: bytes, members: list[tuple[bytes, int, Buffer]]) -> None:
        crc, start = self._crc, self._file.position
        position = start
        pieces: list[Buffer] = []
        small = b""  # headers, padding and packer's own members, up to the next payload
        for extension, number, payload in members:
            size = len(payload)
            small += member_header(stem + extension, size)
            position += BLOCK_BYTES
            if number >= 0:
                before = crc32c(small, crc)
                crc = crc32c(payload, before)
                self._columns[number].append(position, size, crc, before)
                pieces += (small, payload)
                small = b""
            else:
                small += payload
            padding = -size % BLOCK_BYTES
            small += _ZEROS[:padding]
            position += size + padding
        if small:
            crc = crc32c(small, crc)
            pieces.append(small)
        self._crc = crc
        self._file.append(tuple(pieces), position - start)

    def flush(self) -> None:
        self._file.flush()

    def finish(self) -> WrittenShard:
        end = end_with_record(self._file.position, self._spec)
        self._file.append((end,), len(end))
        self._file.sync_and_close()
        for payloads in self._columns:
            payloads.separate()
        return WrittenShard(self._file.position, crc32c(end, self._crc), self._payloads)

    def abort(self) -> None:
        self._file.abort()


def _extension(field: str, kind: str, sample: PackedSample, number: int) -> str:
    if kind == "json":
        return "json" if field == "json" else f"{field}.json"
    if field == "image":
        media = sample.header.media if sample.header else ""
        if media:
            return SUFFIX[media]
        suffix = splitext(sample.names[number])[1][1:].lower()
        return suffix if suffix in IMAGE_EXTENSIONS.split(";") else "jpg"
    suffix = splitext(sample.names[number])[1][1:].lower()
    if not suffix.isalnum() or not suffix.isascii() or len(suffix) > 8:
        payload = sample.payloads[number]
        media = sniff(payload) if kind in ("mask", "image") and payload is not None else ""
        suffix = KIND_SUFFIXES.get(kind) or SUFFIX.get(media, "bin")
    return f"{field}.{suffix}"


def _name_payload(sample: PackedSample, fields: tuple[tuple[str, str], ...]) -> bytes:
    names = {field: name for (field, _), name in zip(fields, sample.names, strict=True) if name}
    return json.dumps({"key": sample.key, "names": names}, ensure_ascii=False).encode()


class TarFormat(WalkedFormat):
    """Tar shards in the WebDataset convention."""

    name = "tar"
    exports: ClassVar = {"dali": ".idx", "rocal": ".idx", "wids": ".wids.json"}

    def shard_name(self, split: str, number: int, count: int) -> str:
        return f"{split}-{number:06d}.tar"

    def open_writer(self, path: Path, spec: ShardSpec) -> TarWriter:
        return TarWriter(path, spec)

    def describe(self, path: Path) -> ShardSpec | None:
        return read_record(path)

    def walk(self, window: Window, options: LocateOptions) -> Iterator[Located]:
        seen = set[str]()
        group = _Group("", window, options)
        for member, stem, extension in sample_members(window):
            if stem != group.stem:
                if group.members:
                    yield group.sample()
                if stem in seen:
                    raise FormatError(
                        f"{window.path}: the members of {stem!r} are not adjacent (again at byte {member.offset}); "
                        f"repack it with  packer convert"
                    )
                seen.add(stem)
                group = _Group(stem, window, options)
            group.add(member, extension)
        if group.members:
            yield group.sample()

    def index_head(self, target: str, samples: int) -> str:
        return f"{_INDEX_VERSION[target]} {samples}\n"

    def index_lines(self, target: str, window: Window) -> Iterator[str]:
        """<extension> <offset> <bytes> <name> of each member; blanks separate these, so no name may contain one."""
        stem, parts = "", list[str]()
        for member, member_stem, extension in sample_members(window):
            if any(character.isspace() for character in member.name):
                raise FormatError(
                    f"{window.path}: member {member.name!r} has a blank in its name, which no index for DALI or rocAL "
                    f"can hold; repack it with  packer convert {quoted(window.path)} --to tar"
                )
            if member_stem != stem and parts:
                yield " ".join(parts) + "\n"
                parts = []
            stem = member_stem
            parts.append(f"{extension} {member.offset} {member.size} {member.name}")
        if parts:
            yield " ".join(parts) + "\n"


def sample_members(window: Window) -> Iterator[tuple[Member, str, str]]:
    """(member, stem, extension in lower case) of all members of a shard that WebDataset reads, in file order.

    Raises FormatError for links, and for names that WebDataset would drop or cannot represent.
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
                f"repack it with  packer convert {quoted(window.path)} --to tar"
            )
        yield member, match[1], match[2].lower()


class _Group:
    """The members of one sample. Labels and names are read immediately, since a stream cannot be rewound."""

    def __init__(self, stem: str, window: Window, options: LocateOptions) -> None:
        self.stem, self.members = stem, dict[str, Member]()
        self._window, self._options = window, options
        self._label, self._key = NO_LABEL, stem
        self._names: dict[str, str] | None = None  # of a sample with a `__name__` member

    def add(self, member: Member, extension: str) -> None:
        if extension in self.members:
            raise FormatError(
                f"{self._window.path}: sample {self.stem!r} has two members .{extension} (at byte {member.offset}): a "
                f"dot in a file name splits it wrongly; repack the originals with  packer convert"
            )
        self.members[extension] = member
        if extension == (self._options.label_key or _LABEL_EXTENSION):
            self._label = without_offset(_label(self._window, member), self._options)
        elif extension == _NAME_EXTENSION:
            self._key, self._names = _read_name(self._window, member)

    def sample(self) -> Located:
        options, ranges, left_behind = self._options, dict[str, tuple[int, int]](), list[str]()
        names = dict(self._names or {})
        known = {"image": options.image_key or IMAGE_EXTENSIONS} | ({} if options.image_key else OTHER_EXTENSIONS)
        firsts = (
            (field, name) for field, suffixes in known.items() for name in suffixes.split(";") if name in self.members
        )
        main, main_extension = next(firsts, ("image", None))
        for extension, member in self.members.items():
            if extension in (options.label_key or _LABEL_EXTENSION, _NAME_EXTENSION):
                continue
            field = main if extension == main_extension else _field_of(extension, options)
            if not is_field(field):
                left_behind.append(extension)
                continue
            if field in ranges:
                raise FormatError(f"{self._window.path}: sample {self.stem!r} has two members for the field {field!r}")
            ranges[field] = (member.offset, member.size)
            if self._names is None and not extension.endswith("json"):
                names[field] = f"{self._key}.{member.name.rpartition('/')[2].split('.', 1)[1]}"
        return Located(self._key, self._label, ranges, names, left_behind=tuple(left_behind), main=main)


def _field_of(extension: str, options: LocateOptions) -> str:
    named = (field for field, key in options.extra_fields.items() if key == extension)
    return next(named, "") or extension.rpartition(".")[0] or extension


def _is_utf8(text: str) -> bool:
    return text.isascii() or text.encode(errors="replace").decode() == text  # false with a lone surrogate


def _label(window: Window, member: Member) -> int:
    text = window.read(member.offset, min(member.size, 64)).strip()
    try:
        if member.size > 64 or not -(1 << 63) <= int(text) < 1 << 63:
            raise ValueError(f"{member.size} bytes are too many for an int64")
        return int(text)
    except ValueError as error:
        where = f"{window.path}: label {member.name!r} at byte {member.offset}"
        raise FormatError(f"{where} is {text[:32]!r}, expected a whole number") from error


def _read_name(window: Window, member: Member) -> tuple[str, dict[str, str]]:
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
        raise FormatError(f"{window.path}: {member.name!r} at byte {member.offset} is not a name: {error}") from error
    return key, names


FORMAT = TarFormat()
