"""`packer index` compares with the existing set before changing it: no data is lost without a flag."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import files_of, make_jpeg
from set_cases import convert, damage

import packer
import readers
from packer.cli.convert import index_command as command
from packer.formats import format_named
from packer.formats.base import PackedSample, ShardSpec
from packer.sources.shards import missing_shards
from packer.testing.children import crashes_at
from readers.headers import parse_header
from readers.layout import DOCUMENTS
from readers.table import NO_LABEL


@pytest.fixture(scope="module", params=("tfrecord", "tar"))
def original(request: pytest.FixtureRequest, tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six shards of train, two of val; tests may not write to the set."""
    return convert(tree, tmp_path_factory.mktemp("losses") / "set", request.param, samples=6).output


@pytest.fixture
def packed(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "set"))


def shards_of(root: Path, split: str = "train") -> list[Path]:
    return [root / shard.path for shard in readers.open(root, split).split_info.shards]


def refused(root: Path, call: Callable[[], object], *texts: str) -> None:
    """The call must raise OutputError or SourceError with all of these texts, and change no file."""
    before = files_of(root)
    with pytest.raises((readers.OutputError, readers.SourceError)) as caught:
        call()
    assert files_of(root) == before, "a refused command has changed the set"
    for text in texts:
        assert text in str(caught.value)


def shard(path: Path, images: list[int], classes: tuple[str, ...] = (), labels: list[int] | None = None) -> Path:
    """A packer shard that belongs to no set."""
    path.parent.mkdir(parents=True, exist_ok=True)
    to = {".h5": "hdf5", ".tar": "tar"}.get(path.suffix, "tfrecord")
    writer = format_named(to).open_writer(path, ShardSpec("train", {"image": "image"}, classes))
    for place, seed in enumerate(images):
        jpeg = make_jpeg(seed)
        label, key = labels[place] if labels else NO_LABEL, f"{path.stem}-{seed}"
        writer.add(PackedSample(key, label, (jpeg,), (f"{key}.jpg",), parse_header(jpeg)))
    writer.finish()
    return path


def test_shards_of_another_set_do_not_replace_a_set(packed: Path, tmp_path: Path) -> None:
    other = shard(tmp_path / "new" / f"other-000000{shards_of(packed)[0].suffix}", [900, 901])
    refused(
        packed,
        lambda: packer.index([other], packed, workers=1),
        "would lose 45 samples in 8 shards", "2 splits (train, val)", "3 classes (cat, dog, owl)", "accept_loss=True",
    )  # fmt: skip
    same_name = shard(tmp_path / "new" / shards_of(packed)[0].name, [900, 901])
    refused(packed, lambda: packer.index([same_name], packed, workers=1), "would lose")
    refused(packed, lambda: packer.index([same_name], packed, accept_loss=True, workers=1), "is in the way of a link")
    result = packer.index([other], packed, accept_loss=True, workers=1)
    assert (result.samples, list(result.splits)) == (2, ["train"])
    with readers.open(packed) as reader:
        assert reader.classes == (), "the new samples have the names of the old set's classes"
    assert packer.verify(packed, workers=1).ok


def test_one_shard_is_not_taken_for_the_whole_set_and_a_missing_one_is_not_ignored(
    packed: Path, tmp_path: Path
) -> None:
    before, (first, _, lost, *_) = files_of(packed), shards_of(packed)
    for _ in range(2):
        packer.index([packed], workers=1)
        assert files_of(packed) == before, "an intact index was rebuilt"
    refused(packed, lambda: packer.index([first], workers=1), "39 samples in 7 shards", f"packer index {packed}")
    apart = packer.index(str(first), tmp_path / "apart", accept_loss=True, workers=1)  # one shard needs no list
    with readers.open(tmp_path / "apart") as reader:
        assert apart.samples == 6 and reader.classes == ("cat", "dog", "owl"), "the classes of the set were lost"
    lost.unlink()
    refused(packed, lambda: packer.index([packed], workers=1), "6 samples in 1 shard", lost.name)
    result = packer.index([packed], accept_loss=True, workers=1)
    assert result.samples == 39 and packer.verify(packed, workers=1).ok
    assert packer.index([packed], workers=1).samples == 39, "an accepted loss is reported again"


def test_a_missing_shard_shows_in_the_names_of_the_others(packed: Path) -> None:
    (packed / "dataset.json").unlink()
    for split in ("train", "val"):
        shutil.rmtree(packed / f"{split}.index")
    last = sorted(path for path in packed.iterdir() if path.name.startswith("train-"))[-1]
    last.unlink()
    refused(packed, lambda: packer.index([packed], workers=1), "1 shard of this set is missing", "accept_loss=True")
    assert packer.index([packed], accept_loss=True, workers=1).samples == 39


