"""Index files for the native readers of DALI, rocAL, tfrecord and wids; the installed ones read samples with them."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from set_cases import FORMATS, convert
from suites.containers import tar_of, write
from suites.programs import run_packer

import packer
import readers
from cache.errors import FormatError, OutputError, StaleIndexError, UnknownNameError
from packer.formats import format_named
from packer.formats.base import PackedSample, ShardSpec
from readers.headers import parse_header

Content = list[tuple[bytes, int]]


@pytest.fixture(scope="module")
def originals(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("export")
    return {to: convert(tree, root / to, to, samples=16, label_offset=2).output for to in FORMATS}


@pytest.fixture
def packed(originals: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A set that tests may change."""
    return lambda to: Path(shutil.copytree(originals[to], tmp_path / to, dirs_exist_ok=True))


def stored(root: Path, split: str = "train") -> Content:
    """The (bytes, label) of each sample as stored, in the order of the set."""
    with readers.open(root, split) as reader:
        return [(bytes(reader.read(i)), int(reader.labels[i]) + 2) for i in range(len(reader))]


def run_dali(node: Callable[[Any], Any], count: int) -> list[list[np.ndarray[Any, Any]]]:
    """The samples from a DALI reader, in its order: a list for each of its outputs."""
    pipe = dali().Pipeline(batch_size=count, num_threads=1, device_id=None)
    with pipe:
        pipe.set_outputs(*node(dali().fn.readers))
    outputs = pipe.run()
    return [[np.array(output[i]) for output in outputs] for i in range(count)]


def dali() -> Any:
    try:
        import nvidia.dali.tfrecord
    except (ImportError, OSError) as error:
        pytest.skip(f"DALI is not installed: {error}")
    return nvidia.dali


# --- index files --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("target", "version"), [("dali", "v1.2"), ("rocal", "v1.0")])
def test_a_tar_index_agrees_with_tarfile(packed: Callable[[str], Path], target: Any, version: str) -> None:
    """Both versions have names; each library reads a different version."""
    root = packed("tar")
    result = packer.export_index(root, target)
    assert [file.name for file in result.files] == [*(f"train-{i:06d}.idx" for i in range(3)), "val-000000.idx"]
    assert result.samples == 45
    for file in result.files:
        first, *lines = file.read_text().splitlines()
        with tarfile.open(file.with_suffix(".tar")) as archive:
            members = [(m.name.partition(".")[2], m.offset_data, m.size, m.name) for m in archive.getmembers()]
        entries = []
        for line in lines:
            words = line.split(" ")
            entries += [(e, int(o), int(s), n) for e, o, s, n in zip(*(words[i::4] for i in range(4)), strict=True)]
        assert entries == members and first == f"{version} {len(lines)}"
        assert all(len({name.partition(".")[0] for name in line.split(" ")[3::4]}) == 1 for line in lines)


def test_a_tfrecord_index_equals_that_of_the_tfrecord_package(packed: Callable[[str], Path], tmp_path: Path) -> None:
    tool = pytest.importorskip("tfrecord.tools.tfrecord2idx")
    result = packer.export_index(packed("tfrecord"), "tfrecord", split="val")
    (file,) = result.files
    assert file.name == "val-00000-of-00001.tfindex" and result.samples == 9
    tool.create_index(str(file.with_suffix(".tfrecord")), str(tmp_path / "theirs"))
    assert file.read_text() == (tmp_path / "theirs").read_text()
    (same,) = packer.export_index(packed("tfrecord"), "dali", split="val", output=tmp_path / "other").files
    assert same == tmp_path / "other" / "val-00000-of-00001.idx" and same.read_text() == file.read_text()


def test_a_wids_index_lists_the_shards(packed: Callable[[str], Path], tmp_path: Path) -> None:
    root = packed("tar")
    train, val = packer.export_index(root, "wids").files
    assert (train.name, val.name) == ("train.wids.json", "val.wids.json")
    content = json.loads(train.read_text())
    assert content["wids_version"] == 1 and [shard["nsamples"] for shard in content["shardlist"]] == [16, 16, 4]
    for shard in content["shardlist"]:
        assert (root / shard["url"]).stat().st_size == shard["filesize"]
    (elsewhere,) = packer.export_index(root, "wids", output=tmp_path / "out", split="val").files
    assert Path(json.loads(elsewhere.read_text())["shardlist"][0]["url"]) == (root / "val-000000.tar").resolve()


# --- read by others -----------------------------------------------------------------------------------------------
def test_dali_reads_our_tars(packed: Callable[[str], Path]) -> None:
    root = packed("tar")
    indexes = [str(file) for file in packer.export_index(root, "dali", split="train").files]
    shards = [index.replace(".idx", ".tar") for index in indexes]
    samples = run_dali(lambda native: native.webdataset(paths=shards, index_paths=indexes, ext=["jpg", "cls"]), 36)
    assert [(image.tobytes(), int(label.tobytes())) for image, label in samples] == stored(root)


def test_dali_reads_our_tfrecords(packed: Callable[[str], Path]) -> None:
    root = packed("tfrecord")
    indexes = [str(file) for file in packer.export_index(root, "dali", split="train").files]
    shards = [index.replace(".idx", ".tfrecord") for index in indexes]

    def node(native: Any) -> Any:
        tfrecord = dali().tfrecord
        features = {
            "image/encoded": tfrecord.FixedLenFeature((), tfrecord.string, ""),
            "image/class/label": tfrecord.FixedLenFeature([1], tfrecord.int64, -1),
        }
        outputs = native.tfrecord(path=shards, index_path=indexes, features=features)
        return outputs["image/encoded"], outputs["image/class/label"]

    assert [(image.tobytes(), int(label[0])) for image, label in run_dali(node, 36)] == stored(root)


