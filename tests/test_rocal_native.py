"""rocAL's own readers over our shards: the directories that they want, on rocAL itself or on a double."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rocal_images import folder_of, numbers_of, solid

import packer
import readers
from cache.errors import DatasetError, FormatError, OutputError
from readers.rocal.native import Layout, labels_of, native_batches, native_pipeline, tar_layout, tfrecord_layout
from readers.rocal.pipelines import resnet_eval_ops
from readers.rocal.vet import Limits

BATCH = 4
MEAN, STD = 255 * np.array([0.485, 0.456, 0.406]), 255 * np.array([0.229, 0.224, 0.225])


def packed(root: Path, to: str, images: dict[int, bytes] | None = None, **options: Any) -> readers.Reader:
    """24 images in shards of 5. TFRecord wants names without a directory, which a manifest brings."""
    images = images or {number: solid(number) for number in range(24)}
    source = root / "images"
    if to == "tfrecord":
        source.mkdir(parents=True)
        for number, data in images.items():
            (source / f"image{number}.jpg").write_bytes(data)
        source = source / "list.csv"
        source.write_text("path,label\n" + "".join(f"image{number}.jpg,{number}\n" for number in images))
    else:
        folder_of(source, images).close()
    packer.convert(source, to=to, output=root / to, workers=1, samples_per_shard=5, **options)
    return readers.open(root / to)


def index_of(shard: Path, target: Path, version: str = "v1.2") -> Path:
    """An index as DALI's tools/wds2idx.py makes it: every member counts."""
    import tarfile

    samples: dict[str, list[str]] = {}
    with tarfile.open(shard) as archive:
        for member in archive:
            stem, _, extension = member.name.partition(".")
            words = [
                extension,
                str(member.offset_data),
                str(member.size),
                *([member.name] if version != "v1.1" else []),
            ]
            samples.setdefault(stem, []).extend(words)
    target.write_text("".join(f"{line}\n" for line in [f"{version} {len(samples)}", *map(" ".join, samples.values())]))
    return target


def indexes_of(reader: readers.Reader, root: Path, version: str = "v1.2") -> list[Path]:
    return [
        index_of(reader.path / shard.path, root / f"{Path(shard.path).stem}.idx", version)
        for shard in reader.split_info.shards
    ]


def seen(layout: Any, ops: Any, epochs: int = 1) -> list[int]:
    """The images of some epochs, which must be those that the labels say."""
    from amd.rocal.plugin.generic import ROCALClassificationIterator

    iterator = ROCALClassificationIterator(native_pipeline(layout, BATCH, ops, seed=5))
    return [number for _ in range(epochs) for number in epoch_of(iterator, layout)]


def epoch_of(iterator: Any, layout: Any) -> list[int]:
    found: list[int] = []
    for images, labels in native_batches(iterator, layout):
        assert images.shape == (BATCH, 3, 16, 16) and labels.dtype == np.int64
        assert numbers_of(images, MEAN, STD) == labels.tolist()
        found += labels.tolist()
    return found


@pytest.mark.rocal
@pytest.mark.parametrize("version", ["v1.0", "v1.1", "v1.2"])
@pytest.mark.parametrize("offset", [0, 1])
def test_tar(rocal: Any, tmp_path: Path, version: str, offset: int) -> None:
    reader = packed(tmp_path, "tar", label_offset=offset)
    layout = tar_layout(reader, tmp_path / "rocal", index_paths=indexes_of(reader, tmp_path, version))
    assert sorted(os.listdir(layout.shards)) == [f"{number:06d}.tar" for number in range(5)]
    assert layout.index is not None
    assert sorted(os.listdir(layout.index)) == [f"{number:06d}.idx" for number in range(5)]
    assert (layout.samples, layout.limits) == (24, (40, 48))
    assert sorted(seen(layout, resnet_eval_ops(size=16, resize=20))) == list(range(24))


