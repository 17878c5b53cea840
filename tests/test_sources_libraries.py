"""Sets of other libraries: Parquet and folders with tables of Hugging Face, MosaicML shards, FFCV files and LMDB
environments; by their public layouts, and as the libraries themselves write and read them.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import random
import shlex
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from conftest import tree_of
from PIL import Image
from suites.containers import varint
from suites.layouts import PICTURES, Layout, LayoutSuite, decoded, pack_error, refusal, write_table

import packer
import readers
from cache.errors import BadSampleError, PackerError, SourceError
from packer.sources.huggingface import HuggingFaceSource
from packer.testing.sources import Content, content_of
from readers.fields import decode_field

CLASSES = ("cat", "dog", "emu")


@pytest.fixture(autouse=True)
def inside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parquet is listed in this process, which is faster, except in the test of files that the library writes."""
    monkeypatch.setattr(HuggingFaceSource, "isolated", "library_itself" in request.node.name)


PIXELS = np.random.default_rng(3).integers(0, 256, (2, 9, 7, 3), np.uint8)


def compact(**record: Any) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()


def png_of(pixels: np.ndarray) -> bytes:
    memory = io.BytesIO()
    Image.fromarray(pixels).save(memory, "PNG")
    return memory.getvalue()


def unpacked(root: Path, split: str | None = None) -> list[tuple[str, int | None, bytes]]:
    with readers.open(root, split, verify=True) as reader:
        return [(sample.key, sample.label, bytes(sample.image)) for sample in reader]


# --- Hugging Face: Parquet ----------------------------------------------------------------------------------------
FEATURES = {"image": {"_type": "Image"}, "label": {"names": list(CLASSES), "_type": "ClassLabel"}}
IMAGES = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def row(number: int, **more: Any) -> dict[str, Any]:
    image = {"bytes": PICTURES[number], "path": f"{number}.jpg"}
    return {"image": image, "label": number % 3, "size": number / 2, "note": f"n° {number}"} | more


def write_parquet(path: Path, rows: Sequence[dict[str, Any]], features: Any = FEATURES, **options: Any) -> Path:
    """A file as written by `datasets`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kinds = {"image": IMAGES, "label": pa.int64(), "mask": IMAGES}
    table = pa.table({name: pa.array([values.get(name) for values in rows], kinds.get(name)) for name in rows[0]})
    if features is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, **{"row_group_size": 2} | options)
    return path


def one_file(root: Path, rows: Sequence[dict[str, Any]] | None = None, **options: Any) -> Path:
    return write_parquet(root / "train-00000-of-00001.parquet", rows or [row(i) for i in range(6)], **options)


def parquet_of(first: str, second: str, test: str) -> Layout:
    """Three files of these names."""

    def write(folder: Path) -> Path:
        write_parquet(folder / "beasts" / first, [row(i) for i in range(5)])
        write_parquet(folder / "beasts" / second, [row(i) for i in (5, 6)], compression="zstd")
        write_parquet(folder / "beasts" / test, [row(7), row(8)], use_dictionary=False)
        return folder / "beasts"

    def truth(root: Path) -> Content:
        samples = [(str(i), i % 3, (PICTURES[i], compact(size=i / 2, note=f"n° {i}"))) for i in range(9)]
        return Content({"train": samples[:7], "test": samples[7:]}, CLASSES, ("image", "json"))

    return Layout(write, truth)


def test_columns(tmp_path: Path) -> None:
    """Masks, captions, plain bytes, labels that are names; several images a row are left out; no features at all."""
    mask = png_of(np.arange(12, dtype=np.uint8).reshape(3, 4))
    boxes = {"bbox": [[1.0, 2.0, 3.0, 4.0]]}
    more = {"label": None, "mask": {"bytes": mask, "path": None}, "caption": ["one", "two"], "blob": b"any"}
    more |= {"objects": boxes, "views": [{"bytes": b"a", "path": None}]}
    rows = [row(number, category=name, **more) for number, name in enumerate(["dog", "cat"])]
    source = packer.open_source(write_parquet(tmp_path / "x.parquet", rows, None), label_column="category")
    listing = source.list("val")
    kinds = {"image": "image", "caption": "text", "mask": "mask", "blob": "file", "json": "json"}
    assert {**listing.fields} == kinds and "left behind: 'views'" in listing.warnings[0]
    (_, label, (image, caption, of_mask, blob, record)), _ = content_of(source, "val").splits["val"]
    assert (listing.classes, label) == (("cat", "dog"), 1)
    assert (image, caption, of_mask, blob) == (PICTURES[0], b"one\ntwo", mask, b"any")
    assert json.loads(record or b"") == {"label": None, "size": 0.0, "note": "n° 0", "objects": boxes}


def test_keys_without_distinct_paths(tmp_path: Path) -> None:
    """Also with missing labels, or -1 as in a test split."""
    rows = [row(0, image={"bytes": PICTURES[0], "path": "same.jpg"}, label=-1) for _ in range(3)]
    rows[1]["label"] = None
    listing = packer.open_source(write_parquet(tmp_path / "train.parquet", rows)).list(None)
    assert not listing.shuffles, "rows are not read in their order"
    part = listing.splits["train"]
    assert list(part.keys) == [f"train/{i:08d}" for i in range(3)] and set(part.labels) == {-1}


README = """---
dataset_info:
- config_name: other
  features: [{name: image, dtype: image}]
- config_name: default
  features:
  - name: image
    dtype: image
  - name: label
    dtype:
      class_label:
        names:
          '0': cat
          '1': dog
          '2': emu