def test_the_tfrecord_package_reads_by_our_index(packed: Callable[[str], Path]) -> None:
    loader = pytest.importorskip("tfrecord.reader")
    root = packed("tfrecord")
    samples = []
    for file in packer.export_index(root, "tfrecord", split="train").files:
        description = {"image/encoded": "byte", "image/class/label": "int"}
        shard = str(file.with_suffix(".tfrecord"))
        for part in range(2):  # the index lets two workers share a file
            records = loader.tfrecord_loader(shard, str(file), description, shard=(part, 2))
            samples += [(bytes(r["image/encoded"]), int(r["image/class/label"][0])) for r in records]
    assert samples == stored(root)


def test_wids_reads_by_our_index(
    packed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wids = pytest.importorskip("wids")
    monkeypatch.setenv("WIDS_CACHE", str(tmp_path / "cache"))
    root = packed("tar")
    (index,) = packer.export_index(root, "wids", split="train", output=tmp_path / "out").files
    samples = wids.ShardListDataset(str(index), transformations=[])
    read = [(samples[i][".jpg"].read(), int(samples[i][".cls"].read())) for i in range(len(samples))]
    assert read == stored(root)


# --- refused sets -------------------------------------------------------------------------------------------------
def test_formats_that_a_library_cannot_read(originals: dict[str, Path]) -> None:
    cases: list[tuple[str, Any, str]] = [
        ("hdf5", "dali", "dali has no reader for hdf5 shards with an index file; feed the set through"),
        ("hdf5", "wids", "wids has no reader for hdf5 shards .* packer convert .* --to tar"),
        ("tfrecord", "rocal", "rocal has no reader for tfrecord .*; it reads them without one, .*tfrecord_layout"),
        ("tar", "tfrecord", "tfrecord has no reader for tar shards .* --to tfrecord"),
    ]
    for to, target, message in cases:
        before = sorted(originals[to].iterdir())
        with pytest.raises(FormatError, match=message):
            packer.export_index(originals[to], target)
        assert sorted(originals[to].iterdir()) == before


def test_a_name_with_a_blank_is_refused(tmp_path: Path, jpeg: Any) -> None:
    """Packer never writes such names; foreign tars may have them."""
    members = [("a.cls", b"0"), ("a.jpg", jpeg(1)), ("b c.cls", b"1"), ("b c.jpg", jpeg(2))]
    write(tmp_path / "train-0.tar", tar_of(*members))
    packer.index([tmp_path / "train-0.tar"])
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(FormatError, match=r"train-0.tar: member 'b c.cls' has a blank in its name"):
        packer.export_index(tmp_path, "dali")
    assert sorted(path.name for path in tmp_path.iterdir()) == before, "a partial index file is left"


def test_names_of_adopted_shards(tmp_path: Path, jpeg: Any) -> None:
    """Shards may differ only after the last dot of their names."""
    for number in range(2):
        spec, image = ShardSpec("train", {"image": "image"}, ("x",)), jpeg(number)
        writer = format_named("tfrecord").open_writer(tmp_path / f"train.tfrecord-0000{number}-of-00002", spec)
        writer.add(PackedSample(f"k{number}", 0, (image,), (f"k{number}.jpg",), parse_header(image)))
        writer.finish()
    packer.index(sorted(tmp_path.iterdir()))
    names = [file.name for file in packer.export_index(tmp_path, "dali").files]
    assert names == ["train.tfrecord-00000-of-00002.idx", "train.tfrecord-00001-of-00002.idx"]


def test_a_changed_shard_is_refused(packed: Callable[[str], Path]) -> None:
    root = packed("tar")
    with open(root / "train-000001.tar", "ab") as file:
        file.write(bytes(512))
    for target in ("dali", "wids"):
        with pytest.raises(StaleIndexError, match=r"train-000001.tar: has \d+ bytes, expected \d+ as indexed"):
            packer.export_index(root, target)  # type: ignore[arg-type]
    assert not (root / "train-000001.idx").exists() and not list(root.glob("*.tmp"))


def test_another_split_and_target(packed: Callable[[str], Path], tmp_path: Path) -> None:
    root = packed("tar")
    with pytest.raises(UnknownNameError, match="no split 'test'"):
        packer.export_index(root, "dali", split="test")
    with pytest.raises(ValueError, match="an index is for one of dali, rocal, tfrecord, wids, not 'ffcv'"):
        packer.export_index(root, "ffcv")  # type: ignore[arg-type]
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match=r"file: cannot be written: Not a directory"):
        packer.export_index(root, "dali", output=tmp_path / "file")


def test_the_command(packed: Callable[[str], Path], tmp_path: Path) -> None:
    root = packed("tar")
    done = run_packer("export-index", root, "--for", "rocal", "-o", tmp_path / "out")
    assert done.returncode == 0 and done.stdout == f"{tmp_path}/out: 4 index files for rocal, 45 samples\n"
    done = run_packer("export-index", root, "--for", "wids", "--split", "val", "--json")
    assert json.loads(done.stdout)["files"] == [f"{root}/val.wids.json"]
    assert run_packer("export-index", root, "--for", "webdataset").returncode == 2
    shutil.rmtree(root / "train.index")
    (root / "dataset.json").unlink()
    done = run_packer("export-index", root, "--for", "dali")
    assert done.returncode == 1 and "no dataset.json" in done.stderr and "Traceback" not in done.stderr
