"""HDF5 shards: the suite of `packer.testing.formats`, and false claims in HDF5 files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from cache.errors import NotFlatError
from packer.formats.base import Located, LocateOptions, PackedSample, ShardSpec
from packer.testing.formats import (
    FIELDS,
    GIB,
    IMAGE,
    JPEG,
    FormatSuite,
    read_range,
    two_samples,
)


class TestHdf5(FormatSuite):
    name = "hdf5"
    walks = False

    def beyond_4_gib(self, folder: Path) -> tuple[Path, dict[str, bytes]]:
        """Our writer, its file and its counter moved on by 5 GiB between two samples."""
        path = folder / "train-00000-of-00001.h5"
        writer: Any = self.format.open_writer(path, ShardSpec("train", IMAGE))
        writer.add(PackedSample("a", 0, (b"first",), ("",), None))
        writer.flush()
        file = writer._files["image"]
        file.position = os.lseek(file.descriptor, 5 * GIB, os.SEEK_CUR)
        for key, image in (("b", b"second"), ("c", JPEG)):
            writer.add(PackedSample(key, 1, (image,), ("",), None))
        offsets = list(writer.finish().payloads["image"].offset)
        assert [found.ranges["image"][0] for found in self.locate(path)] == offsets, "finish() and locate differ"
        return path, {"b": b"second", "c": JPEG}

    def after_cut(self, truth: list[Located], data: bytes, size: int) -> list[Located] | None:
        return None

    def flips(self, data: bytes) -> Iterable[int]:
        """Most of a small file is unused space: take what is not zero, and its neighbours."""
        assert b"GCOL" not in data, "a global heap: one flipped bit in it makes the HDF5 library loop for ever"
        used = {i for i, byte in enumerate(data) if byte}
        return sorted({j for i in used for j in (i - 1, i, i + 1) if 0 <= j < len(data)})

    def must_notice(self, path: Path, data: bytes, truth: list[Located]) -> set[int]:
        """Payloads, tables and keys. Harmless: free space, caches of statistics, reserved bytes of HDF5."""
        noticed = {i for found in truth for at, n in found.ranges.values() for i in range(at, at + n)}
        with h5py.File(path) as file:
            tables = [file["label"], file["image/offset"], file["image/length"], file["mask/offset"]]
            for table in tables:
                noticed |= set(range(table.id.get_offset(), table.id.get_offset() + table.id.get_storage_size()))
            start = file["mask/length"].id.get_offset()
            noticed |= set(range(start, start + 8))  # of the first sample; the second has no mask
            for strings in (file["key"], file["image/name"]):
                chunk = strings.id.get_chunk_info(0)
                noticed |= set(
                    range(chunk.byte_offset, chunk.byte_offset + chunk.size - 5)
                )  # its last bits are padding
        return noticed & set(self.flips(data))

    def test_describe(self, tmp_path: Path) -> None:
        path, _ = self.write(tmp_path, two_samples(), label_offset=1, classes=("cat", "d\u00f6g"))
        spec = self.format.describe(path)
        assert spec == ShardSpec("train", FIELDS, ("cat", "d\u00f6g"), 1)

    def test_more_classes_than_an_attribute_holds(self, tmp_path: Path) -> None:
        classes = tuple(f"class {i} " + "\u00e9" * (i % 60) for i in range(5000))
        path, _ = self.write(tmp_path, two_samples(), classes=classes)
        spec = self.format.describe(path)
        assert spec is not None and spec.classes == classes
        assert len(self.locate(path)) == 2

    @pytest.mark.parametrize(
        ("table", "values"),
        [
            ("image/offset", np.array([0, 1 << 40], np.uint64)),
            ("image/offset", np.array([0, 2**64 - 2], np.uint64)),
            ("image/length", np.array([0, 1 << 40], np.uint64)),
            ("image/length", np.array([2**64 - 1, 0], np.uint64)),
            ("image/length", np.array([5, -5], np.int64)),
            ("image/length", np.array([5.0, np.nan])),
            ("image/offset", np.array([-1, 0], np.int64)),
            ("image/offset", np.array([0], np.uint64)),
            ("image/offset", np.array([[0, 0]], np.uint64)),
            ("image/offset", np.array([b"0", b"1"])),
            ("label", np.array([0, np.nan])),
            ("label", np.array([b"0", b"cat"])),
            ("label", np.array([0], np.int64)),
            ("key", np.array([b"a"])),
            ("key", np.array(b"a")),
        ],
    )
    def test_tables_that_lie(self, tmp_path: Path, table: str, values: np.ndarray[Any, Any]) -> None:
        path, _ = self.write(tmp_path, two_samples())
        with h5py.File(path, "r+") as file:
            del file[table]
            file[table] = values
        self.refused(path)

    @pytest.mark.parametrize("name", ["image", "image/data", "image/offset", "image/length", "label", "key", "mask"])
    def test_tables_that_are_missing_or_something_else(self, tmp_path: Path, name: str) -> None:
        path, _ = self.write(tmp_path, two_samples())
        with h5py.File(path, "r+") as file:
            del file[name]
        self.refused(path)
        with h5py.File(path, "r+") as file:
            file.require_group(f"{name}/sub")
        self.refused(path)
        with h5py.File(path, "r+") as file:
            del file[name]
            file[name] = h5py.SoftLink("/nowhere")
        self.refused(path)

    @pytest.mark.parametrize(
        ("attribute", "value"),
        [
            ("version", 2),
            ("version", "one"),
            ("label_offset", "x"),
            ("fields", ["image"]),
            ("fields", ["image", "mask", "nowhere"]),
            ("field_kinds", ["image"]),
            ("fields", 5),
            ("classes", 5),
        ],
    )
    def test_attributes_that_lie(self, tmp_path: Path, attribute: str, value: object) -> None:
        path, _ = self.write(tmp_path, two_samples())
        with h5py.File(path, "r+") as file:
            file.attrs[attribute] = value
        self.refused(path, "version 2, .*upgrade" if value == 2 else None)

    @pytest.mark.parametrize("attribute", ["version", "split", "fields", "field_kinds", "label_offset"])
    def test_attributes_that_are_missing(self, tmp_path: Path, attribute: str) -> None:
        path, _ = self.write(tmp_path, two_samples())
        with h5py.File(path, "r+") as file:
            del file.attrs[attribute]
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
            ((np.arange(100, dtype=np.uint8), {"chunks": (10,), "compression": "lzf"}), "chunked with lzf"),
            ((np.arange(100, dtype=np.uint8), {"chunks": (10,)}), "is chunked"),
            (np.zeros((2, 8, 8, 3), np.uint8), "array of uint8 with shape"),
        ],
    )
    def test_images_that_are_not_flat(self, tmp_path: Path, images: Any, why: str) -> None:
        path = self.foreign(tmp_path, images=images, offsets=np.array([0, 50]))
        with pytest.raises(NotFlatError, match=f"{why}.* packer convert {path} --to hdf5"):
            list(self.format.locate(path, LocateOptions()))

    @pytest.mark.parametrize("images", [np.zeros(100, np.float32), np.uint8(5)])
    def test_data_sets_that_hold_no_images(self, tmp_path: Path, images: Any) -> None:
        path = self.foreign(tmp_path, images=images, offsets=np.array([0, 50]))
        self.refused(path, f"/images holds {images.dtype} of shape .*; expected encoded images")

    @pytest.mark.parametrize("how", ["variable length", "compact", "external", "never written", "link", "virtual"])
    def test_images_without_bytes_of_their_own_in_the_file(self, tmp_path: Path, how: str) -> None:
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
        elsewhere = how in ("external", "link", "virtual")  # which `convert` does not follow either
        with pytest.raises(NotFlatError, match=" h5repack " if elsewhere else f" packer convert {path} --to hdf5"):
            list(self.format.locate(path, LocateOptions()))

    @pytest.mark.parametrize(
        ("tables", "match"),
        [
            ({}, "no table of offsets"),
            ({"offsets": np.array([0, 101])}, "do not fit"),
            ({"offsets": np.array([50, 0])}, "do not fit"),
            ({"offsets": np.array([-1, 50])}, "do not fit"),
            ({"offsets": np.array([0, 50]), "lengths": np.array([50, 51])}, "do not fit"),
            ({"offsets": np.array([0, 50]), "lengths": np.array([50, -1])}, "do not fit"),
            ({"offsets": np.array([0, 50]), "lengths": np.array([50])}, "do not fit"),
            ({"offsets": np.array([2**64 - 1, 0], np.uint64), "lengths": np.array([2, 2])}, "do not fit"),
            ({"offsets": np.array([0, 50]), "labels": np.array([0, 1, 2])}, "expected 2 whole numbers"),
            ({"offsets": np.array([0, 50]), "labels": np.array([0.5, 1])}, "expected 2 whole numbers"),
            ({"offsets": np.array([0, 50]), "labels": np.array([0, 2**63], np.uint64)}, "not an int64"),
        ],
    )
    def test_foreign_tables_that_lie(self, tmp_path: Path, tables: dict[str, Any], match: str) -> None:
        self.refused(self.foreign(tmp_path, images=np.arange(100, dtype=np.uint8), **tables), match)

    @pytest.mark.parametrize("label", ["cat", [1, 2], 2.5, 2.5 + 1j, 2**63])
    def test_foreign_label_attributes_that_are_none(self, tmp_path: Path, label: Any) -> None:
        path = self.foreign(tmp_path, a=np.arange(10, dtype=np.uint8))
        with h5py.File(path, "r+") as file:
            file["a"].attrs["label"] = label
        self.refused(path)

    def test_files_with_nothing_for_us(self, tmp_path: Path) -> None:
        self.refused(self.foreign(tmp_path, x=np.zeros((3, 3))), "no data set of images found; it has x")
        self.refused(tmp_path / "foreign.h5", "no 'y'; it has x", LocateOptions(image_key="y"))

    def test_a_user_block_moves_every_range(self, tmp_path: Path) -> None:
        path = tmp_path / "block.h5"
        with h5py.File(path, "w", userblock_size=1024) as file:
            file["images"] = np.arange(100, dtype=np.uint8)
            file["offsets"] = np.array([0, 60])
        ranges = [found.ranges["image"] for found in self.locate(path)]
        assert [read_range(path, place) for place in ranges] == [bytes(range(60)), bytes(range(60, 100))]
