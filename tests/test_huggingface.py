"""Data sets of Hugging Face: Parquet with images in it, and folders with tables of metadata."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import make_jpeg, tree_of
from PIL import Image

import packer
import readers
from cache.errors import BadSampleError, SourceError
from packer.sources.huggingface import HuggingFaceSource
from packer.testing.sources import Found, SourceSuite, found

PICTURES = [make_jpeg(number, (16 + 4 * number, 24)) for number in range(9)]
CLASSES = ("cat", "dog", "emu")
FEATURES = {"image": {"_type": "Image"}, "label": {"names": list(CLASSES), "_type": "ClassLabel"}}
IMAGES = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def row(number: int, **more: Any) -> dict[str, Any]:
    image = {"bytes": PICTURES[number], "path": f"{number}.jpg"}
    return {"image": image, "label": number % 3, "size": number / 2, "note": f"n° {number}"} | more


def write(
    path: Path, rows: Sequence[dict[str, Any]], features: dict[str, Any] | None = FEATURES, **options: Any
) -> Path:
    """A Parquet file as `datasets` writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kinds = {"image": IMAGES, "label": pa.int64(), "mask": IMAGES}
    columns = {name: pa.array([its.get(name) for its in rows], kinds.get(name)) for name in rows[0]}
    table = pa.table(columns)
    if features is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, **{"row_group_size": 2} | options)
    return path


@pytest.mark.parametrize(
    "names",
    [
        {"train": ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
         "test": ["data/test-00000-of-00001-0123456789abcdef.parquet"]},
        {"train": ["default/train/0000.parquet", "default/train/0001.parquet"], "test": ["default/test/0000.parquet"]},
        {"train": ["train-a.parquet", "train-b.parquet"], "test": ["test.parquet"]},
    ],
    ids=["pushed", "converted", "plain"],
)  # fmt: skip
class TestHuggingFace(SourceSuite):
    @pytest.fixture
    def root(self, tmp_path: Path, names: dict[str, list[str]]) -> Path:
        root = tmp_path / "beasts"
        write(root / names["train"][0], [row(i) for i in range(5)])
        write(root / names["train"][1], [row(i) for i in (5, 6)], compression="zstd")
        write(root / names["test"][0], [row(7), row(8)], use_dictionary=False)
        return root

    def open(self, root: Path) -> Any:
        source: Any = super().open(root)
        source.isolated = False  # listed in this process, which is quicker; other tests do otherwise
        return source

    @pytest.fixture
    def truth(self) -> Found:
        def one(number: int) -> tuple[str, int, tuple[bytes, bytes]]:
            record = json.dumps({"size": number / 2, "note": f"n° {number}"}, ensure_ascii=False, separators=(",", ":"))
            return str(number), number % 3, (PICTURES[number], record.encode())

        splits = {"train": [one(i) for i in range(7)], "test": [one(i) for i in (7, 8)]}
        return Found(splits, CLASSES, ("image", "json"))


def test_columns(tmp_path: Path) -> None:
    """Masks, captions, plain bytes, labels that are names; several images a row are left behind; no features at all."""
    mask = io.BytesIO()
    Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4)).save(mask, "PNG")
    rows = [
        row(
            number,
            label=None,
            mask={"bytes": mask.getvalue(), "path": None},
            caption=["one", "two"],
            blob=b"any",
            category=name,
            objects={"bbox": [[1.0, 2.0, 3.0, 4.0]]},
            views=[{"bytes": b"a", "path": None}],
        )
        for number, name in enumerate(["dog", "cat"])
    ]
    path = write(tmp_path / "x.parquet", rows, None)
    source = packer.open_source(path, label_column="category")
    listing = source.list("val")
    kinds = {"image": "image", "caption": "text", "mask": "mask", "blob": "file", "json": "json"}
    assert dict(listing.fields) == kinds and "left behind: 'views'" in listing.warnings[0]
    (_, label, (image, caption, of_mask, blob, record)), _ = found(source, "val").splits["val"]
    assert (listing.classes, label) == (("cat", "dog"), 1)
    assert (image, caption, of_mask, blob) == (PICTURES[0], b"one\ntwo", mask.getvalue(), b"any")
    about = json.loads(record or b"")
    assert about == {"label": None, "size": 0.0, "note": "n° 0", "objects": {"bbox": [[1.0, 2.0, 3.0, 4.0]]}}


