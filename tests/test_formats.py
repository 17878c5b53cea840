"""Formats: the suite of `packer.testing.formats`, and false claims in files; detection of the format; checksums."""

from __future__ import annotations

import gzip
import json
import os
import struct
import sys
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st
from suites.containers import BLOCK, block, entry, example, feature, message, record_head, varint
from suites.containers import record as framed

from cache.checksums import JoinedChecksum, crc32c_combine, crc32c_shift
from cache.errors import FormatError, NotFlatError
from packer.formats import format_named, format_of_file, writable_formats
from packer.formats.base import Located, LocateOptions, PackedSample, ShardSpec
from packer.formats.tar import member_stem
from packer.formats.tfrecord import masked_crc
from packer.testing.formats import (
    FIELDS,
    GIB,
    HEADER,
    IMAGE,
    JPEG,
    KEYS,
    LOOKALIKES,
    FormatSuite,
    bounded,
    read_range,
    sample,
    two_samples,
)
from readers.table import NO_LABEL


def beyond(writer: Any, file: str | None) -> list[int]:
    """Two samples around a hole of 5 GiB, by which the writer's file and position are moved; returns the stated
    offsets."""
    writer.add(PackedSample("a", 0, (b"first",), ("",), None))
    writer.flush()
    out = writer._files[file] if file else writer._file
    out.position = os.lseek(out.descriptor, 5 * GIB, os.SEEK_CUR)
    for key, image in (("b", b"second"), ("c", JPEG)):
        writer.add(PackedSample(key, 1, (image,), ("",), None))
    return list(writer.finish().payloads["image"].offset)


def used(data: bytes) -> list[int]:
    """The positions of the non-zero bytes, and their neighbours."""
    places = {j for i, byte in enumerate(data) if byte for j in (i - 1, i, i + 1)}
    return sorted(places & {*range(len(data))})