def test_numbers_in_names_reveal_missing_shards() -> None:
    cases: list[tuple[list[str], int, list[str]]] = [
        (["train-00000-of-00003.h5", "train-00002-of-00003.h5"], 1, ["train-00001-of-00003.h5"]),
        (["a-1-of-2", "a-2-of-2"], 0, []),
        (["train-000001.tar", "train-000004.tar"], 2, ["train-000002.tar", "train-000003.tar"]),
        (["a-0.tar", "a-2.tar", "a-10.tar"], 8, ["a-1.tar", "a-3.tar", "a-4.tar"]),
        (["train2014.tar", "train2017.tar"], 0, []),
        (["2024-01-05.tar", "2024-01-09.tar"], 0, []),
        (["x.tar", "y-00001.tfrecord"], 0, []),
        (["a-00001-of-99999999999.h5"], 0, []),
    ]
    for names, count, first in cases:
        assert missing_shards(names) == (count, first)


def test_a_truncated_record_is_a_loss(tree: Path, tmp_path: Path) -> None:
    root = convert(tree, tmp_path / "set", "tfrecord", samples=12).output
    path = shards_of(root)[1]
    data, position = path.read_bytes(), 0
    for _ in range(10):
        length = int.from_bytes(data[position : position + 8], "little")
        position += 16 + length
    path.write_bytes(data[:position])
    refused(root, lambda: packer.index([root], workers=1), f"2 samples of {path.name}, which had 12 and has 10")
    (root / "dataset.json").rename(tmp_path / "kept.json")
    refused(root, lambda: packer.index([root], workers=1), "2 samples of train, whose index has 36")
    (tmp_path / "kept.json").rename(root / "dataset.json")
    assert packer.index([root], accept_loss=True, workers=1).samples == 43


def test_damaged_shards_get_no_new_checksums_and_an_unreadable_index_is_not_replaced_silently(packed: Path) -> None:
    path, data = damage(packed, 8)
    refused(packed, lambda: packer.index([packed], workers=1), "the checksums of 1 shard", "damaged, or rewritten")
    assert not packer.verify(packed, workers=1).ok
    path.write_bytes(data)
    text = (packed / "dataset.json").read_text()
    for damaged in (text[:-100], text.replace('"version": 1', '"version": 3')):
        (packed / "dataset.json").write_text(damaged)
        refused(packed, lambda: packer.index([packed], workers=1), "of its dataset.json, which cannot be read")
    assert packer.index([packed], accept_loss=True, workers=1).samples == 45
    with readers.open(packed, "val") as reader:
        assert reader.classes == ("cat", "dog", "owl")