def test_keys_without_distinct_paths(tmp_path: Path) -> None:
    """And labels that are missing, or -1 as in a test split."""
    rows = [row(0, image={"bytes": PICTURES[0], "path": "same.jpg"}, label=-1) for _ in range(3)]
    rows[1]["label"] = None
    listing = packer.open_source(write(tmp_path / "train.parquet", rows)).list(None)
    assert list(listing.splits["train"].keys) == [f"train/{i:08d}" for i in range(3)]
    assert set(listing.splits["train"].labels) == {-1}


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
    write(tmp_path / "data" / "train-00000-of-00001.parquet", [row(0), row(1)], None)
    (tmp_path / "README.md").write_text(README)
    assert packer.open_source(tmp_path).list(None).classes == CLASSES
    (tmp_path / "README.md").write_text(README.replace("- name", "- {name"))
    with pytest.raises(SourceError, match="its header: cannot be read as YAML"):
        packer.open_source(tmp_path).list(None)


def test_several_sets_in_a_repository(tmp_path: Path) -> None:
    for name in ("large", "small"):
        write(tmp_path / name / "train-00000-of-00001.parquet", [row(0)])
    (tmp_path / "README.md").write_text("# Two")
    with pytest.raises(SourceError, match=f"holds 2 data sets: large, small; name .* packer convert {tmp_path}/large"):
        packer.open_source(tmp_path).list(None)
    assert list(packer.open_source(tmp_path / "small").list(None).splits) == ["train"]


def one_file(root: Path, rows: Sequence[dict[str, Any]] | None = None, **options: Any) -> Path:
    return write(root / "train-00000-of-00001.parquet", rows or [row(i) for i in range(6)], **options)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (
            lambda root: write(root / "train-00000-of-00003.parquet", [row(0)]),
            "speak of 3.*first of them train-00001-of",
        ),
        (lambda root: one_file(root, [row(0, label=3)]), "row 1 has the 'label' 3, the last is 2"),
        (
            lambda root: [
                write(root / "train-00000-of-00002.parquet", [row(0)]),
                write(root / "train-00001-of-00002.parquet", [row(1, size="large")]),
            ],
            "its column 'size' is missing, or not as in",
        ),
        (
            lambda root: one_file(
                root, [row(0)], features={**FEATURES, "label": {"_type": "ClassLabel", "names": [1, 1]}}
            ),
            "the names of its classes",
        ),
        (lambda root: one_file(root, [row(0)], features={"image": {"_type": "Audio"}}), "no column of images"),
    ],
    ids=["missing", "label", "columns", "names", "audio"],
)
def test_a_set_that_is_refused(tmp_path: Path, work: Callable[[Path], object], message: str) -> None:
    work(tmp_path)
    with pytest.raises(SourceError, match=message):
        packer.open_source(tmp_path).list(None)


