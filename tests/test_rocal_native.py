"""rocAL's native readers over our shards: the directories that they need, on rocAL itself or on a double."""

from __future__ import annotations

import dataclasses
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import by_subject
from rocal_images import folder_of, numbers_of, solid

import packer
import readers
from cache.errors import DatasetError, FormatError, OutputError
from readers.rocal.native import Layout, native_batches, native_pipeline, tar_layout, tfrecord_layout
from readers.rocal.pipelines import resnet_eval_ops
from readers.rocal.source import Limits

BATCH = 4
MEAN, STD = 255 * np.array([0.485, 0.456, 0.406]), 255 * np.array([0.229, 0.224, 0.225])
OPS = resnet_eval_ops(size=16, resize=20)
LAYOUTS: dict[str, Any] = {"tar": tar_layout, "tfrecord": tfrecord_layout}


def packed(root: Path, to: str, images: dict[int, bytes] | int = 24, **options: Any) -> readers.Reader:
    """A set of some images, in shards of 5. rocAL needs names without a directory in TFRecord, so they come from a
    manifest."""
    images = images if isinstance(images, dict) else {number: solid(number) for number in range(images)}
    source = root / "images"
    if to == "tfrecord":
        source = manifest_of(source, images)
    else:
        folder_of(source, images).close()
    packer.convert(source, to=to, output=root / to, **by_subject(options, workers=1, samples=5))
    return readers.open(root / to)


def manifest_of(folder: Path, images: dict[int, bytes]) -> Path:
    """A manifest of images in its folder; the label of each image is its number."""
    folder.mkdir(parents=True)
    for number, data in images.items():
        (folder / f"image{number}.jpg").write_bytes(data)
    (folder / "list.csv").write_text("path,label\n" + "".join(f"image{number}.jpg,{number}\n" for number in images))
    return folder / "list.csv"


def indexes_of(reader: readers.Reader, root: Path, version: str = "v1.2") -> list[Path]:
    """Indexes as DALI's tools/wds2idx.py writes them, with every member, including one that is neither label nor
    image."""
    paths = []
    for shard in reader.split_info.shards:
        samples: dict[str, list[str]] = {}
        with tarfile.open(reader.path / shard.path) as archive:
            for member in archive:
                stem, _, extension = member.name.partition(".")
                words = [extension, str(member.offset_data), str(member.size), member.name]
                samples.setdefault(stem, []).extend(words[: 3 if version == "v1.1" else 4])
        paths.append(root / f"{Path(shard.path).stem}.idx")
        other = " json 0 100 x.json" if version != "v1.1" else ""
        lines = [f"{version} {len(samples)}", *(" ".join(words) + other for words in samples.values())]
        paths[-1].write_text("".join(f"{line}\n" for line in lines))
    return paths


def numbers_read(layout: Layout, epochs: int = 1) -> list[int]:
    """The images of some epochs, which must match their labels."""
    from amd.rocal.plugin.generic import ROCALClassificationIterator

    iterator = ROCALClassificationIterator(native_pipeline(layout, BATCH, OPS, seed=5))
    numbers: list[int] = []
    for _ in range(epochs):
        for images, labels in native_batches(iterator, layout):
            assert images.shape == (BATCH, 3, 16, 16) and labels.dtype == np.int64
            assert numbers_of(images, MEAN, STD) == labels.tolist()
            numbers += labels.tolist()
    return numbers


@pytest.mark.rocal
@pytest.mark.parametrize(("version", "offset"), [("v1.0", 0), ("v1.1", 0), ("v1.2", 1)])
def test_tar(rocal: Any, tmp_path: Path, version: str, offset: int) -> None:
    """Members that are neither label nor image are left out: rocAL would take them for the label."""
    reader = packed(tmp_path, "tar", label_offset=offset)
    layout = tar_layout(reader, tmp_path / "rocal", index_paths=indexes_of(reader, tmp_path, version))
    assert layout.index is not None
    assert sorted(os.listdir(layout.shards)) == [f"{number:06d}.tar" for number in range(5)]
    assert sorted(os.listdir(layout.index)) == [f"{number:06d}.idx" for number in range(5)]
    assert (layout.samples, layout.limits) == (24, (40, 48))
    assert sorted(numbers_read(layout)) == list(range(24))


@pytest.mark.rocal
@pytest.mark.parametrize("offset", [0, 1])
def test_tfrecord(rocal: Any, tmp_path: Path, offset: int) -> None:
    layout = tfrecord_layout(packed(tmp_path, "tfrecord", label_offset=offset), tmp_path / "rocal")
    assert not any(path.is_symlink() for path in layout.shards.iterdir())
    assert sorted(numbers_read(layout)) == list(range(24))


