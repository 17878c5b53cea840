"""The index is protected like the shards: by checksums of its files, and by a fingerprint that covers it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import make_jpeg, tree_of
from remote_suite import address  # noqa: F401
from set_cases import FORMATS, convert, flip

import packer
import readers
from packer.formats import format_named
from packer.formats.base import PackedSample, ShardSpec
from readers.order import ResumeToken, Shuffled
from readers.table import NO_LABEL

HEADER_COLUMNS = ("height", "width", "components", "process", "orientation", "media", "image.name")


@pytest.fixture(scope="module", params=FORMATS)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three samples, two of them with masks; read-only."""
    root = tmp_path_factory.mktemp("checksums")
    tree_of(root / "in", {f"train/cat/{number}.JPEG": make_jpeg(number) for number in range(3)})
    return convert(root / "in", root / "set", request.param).output


def copy_of(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "copy", dirs_exist_ok=True))


def without_checksums(root: Path, *, adopted: bool = False) -> Path:
    """The set as earlier versions wrote it."""
    path = root / "dataset.json"
    content = json.loads(path.read_text())
    for split in content["splits"].values():
        del split["columns"]
    del content["documents"]
    if adopted:
        content["made"]["indexed_by"] = "packer"
    path.write_text(json.dumps(content))
    return root


def test_every_flipped_byte_of_every_column_is_detected(packed: Path, tmp_path: Path) -> None:
    """By checksums; for a set of an earlier version without them, in columns of headers by comparison with the
    shards."""
    root = copy_of(packed, tmp_path)
    assert packer.verify(root, workers=1).ok, "the undamaged set does not verify"
    flips = 0
    for path in sorted((root / "train.index").iterdir()):
        size = path.stat().st_size
        for at in {0, 127, size - 1} & set(range(size)):
            before = flip(path, at)
            result = packer.verify(root, workers=1)
            named = [problem for problem in result.problems if problem.shard == f"train.index/{path.name}"]
            assert named, f"byte {at} of {path.name} flipped: {result.problems[:2]}"
            assert f"rebuild it with  packer index {root}" in named[0].what, "the remedy is not named"
            path.write_bytes(before)
            flips += 1
    assert flips > 40
    without_checksums(root)
    assert packer.verify(root, workers=1).ok, "a set of an earlier version does not verify"
    for column in HEADER_COLUMNS:
        path = root / "train.index" / f"{column}.npy"
        before = flip(path, path.stat().st_size - 1)
        (problem,) = packer.verify(root, workers=1).problems
        assert problem.index == 2 and column.removeprefix("image.") in problem.what
        path.write_bytes(before)


def test_a_damaged_index_is_used_for_no_extraction_or_conversion(packed: Path, tmp_path: Path) -> None:
    root = copy_of(packed, tmp_path)
    path = root / "train.index" / "image.name.npy"
    flip(path, path.stat().st_size - 1)
    with pytest.raises(readers.DatasetError, match=r"image\.name\.npy: its CRC32C is .*rebuild it with  packer index"):
        packer.extract(root, tmp_path / "out")
    with pytest.raises(readers.DatasetError, match=r"image\.name\.npy: its CRC32C is"):
        convert(root, tmp_path / "other")
    with pytest.raises(readers.StagingError, match=r"image\.name\.npy"), readers.stage(root, target=tmp_path / "to"):
        pytest.fail("a damaged index was staged")


def test_a_damaged_index_at_an_address_is_detected(packed: Path, tmp_path: Path, address: str) -> None:  # noqa: F811
    root = copy_of(packed, tmp_path)
    packer.upload(root, address)
    assert packer.verify(address).ok
    from cache.remote import Remote

    remote = Remote(address)
    path = root / "train.index" / "width.npy"
    flip(path, path.stat().st_size - 1)
    remote.store.put("train.index/width.npy", path, crc32c=0)
    for _ in range(2):  # with the index cached on this machine, and without it
        result = packer.verify(address)
        assert not result.ok and "width.npy" in str(result.problems[0]), result.problems
        shutil.rmtree(readers.opening.remote.index_cache_folder(), ignore_errors=True)


def two_images(folder: Path) -> Path:
    """A TFRecord whose samples have two images each."""
    folder.mkdir()
    path = folder / "train-00000-of-00001.tfrecord"
    writer = format_named("tfrecord").open_writer(path, ShardSpec("train", {"image": "image", "right": "file"}))
    for number in range(4):
        images = (make_jpeg(number), make_jpeg(100 + number))
        writer.add(PackedSample(f"k{number}", NO_LABEL, images, ("", ""), None))
    writer.finish()
    return path


def test_different_indexes_of_one_shard_have_different_fingerprints(tmp_path: Path, place: dict[str, Any]) -> None:
    """Otherwise a cache or a token of one set would be accepted for the other."""
    shard = two_images(tmp_path / "shards")
    left, right, again = (
        packer.index([shard], tmp_path / name, image_key=f"{key}/encoded", workers=1).output
        for name, key in (("left", "image"), ("right", "right"), ("again", "image"))
    )
    prints = [readers.open(root).fingerprint for root in (left, right, again)]
    assert prints[0] != prints[1], "two sets with other images have one fingerprint"
    assert prints[0] == prints[2], "the same index made twice has two fingerprints"
    with readers.open(left) as first, readers.open(right) as two:
        with readers.cached(first, 1.0, **place) as kept:
            assert [bytes(data) for data in kept.read_many(range(4))] == [make_jpeg(i) for i in range(4)]
            with readers.cached(two, 1.0, **place) as other:
                assert [bytes(data) for data in other.read_many(range(4))] == [make_jpeg(100 + i) for i in range(4)]
        order = Shuffled(4, seed=1)
        token = ResumeToken(1, 0, 2, first.fingerprint, "", order.spec(), 4)
        with pytest.raises(readers.ResumeError):
            token.check(fingerprint=two.fingerprint, order_spec=order.spec(), decoder="", samples=4)
    for root in (left, right):
        without_checksums(root)
    assert readers.open(left).fingerprint != readers.open(right).fingerprint, (
        "without checksums the sets share a fingerprint"
    )


def test_a_set_adopted_with_derived_keys_verifies_and_is_rebuilt_with_them(tmp_path: Path) -> None:
    shard = two_images(tmp_path / "shards")
    root = packer.index([shard], image_key="right/encoded", workers=1).output
    assert packer.verify(root, deep=True, workers=1).ok
    before = readers.open(root).fingerprint
    path = root / "train.index" / "label.npy"
    flip(path, path.stat().st_size - 1)
    assert not packer.verify(root, workers=1).ok
    packer.index([root], workers=1)
    assert packer.verify(root, workers=1).ok
    assert readers.open(root).fingerprint == before, "the repair changed the fingerprint"
    with readers.open(root) as reader:
        assert bytes(reader.read(0)) == make_jpeg(100)


def test_tokens_of_converted_sets_of_earlier_versions_stay_valid(packed: Path, tmp_path: Path) -> None:
    """Their labels and byte ranges follow from the shards, which the fingerprint has always covered."""
    root = without_checksums(copy_of(packed, tmp_path))
    assert readers.open(root).fingerprint == f"{packer.inspect(root).fingerprint}/train"
    without = readers.open(without_checksums(copy_of(packed, tmp_path / "b"), adopted=True)).fingerprint
    assert without.startswith(packer.inspect(root).fingerprint) and without.count("-") == 1