---
# Beasts
"""


def test_class_names_in_the_readme(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    write_parquet(tmp_path / "data" / "train-00000-of-00001.parquet", [row(0), row(1)], None)
    (tmp_path / "README.md").write_text(README)
    assert packer.open_source(tmp_path).list(None).classes == CLASSES
    (tmp_path / "README.md").write_text(README.replace("- name", "- {name"))
    assert "its header: cannot be read as YAML" in refusal(tmp_path)


def test_several_sets_in_a_repository(tmp_path: Path) -> None:
    for name in ("large", "small"):
        write_parquet(tmp_path / name / "train-00000-of-00001.parquet", [row(0)])
    (tmp_path / "README.md").write_text("# Two")
    error = refusal(tmp_path)
    assert "has 2 data sets: large, small; name" in error and f"packer convert {tmp_path}/large" in error
    assert list(packer.open_source(tmp_path / "small").list(None).splits) == ["train"]


def two_files(root: Path, **second: Any) -> None:
    for number, more in enumerate(({}, second)):
        write_parquet(root / f"train-{number:05d}-of-00002.parquet", [row(number, **more)])


def lfs_pointer(root: Path) -> None:
    two_files(root)
    (root / "train-00001-of-00002.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


TWICE = {**FEATURES, "label": {"_type": "ClassLabel", "names": [1, 1]}}


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda root: write_parquet(root / "train-00000-of-00003.parquet", [row(0)]), "first of them train-00001-of"),
        (lambda root: one_file(root, [row(0, label=3)]), "row 1 has the 'label' 3, the last is 2"),
        (lambda root: two_files(root, size="large"), "its column 'size' is missing, or not as in"),
        (lambda root: one_file(root, [row(0)], features=TWICE), "its class names"),
        (lambda root: one_file(root, [row(0)], features={"image": {"_type": "Audio"}}), "no column of images"),
        (lfs_pointer, "a pointer of Git LFS and not the file; run  git lfs pull"),
    ],
    ids=["missing", "label", "columns", "names", "audio", "lfs"],
)
def test_parquet_that_is_refused(tmp_path: Path, work: Callable[[Path], object], message: str) -> None:
    work(tmp_path)
    assert message in refusal(tmp_path)


def test_images_that_are_only_paths(tmp_path: Path) -> None:
    path = one_file(tmp_path, [row(0), row(1, image={"bytes": None, "path": "/etc/passwd"}), row(2, image=None)])
    source: Any = packer.open_source(path)
    places = source.list(None).splits["train"].places
    with source.open() as reader:
        assert bytes(reader.read(places[0], None)[0]) == PICTURES[0]
        with pytest.raises(BadSampleError, match="no bytes, only the path '/etc/passwd'"):
            reader.read(places[1], None)
        with pytest.raises(BadSampleError, match="the column is null"):
            reader.read(places[2], None)


def bomb(size: int) -> bytes:
    return b"\xff\xd8\xff" + bytes(size)


@pytest.mark.parametrize("use_dictionary", [False, True], ids=["page", "dictionary"])
def test_a_page_that_unpacks_to_too_much_is_refused_unread(tmp_path: Path, use_dictionary: bool) -> None:
    rows = [row(0, image={"bytes": bomb(65 << 20), "path": "0.jpg"})]
    path = one_file(tmp_path, rows, compression="zstd", use_dictionary=use_dictionary, data_page_size=1 << 30)
    assert path.stat().st_size < 1 << 20
    source: Any = packer.open_source(path)
    places = source.list(None).splits["train"].places
    with source.open() as reader, pytest.raises(SourceError, match=r"image.bytes: .* unpack to .* bomb"):
        reader.read(places[0], None)


def test_a_dictionary_that_is_used_many_times(tmp_path: Path) -> None:
    """Only a few rows are in memory at a time, whatever their number: all of them would take 800 MB."""
    size = 8 << 20
    path = tmp_path / "train.parquet"
    images = pa.DictionaryArray.from_arrays(np.zeros(100, np.int32), pa.array([bomb(size)], pa.binary()))
    table = pa.table({"image": images, "label": np.zeros(100, np.int64)})
    pq.write_table(table, path, store_schema=False, compression="none", dictionary_pagesize_limit=1 << 30)
    source: Any = HuggingFaceSource(path)
    before = pa.total_allocated_bytes()
    assert len(source.list(None).splits["train"]) == 100
    with source.open() as reader:
        for number in (0, 40):
            assert len(reader.read((0, 0, number), None)[0]) == size + 3
            assert pa.total_allocated_bytes() - before < 40 * size


def test_a_page_with_a_false_header(tmp_path: Path) -> None:
    """The footer is unchanged; the header of the first page of images claims to unpack to 2 GB."""
    path = one_file(tmp_path, [row(i) for i in range(4)], row_group_size=4, use_dictionary=False)
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    assert column.path_in_schema == "image.bytes"
    data, start = path.read_bytes(), column.data_page_offset
    assert data[start : start + 3] == b"\x15\x00\x15"  # page type 0; then the unpacked size in bytes, zigzag
    stop = next(at for at in range(start + 3, start + 9) if data[at] < 0x80) + 1
    claimed = b"\xfe\xff\xff\x0f"[: stop - start - 3 - 1].ljust(stop - start - 4, b"\xff") + b"\x7f"
    path.write_bytes(data[: start + 3] + claimed + data[stop:])
    source: Any = packer.open_source(path)
    assert len(source.list(None).splits["train"]) == 4
    with source.open() as reader, pytest.raises(SourceError):
        reader.read((0, 0, 0), None)


@pytest.mark.filterwarnings("default")
def test_sets_written_by_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes, labels and names that `datasets` reads; a folder of save_to_disk with the message that refuses it."""
    datasets = pytest.importorskip("datasets", reason="datasets, which writes such files, is not installed")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))})
    rows = {"image": [row(i)["image"] for i in range(9)], "label": [i % 3 for i in range(9)]}
    made = datasets.Dataset.from_dict(rows, features=features)
    for number in range(2):
        part = made.shard(2, number, contiguous=True)
        part.to_parquet(tmp_path / "set" / "data" / f"train-{number:05d}-of-00002.parquet")
    loaded = datasets.load_dataset(str(tmp_path / "set"), split="train", cache_dir=str(tmp_path / "cache"))
    packer.convert(tmp_path / "set", "hdf5", tmp_path / "out", run=packer.Run(workers=1))
    plain = loaded.cast_column("image", datasets.Image(decode=False))
    expected = [(item["image"]["path"][:-4], item["label"], item["image"]["bytes"]) for item in plain]
    assert unpacked(tmp_path / "out") == expected and len(expected) == 9
    with readers.open(tmp_path / "out") as reader:
        assert tuple(reader.classes) == tuple(loaded.features["label"].names)

    datasets.DatasetDict(train=made).save_to_disk(tmp_path / "saved")
    error = pack_error(tmp_path / "saved", tmp_path / "no", SourceError)
    assert "from Hugging Face's save_to_disk, run  python -c " in error
    line = next(text for text in error.splitlines() if "python -c" in text).partition("python -c ")[2]
    (code,) = shlex.split(line)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert [sample[1:] for sample in unpacked(tmp_path / "OUT")] == [sample[1:] for sample in expected]