@pytest.mark.rocal
def test_the_exported_index_is_the_version_that_rocal_reads(rocal: Any, tmp_path: Path) -> None:
    """Without our layout: a directory of tars with flat names, and a directory of indexes."""
    manifest = manifest_of(tmp_path / "images", {number: solid(number) for number in range(8)})
    packer.convert(manifest, to="tar", output=tmp_path / "set", run=packer.Run(workers=1))
    packer.export_index(tmp_path / "set", "rocal", output=tmp_path / "index")
    (tmp_path / "shards").mkdir()
    for shard in (tmp_path / "set").glob("*.tar"):
        (tmp_path / "shards" / shard.name).symlink_to(shard)
    layout = Layout("tar", tmp_path / "shards", tmp_path / "index", 8, 0, Limits(40, 48))
    assert sorted(numbers_read(layout)) == list(range(8))


@pytest.mark.rocal
@pytest.mark.parametrize("to", LAYOUTS)
def test_the_number_of_batches_of_an_epoch(rocal: Any, tmp_path: Path, to: str) -> None:
    """rocAL's iterator occasionally goes one step too far; the last sample fills the last batch.

    The indexes are found next to the shards.
    """
    reader = packed(tmp_path, to, 22)
    if to == "tar":
        indexes_of(reader, reader.path)
    layout = LAYOUTS[to](reader, tmp_path / "rocal")
    for seed in range(6):
        if rocal:
            rocal.seed_traps(seed)
        assert sorted(numbers_read(layout, epochs=2)) == sorted([*range(22), 21, 21] * 2)


# --- refused sets -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("to", LAYOUTS)
def test_sets_that_rocal_would_read_wrongly(tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images = {number: solid(number) for number in range(6)} | {4: solid(4, "PNG"), 5: solid(5, mode="CMYK")}
    reader, target = packed(tmp_path, to, images), tmp_path / "rocal"
    with pytest.raises(DatasetError, match=r"2 images are not.*image4, png.*external_source"):
        LAYOUTS[to](reader, target)
    other = "tfrecord" if to == "tar" else "tar"
    with pytest.raises(DatasetError, match=f"expected {other}: packer convert"):
        LAYOUTS[other](reader, target)
    reader = packed(tmp_path / "small", to, 2)
    (shard,) = reader.split_info.shards
    large = dataclasses.replace(reader.split_info, shards=(dataclasses.replace(shard, bytes=1 << 32),))
    monkeypatch.setattr(type(reader), "split_info", large)
    with pytest.raises(DatasetError, match="4294967296 bytes, rocAL reads less than 4 GiB"):
        LAYOUTS[to](reader, target)
    assert not target.exists()


def test_indexes_that_do_not_fit(tmp_path: Path) -> None:
    reader = packed(tmp_path, "tar")
    target = tmp_path / "rocal"
    with pytest.raises(FormatError, match=r"not a readable index of .*packer export-index .*tar --for rocal"):
        tar_layout(reader, target)
    indexes = indexes_of(reader, tmp_path)
    with pytest.raises(DatasetError, match="5 shards need as many index files, found 4"):
        tar_layout(reader, target, index_paths=indexes[:4])
    with pytest.raises(FormatError, match=r"expected v1.0, v1.1 or v1.2 and 5 samples"):
        tar_layout(reader, target, index_paths=indexes[::-1])
    good = indexes[0].read_text()
    for bad, message in [
        ("", "not a readable index"),
        ("v1.2 five\n", "expected v1.0, v1.1 or v1.2 and 5 samples"),
        (good.replace("v1.2", "v2.0"), "found 'v2.0 5'"),
        (good.replace(" 512 ", " 513 "), "line 2: 513"),
        (good.replace(" 512 ", f" {1 << 40} "), "not a range of a member"),
        (good.replace(" 512 ", " -512 "), "expected groups of 4 words"),
        (good.replace("jpg", "jpg extra"), "expected groups of 4 words"),
        (good.replace("cls", "txt"), "expected one cls and one JPEG"),
    ]:
        indexes[0].write_text(bad)
        with pytest.raises(FormatError, match=message):
            tar_layout(reader, target, index_paths=indexes)
    indexes[0].write_text(good)
    assert not target.exists() and not list(tmp_path.glob(".rocal*"))
    tar_layout(reader, target, index_paths=indexes)
    with pytest.raises(OutputError, match="exists; give a new directory"):
        tar_layout(reader, target, index_paths=indexes)


def test_a_directory_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = packed(tmp_path, "tfrecord")

    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(OutputError, match="cross-device link; hard links need the file system"):
        tfrecord_layout(reader, tmp_path / "rocal")
    assert not (tmp_path / "rocal").exists() and not list(tmp_path.glob(".rocal*"))


@pytest.mark.parametrize(
    ("name", "message"),
    [("000/image0.jpg", r"name 000/image0.jpg has a directory.*external_source"), ("0.jpg", "1 samples have no label")],
)
def test_names_and_labels_that_tfrecord_readers_cannot_use(tmp_path: Path, name: str, message: str) -> None:
    image = tmp_path / "images" / name
    image.parent.mkdir(parents=True)
    image.write_bytes(solid(0))
    packer.convert(tmp_path / "images", to="tfrecord", output=tmp_path / "set", run=packer.Run(workers=1))
    with pytest.raises(DatasetError, match=message):
        tfrecord_layout(readers.open(tmp_path / "set"), tmp_path / "rocal")