def test_a_pointer_of_git_lfs(tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path / f"train-{number:05d}-of-00002.parquet", [row(number)])
    (tmp_path / "train-00001-of-00002.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(SourceError, match="a pointer of Git LFS and not the file; run  git lfs pull"):
        packer.open_source(tmp_path).list(None)


def test_images_that_are_paths_alone(tmp_path: Path) -> None:
    path = one_file(tmp_path, [row(0), row(1, image={"bytes": None, "path": "/etc/passwd"}), row(2, image=None)])
    source: Any = packer.open_source(path)
    listing = source.list(None)
    with source.open() as reader:
        places = listing.splits["train"].places
        assert bytes(reader.read(places[0], None)[0]) == PICTURES[0]
        with pytest.raises(BadSampleError, match="no bytes, only the path '/etc/passwd'"):
            reader.read(places[1], None)
        with pytest.raises(BadSampleError, match="the column is null"):
            reader.read(places[2], None)


# --- bombs --------------------------------------------------------------------------------------------------------
def bomb(size: int) -> bytes:
    return b"\xff\xd8\xff" + bytes(size)


@pytest.mark.parametrize("use_dictionary", [False, True], ids=["page", "dictionary"])
def test_a_page_that_unpacks_to_much_is_refused_before_it_is_read(tmp_path: Path, use_dictionary: bool) -> None:
    rows = [row(0, image={"bytes": bomb(65 << 20), "path": "0.jpg"})]
    path = one_file(tmp_path, rows, compression="zstd", use_dictionary=use_dictionary, data_page_size=1 << 30)
    assert path.stat().st_size < 1 << 20
    source: Any = packer.open_source(path)
    listing = source.list(None)
    with (
        source.open() as reader,
        pytest.raises(SourceError, match=r"image.bytes: .* unpack to .* bomb"),
    ):
        reader.read(listing.splits["train"].places[0], None)


def test_a_dictionary_that_is_used_many_times(tmp_path: Path) -> None:
    """A few rows are in memory at a time, whatever their number: all of them would take 800 MB."""
    size = 8 << 20
    path = tmp_path / "train.parquet"
    images = pa.DictionaryArray.from_arrays(np.zeros(100, np.int32), pa.array([bomb(size)], pa.binary()))
    table = pa.table({"image": images, "label": np.zeros(100, np.int64)})
    pq.write_table(table, path, store_schema=False, compression="none", dictionary_pagesize_limit=1 << 30)
    source: Any = HuggingFaceSource(path)
    before = pa.total_allocated_bytes()
    assert len(source.list(None).splits["train"]) == 100
    with source.open() as reader:
        for row in (0, 40):
            assert len(reader.read((0, 0, row), None)[0]) == size + 3
            assert pa.total_allocated_bytes() - before < 40 * size


def test_a_page_whose_header_lies(tmp_path: Path) -> None:
    """The footer is left as it is; the header of the first page of images says that it unpacks to 2 GB."""
    path = one_file(tmp_path, [row(i) for i in range(4)], row_group_size=4, use_dictionary=False)
    listed = packer.open_source(path).list(None).splits["train"]
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    assert column.path_in_schema == "image.bytes"
    data = path.read_bytes()
    start = column.data_page_offset
    assert data[start : start + 3] == b"\x15\x00\x15"  # the type of the page, 0; then the bytes it unpacks to, zigzag
    stop = next(at for at in range(start + 3, start + 9) if data[at] < 0x80) + 1
    claimed = b"\xfe\xff\xff\x0f"[: stop - start - 3 - 1].ljust(stop - start - 4, b"\xff") + b"\x7f"
    path.write_bytes(data[: start + 3] + claimed + data[stop:])
    source: Any = packer.open_source(path)
    assert len(source.list(None).splits["train"]) == len(listed) == 4
    with source.open() as reader, pytest.raises(SourceError):
        reader.read((0, 0, 0), None)


def test_rows_are_read_in_their_order(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"cannot be read in shuffled order; convert it as it is, and then"):
        packer.convert(
            packer.open_source(one_file(tmp_path)),
            "tar",
            tmp_path / "out",
            shards=packer.Shards(shuffle=1),
            run=packer.Run(workers=1),
        )


# --- by the library itself ----------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("default")
def test_a_set_of_the_library_itself(tmp_path: Path) -> None:
    """The bytes, labels and names that `datasets` reads."""
    datasets = pytest.importorskip("datasets", reason="datasets, which writes such files, is not installed")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))})
    rows = {"image": [row(i)["image"] for i in range(9)], "label": [i % 3 for i in range(9)]}
    made = datasets.Dataset.from_dict(rows, features=features)
    for number in range(2):
        part = made.shard(2, number, contiguous=True)
        part.to_parquet(tmp_path / "set" / "data" / f"train-{number:05d}-of-00002.parquet")
    theirs = datasets.load_dataset(str(tmp_path / "set"), split="train", cache_dir=str(tmp_path / "cache"))
    packer.convert(
        packer.open_source(tmp_path / "set"),
        "hdf5",
        tmp_path / "out",
        run=packer.Run(workers=1),
        shards=packer.Shards(samples=2),
    )
    with readers.open(tmp_path / "out", "train", verify=True) as reader:
        assert tuple(reader.classes) == tuple(theirs.features["label"].names)
        plain = theirs.cast_column("image", datasets.Image(decode=False))
        for sample, its in zip(reader, plain, strict=True):
            assert (sample.label, bytes(sample.image), f"{sample.key}.jpg") == (
                its["label"],
                its["image"]["bytes"],
                its["image"]["path"],
            )


# --- imagefolder --------------------------------------------------------------------------------------------------
def table(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(its) + "\n" for its in rows))
        return
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
        return
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([rows[0], *(its.values() for its in rows)])