# --- HDF5 --------------------------------------------------------------------------------------------------------
class TestHdf5(FormatSuite):
    name = "hdf5"
    walks = False

    def beyond_4_gib(self, folder: Path) -> tuple[Path, dict[str, bytes]]:
        path = folder / "train-00000-of-00001.h5"
        offsets = beyond(self.format.open_writer(path, ShardSpec("train", IMAGE)), "image")
        assert [located.ranges["image"][0] for located in self.locate(path)] == offsets, "finish() and locate differ"
        return path, {"b": b"second", "c": JPEG}

    def after_cut(self, truth: list[Located], data: bytes, size: int) -> list[Located] | None:
        return None

    def test_objects_that_a_profiler_keeps_change_no_byte(self, tmp_path: Path) -> None:
        """As that of a Dask worker does for some frames, at random."""
        samples, kept = [sample(f"k{i}", bytes([i]) * 50, name=f"k{i}.jpg") for i in range(5)], list[Any]()
        (tmp_path / "alone").mkdir()
        (tmp_path / "profiled").mkdir()
        plain, _ = self.write(tmp_path / "alone", samples)
        sys.setprofile(lambda frame, event, value: kept.append((frame, value)))
        try:
            profiled, _ = self.write(tmp_path / "profiled", samples)
        finally:
            sys.setprofile(None)
        assert kept and profiled.read_bytes() == plain.read_bytes()

    def flips(self, data: bytes) -> Iterable[int]:
        """Most of a small file is unused space."""
        assert b"GCOL" not in data, "a global heap, in which one flipped bit makes the HDF5 library loop for ever"
        return used(data)

    def must_notice(self, path: Path, data: bytes, truth: list[Located]) -> set[int]:
        """Payloads, tables and keys. Harmless: free space, caches of statistics, reserved bytes of HDF5."""
        ranges = [place for located in truth for place in located.ranges.values()]
        with h5py.File(path) as file:
            for name in ("label", "image/offset", "image/length", "mask/offset"):
                ranges.append((file[name].id.get_offset(), file[name].id.get_storage_size()))
            ranges.append((file["mask/length"].id.get_offset(), 8))  # of the first sample; the second has no mask
            for name in ("key", "image/name"):
                chunk = file[name].id.get_chunk_info(0)
                ranges.append((chunk.byte_offset, chunk.size - 5))  # the last bits of the chunk are padding
        return {i for at, n in ranges for i in range(at, at + n)} & set(self.flips(data))

    @pytest.mark.parametrize("count", [2, 5000], ids=["few", "more than an attribute holds"])
    def test_describe(self, tmp_path: Path, count: int) -> None:
        classes = tuple(f"class {i} " + "\u00e9" * (i % 60) for i in range(count))
        path, _ = self.write(tmp_path, two_samples(), label_offset=1, classes=classes)
        assert self.format.describe(path) == ShardSpec("train", FIELDS, classes, 1)
        assert len(self.locate(path)) == 2

    @pytest.mark.parametrize("name", ["image", "image/data", "image/offset", "image/length", "label", "key", "mask"])
    def test_false_or_missing_tables(self, tmp_path: Path, name: str) -> None:
        lies: dict[str, list[Any]] = {
            "image/offset": [np.array([0, 2**64 - 2], np.uint64), [-1, 0], [[0, 0]], [b"0", b"1"], [0, 1 << 40]],
            "image/length": [np.array([2**64 - 1, 0], np.uint64), [5, -5], [5.0, np.nan]],
            "label": [[0], [b"0", b"cat"]],
            "key": [[b"a"], b"a"],
        }
        path, _ = self.write(tmp_path, two_samples())
        for value in (*lies.get(name, ()), None, h5py.SoftLink("/nowhere")):
            with h5py.File(path, "r+") as file:
                del file[name]
                if value is not None:
                    file[name] = value
            self.refused(path)
            if value is None:
                with h5py.File(path, "r+") as file:
                    file.require_group(f"{name}/sub")
                self.refused(path)

    @pytest.mark.parametrize("name", ["version", "split", "fields", "field_kinds", "label_offset", "classes"])
    def test_false_or_missing_attributes(self, tmp_path: Path, name: str) -> None:
        lies: dict[str, list[Any]] = {
            "version": [2, "one"],
            "fields": [["image"], ["image", "mask", "nowhere"], 5],
            "field_kinds": [["image"]],
            "label_offset": ["x"],
            "classes": [5],
        }
        path, _ = self.write(tmp_path, two_samples())
        for value in lies.get(name, []):
            with h5py.File(path, "r+") as file:
                file.attrs[name] = value
            self.refused(path, "version 2, .*upgrade" if value == 2 else None)
        if name != "classes":
            with h5py.File(path, "r+") as file:
                del file.attrs[name]
            self.refused(path, "HDF5 cannot read it")

    def foreign(self, folder: Path, **data_sets: Any) -> Path:
        """A file made with h5py: name=value, or name=(value, options of create_dataset)."""
        path = folder / "foreign.h5"
        with h5py.File(path, "w") as file:
            for name, value in data_sets.items():
                data, options = value if isinstance(value, tuple) else (value, {})
                file.create_dataset(name, data=data, **options)
        return path

    @pytest.mark.parametrize(
        ("images", "why"),
        [
            ((np.arange(100, dtype=np.uint8), {"chunks": (10,), "compression": "gzip"}), "chunked with gzip"),
            ((np.arange(100, dtype=np.uint8), {"chunks": (10,)}), "is chunked"),
            (np.zeros((2, 8, 8, 3), np.uint8), "array of uint8 with shape"),
            (np.zeros(100, np.float32), "has float32 of shape .*; expected encoded images"),
            (np.uint8(5), "has uint8 of shape .*; expected encoded images"),
        ],
    )
    def test_images_that_are_not_flat_or_missing(self, tmp_path: Path, images: Any, why: str) -> None:
        path = self.foreign(tmp_path, images=images, offsets=np.array([0, 50]))
        if "expected" in why:
            self.refused(path, why)
            return
        with pytest.raises(NotFlatError, match=f"{why}.* packer convert {path} --to hdf5"):
            list(self.format.locate(path, LocateOptions()))

    @pytest.mark.parametrize("how", ["variable length", "compact", "external", "never written", "link", "virtual"])
    def test_images_without_their_bytes_in_the_file(self, tmp_path: Path, how: str) -> None:
        path = self.foreign(tmp_path, offsets=np.array([0, 50], np.uint64))
        data = np.arange(100, dtype=np.uint8)
        with h5py.File(path, "r+") as file, h5py.File(tmp_path / "other.h5", "w") as other:
            other["images"] = data
            if how == "variable length":
                file.create_dataset("images", (2,), h5py.vlen_dtype(np.uint8))[0] = data
            elif how == "compact":
                plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                plist.set_layout(h5py.h5d.COMPACT)
                h5py.h5d.create(file.id, b"images", h5py.h5t.STD_U8LE, h5py.h5s.create_simple((100,)), plist)
                file["images"][:] = data
            elif how == "external":
                file.create_dataset("images", (100,), np.uint8, external=str(tmp_path / "raw.bin"))[:] = data
            elif how == "never written":
                file.create_dataset("images", (100,), np.uint8)
            elif how == "link":
                file["images"] = h5py.ExternalLink("other.h5", "/images")
            else:
                layout = h5py.VirtualLayout((100,), np.uint8)
                layout[:] = h5py.VirtualSource(other["images"])
                file.create_virtual_dataset("images", layout)
        elsewhere = how in ("external", "link", "virtual")  # `convert` does not follow it either
        with pytest.raises(NotFlatError, match=" h5repack " if elsewhere else f" packer convert {path} --to hdf5"):
            list(self.format.locate(path, LocateOptions()))

    @pytest.mark.parametrize(
        ("match", "tables"),
        [
            ("no table of offsets", [{}]),
            ("do not fit", [{"offsets": [0, 101]}, {"offsets": [50, 0]}, {"offsets": [-1, 50]},
                            {"offsets": [0, 50], "lengths": [50, 51]}, {"offsets": [0, 50], "lengths": [50, -1]},
                            {"offsets": [0, 50], "lengths": [50]},
                            {"offsets": np.array([2**64 - 1, 0], np.uint64), "lengths": [2, 2]}]),
            ("expected 2 whole numbers", [{"offsets": [0, 50], "labels": [0, 1, 2]},
                                          {"offsets": [0, 50], "labels": [0.5, 1]}]),
            ("not an int64", [{"offsets": [0, 50], "labels": np.array([0, 2**63], np.uint64)}]),
        ],
    )  # fmt: skip
    def test_false_foreign_tables(self, tmp_path: Path, match: str, tables: list[dict[str, Any]]) -> None:
        for some in tables:
            self.refused(self.foreign(tmp_path, images=np.arange(100, dtype=np.uint8), **some), match)

    def test_invalid_foreign_labels_and_files(self, tmp_path: Path) -> None:
        path = self.foreign(tmp_path, a=np.arange(10, dtype=np.uint8))
        for label in ("cat", [1, 2], 2.5, 2.5 + 1j, 2**63):
            with h5py.File(path, "r+") as file:
                file["a"].attrs["label"] = label
            self.refused(path)
        self.refused(self.foreign(tmp_path, x=np.zeros((3, 3))), "/x holds an array of float64")
        self.refused(path, "no 'y'; it has x", LocateOptions(image_key="y"))

    def test_a_user_block_moves_every_range(self, tmp_path: Path) -> None:
        path = tmp_path / "block.h5"
        with h5py.File(path, "w", userblock_size=1024) as file:
            file["images"] = np.arange(100, dtype=np.uint8)
            file["offsets"] = np.array([0, 60])
        ranges = [located.ranges["image"] for located in self.locate(path)]
        assert [read_range(path, place) for place in ranges] == [bytes(range(60)), bytes(range(60, 100))]