@pytest.mark.rocal
def test_indexes_beside_the_shards_are_found(rocal: Any, tmp_path: Path) -> None:
    reader = packed(tmp_path, "tar")
    with pytest.raises(FormatError, match=r"not a readable index of .*packer export-index .*tar --for rocal"):
        tar_layout(reader, tmp_path / "rocal")
    indexes_of(reader, tmp_path / "tar")
    layout = tar_layout(reader, tmp_path / "rocal")
    assert sorted(seen(layout, resnet_eval_ops(size=16, resize=20))) == list(range(24))


@pytest.mark.rocal
def test_members_that_are_no_label_and_no_image_are_left_out(rocal_double: Any, tmp_path: Path) -> None:
    """rocAL would take them for the label."""
    reader = packed(tmp_path, "tar", {number: solid(number) for number in range(4)})
    (index,) = indexes_of(reader, tmp_path)
    head, *lines = index.read_text().splitlines()
    index.write_text("\n".join([head, *(f"{line} json 0 100 x.json" for line in lines)]) + "\n")
    layout = tar_layout(reader, tmp_path / "rocal", index_paths=[index])
    assert sorted(seen(layout, resnet_eval_ops(size=16, resize=20))) == [0, 1, 2, 3]
    assert layout.index is not None
    (layout.index / "000000.idx").write_text("\n".join(["v1.0 4", *lines]) + "\n")
    with pytest.raises(readers.PipelineError, match="not present in the map"):  # rocAL looks up image0, not 000/image0
        seen(layout, resnet_eval_ops(size=16, resize=20))
    (layout.index / "000000.idx").write_text(index.read_text().replace(head, "v1.0 4"))
    with pytest.raises(ValueError, match="invalid literal for int"):
        seen(layout, resnet_eval_ops(size=16, resize=20))


@pytest.mark.rocal
def test_the_exported_index_is_the_version_that_rocal_reads(rocal: Any, tmp_path: Path) -> None:
    """Without our layout: a directory of tars with flat names and one of indexes."""
    images = {number: solid(number) for number in range(8)}
    (tmp_path / "images").mkdir()
    for number, data in images.items():
        (tmp_path / "images" / f"image{number}.jpg").write_bytes(data)
    rows = "".join(f"image{number}.jpg,{number}\n" for number in images)
    (tmp_path / "images" / "list.csv").write_text("path,label\n" + rows)
    packer.convert(tmp_path / "images" / "list.csv", to="tar", output=tmp_path / "set", workers=1)
    packer.export_index(tmp_path / "set", "rocal", output=tmp_path / "index")
    (tmp_path / "shards").mkdir()
    for shard in (tmp_path / "set").glob("*.tar"):
        (tmp_path / "shards" / shard.name).symlink_to(shard)
    layout = Layout("tar", tmp_path / "shards", tmp_path / "index", len(images), 0, Limits(40, 48))
    assert sorted(seen(layout, resnet_eval_ops(size=16, resize=20))) == list(images)


@pytest.mark.rocal
@pytest.mark.parametrize("to", ["tar", "tfrecord"])
def test_epochs_have_as_many_batches_as_samples_fill(rocal: Any, tmp_path: Path, to: str) -> None:
    """rocAL's own iterator goes one step too far now and then; the last sample fills the last batch."""
    reader = packed(tmp_path, to, {number: solid(number) for number in range(22)})
    if to == "tar":
        layout = tar_layout(reader, tmp_path / "rocal", index_paths=indexes_of(reader, tmp_path))
    else:
        layout = tfrecord_layout(reader, tmp_path / "rocal")
    for seed in range(6):
        if rocal:
            rocal.seed_traps(seed)
        found = seen(layout, resnet_eval_ops(size=16, resize=20), epochs=2)
        assert sorted(found) == sorted([*range(22), 21, 21] * 2)