# --- Hugging Face: folders with tables ----------------------------------------------------------------------------
def image_folder(root: Path, suffix: str, above: bool) -> Path:
    """above: one table for both splits, in the root folder."""
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    for i in range(8):
        split = "train" if i < 5 else "test"
        folder = f"{split}/" if above else ""
        tree_of(root, {f"{split}/{i}.jpg": PICTURES[i]} | ({f"{split}/masks/{i}.png": b"mask %d" % i} if i < 6 else {}))
        mask = f"{folder}masks/{i}.png" if i < 6 else ""
        rows[split].append(
            {"file_name": f"{folder}{i}.jpg", "mask_file_name": mask, "label": CLASSES[i % 2], "n": str(i)}
        )
    if above:
        write_table(root / f"metadata.{suffix}", rows["train"] + rows["test"])
    else:
        for split, entries in rows.items():
            write_table(root / split / f"metadata.{suffix}", entries)
    return root


def image_folder_truth(root: Path) -> Content:
    def one(split: str, number: int) -> tuple[str, int, Any]:
        mask = b"mask %d" % number if number < 6 else None
        return f"{split}/{number}", number % 2, (PICTURES[number], mask, compact(n=str(number)))

    splits = {"train": [one("train", i) for i in range(5)], "test": [one("test", i) for i in range(5, 8)]}
    return Content(splits, CLASSES[:2], ("image", "mask", "json"))


def folder_of(suffix: str, above: bool) -> Layout:
    return Layout(lambda folder: image_folder(folder / "set", suffix, above), image_folder_truth, whole=True)


def test_a_table_of_a_folder_may_be_parquet(tmp_path: Path) -> None:
    root = image_folder(tmp_path, "parquet", False)
    assert content_of(packer.open_source(root)) == image_folder_truth(root)


def test_images_that_no_row_names_are_left_out(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "set", "jsonl", False)
    (root / "train" / "stray.jpg").write_bytes(PICTURES[8])
    listing = packer.open_source(root).list("train")
    assert listing.left_out == [("train/stray.jpg", "not in metadata.jsonl")]
    assert packer.open_source(root, layout="tree").list(None).classes == ("masks",)


def test_folders_without_labels(tmp_path: Path) -> None:
    root = tree_of(tmp_path / "set", {"a/0.jpg": PICTURES[0], "b/1.jpg": PICTURES[1]})
    write_table(root / "metadata.csv", [{"file_name": "a/0.jpg", "n": "0"}, {"file_name": "b/1.jpg", "n": "1"}])
    listing = packer.open_source(root).list(None)
    assert set(listing.splits["train"].labels) == {-1} and "layout='tree'" in listing.warnings[0]


@pytest.mark.parametrize(
    ("column", "name"),
    [("file_name", "../secret.jpg"), ("file_name", "/etc/passwd"), ("file_name", ""), ("file_name", "a\0b"),
     ("mask_file_name", "a/../../secret.jpg")],
)  # fmt: skip
def test_a_name_that_leads_outside(tmp_path: Path, column: str, name: str) -> None:
    root = tree_of(tmp_path / "set", {"0.jpg": PICTURES[0]})
    write_table(root / "metadata.jsonl", [{"file_name": "0.jpg"}, {"file_name": "0.jpg", column: name}])
    error = refusal(root)
    assert "line 2: " in error and "does not name a file below the folder" in error


# --- MosaicML's streaming -----------------------------------------------------------------------------------------
COLUMNS = {"class": "int", "image": "jpeg", "note": "str", "vector": "ndarray:float32:3", "weight": "float32"}
SIZES = {"int": 8, "float32": 4, "ndarray:float32:3": 12, "uint8": 1, "int16": 2}
PACK: dict[str, Callable[[bytes], bytes]] = {
    "zstd:7": zstandard.ZstdCompressor(level=7).compress,
    "gz": gzip.compress,
    "bz2:9": bz2.compress,
}


def sample_of(values: Sequence[bytes], columns: dict[str, str] = COLUMNS) -> bytes:
    pairs = zip(values, columns.values(), strict=True)
    sizes = [struct.pack("<I", len(value)) for value, how in pairs if how not in SIZES]
    return b"".join([*sizes, *values])


def shard_of(samples: Sequence[bytes], info: bytes = b"{}") -> bytes:
    starts = 4 * (len(samples) + 2) + len(info)
    offsets = np.cumsum([starts, *map(len, samples)]).astype("<u4")
    return struct.pack("<I", len(samples)) + offsets.tobytes() + info + b"".join(samples)