# --- TFRecord ----------------------------------------------------------------------------------------------------
X = example(image__encoded=b"x")


class TestTFRecord(FormatSuite):
    name = "tfrecord"
    hole = 32 << 20
    opening = example(image__key=b"hole", image__encoded=bytes(hole))[:-hole]

    @pytest.fixture(autouse=True)
    def holes_cost_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Reading 4 GiB of zeros takes seconds: serve the records with holes from memory."""
        real, whole = os.pread, self.opening + bytes(self.hole)

        def pread(descriptor: int, count: int, offset: int) -> bytes:
            return whole if count == len(whole) else real(descriptor, count, offset)

        monkeypatch.setattr("packer.formats.base.pread", pread)

    def beyond_4_gib(self, folder: Path) -> tuple[Path, dict[str, bytes]]:
        """Records with holes as images, small ones because a record is read as a whole; then the records of our
        writer."""
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
        offset = beyond(self.format.open_writer(path, ShardSpec("train", IMAGE)), None)[1]
        assert offset > 5 * GIB and read_range(path, (offset, 6)) == b"second"
        path.unlink()

    def after_cut(self, truth: list[Located], data: bytes, size: int) -> list[Located] | None:
        """A file that ends between two records is a valid shorter file, as for every TFRecord reader."""
        ends, position = {0: 0}, 0
        for count in range(1, len(truth) + 1):
            position += 12 + struct.unpack_from("<Q", data, position)[0] + 4
            ends[position] = count
        return truth[: ends[size]] if size in ends else None

    def must_notice(self, path: Path, data: bytes, truth: list[Located]) -> set[int]:
        """Harmless without check_payload: features that are not read, and the checksum of the data."""
        noticed, position = set[int](), 0
        for located in truth:
            length = struct.unpack_from("<Q", data, position)[0]
            noticed |= set(range(position, position + 12))
            names = ["image/encoded", "image/filename", "image/class/label", "image/class/synset"]
            names += ["mask/encoded", "mask/filename"] if "mask" in located.ranges else []
            for text in (*names, *located.names.values()):
                at = data.index(text.encode(), position)
                noticed |= set(range(at, at + len(text)))
            for at, n in located.ranges.values():
                noticed |= set(range(at, at + n))
            position += 12 + length + 4
        return noticed

    def test_check_payload_notices_every_flip(self, tmp_path: Path) -> None:
        path, _ = self.write(tmp_path, two_samples())
        data = path.read_bytes()
        silent = []
        for i in range(len(data)):
            path.write_bytes(data[:i] + bytes([data[i] ^ (0x01, 0xFF)[i % 2]]) + data[i + 1 :])
            if self.outcome(path, LocateOptions(check_payload=True)) is not None:
                silent.append(i)
        assert silent == [], "the checksums of the record missed a flip"

    def hostile(self, folder: Path, data: bytes) -> Path:
        path = folder / "hostile.tfrecord"
        path.write_bytes(data)
        return path

    @pytest.mark.parametrize("length", [1, 4, 5, 1 << 31, (1 << 40) + 1, 1 << 63, (1 << 64) - 17, (1 << 64) - 1])
    def test_lengths_past_the_end(self, tmp_path: Path, length: int) -> None:
        """Each has a correct checksum; four bytes follow."""
        self.refused(self.hostile(tmp_path, framed(X) + record_head(length) + b"1234"), "the file ends at .*truncated")

    @pytest.mark.parametrize(
        "data",
        [
            # Lengths that never end, or end beyond the data; groups, which protobuf dropped; numbers that are cut off.
            b"\x0a" + b"\xff" * 10, b"\x0a" + b"\xff" * 9 + b"\x01rest", b"\x0a" + b"\x80" * 20 + b"\x00", b"\x0a",
            b"\x0a\x05abc", b"\x0b", b"\x0e\x01", b"\x09\x01", b"\x0d\x01", b"\x08\x80",
            message(1, message(1, message(1, b"k"), length=99)),
            message(1, message(1, message(1, b"k", length=99))),
            message(1, message(1, message(1, b"k") + message(2, message(1, message(1, b"v", length=2))))),
            message(1, message(1, message(1, b"k") + message(2, message(1, message(1, b"v"), length=9)))),
            example(entry("image/class/label", message(3, message(1, b"\x80")))),
            example(entry("image/class/label", message(3, b"\x08" + b"\xff" * 11))),
        ],
        ids=lambda data: data[:24].hex(),
    )  # fmt: skip
    def test_invalid_protobuf(self, tmp_path: Path, data: bytes) -> None:
        self.refused(self.hostile(tmp_path, framed(data)), "record 0 at byte 0: (?!no feature)")

    @pytest.mark.parametrize(
        ("label", "expected"),
        [
            (message(3, message(1, b"\x05")), 5),  # packed
            (message(3, b"\x08\x05"), 5),  # not packed
            (b"\x20\x01" + message(3, b"\x08\x05"), 5),  # after an unknown field
            (message(3, message(1, varint((1 << 64) - 1))), NO_LABEL),
            (message(3, b""), NO_LABEL),
            (b"", NO_LABEL),
            (message(3, message(1, b"\x05\x06")), "the label 'image/class/label' holds .* expected one int64"),
            (message(2, message(1, b"\0\0\0\0")), "the label 'image/class/label' holds .* expected one int64"),
            (message(3, message(1, bytes((1 << 20) + 1))), "more than 1048576 values"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_ways_to_write_a_label(self, tmp_path: Path, label: bytes, expected: int | str) -> None:
        path = self.hostile(tmp_path, framed(example(entry("image/class/label", label), image__encoded=b"x")))
        if isinstance(expected, str):
            self.refused(path, expected)
        else:
            assert self.locate(path)[0].label == expected

    def test_the_last_feature_of_a_repeated_name_counts(self, tmp_path: Path) -> None:
        data = example(entry("image/encoded", feature(b"no")), image__key=b"k", image__encoded=b"yes")
        path = self.hostile(tmp_path, framed(b"\x10\x01" + data))  # an unknown field comes first
        assert read_range(path, self.locate(path)[0].ranges["image"]) == b"yes"

    def test_options_name_the_features(self, tmp_path: Path) -> None:
        path = self.hostile(tmp_path, framed(example(png=b"image", seg=b"mask", y=5)))
        options = LocateOptions(image_key="png", label_key="y", extra_fields={"mask": "seg"}, label_offset=1)
        [located] = self.format.locate(path, options)
        payloads = {field: read_range(path, place) for field, place in located.ranges.items()}
        assert (located.label, payloads) == (4, {"image": b"image", "mask": b"mask"})
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
    """A test vector of tensorflow/core/lib/hash/crc32c_test.cc: the CRC32C of 32 zeros, masked by hand."""
    crc = crc32c(bytes(32))
    assert crc == 0x8A9136AA
    rotated = int(f"{crc:032b}"[-15:] + f"{crc:032b}"[:-15], 2)
    assert masked_crc(crc) == (rotated + 0xA282EAD8) % 2**32


# --- tar ---------------------------------------------------------------------------------------------------------
def member(name: bytes, data: bytes, kind: bytes = b"0") -> bytes:
    return block(name, len(data), kind) + data + bytes(-len(data) % BLOCK)


def pax(*records: bytes) -> bytes:
    return member(b"PaxHeader", b"".join(records), b"x")


def record(keyword: bytes, value: bytes) -> bytes:
    """A PAX record; its length includes its own digits."""
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

    def flips(self, data: bytes) -> Iterable[int]:
        """Most of a small file is padding: of the padding only its ends and those of blocks, and the block of zeros at
        the end."""
        last = len(data.rstrip(b"\0")) // BLOCK
        ends = {end + i for end in range(0, len(data), BLOCK) for i in (-1, 0, 1)} - {-1}
        return sorted({*used(data), *ends, *range((last + 1) * BLOCK, (last + 2) * BLOCK)})

    def after_cut(self, truth: list[Located], data: bytes, size: int) -> list[Located] | None:
        """One whole block of zeros after the last member is an end that every tar program accepts."""
        last = max(at + n for located in truth for at, n in located.ranges.values())
        return truth if size >= last + -last % BLOCK + BLOCK else None

    def must_notice(self, path: Path, data: bytes, truth: list[Located]) -> set[int]:
        """Harmless: padding, the two bytes that end the checksum field, and everything after the first block of
        zeros."""
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
        ("match", "sizes"),
        [
            ("truncated", [b"00000001001\0", b"77777777777\0", b"\x80" + (1 << 40).to_bytes(11, "big"),
                           b"\x80\0\0\0" + ((1 << 63) - 1).to_bytes(8, "big")]),
            ("impossible number", [b"\x80" + (1 << 80).to_bytes(11, "big"), b"\xff" * 10 + b"\xfc\x00"]),  # -1024
            ("not an octal number", [b"-0000002000", b"+0000000010", b"0o000000010", b"00000_00010", b"00000000089",
                                     b"12345 54321"]),
        ],
    )  # fmt: skip
    def test_false_sizes(self, tmp_path: Path, match: str, sizes: list[bytes]) -> None:
        """The first size is one byte too large; -2000 (octal) would lead back to the same header."""
        for size in sizes:
            data = member(b"a.jpg", b"first") + block(b"b.jpg", size) + bytes(BLOCK)
            self.refused(self.hostile(tmp_path, data, b""), match)

    @pytest.mark.parametrize("size", ["-1", "-1024", "²", "٣", "1e3", "0x10", "", " 5", "9" * 18, "9" * 40, "5_0"])
    def test_false_pax_sizes(self, tmp_path: Path, size: str) -> None:
        data = pax(record(b"size", size.encode())) + member(b"a.jpg", b"12345")
        self.refused(self.hostile(tmp_path, data), "PAX size|truncated")

    def test_correct_sizes(self, tmp_path: Path) -> None:
        binary = block(b"a.jpg", b"\x80" + (5).to_bytes(11, "big")) + b"12345" + bytes(BLOCK - 5)
        assert self.locate(self.hostile(tmp_path, binary))[0].ranges == {"image": (BLOCK, 5)}
        data = pax(record(b"size", b"5")) + block(b"a.jpg", 0) + b"12345" + bytes(BLOCK - 5) + member(b"b.jpg", b"b")
        assert [located.ranges["image"][1] for located in self.locate(self.hostile(tmp_path, data))] == [5, 1]

    @pytest.mark.parametrize(
        ("data", "match"),
        [
            *(
                (pax(body) + member(b"a.jpg", b"x"), "malformed PAX record")
                for body in (b"path=a", b"0 path=a\n", b"99 path=a\n", b"-9 path=a\n", b"9 path a\n", b" " * 30)
            ),
            (pax(record(b"comment", b"x" * (2 << 20))) + member(b"a.jpg", b"x"), "too large"),
            *(
                (member(b"a.jpg", b"x") + block(b"b.jpg", 0, kind), "a link or device")
                for kind in (b"1", b"2", b"3", b"4", b"6", b"Q", b"\xff")
            ),
            (member(b"a.jpg", b"x", b"S"), "sparse member"),
            (pax(record(b"GNU.sparse.major", b"1")) + member(b"a.jpg", b"x"), "sparse member"),
            (member(b"README", b"x"), "no extension.* packer convert "),
            (member(b"a.b.jpg", b"1") + member(b"a.b.jpg", b"2"), r"two members \.b\.jpg"),
            (member(b"a.jpg", b"1") + member(b"b.jpg", b"2") + member(b"a.cls", b"3"), "not adjacent"),
            (member(b"a.png", b"1") + member(b"a.image", b"2"), "two members for the field 'image'"),
            (member(b"a\xff.jpg", b"1"), "not UTF-8"),
            (pax(record(b"path", b"a\xff.jpg")) + member(b"a.jpg", b"1"), "not UTF-8"),
            (b"not a tar at all" * 100, "checksum|octal"),
            *(
                (member(b"a.cls", label) + member(b"a.jpg", b"x"), "whole number")
                for label in (b"cat", b"", b" ", b"1.5", b"0x1", b"1 2", b"9" * 19, b"-" + b"9" * 30, b"1" * 65)
            ),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_members_that_make_no_samples(self, tmp_path: Path, data: bytes, match: str) -> None:
        self.refused(self.hostile(tmp_path, data), match)

    @pytest.mark.parametrize("label", [b"7", b" 7\n", b"007"])
    def test_labels_of_other_programs(self, tmp_path: Path, label: bytes) -> None:
        path = self.hostile(tmp_path, member(b"a.cls", label) + member(b"a.jpg", b"x"))
        assert self.locate(path)[0].label == 7

    @pytest.mark.parametrize(
        "content",
        [
            b"", b"{", b"[]", b"\xff\xfe", b'{"key": "a"}', b'{"key": 1, "names": {}}', b'{"key": "a", "names": []}',
            b'{"key": "a", "names": {"image": 1}}', b'{"key": "\\ud800", "names": {}}',
            b'{"key": "a", "names": {"image": "\\udcff"}}', b'{"key": "a", "names": {}} more',
            b'{"key": ' + b"[" * 100_000, b'{"key": ' + b"9" * 10_000 + b', "names": {}}',
            b'{"key": "a", "names": {}}'.ljust(2 << 20),
        ],
        ids=lambda content: content[:40].decode("latin-1"),
    )  # fmt: skip
    def test_invalid_name_members(self, tmp_path: Path, content: bytes) -> None:
        data = member(b"a.__name__", content) + member(b"a.jpg", b"x")
        self.refused(self.hostile(tmp_path, data), "is not a name|too large for a name")

    def test_stems_are_distinct_short_and_split_at_their_only_dot(self) -> None:
        keys = {*KEYS, *LOOKALIKES, *(f"{key}/x" for key in KEYS)}
        keys |= {member_stem(key) for key in keys}  # including hashes of long keys, and escaped keys
        stems = {key: member_stem(key) for key in keys}
        assert len(set(stems.values())) == len(keys), "two keys share a stem, so their members would be one sample"
        for key, stem in stems.items():
            assert "." not in stem.rpartition("/")[2], f"the stem {stem!r} of {key!r} is split at the wrong dot"
            assert len(stem.encode()) <= 76 and not set(stem) & set(" \t\n\0"), f"the stem {stem!r} of {key!r}"
        for key in ("n01440764/ILSVRC2012_val_00000293", "a/b/c", "000000", "cat(1)"):
            assert member_stem(key) == key

    def test_the_names_member_is_as_documented(self, tmp_path: Path) -> None:
        path, _ = self.write(tmp_path, [sample("a.b", JPEG, name="a.b.JPEG", header=HEADER)])
        with tarfile.open(path) as archive, bounded():
            assert archive.getnames() == ["a%2Eb.__name__", "a%2Eb.jpg"]
            content = archive.extractfile("a%2Eb.__name__")
            assert content is not None and json.load(content) == {"key": "a.b", "names": {"image": "a.b.JPEG"}}


# --- detection of the format -------------------------------------------------------------------------------------
def test_formats_by_name() -> None:
    assert [format_named(name).name for name in writable_formats()][:3] == ["hdf5", "tfrecord", "tar"]
    with pytest.raises(FormatError, match="no format 'zip'; there are hdf5, tfrecord, tar"):
        format_named("zip")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("x.h5", b"\x89HDF\r\n\x1a\n" + bytes(600), "hdf5"),
        ("anything", b"\x89HDF\r\n\x1a\n" + bytes(600), "hdf5"),
        ("anything", block(b"a.jpg", 0), "tar"),
        ("x.tar", bytes(1024), "tar"),
        ("x.tfrecord", b"", "tfrecord"),
        ("train-00000-of-00001", framed(b""), "tfrecord"),
        ("a.tfrecord-00001-of-00002", framed(b""), "tfrecord"),
        ("x.jpg", JPEG, "neither an HDF5 file, a TFRecord file"),
        ("x.tar", gzip.compress(block(b"a.jpg", 0), mtime=0), "gzip.* packer convert "),
        ("x.tar", b"short", "neither"),
    ],
)
def test_format_of_a_file(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    if expected in writable_formats():
        assert format_of_file(tmp_path / name).name == expected
        return
    with pytest.raises(FormatError, match=expected):
        format_of_file(tmp_path / name)


# --- checksums ---------------------------------------------------------------------------------------------------
@given(st.lists(st.tuples(st.binary(max_size=300), st.booleans()), max_size=40), st.booleans())
def test_a_checksum_joined_from_parts(parts: list[tuple[bytes, bool]], many: bool) -> None:
    joined, crc = JoinedChecksum(), 0
    for data, known in parts * (200 if many else 1):
        crc = crc32c(data, crc)
        joined.add(*((b"", crc32c(data), len(data)) if known else (data,)))
        if not many:
            assert joined.value() == crc
    assert joined.value() == crc == joined.value()


def test_checksums_over_any_length() -> None:
    """Lengths far beyond what a test can checksum: the scalar method is the reference."""
    lengths = np.array([0, 1, 255, 256, 4096, (1 << 20) + 7, 1 << 33, (1 << 40) - 1, (1 << 63) + 5], np.uint64)
    crcs = np.array([0xDEADBEEF, 1, 1 << 31, 0xFFFFFFFF, 0, 5, 6, 7, 8], np.uint32)
    expected = [crc32c_combine(crc, 0, length) for crc, length in zip(crcs.tolist(), lengths.tolist(), strict=True)]
    assert crc32c_shift(crcs, lengths).tolist() == expected
    assert crc32c_shift(crcs[:0], lengths[:0]).tolist() == []