def test_an_error_in_the_middle_leaves_the_set_intact(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even in the last step the old index is still intact."""
    flipped = packed / "train.index" / "width.npy"
    data = flipped.read_bytes()
    flipped.write_bytes(data[:-1] + b"\x7f")
    before = files_of(packed)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device", "dataset.json")

    monkeypatch.setattr("packer.adoption.write_dataset_info", full)
    with pytest.raises(OSError, match="No space left"):
        packer.index([packed], workers=1)
    after = files_of(packed)
    assert {name: after.get(name) for name in before} == before, "files of the old set are gone or changed"
    monkeypatch.undo()
    packer.index([packed], workers=1)
    assert packer.verify(packed, workers=1).ok
    assert sorted(path.name for path in packed.iterdir() if path.is_dir()) == ["train.index-2", "val.index"]


def test_a_crash_at_every_step_leaves_the_old_index_or_the_new_one(tree: Path, tmp_path: Path) -> None:
    old = convert(tree / "train", tmp_path / "old", "tfrecord", checksums=True).output
    before, out = files_of(old), tmp_path / "out"
    outcomes: dict[str, int] = {}
    for step in range(1, 300, 4):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(old, out)
        crashed = crashes_at(step, lambda: packer.index([out], label_offset=-1, classes=list("abcd"), workers=1))
        files = files_of(out)
        state = "old" if files["dataset.json"] == before["dataset.json"] else "new"
        if state == "old":
            files = dict.fromkeys({*DOCUMENTS} - {*files}, b"") | files  # may be missing until the next command
            same = {name for name in before if files[name] == before[name]}
            assert {name for name in before if files[name]} == same, f"step {step} has damaged the old set"
        assert packer.verify(out, workers=1).ok, f"the {state} set is not intact after step {step}"
        outcomes[state] = outcomes.get(state, 0) + 1
        if not crashed:
            break
        packer.index([out], label_offset=-1, classes=list("abcd"), workers=1)
        names = {name.split("/")[0] for name in files_of(out)}
        shard = "train-00000-of-00001.tfrecord"
        assert names == {"dataset.json", *DOCUMENTS, shard, "train.index-2"}, f"after step {step}"
    else:
        pytest.fail("the command never completed")
    assert outcomes["old"] > 6 and outcomes["new"] > 2, outcomes


def test_links_of_one_name_are_refused(tmp_path: Path) -> None:
    paths = [shard(tmp_path / folder / "train-000000.tar", [number]) for number, folder in enumerate("ab")]
    (tmp_path / "out").mkdir()
    refused(tmp_path, lambda: packer.index(paths, tmp_path / "out", workers=1), "have the same name", *map(str, paths))


def test_shards_with_other_classes_do_not_mix_and_lists_that_agree_are_merged(tmp_path: Path) -> None:
    for suffix in (".h5", ".tar", ".tfrecord"):
        folder = tmp_path / suffix[1:]
        shard(folder / f"train-a{suffix}", [1, 2], ("cat", "dog"), [0, 1])
        shard(folder / f"train-b{suffix}", [3, 4], ("dog", "owl"), [0, 1])
        with pytest.raises(readers.FormatError, match=r"label 0 is 'cat' in one and 'dog' in the other.*classes=NAMES"):
            packer.index([folder], workers=1)
        packer.index([folder], classes=["a", "b"], workers=1)
        packer.index([folder], workers=1)
        with readers.open(folder) as reader:
            assert reader.classes == ("a", "b"), "a repair loses names that the user gave"
    shard(tmp_path / "more" / "train-a.h5", [1, 2], ("cat", "dog"), [0, 1])
    shard(tmp_path / "more" / "train-b.h5", [3, 4], ("cat", "dog", "owl"), [0, 2])
    packer.index([tmp_path / "more"], workers=1)
    with readers.open(tmp_path / "more") as reader:
        assert reader.classes == ("cat", "dog", "owl")


def test_another_label_offset_does_not_move_the_names_of_the_classes(tmp_path: Path) -> None:
    path = shard(tmp_path / "train-a.tfrecord", [1, 2], ("nothing", "cat", "dog"), [1, 2])
    packer.index([path], classes=["nothing", "cat", "dog"], workers=1)
    refused(tmp_path, lambda: packer.index([path], label_offset=1, workers=1), "1 class (nothing)")
    packer.index([path], label_offset=1, accept_loss=True, workers=1)
    with readers.open(tmp_path) as reader:
        assert [reader.classes[label] for label in reader.labels] == ["cat", "dog"]


def test_too_few_class_names_are_refused(tmp_path: Path) -> None:
    path = shard(tmp_path / "train-a.tfrecord", [1, 2], (), [0, 7])
    names = tmp_path / "names.txt"
    names.write_text("cat\ndog\n\n")
    done = CliRunner().invoke(command, [str(path), "--classes", str(names)])
    assert "has the label 7, so 8 class names are needed; classes has 2" in str(done.exception)
    names.write_text("cat\n\ndog\n")
    done = CliRunner().invoke(command, [str(path), "--classes", str(names)])
    assert done.exit_code == 2 and "line 2 of" in done.output, done.output


def test_a_tar_shard_describes_its_set(tmp_path: Path) -> None:
    tar, path = format_named("tar"), tmp_path / "val-000000.tar"
    spec = ShardSpec("val", {"image": "image", "m": "json"}, ("cat", "d\u00f6g"), 1, 3)
    writer = tar.open_writer(path, spec)
    writer.add(PackedSample("k", 0, (b"x", None), ("", ""), None))
    writer.finish()
    assert tar.describe(path) == spec
    data = path.read_bytes()
    outer = tar.open_writer(tmp_path / "outer.tar", ShardSpec("train", {"image": "file"}))
    outer.add(PackedSample("k", NO_LABEL, (data,), ("",), None))
    outer.finish()
    assert tar.describe(tmp_path / "outer.tar") == ShardSpec("train", {"image": "file"})
    (tmp_path / "plain.tar").write_bytes((tmp_path / "outer.tar").read_bytes()[: 512 + len(data)] + bytes(1024))
    assert tar.describe(tmp_path / "plain.tar") is None, "one shard of a set was taken for the whole set"
    at = data.index(b'"classes"')
    path.write_bytes(data[:at] + b"X" + data[at + 1 :])
    with pytest.raises(readers.FormatError, match=r"its record of the set at byte \d+ is damaged: its CRC32C"):
        tar.describe(path)