def write_mds(
    root: Path, shards: Sequence[Sequence[bytes]], columns: dict[str, str] = COLUMNS, compression: str | None = None
) -> Path:
    """Write a set of these samples."""
    root.mkdir(parents=True)
    infos = []
    for number, samples in enumerate(shards):
        name, data = f"shard.{number:05d}.mds", shard_of(samples)
        files = [(name, data)]
        if compression:
            files.append((f"{name}.{compression.partition(':')[0]}", PACK[compression](data)))
        (root / files[-1][0]).write_bytes(files[-1][1])
        described = [
            {"basename": name, "bytes": len(content), "hashes": {"sha1": hashlib.sha1(content).hexdigest()}}
            for name, content in files
        ]
        info = {"column_encodings": list(columns.values()), "column_names": list(columns), "format": "mds"}
        info |= {"column_sizes": [SIZES.get(how) for how in columns.values()], "compression": compression}
        info |= {"hashes": ["sha1"], "samples": len(samples), "size_limit": 1 << 26, "version": 2}
        infos.append(info | {"raw_data": described[0], "zip_data": described[1] if compression else None})
    (root / "index.json").write_text(json.dumps({"shards": infos, "version": 2}, sort_keys=True))
    return root


def sample(number: int) -> bytes:
    vector = np.arange(3, dtype="<f4") + number
    values = [struct.pack("<q", number % 3), PICTURES[number], f"n° {number}".encode(), vector.tobytes()]
    return sample_of([*values, struct.pack("<f", number / 4)])


def mds_of(compression: str | None) -> Layout:
    """Two splits, one of two shards and one of a single shard."""

    def write(folder: Path) -> Path:
        shards = [[sample(i) for i in range(4)], [sample(i) for i in range(4, 7)]]
        write_mds(folder / "set" / "train", shards, compression=compression)
        write_mds(folder / "set" / "val", [[sample(7), sample(8)]], compression=compression)
        return folder / "set"

    def truth(root: Path) -> Content:
        splits: dict[str, Any] = {"train": [], "val": []}
        for number in range(9):
            memory = io.BytesIO()
            np.save(memory, np.arange(3, dtype="<f4") + number)
            fields = (PICTURES[number], memory.getvalue(), compact(note=f"n° {number}", weight=number / 4))
            name, place = ("train", number) if number < 7 else ("val", number - 7)
            splits[name].append((f"{name}/{place:08d}", number % 3, fields))
        return Content(splits, fields=("image", "vector", "json"))

    return Layout(write, truth, "*.mds*", damages=300)


def test_encodings_of_mds(tmp_path: Path) -> None:
    """Raw pixels of Pillow and NumPy become PNG; labels that are names; a mask; JSON; gzip-compressed shards."""
    pixels, mask = PIXELS[0], png_of(PIXELS[0][..., 0])
    columns = {"box": "ndarray", "cls": "str", "extra": "json", "id": "str_int"}
    columns |= {"mask": "png", "raw": "bytes", "x": "pil"}
    box = bytes((66, 2 << 2, 1, 4)) + np.arange(4, dtype="<f8").tobytes()
    pil = struct.pack("<III", 7, 9, 3) + b"RGB" + pixels.tobytes()
    rows = [
        sample_of([box, name, b'{"a": [1, null]}', b"12345678901234567890", mask, b"any", pil], columns)
        for name in (b"dog", b"cat")
    ]
    source = packer.open_source(write_mds(tmp_path / "set", [rows], columns, "gz"))
    kinds = {"image": "image", "box": "array", "mask": "mask", "raw": "file", "json": "json"}
    assert {**source.list(None).fields} == kinds
    read = content_of(source, "test")
    assert read.classes == ("cat", "dog") and read.fields == tuple(kinds)
    (_, label, (image, array, of_mask, raw, record)), _ = read.splits["test"]
    assert label == 1 and np.array_equal(decoded(image), pixels)
    assert np.array_equal(decode_field("array", array or b""), np.arange(4.0)[None])
    assert (of_mask, raw) == (mask, b"any")
    assert json.loads(record or b"") == {"extra": {"a": [1, None]}, "id": 12345678901234567890}


def damage(root: Path, **changes: Any) -> None:
    index = json.loads((root / "index.json").read_text())
    for name, value in changes.items():
        where, _, last = name.rpartition("__")
        target = index["shards"][0]
        for part in filter(None, where.split("__")):
            target = target[part]
        target[last] = value
    (root / "index.json").write_text(json.dumps(index))


def replace(root: Path, offset: int, data: bytes) -> None:
    path = next(root.glob("shard.*"))
    old = path.read_bytes()
    path.write_bytes(old[:offset] + data + old[offset + len(data) :])


ENCODINGS = list(COLUMNS.values())


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda root: damage(root, raw_data__basename="../shard.00000.mds"), "leads outside"),
        (lambda root: damage(root, samples=5), "claims|but index.json says 5"),
        (lambda root: damage(root, samples=1 << 29), "but claims 536,870,912 samples"),
        (lambda root: damage(root, raw_data__bytes=7), "has 7 bytes, but claims 2 samples"),
        (lambda root: damage(root, column_encodings=["pkl", *ENCODINGS[1:]]), "'pkl', which is pickled"),
        (lambda root: damage(root, column_encodings=["int", "wav", *ENCODINGS[2:]]), "the encoding 'wav'"),
        (lambda root: damage(root, format="json"), "shards of the format 'json'"),
        (lambda root: damage(root, column_names="x"), "not an index of MDS shards"),
        (lambda root: (root / "index.json").write_text('{"shards": [{"column_' + "[" * 9999), "not an index"),
        (lambda root: replace(root, 4, struct.pack("<I", 1)), "its offsets fall, or lead beyond"),
        (lambda root: replace(root, 12, struct.pack("<I", 1 << 31)), "its offsets fall, or lead beyond"),
        (lambda root: replace(root, 18, struct.pack("<I", 1 << 30)), "sample 0: has .* damaged"),
    ],
)
def test_mds_with_false_claims(tmp_path: Path, work: Callable[[Path], object], message: str) -> None:
    root = write_mds(tmp_path / "set", [[sample(0), sample(1)]])
    work(root)
    with pytest.raises(SourceError, match=message):
        packer.open_source(root).list(None)