def image_folder(root: Path, suffix: str, above: bool) -> Path:
    """above: one table for both splits, in the root."""
    splits = {"train": range(5), "test": range(5, 8)}
    names = {f"{split}/{i}.jpg": PICTURES[i] for split, its in splits.items() for i in its}
    tree_of(root, names | {f"train/masks/{i}.png": b"mask %d" % i for i in range(5)} | {"test/masks/5.png": b"mask 5"})
    rows: dict[str, list[dict[str, Any]]] = {split: [] for split in splits}
    for split, its in splits.items():
        folder = f"{split}/" if above else ""
        for i in its:
            mask = f"{folder}masks/{i}.png" if i < 6 else ""
            rows[split].append(
                {"file_name": f"{folder}{i}.jpg", "mask_file_name": mask, "label": CLASSES[i % 2], "n": str(i)}
            )
    if above:
        table(root / f"metadata.{suffix}", [its for split in rows.values() for its in split])
    else:
        for split, its in rows.items():
            table(root / split / f"metadata.{suffix}", its)
    return root


@pytest.mark.parametrize("above", [True, False], ids=["above", "in-splits"])
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
class TestImageFolder(SourceSuite):
    @pytest.fixture
    def root(self, tmp_path: Path, suffix: str, above: bool) -> Path:
        return image_folder(tmp_path / "set", suffix, above)

    @pytest.fixture
    def truth(self) -> Found:
        def one(split: str, number: int) -> tuple[Any, ...]:
            mask = b"mask %d" % number if number < 6 else None
            fields = (PICTURES[number], mask, json.dumps({"n": str(number)}, separators=(",", ":")).encode())
            return f"{split}/{number}", number % 2, fields

        splits = {"train": [one("train", i) for i in range(5)], "test": [one("test", i) for i in range(5, 8)]}
        return Found(splits, CLASSES[:2], ("image", "mask", "json"))

    def whole_files(self, root: Path) -> bool:
        return True


def test_what_no_row_names_is_left_out(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "set", "jsonl", False)
    (root / "train" / "stray.jpg").write_bytes(PICTURES[8])
    listing = packer.open_source(root).list("train")
    assert listing.left_out == [("train/stray.jpg", "not in metadata.jsonl")]
    assert packer.open_source(root, layout="tree").list(None).classes == ("masks",)


def test_without_labels(tmp_path: Path) -> None:
    root = tree_of(tmp_path / "set", {"a/0.jpg": PICTURES[0], "b/1.jpg": PICTURES[1]})
    table(root / "metadata.csv", [{"file_name": "a/0.jpg", "n": "0"}, {"file_name": "b/1.jpg", "n": "1"}])
    listing = packer.open_source(root).list(None)
    assert set(listing.splits["train"].labels) == {-1} and "layout='tree'" in listing.warnings[0]


@pytest.mark.parametrize("name", ["../secret.jpg", "/etc/passwd", "a/../../secret.jpg", "", "a\0b"])
@pytest.mark.parametrize("column", ["file_name", "mask_file_name"])
def test_a_name_that_leads_out(tmp_path: Path, name: str, column: str) -> None:
    root = tree_of(tmp_path / "set", {"0.jpg": PICTURES[0]})
    (tmp_path / "secret.jpg").write_bytes(PICTURES[1])
    table(root / "metadata.jsonl", [{"file_name": "0.jpg"}, {"file_name": "0.jpg", column: name}])
    if not name and column != "file_name":
        return
    with pytest.raises(SourceError, match=r"line 2: .*does not name a file below the folder"):
        packer.open_source(root).list(None)


def test_a_folder_of_save_to_disk_is_named_with_the_line_that_packs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    rows = {"image": [{"bytes": make_jpeg(number), "path": None} for number in range(4)], "label": [0, 1, 1, 0]}
    whole = datasets.DatasetDict(train=datasets.Dataset.from_dict(rows, features=features))
    whole.save_to_disk(tmp_path / "saved")
    with pytest.raises(SourceError, match="of Hugging Face's save_to_disk, run  python -c ") as refusal:
        packer.convert(tmp_path / "saved", "tar", tmp_path / "no", run=packer.Run(workers=1))
    line = next(text for text in str(refusal.value).splitlines() if "python -c" in text).partition("python -c ")[2]
    (code,) = shlex.split(line)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    with readers.open(tmp_path / "OUT") as reader:
        assert (reader.labels.tolist(), reader.classes) == ([0, 1, 1, 0], ("cat", "dog"))
