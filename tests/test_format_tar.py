"""Tar shards: the suite of `packer.testing.formats`, and false claims in tar files."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest
from suites.containers import BLOCK, block

from packer.formats.base import Located
from packer.formats.tar import member_stem
from packer.testing.formats import (
    GIB,
    HEADER,
    JPEG,
    KEYS,
    LOOKALIKES,
    FormatSuite,
    bounded,
    sample,
)


def member(name: bytes, data: bytes, kind: bytes = b"0") -> bytes:
    return block(name, len(data), kind) + data + bytes(-len(data) % BLOCK)


def pax(*records: bytes) -> bytes:
    return member(b"PaxHeader", b"".join(records), b"x")


def record(keyword: bytes, value: bytes) -> bytes:
    """A PAX record; its length counts its own digits."""
    rest = b" " + keyword + b"=" + value + b"\n"
    length = next(n for n in range(len(rest), len(rest) + 9) if n == len(rest) + len(b"%d" % n))
    return b"%d" % length + rest


class TestTar(FormatSuite):
    name = "tar"

    def beyond_4_gib(self, folder: Path) -> tuple[Path, dict[str, bytes]]:
        """The second member is a hole of 5 GiB."""
        path, _ = self.write(folder, [sample("a", b"first")])
        with open(path, "r+b") as file:
            file.truncate(2 * BLOCK)
            file.seek(2 * BLOCK)
            file.write(block(b"hole.bin", 5 * GIB))
            file.seek(5 * GIB, os.SEEK_CUR)
            file.write(member(b"b.jpg", b"second") + member(b"c.jpg", JPEG) + bytes(2 * BLOCK))
        return path, {"b": b"second", "c": JPEG}

    def after_cut(self, truth: list[Located], data: bytes, size: int) -> list[Located] | None:
        """One whole block of zeros after the last member is an end that every tar program takes."""
        last = max(at + n for found in truth for at, n in found.ranges.values())
        end = len(data[: last + -last % BLOCK]) + BLOCK
        return truth if size >= end else None

    def must_notice(self, path: Path, data: bytes, truth: list[Located]) -> set[int]:
        """Harmless: padding, the two bytes that end the checksum field, and what follows the first block of zeros."""
        with tarfile.open(path) as archive:
            members = archive.getmembers()
        noticed: set[int] = set()
        for info in members:
            noticed |= {*range(info.offset, info.offset + 154), *range(info.offset + 156, info.offset_data + info.size)}
        end = members[-1].offset_data + members[-1].size
        end += -end % BLOCK
        return noticed | set(range(end, end + BLOCK))

    def hostile(self, folder: Path, data: bytes, end: bytes = bytes(2 * BLOCK)) -> Path:
        path = folder / "hostile.tar"
        path.write_bytes(data + end)
        return path

    @pytest.mark.parametrize(
        ("size", "match"),
        [
            (b"00000001001\0", "truncated"),  # one byte more than there is
            (b"77777777777\0", "truncated"),
            (b"\x80" + (1 << 40).to_bytes(11, "big"), "truncated"),
            (b"\x80\0\0\0" + ((1 << 63) - 1).to_bytes(8, "big"), "truncated"),
            (b"\x80" + (1 << 80).to_bytes(11, "big"), "impossible number"),
            (b"\xff" * 12, "impossible number"),  # -1
            (b"\xff" * 10 + b"\xfc\x00", "impossible number"),  # -1024
            (b"-0000000001", "not an octal number"),
            (b"-0000002000", "not an octal number"),  # would lead back to this very header
            (b"+0000000010", "not an octal number"),
            (b"0o000000010", "not an octal number"),
            (b"00000_00010", "not an octal number"),
            (b"00000000089", "not an octal number"),
            (b"12345 54321", "not an octal number"),
        ],
    )
    def test_lying_sizes(self, tmp_path: Path, size: bytes, match: str) -> None:
        first = member(b"a.jpg", b"first")
        self.refused(self.hostile(tmp_path, first + block(b"b.jpg", size) + bytes(BLOCK), b""), match)

    def test_base_256_size_that_is_true(self, tmp_path: Path) -> None:
        path = self.hostile(tmp_path, block(b"a.jpg", b"\x80" + (5).to_bytes(11, "big")) + b"12345" + bytes(BLOCK - 5))
        assert self.locate(path)[0].ranges == {"image": (BLOCK, 5)}

    @pytest.mark.parametrize("size", ["-1", "-1024", "²", "٣", "1e3", "0x10", "", " 5", "9" * 18, "9" * 40, "5_0"])
    def test_lying_pax_sizes(self, tmp_path: Path, size: str) -> None:
        data = pax(record(b"size", size.encode())) + member(b"a.jpg", b"12345")
        self.refused(self.hostile(tmp_path, data), "PAX size|truncated")

    def test_pax_size_that_is_true(self, tmp_path: Path) -> None:
        data = pax(record(b"size", b"5")) + block(b"a.jpg", 0) + b"12345" + bytes(BLOCK - 5) + member(b"b.jpg", b"b")
        assert [found.ranges["image"][1] for found in self.locate(self.hostile(tmp_path, data))] == [5, 1]

    @pytest.mark.parametrize(
        "body",
        [
            b"path=a",
            b"0 path=a\n",
            b"1 path=a\n",
            b"99 path=a\n",
            b"-9 path=a\n",
            b"9 path a\n",
            b"9path=aa\n",
            b" " * 30,
        ],
    )
    def test_malformed_pax_records(self, tmp_path: Path, body: bytes) -> None:
        self.refused(self.hostile(tmp_path, pax(body) + member(b"a.jpg", b"x")), "malformed PAX record")

    def test_huge_extended_header(self, tmp_path: Path) -> None:
        data = pax(record(b"comment", b"x" * (2 << 20))) + member(b"a.jpg", b"x")
        self.refused(self.hostile(tmp_path, data), "too large")

    @pytest.mark.parametrize("kind", [b"1", b"2", b"3", b"4", b"6", b"Q", b"\xff"])
    def test_links_and_devices(self, tmp_path: Path, kind: bytes) -> None:
        data = member(b"a.jpg", b"x") + block(b"b.jpg", 0, kind)
        self.refused(self.hostile(tmp_path, data), "a link or device")

    @pytest.mark.parametrize(
        "data",
        [member(b"a.jpg", b"x", b"S"), pax(record(b"GNU.sparse.major", b"1")) + member(b"a.jpg", b"x")],
        ids=["gnu", "pax"],
    )
    def test_sparse_members(self, tmp_path: Path, data: bytes) -> None:
        self.refused(self.hostile(tmp_path, data), "sparse member")

    @pytest.mark.parametrize(
        ("data", "match"),
        [
            (member(b"README", b"x"), "no extension.* packer convert "),
            (member(b"a.b.jpg", b"1") + member(b"a.b.jpg", b"2"), r"two members \.b\.jpg"),
            (member(b"a.jpg", b"1") + member(b"b.jpg", b"2") + member(b"a.cls", b"3"), "not adjacent"),
            (member(b"a.png", b"1") + member(b"a.image", b"2"), "two members for the field 'image'"),
            (member(b"a\xff.jpg", b"1"), "not UTF-8"),
            (pax(record(b"path", b"a\xff.jpg")) + member(b"a.jpg", b"1"), "not UTF-8"),
            (b"not a tar at all" * 100, "checksum|octal"),
        ],
    )
    def test_members_that_make_no_samples(self, tmp_path: Path, data: bytes, match: str) -> None:
        self.refused(self.hostile(tmp_path, data), match)

    @pytest.mark.parametrize(
        "label", [b"cat", b"", b" ", b"1.5", b"0x1", b"1 2", b"9" * 19, b"-" + b"9" * 30, b"1" * 65]
    )
    def test_labels_that_are_none(self, tmp_path: Path, label: bytes) -> None:
        self.refused(self.hostile(tmp_path, member(b"a.cls", label) + member(b"a.jpg", b"x")), "whole number")

    @pytest.mark.parametrize("label", [b"7", b" 7\n", b"007"])
    def test_labels_as_others_write_them(self, tmp_path: Path, label: bytes) -> None:
        path = self.hostile(tmp_path, member(b"a.cls", label) + member(b"a.jpg", b"x"))
        assert self.locate(path)[0].label == 7

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"{",
            b"[]",
            b"{}",
            b'{"key": "a"}',
            b'{"key": 1, "names": {}}',
            b'{"key": "a", "names": []}',
            b'{"key": "a", "names": {"image": 1}}',
            b'{"key": "\\ud800", "names": {}}',
            b'{"key": "a", "names": {"image": "\\udcff"}}',
            b'{"key": "a", "names": {}} more',
            b'{"key": ' + b"[" * 100_000,
            b'{"key": ' + b"9" * 10_000 + b', "names": {}}',
            b"\xff\xfe",
            b'{"key": "a", "names": {}}'.ljust(2 << 20),
        ],
        ids=lambda content: content[:40].decode("latin-1"),
    )
    def test_name_members_that_are_none(self, tmp_path: Path, content: bytes) -> None:
        data = member(b"a.__name__", content) + member(b"a.jpg", b"x")
        self.refused(self.hostile(tmp_path, data), "is not a name|too large for a name")

    def test_stems_are_distinct_short_and_split_at_their_only_dot(self) -> None:
        keys = {*KEYS, *LOOKALIKES, *(f"{key}/x" for key in KEYS)}
        keys |= {member_stem(key) for key in keys}  # among them the hashes of long keys, and escaped ones
        stems = {key: member_stem(key) for key in keys}
        assert len(set(stems.values())) == len(keys), "two keys share a stem, so their members would be one sample"
        for key, stem in stems.items():
            assert "." not in stem.rpartition("/")[2], f"the stem {stem!r} of {key!r} is split at the wrong dot"
            assert len(stem.encode()) <= 76 and not set(stem) & set(" \t\n\0"), f"the stem {stem!r} of {key!r}"

    def test_stems_of_usual_keys_are_the_keys(self) -> None:
        for key in ("n01440764/ILSVRC2012_val_00000293", "a/b/c", "000000", "cat (1)".replace(" ", "")):
            assert member_stem(key) == key


def test_json_names_member_is_what_the_documentation_says(tmp_path: Path) -> None:
    suite = TestTar()
    path, _ = suite.write(tmp_path, [sample("a.b", JPEG, name="a.b.JPEG", header=HEADER)])
    with tarfile.open(path) as archive, bounded():
        names = archive.getnames()
        content = archive.extractfile("a%2Eb.__name__")
        assert names == ["a%2Eb.__name__", "a%2Eb.jpg"]
        assert content is not None and json.load(content) == {"key": "a.b", "names": {"image": "a.b.JPEG"}}