def test_bytes_with_a_wrong_hash(tmp_path: Path) -> None:
    root = write_mds(tmp_path / "set", [[sample(0), sample(1)]])
    replace(root, (root / "shard.00000.mds").stat().st_size - 20, b"!")
    source: Any = packer.open_source(root)
    source.list(None)
    with source.open() as reader, pytest.raises(SourceError, match="its sha1 differs from index"):
        reader.read((0, 14, 20), None)


def test_a_compressed_shard_that_is_a_bomb(tmp_path: Path) -> None:
    """It unpacks to more than its index states, or to less, or has an unsupported compression."""
    root = write_mds(tmp_path / "set", [[sample(0)]], compression="zstd:7")
    packed = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    (root / "shard.00000.mds.zstd").write_bytes(packed)
    for changes, message in (
        ({"zip_data__bytes": len(packed)}, "unpacks to more than"),
        ({"raw_data__bytes": 1 << 31}, "truncated"),
        ({"compression": "snappy"}, "compressed with 'snappy', which is not read; unpack them"),
    ):
        damage(root, **changes)
        assert message in refusal(root)


def test_a_damaged_sample_of_mds(tmp_path: Path) -> None:
    columns = {"image": "pil", "y": "int"}
    pil = struct.pack("<III", 4, 5, 3) + b"RGB" + bytes(59)
    root = write_mds(tmp_path / "set", [[sample_of([pil, struct.pack("<q", 1)], columns)]], columns)
    with pytest.raises(BadSampleError, match="59 bytes of pixels, expected 4 x 5 of RGB"):
        content_of(packer.open_source(root))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("compression", [None, "zstd:3"])
def test_mds_written_by_the_package(tmp_path: Path, compression: str | None) -> None:
    """The same samples as from the package's reader."""
    streaming = pytest.importorskip("streaming", reason="mosaicml-streaming, which writes such sets, is not installed")
    columns = {"image": "jpeg", "label": "int", "caption": "str", "vector": "ndarray", "pixels": "pil"}
    how = {"columns": columns, "compression": compression, "hashes": ["sha1", "xxh64"], "size_limit": 1 << 11}
    with streaming.MDSWriter(out=str(tmp_path / "set"), **how) as writer:
        for number, picture in enumerate(PICTURES):
            value = {"image": picture, "label": number % 4, "caption": f"picture {number}"}
            vector = np.arange(number + 1, dtype=np.int16)
            writer.write(value | {"vector": vector, "pixels": Image.fromarray(PIXELS[number % 2])})
    (samples,) = content_of(packer.open_source(tmp_path / "set")).splits.values()
    reference = streaming.StreamingDataset(local=str(tmp_path / "set"), shuffle=False, batch_size=1)
    assert len(samples) == len(reference) == len(PICTURES)
    for number, (_, label, (image, caption, more, vector)) in enumerate(samples):
        item = reference[number]
        assert (label, (caption or b"").decode()) == (item["label"], item["caption"])
        assert image == PICTURES[number] and np.array_equal(decode_field("array", vector or b""), item["vector"])
        assert np.array_equal(decoded(more), np.asarray(item["pixels"]))


# --- FFCV ---------------------------------------------------------------------------------------------------------
FLOAT, INT, IMAGE, BYTES, ARRAY, JSON = range(6)
PAGE = 1 << 21
IMAGE_TYPE = np.dtype([("mode", "<u1"), ("width", "<u2"), ("height", "<u2"), ("data_ptr", "<u8")])
BYTES_TYPE = np.dtype([("ptr", "<u8"), ("size", "<u8")])


class At(int):
    """A position in the heap."""


def moved(value: Any, start: int) -> Any:
    if isinstance(value, tuple):
        return tuple(moved(item, start) for item in value)
    return start + value if isinstance(value, At) else value