@pytest.mark.rocal
def test_a_naive_loop_over_rocals_own_reader_ends_badly(rocal_double: Any, tmp_path: Path) -> None:
    from amd.rocal.plugin.generic import ROCALClassificationIterator

    reader = packed(tmp_path, "tfrecord")
    layout = tfrecord_layout(reader, tmp_path / "rocal")
    ends = []
    for seed in range(12):
        rocal_double.seed_traps(seed)
        pipeline = native_pipeline(layout, BATCH, resnet_eval_ops(size=16, resize=20))
        try:
            ends.append(sum(labels_of(pipeline, layout).size for _ in ROCALClassificationIterator(pipeline)))
        except RuntimeError as error:
            ends.append(str(error))
    assert 24 in ends and any("No meta data has been loaded" in str(end) for end in ends)


@pytest.mark.rocal
@pytest.mark.parametrize("offset", [0, 1])
def test_tfrecord(rocal: Any, tmp_path: Path, offset: int) -> None:
    reader = packed(tmp_path, "tfrecord", label_offset=offset)
    layout = tfrecord_layout(reader, tmp_path / "rocal")
    assert not any(path.is_symlink() for path in layout.shards.iterdir())
    assert sorted(seen(layout, resnet_eval_ops(size=16, resize=20))) == list(range(24))


def test_what_rocal_would_replace_is_refused(tmp_path: Path) -> None:
    images = {number: solid(number) for number in range(6)} | {4: solid(4, "PNG"), 5: solid(5, mode="CMYK")}
    for to, make in (("tar", lambda r: tar_layout(r, tmp_path / "x")), ("tfrecord", None)):
        reader = packed(tmp_path / to, to, images)
        with pytest.raises(DatasetError, match=r"2 images are not.*image4, png.*external_source"):
            make(reader) if make else tfrecord_layout(reader, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_sets_and_indexes_that_do_not_fit(tmp_path: Path) -> None:
    reader = packed(tmp_path, "tar")
    indexes = indexes_of(reader, tmp_path)
    target = tmp_path / "rocal"
    with pytest.raises(DatasetError, match="expected tfrecord: packer convert"):
        tfrecord_layout(reader, target)
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
    with pytest.raises(FormatError, match="not a readable index"):
        tar_layout(reader, target, index_paths=[tmp_path / "none.idx", *indexes[1:]])
    indexes[0].write_text(good)
    assert not target.exists() and not list(tmp_path.glob(".rocal*"))
    tar_layout(reader, target, index_paths=indexes)
    with pytest.raises(OutputError, match="exists; give a new directory"):
        tar_layout(reader, target, index_paths=indexes)


def test_links_that_cannot_be_made_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = packed(tmp_path, "tfrecord")

    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(OutputError, match="cross-device link; hard links need the file system"):
        tfrecord_layout(reader, tmp_path / "rocal")
    assert not (tmp_path / "rocal").exists() and not list(tmp_path.glob(".rocal*"))


def test_shards_and_labels_that_tfrecord_readers_cannot_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    reader = packed(tmp_path, "tfrecord")
    shards = list(reader.split_info.shards)
    shards[1] = dataclasses.replace(shards[1], bytes=1 << 32)
    large = dataclasses.replace(reader.split_info, shards=tuple(shards))
    with monkeypatch.context() as patch:
        patch.setattr(type(reader), "split_info", large)
        with pytest.raises(DatasetError, match="4294967296 bytes, rocAL reads less than 4 GiB"):
            tfrecord_layout(reader, tmp_path / "rocal")
    folder_of(tmp_path / "nested", {0: solid(0)})
    packer.convert(tmp_path / "nested", to="tfrecord", output=tmp_path / "nested-tfrecord", workers=1)
    with pytest.raises(DatasetError, match=r"name 000/image0.jpg has a directory.*external_source"):
        tfrecord_layout(readers.open(tmp_path / "nested-tfrecord"), tmp_path / "rocal")
    flat = tmp_path / "flat"
    flat.mkdir()
    for number in range(3):
        (flat / f"{number}.jpg").write_bytes(solid(number))
    packer.convert(flat, to="tfrecord", output=tmp_path / "unlabelled", workers=1)
    with pytest.raises(DatasetError, match="3 samples have no label"):
        tfrecord_layout(readers.open(tmp_path / "unlabelled"), tmp_path / "rocal")
