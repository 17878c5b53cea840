"""TFRecord shards: the suite of `packer.testing.formats`, and false claims in TFRecord files."""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c
from suites.containers import entry, example, feature, message, record_head, varint
from suites.containers import record as framed

from cache.errors import NotFlatError
from packer.formats import format_of_file
from packer.formats.base import Located, LocateOptions, PackedSample, ShardSpec
from packer.formats.tfrecord import masked_crc
from packer.testing.formats import (
    GIB,
    IMAGE,
    JPEG,
    FormatSuite,
    read_range,
    sample,
    two_samples,
)
from readers.table import NO_LABEL

X = example(image__encoded=b"x")


class TestTFRecord(FormatSuite):
    name = "tfrecord"
    hole = 32 << 20
    opening = example(image__key=b"hole", image__encoded=bytes(hole))[:-hole]

    @pytest.fixture(autouse=True)
    def holes_cost_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Reading 4 GiB of zeros takes seconds: give the records with holes out of memory."""
        real, whole = os.pread, self.opening + bytes(self.hole)

        def pread(descriptor: int, count: int, offset: int) -> bytes:
            return whole if count == len(whole) else real(descriptor, count, offset)

        monkeypatch.setattr(os, "pread", pread)

    def beyond_4_gib(self, folder: Path) -> tuple[Path, dict[str, bytes]]:
        """Records with holes for images, small ones because a record is read as a whole; then what our writer wrote."""
        path, _ = self.write(folder, [sample("last", JPEG), sample("very last", b"x")])
        real, opening, hole, count = path.read_bytes(), self.opening, self.hole, 130
        head = record_head(len(opening) + hole) + opening
        with open(path, "wb") as file:
            for _ in range(count):
                file.write(head)
                file.seek(hole + 4, os.SEEK_CUR)
            file.write(real)
        return path, {"last": JPEG, "very last": b"x"}

    def test_writer_states_offsets_beyond_4_gib(self, tmp_path: Path) -> None:
        path = tmp_path / "train.tfrecord"
        writer: Any = self.format.open_writer(path, ShardSpec("train", IMAGE))
        writer.add(PackedSample("a", 0, (b"first",), ("",), None))
        writer.flush()
        writer._file.position = os.lseek(writer._file.descriptor, 5 * GIB, os.SEEK_SET)
        writer.add(PackedSample("b", 0, (b"second",), ("",), None))
        offset = writer.finish().payloads["image"].offset[1]
        assert offset > 5 * GIB and read_range(path, (offset, 6)) == b"second"
        path.unlink()

    def after_cut(self, truth: list[Located], data: bytes, size: int) -> list[Located] | None:
        """A file that ends between two records is a shorter file, as for every TFRecord reader."""
        ends, position = {0: 0}, 0
        for count in range(1, len(truth) + 1):
            position += 12 + struct.unpack_from("<Q", data, position)[0] + 4
            ends[position] = count
        return truth[: ends[size]] if size in ends else None

    def must_notice(self, path: Path, data: bytes, truth: list[Located]) -> set[int]:
        """Harmless without check_payload: features that are not read, and the checksum of the data."""
        noticed, position = set[int](), 0
        for found in truth:
            length = struct.unpack_from("<Q", data, position)[0]
            noticed |= set(range(position, position + 12))
            names = ["image/encoded", "image/filename", "image/class/label", "image/class/synset"]
            names += ["mask/encoded", "mask/filename"] if "mask" in found.ranges else []
            for text in (*names, *found.names.values()):
                at = data.index(text.encode(), position)
                noticed |= set(range(at, at + len(text)))
            for at, n in found.ranges.values():
                noticed |= set(range(at, at + n))
            position += 12 + length + 4
        return noticed

    @pytest.mark.parametrize("mask", [0x01, 0xFF])
    def test_check_payload_notices_every_flip(self, tmp_path: Path, mask: int) -> None:
        path, _ = self.write(tmp_path, two_samples())
        data = path.read_bytes()
        silent = []
        for i in range(len(data)):
            path.write_bytes(data[:i] + bytes([data[i] ^ mask]) + data[i + 1 :])
            if self.outcome(path, LocateOptions(check_payload=True)) is not None:
                silent.append(i)
        assert silent == [], "flips that the record's own checksums did not show"

    def hostile(self, folder: Path, data: bytes) -> Path:
        path = folder / "hostile.tfrecord"
        path.write_bytes(data)
        return path

    @pytest.mark.parametrize("length", [1, 4, 5, 1 << 31, (1 << 40) + 1, 1 << 63, (1 << 64) - 17, (1 << 64) - 1])
    def test_lengths_past_the_end(self, tmp_path: Path, length: int) -> None:
        """Each with its right checksum; four bytes follow."""
        first = framed(X)
        self.refused(self.hostile(tmp_path, first + record_head(length) + b"1234"), "the file ends at .*truncated")

    @pytest.mark.parametrize(
        "data",
        [
            b"\x0a" + b"\xff" * 10,  # a length that never ends
            b"\x0a" + b"\xff" * 11 + b"\x01",
            b"\x0a" + b"\xff" * 9 + b"\x01" + b"rest",  # 2^64 - 1
            b"\x0a" + b"\x80" * 20 + b"\x00",
            b"\xff" * 12,
            b"\x0a",
            b"\x0a\x80",
            b"\x0a\x05abc",
            b"\x0b",  # a group, which protobuf dropped
            b"\x0c",
            b"\x0e\x01",
            b"\x09\x01",  # eight bytes, one there
            b"\x0d\x01",
            b"\x08\x80",
            message(1, message(1, message(1, b"k"), length=99)),
            message(1, message(1, message(1, b"k", length=99))),
            message(1, message(1, message(1, b"k") + message(2, message(1, message(1, b"v", length=2))))),
            message(1, message(1, message(1, b"k") + message(2, message(1, message(1, b"v"), length=9)))),
            example(entry("image/class/label", message(3, message(1, b"\x80")))),
            example(entry("image/class/label", message(3, b"\x08" + b"\xff" * 11))),
        ],
        ids=lambda data: data[:24].hex(),
    )
    def test_protobuf_that_is_none(self, tmp_path: Path, data: bytes) -> None:
        self.refused(self.hostile(tmp_path, framed(data)), "record 0 at byte 0: (?!no feature)")

    def test_more_values_than_anybody_has(self, tmp_path: Path) -> None:
        label = entry("image/class/label", message(3, message(1, bytes((1 << 20) + 1))))
        self.refused(self.hostile(tmp_path, framed(example(label))), "more than 1048576 values")

    @pytest.mark.parametrize(
        ("label", "expected"),
        [
            (message(3, message(1, b"\x05")), 5),  # packed
            (message(3, b"\x08\x05"), 5),  # not packed
            (message(3, message(1, varint((1 << 64) - 1))), NO_LABEL),
            (message(3, b""), NO_LABEL),
            (b"", NO_LABEL),
        ],
    )
    def test_ways_to_write_a_label(self, tmp_path: Path, label: bytes, expected: int) -> None:
        data = example(entry("image/class/label", label), image__encoded=b"x")
        assert self.locate(self.hostile(tmp_path, framed(data)))[0].label == expected

    @pytest.mark.parametrize("label", [message(3, message(1, b"\x05\x06")), message(2, message(1, b"\0\0\0\0"))])
    def test_labels_that_are_not_one_whole_number(self, tmp_path: Path, label: bytes) -> None:
        data = example(entry("image/class/label", label), image__encoded=b"x")
        self.refused(self.hostile(tmp_path, framed(data)), "the label 'image/class/label' holds .* expected one int64")

    def test_the_last_of_a_repeated_name_wins(self, tmp_path: Path) -> None:
        data = example(entry("image/encoded", feature(b"no")), image__key=b"k", image__encoded=b"yes")
        path = self.hostile(tmp_path, framed(data))
        assert read_range(path, self.locate(path)[0].ranges["image"]) == b"yes"

    def test_options_name_the_features(self, tmp_path: Path) -> None:
        data = example(png=b"image", seg=b"mask", y=5)
        path = self.hostile(tmp_path, framed(data))
        options = LocateOptions(image_key="png", label_key="y", extra_fields={"mask": "seg"}, label_offset=1)
        [found] = self.format.locate(path, options)
        payloads = {field: read_range(path, place) for field, place in found.ranges.items()}
        assert (found.label, payloads) == (4, {"image": b"image", "mask": b"mask"})
        self.refused(path, "no feature 'image/encoded'; it has png, seg, y; .* image_key='KEY'")
        self.refused(path, "no feature 'jpg'; it has png, seg, y", LocateOptions(image_key="jpg"))
        self.refused(path, "no feature 'label'", LocateOptions(image_key="png", label_key="label"))

    def test_compressed_files_are_refused(self, tmp_path: Path) -> None:
        path = self.hostile(tmp_path, gzip.compress(framed(X)))
        self.refused(path, f"gzip.* packer convert {path} --to tfrecord")
        with pytest.raises(NotFlatError, match=f"gzip.* packer convert {path} --to "):
            format_of_file(path)
        self.refused(self.hostile(tmp_path, zlib.compress(framed(X))), "wrong length checksum.*zlib")

    def test_a_first_record_whose_length_looks_like_gzip(self, tmp_path: Path) -> None:
        """0x8b1f bytes: the file starts with the magic of gzip."""
        size = 0x8B1F - (len(example(image__encoded=bytes(35_000))) - 35_000)
        path = self.hostile(tmp_path, framed(example(image__encoded=bytes(size))))
        assert path.read_bytes()[:2] == b"\x1f\x8b", "the test's record has another length"
        assert self.locate(path)[0].ranges["image"][1] == size
        assert format_of_file(path) is self.format


def test_masked_checksum_of_tensorflow() -> None:
    """A vector of tensorflow/core/lib/hash/crc32c_test.cc: crc32c of 32 zeros, then the mask by hand."""
    crc = crc32c(bytes(32))
    assert crc == 0x8A9136AA
    rotated = int(f"{crc:032b}"[-15:] + f"{crc:032b}"[:-15], 2)
    assert masked_crc(crc) == (rotated + 0xA282EAD8) % 2**32