class Beton:
    """Writes a file: fields as (name, type, dtype of its metadata, arguments)."""

    def __init__(self, *fields: tuple[str, int, Any, bytes]) -> None:
        self.fields = fields
        self.record = np.dtype([(name, kind) for name, _, kind, _ in fields], align=True)
        self.rows: list[tuple[Any, ...]] = []
        self.heap = bytearray()
        self.allocations: list[tuple[int, int, int]] = []

    def put(self, data: bytes) -> At:
        """Add data; returns its position from the start of the heap."""
        at = len(self.heap)
        self.heap += data
        self.allocations.append((len(self.rows), at, len(data)))
        return At(at)

    def image(self, value: bytes | np.ndarray) -> tuple[int, int, int, At]:
        if isinstance(value, bytes):
            return 0, *Image.open(io.BytesIO(value)).size, self.put(value)
        return 1, value.shape[1], value.shape[0], self.put(value.tobytes())

    def write(self, path: Path, **changes: int) -> Path:
        """changes: header numbers to replace."""
        head = 24 + 1041 * len(self.fields)
        start = -(-(head + len(self.rows) * self.record.itemsize) // PAGE) * PAGE
        described = b"".join(
            struct.pack("<B16s1024s", number, name.encode(), arguments) for name, number, _, arguments in self.fields
        )
        heap = bytes(self.heap).ljust(-(-len(self.heap) // PAGE) * PAGE, b"\0")
        header = {"version": 2, "fields": len(self.fields), "page": PAGE, "samples": len(self.rows)}
        header |= {"table": start + len(heap)} | changes
        rows = np.array([moved(row, start) for row in self.rows], self.record)
        data = struct.pack("<HHIQQ", *header.values()) + described + rows.tobytes()
        table = b"".join(struct.pack("<QQQ", sample, start + at, size) for sample, at, size in self.allocations)
        path.write_bytes(data.ljust(start, b"\0") + heap + table)
        return path


def array_arguments(dtype: Any, shape: tuple[int, ...]) -> bytes:
    text = json.dumps(np.dtype(dtype).descr).encode()
    return struct.pack("<32Q", *shape, *[0] * (32 - len(shape))) + struct.pack("<Q", len(text)) + text


def beton(folder: Path) -> Path:
    """Images of both modes, labels, and a field of every other kind."""
    made = Beton(
        ("picture", IMAGE, IMAGE_TYPE, b""),
        ("label", INT, "<i8", b""),
        ("weight", FLOAT, "<f8", b""),
        ("blob", BYTES, BYTES_TYPE, b""),
        ("vector", ARRAY, "<u8", array_arguments("<f4", (2, 3))),
        ("about", JSON, BYTES_TYPE, b""),
    )
    for number, value in enumerate([*PICTURES[:5], *PIXELS]):
        text = json.dumps({"n": number}).encode() + b"\0"
        vector = (np.arange(6, dtype="<f4") + number).tobytes()
        row = (made.image(value), number % 3, number / 2, (made.put(bytes(number)), number), made.put(vector))
        made.rows.append((*row, (made.put(text), len(text))))
    return made.write(folder / "train.beton")


def beton_truth(root: Path) -> Content:
    read = content_of(packer.open_source(root))
    assert read.fields == ("image", "blob", "vector", "json") and len(read.splits["train"]) == 7
    for number, (key, label, (picture, blob, vector, record)) in enumerate(read.splits["train"]):
        assert (key, label, blob) == (f"train/{number:08d}", number % 3, bytes(number))
        assert json.loads(record or b"") == {"weight": number / 2, "about": {"n": number}}
        assert np.array_equal(decode_field("array", vector or b""), np.arange(6).reshape(2, 3) + number)
        assert picture == PICTURES[number] if number < 5 else np.array_equal(decoded(picture), PIXELS[number - 5])
    return read


def test_a_file_written_by_ffcv(tmp_path: Path) -> None:
    """A file by DatasetWriter of ffcv 1.0.2, with write_mode="proportion": pixels, and a JPEG."""
    golden = Path(__file__).parent / "golden" / "ffcv-1.0.2.beton.xz"
    (tmp_path / "train.beton").write_bytes(lzma.decompress(golden.read_bytes()))
    y, x = np.mgrid[0:24, 0:20]
    (samples,) = content_of(packer.open_source(tmp_path / "train.beton")).splits.values()
    assert len(samples) == 6
    for number, (_, label, (picture, blob, vector, record)) in enumerate(samples):
        planes = [x * (3 + number) % 256, y * (5 + number) % 256, (x + y + number * 9) % 256]
        expected = np.stack(planes, axis=-1)[: 20 + number]
        difference = np.abs(np.asarray(Image.open(io.BytesIO(picture or b""))).astype(int) - expected).max()
        assert difference <= (12 if number == 2 else 0) and (picture or b"").startswith(b"\xff\xd8") == (number == 2)
        assert (label, blob) == (number % 3, b"x" * number)
        assert json.loads(record or b"") == {"weight": number / 4, "about": {"n": number}}
        assert np.array_equal(decode_field("array", vector or b""), np.arange(6).reshape(2, 3) + number)


VECTORS = [[0.0, 1.0, 0.5], [1.0, 0.0, 0.0], [0.0] * 3]


@pytest.mark.parametrize(
    ("field", "labels"),
    [
        (("score", FLOAT, "<f8", b""), [0.25, 0.5, 1.75]),
        (("label", ARRAY, "<u8", array_arguments("<f4", (3,))), VECTORS),
    ],
    ids=["fractions", "vectors"],
)
def test_labels_that_are_not_class_numbers(tmp_path: Path, field: Any, labels: list[Any]) -> None:
    """They are the labels for training, in the field that they come from."""
    pytest.importorskip("torch", reason="torch is not installed")
    from readers.loader import ImageLoader

    made = Beton(("image", IMAGE, IMAGE_TYPE, b""), field)
    for value, label in zip(PICTURES, labels, strict=False):
        row = made.put(np.array(label, "<f4").tobytes()) if isinstance(label, list) else label
        made.rows.append((made.image(value), row))
    source = packer.open_source(made.write(tmp_path / "train.beton"), label_column=field[0])
    packer.convert(source, "tar", tmp_path / "set", run=packer.Run(workers=1))
    with readers.open(tmp_path / "set") as reader:
        ((read,),) = ImageLoader(reader, 3, fields=("label",), shuffle=False, threads=1)
    assert np.array_equal(read.numpy(), np.array(labels, read.numpy().dtype))


def small(path: Path, change: Callable[[Beton], object] = lambda made: None, **header: int) -> Path:
    """Two images with labels."""
    made = Beton(("image", IMAGE, IMAGE_TYPE, b""), ("label", INT, "<i8", b""))
    for number, picture in enumerate(PICTURES[:2]):
        made.rows.append((made.image(picture), number))
    change(made)
    return made.write(path, **header)


def with_row(made: Beton, number: int, **values: Any) -> None:
    picture, label = made.rows[number]
    names = IMAGE_TYPE.names or ()
    changed = tuple(values.get(name, value) for name, value in zip(names, picture, strict=True))
    made.rows[number] = (changed, values.get("label", label))


def unknown_type(made: Beton) -> None:
    made.fields = (("image", 255, IMAGE_TYPE, b""), made.fields[1])


@pytest.mark.parametrize(
    ("change", "header", "message"),
    [
        (lambda made: with_row(made, 1, data_ptr=At(7)), {}, "where nothing was allocated"),
        (lambda made: made.allocations.__setitem__(0, (0, 0, (1 << 64) - 9)), {}, "outside of the data"),
        (lambda made: made.rows.extend([made.rows[1]] * 9000), {}, "places are shared"),
        (lambda made: made.allocations.clear(), {}, "has no table of allocations"),
        (lambda made: with_row(made, 0, label=-5), {}, "row 1: the label -5 is out of range"),
        (unknown_type, {}, "user-defined"),
        (lambda made: None, {"samples": (1 << 64) - 1}, "truncated, or the program that wrote it did not finish"),
        (lambda made: None, {"samples": 0}, "no samples"),
        (lambda made: None, {"table": 0}, "did not finish"),
        (lambda made: None, {"table": 1 << 50}, "truncated"),
        (lambda made: None, {"fields": 200}, "the type|two fields"),
        (lambda made: None, {"version": 1}, "version 1"),
    ],
)
def test_a_beton_with_false_claims(
    tmp_path: Path, change: Callable[[Beton], object], header: Any, message: str
) -> None:
    with pytest.raises(SourceError, match=message):
        packer.open_source(small(tmp_path / "x.beton", change, **header)).list(None)


def test_an_image_may_belong_to_several_samples(tmp_path: Path) -> None:
    def shared(made: Beton) -> None:
        with_row(made, 1, data_ptr=At(0))
        made.rows.extend([made.rows[1]] * 9)

    assert len(packer.open_source(small(tmp_path / "x.beton", shared)).list(None).splits["train"]) == 11


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        ("O", (3,), "expected numbers"),
        ([("a", "<f4"), ("b", "<f4")], (3,), "an unknown kind"),
        ("<f4", (1 << 40, 1 << 40), "expected numbers"),
        ("<f4", (1 << 30,), "outside of the data"),
    ],
)
def test_a_false_array_of_a_beton(tmp_path: Path, dtype: Any, shape: tuple[int, ...], message: str) -> None:
    made = Beton(("image", IMAGE, IMAGE_TYPE, b""), ("vector", ARRAY, "<u8", array_arguments(dtype, shape)))
    made.rows.append((made.image(PICTURES[0]), made.put(bytes(12))))
    assert message in refusal(made.write(tmp_path / "x.beton"))


def test_pixels_of_a_wrong_size(tmp_path: Path) -> None:
    path = small(tmp_path / "val.beton", lambda made: with_row(made, 1, mode=1))
    with pytest.raises(BadSampleError, match=r"'image': is of the mode 1 and has .* bytes, expected pixels"):
        content_of(packer.open_source(path))


# --- LMDB: Caffe's Datums, and images under their names -----------------------------------------------------------
LABELS = [2, 0, 1, 1, 0]


@pytest.fixture(name="lmdb")
def _lmdb() -> Any:
    return pytest.importorskip("lmdb", reason="the package lmdb, which writes the environments, is not installed")


def write_lmdb(path: Path, values: dict[bytes, bytes], subdir: bool = True) -> Path:
    lmdb = pytest.importorskip("lmdb", reason="the package lmdb, which writes the environments, is not installed")
    environment = lmdb.open(str(path), map_size=16 << 20, subdir=subdir)
    with environment, environment.begin(write=True) as transaction:
        for key, value in values.items():
            transaction.put(key, value)
    return path


def datum(data: bytes | None, label: int, shape: tuple[int, int, int] = (0, 0, 0), encoded: bool = True) -> bytes:
    """A caffe.Datum, by the rules of protocol buffers alone."""
    out = b"".join(varint(number << 3) + varint(value) for number, value in zip((1, 2, 3), shape, strict=True))
    if data is not None:
        out += varint(4 << 3 | 2) + varint(len(data)) + data
    return out + varint(5 << 3) + varint(label) + varint(7 << 3) + varint(encoded)


DATUMS = {b"%08d" % number: datum(PICTURES[number], label) for number, label in enumerate(LABELS)}
EXPECTED = [(f"{number:08d}", label, PICTURES[number]) for number, label in enumerate(LABELS)]


@pytest.mark.parametrize("workers", [1, 2])
def test_datums(tmp_path: Path, workers: int) -> None:
    path = write_lmdb(tmp_path / "ilsvrc12_val_lmdb", DATUMS, subdir=workers == 1)
    run, shards = packer.Run(workers=workers), packer.Shards(samples=2)
    assert packer.convert(path, "tar", tmp_path / "out", run=run, shards=shards).splits == {"val": 5}
    assert unpacked(tmp_path / "out", "val") == EXPECTED
    assert packer.verify(tmp_path / "out", against=path, workers=1).ok


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_of_datums_become_png_with_red_first(tmp_path: Path, channels: int) -> None:
    pixels = PIXELS[0][..., :channels]
    blue_first = np.ascontiguousarray(pixels[..., ::-1].transpose(2, 0, 1))  # as in OpenCV
    value = datum(blue_first.tobytes(), 3, (channels, 9, 7), encoded=False)
    ((_, label, (image,)),) = content_of(packer.open_source(write_lmdb(tmp_path / "x", {b"0": value}))).splits["train"]
    assert label == 3 and np.array_equal(decoded(image).reshape(pixels.shape), pixels)


def test_a_bad_datum_falls_under_on_error(tmp_path: Path) -> None:
    wrong = {
        b"1": datum(None, 0),
        b"2": datum(b"\0" * 10, 0, (3, 6, 7), encoded=False),
        b"3": datum(PICTURES[0], 0)[:40],
        b"4": datum(b"\0" * 20, 0, (2, 2, 5), encoded=False),
        b"5": varint(6 << 3 | 2) + varint(4) + bytes(4),
        b"6": datum(PICTURES[0], 1 << 40),
        b"7": datum(PICTURES[0], -5),
        b"8": datum(b"\0" * 4, 0, ((1 << 63), (1 << 63), 4), encoded=False),
        b"9": b"\xff" * 30,
    }
    path = write_lmdb(tmp_path / "x", {b"0": datum(PICTURES[0], 1)} | wrong)
    assert "1: is not a Datum with an image: it has no data" in pack_error(path, tmp_path / "a")
    result = packer.convert(path, "tar", tmp_path / "b", run=packer.Run(workers=1, on_error="skip"))
    assert unpacked(tmp_path / "b") == [("0", 1, PICTURES[0])]
    assert result.left_out == {"skipped": len(wrong)}


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda data: data[: len(data) // 2], "ended the process that read it: truncated"),
        (lambda data: data[:4096], "truncated|cannot"),
        (lambda data: data[:100], "truncated|not an LMDB|cannot be opened"),
        (lambda data: data[:16] + b"\xef\xbe\xad\xde" + data[20:], "no kind of source|not an LMDB"),
        (lambda data: data[:40] + b"\xff\xff\xff\x7f" + data[44:], "not an LMDB|cannot"),
    ],
)
def test_damaged_environments_are_refused(tmp_path: Path, damage: Any, match: str) -> None:
    path = write_lmdb(tmp_path / "x.mdb", DATUMS, subdir=False)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SourceError, match=match):
        packer.open_source(path).list(None)


def test_damaged_pages_are_harmless_or_end_a_process_with_a_clear_error(tmp_path: Path) -> None:
    """liblmdb aborts or faults on a wrong byte in the meta pages, the tree or its nodes, so it runs in another
    process."""
    values = {b"%08d" % i: datum(PICTURES[i % 5], i) for i in range(200)}
    path = write_lmdb(tmp_path / "x.mdb", values, subdir=False)
    whole = path.read_bytes().rstrip(b"\0")
    whole += bytes(-len(whole) % 4096)
    rng, refusals = random.Random(1), []
    for _ in range(6):
        content = bytearray(whole)
        for _ in range(rng.choice((1, 4, 30))):
            content[rng.randrange(len(content) // 4096) * 4096 + rng.randrange(160)] = rng.choice((0, 255, 7, 64))
        path.write_bytes(content)
        try:
            packer.open_source(path).list(None)
        except PackerError as error:
            refusals.append(str(error))
    assert refusals and all(str(path) in text for text in refusals)


def test_values_that_are_not_images_are_left_out_and_the_environment_is_unchanged(tmp_path: Path, lmdb: Any) -> None:
    """Also a database inside; an environment with nothing but such values is refused."""
    images = {b"%d.jpg" % number: PICTURES[number] for number in range(5)}
    path = write_lmdb(tmp_path / "x", images | {b"__len__": b"\x80\x04K\x05."})
    with lmdb.open(str(path), max_dbs=1) as environment:
        environment.open_db(b"inner")
    (path / "lock.mdb").unlink()
    before = {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(path)}
    result = packer.convert(path, "tar", tmp_path / "out", run=packer.Run(workers=1))
    assert (result.samples, sum(result.left_out.values())) == (5, 2)
    assert {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(path)} == before
    with pytest.raises(PackerError, match=f"{tmp_path}/y: has no values"):
        packer.convert(write_lmdb(tmp_path / "y", {}), "tar", tmp_path / "out", run=packer.Run(workers=1))


def test_values_in_a_deep_tree_come_in_the_order_of_their_keys(tmp_path: Path) -> None:
    """Pages are in the order of writing, and a large value is not in the page of its key."""
    values = {b"%06d" % n: datum(PICTURES[0] + bytes(n % 7000), n) for n in random.Random(2).sample(range(1500), 1500)}
    path = write_lmdb(tmp_path / "x", values)
    part = packer.open_source(path).list(None).splits["train"]
    assert list(part.keys) == sorted(key.decode() for key in values) and part.labels.tolist() == list(range(1500))
    packer.convert(path, "tfrecord", tmp_path / "out", run=packer.Run(workers=1))
    with readers.open(tmp_path / "out") as reader:
        assert all(bytes(reader.read(n)) == PICTURES[0] + bytes(n % 7000) for n in range(0, 1500, 37))


# --- the contract -------------------------------------------------------------------------------------------------
LAYOUTS = {
    "pushed": parquet_of(*(f"data/{name}.parquet" for name in ("train-00000-of-00002", "train-00001-of-00002",
                                                              "test-00000-of-00001-0123456789abcdef"))),
    "converted": parquet_of("default/train/0000.parquet", "default/train/0001.parquet", "default/test/0000.parquet"),
    "plain": parquet_of("train-a.parquet", "train-b.parquet", "test.parquet"),
    "folder and a table": folder_of("csv", True),
    "folders and tables": folder_of("jsonl", False),
    "mds": mds_of(None),
    "mds of zstd": mds_of("zstd:7"),
    "mds of bz2": mds_of("bz2:9"),
    # The header, the fields, the metadata; then pages of zeros.
    "ffcv": Layout(beton, beton_truth, damages=1000, changed_bytes=2200 + 6 * 1041),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
class TestOfLibraries(LayoutSuite):
    pass


def lmdb_of(values: dict[bytes, bytes], expected: Content) -> Layout:
    def write(folder: Path) -> Path:
        return write_lmdb(folder / "train.lmdb", values, subdir=False)

    return Layout(write, lambda root: expected, inside={"isolated": False})


OF_DATUMS = lmdb_of(DATUMS, Content({"train": [(key, label, (data,)) for key, label, data in EXPECTED]}))
IN_FOLDERS = [("cat/0", 0, (PICTURES[0],)), ("cat/2", 0, (PICTURES[2],)), ("dog/1", 1, (PICTURES[1],))]
OF_FILES = lmdb_of(
    {f"{key}.jpg".encode(): image for key, _, (image,) in IN_FOLDERS}, Content({"train": IN_FOLDERS}, ("cat", "dog"))
)


@pytest.mark.parametrize("layout", [OF_DATUMS, OF_FILES], ids=["datums", "files"])
class TestLmdb(LayoutSuite):
    """Listed in this process, which is faster; other tests use a separate process."""

    def test_files_cut_short(self, root: Path, truth: Content) -> None:
        """A cut may end the process that reads the file."""
        os.truncate(root, int(root.stat().st_size * 0.3))
        refusal(root)
