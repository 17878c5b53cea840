"""Sets as values: each operation is compared with the same change of a dictionary, and no shard byte is written."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg, tree_of
from set_cases import COUNTS, FORMATS, OTHERS, Held, check, content, convert, flip, masks_for, pack_tree, shards, wrong
from suites.programs import Notes

import packer
import readers
from cache.checksums import crc32c
from packer.cli import main
from packer.sets.deal import shares
from packer.sets.pieces import LabelChange
from readers.layout import DOCUMENTS, read_dataset_info
from readers.order.local import shard_starts

RUN = packer.Run(workers=1)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Two sets of each format; tests may not write to them."""
    made: dict[str, tuple[Path, Path]] = {}

    def packed(to: str) -> tuple[Path, Path]:
        if to not in made:
            root = tmp_path_factory.mktemp(to)
            made[to] = pack_tree(root / "one", to, COUNTS), pack_tree(root / "two", to, OTHERS, seed=1)
        return made[to]

    return packed


@pytest.fixture
def one(packed: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> Path:
    """A set that tests may change."""
    return Path(shutil.copytree(packed("tar")[0], tmp_path / "set"))


@pytest.fixture
def two(packed: Callable[[str], tuple[Path, Path]]) -> Path:
    """Another set."""
    return packed("tar")[1]


@pytest.fixture
def masked(one: Path, tmp_path: Path) -> Path:
    """A set with masks, of which a sample was dropped."""
    masks_for(tmp_path / "masks", ["cat/cat0t0", "dog/dog0t3"])
    packer.add_field(one, tmp_path / "masks", "mask", run=RUN)
    packer.drop(one, keys=["cat/cat0t1"])
    return one


def labelled(sample: Held, label: str) -> Held:
    return sample._replace(label=label)


def width_of(sample: Held) -> int:
    return readers.decode.decode_image(sample.fields["image"]).shape[1]


def with_prefix(key: str, prefix: str) -> str:
    split, _, rest = key.partition("/")
    return f"{split}/{prefix}/{rest}"


def operations(root: Path) -> list[str]:
    return [operation.operation for operation in read_dataset_info(root).history]


@pytest.mark.parametrize("to", FORMATS)
def test_operations_in_sequence(to: str, packed: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    """Every state equals that of the dictionary after the same operations; existing shards are never written."""
    first, second = packed(to)
    root = Path(shutil.copytree(first, tmp_path / "set"))
    expected, others = content(root), content(second)
    before = shards(root)

    packer.drop(root, where='label == "dog" and width == 32', split="train")
    narrow = [key for key, sample in expected.items() if key.startswith("train/dog") and width_of(sample) == 32]
    expected = {key: sample for key, sample in expected.items() if key not in narrow}
    assert narrow
    check(root, expected)

    packer.relabel(root, names={"cat": "tiger"})
    expected = {key: labelled(sample, sample.label.replace("cat", "tiger")) for key, sample in expected.items()}
    check(root, expected)

    some = [key.partition("/")[2] for key in expected][::2]
    masks = masks_for(tmp_path / "masks", some)
    added = packer.add_field(root, tmp_path / "masks", "mask", run=RUN)
    assert (added.with_field, added.unmatched, read_dataset_info(root).fields["mask"]) == (len(some), 0, "mask")
    for key, sample in expected.items():
        if key.partition("/")[2] in masks:
            expected[key] = Held(sample.label, {**sample.fields, "mask": masks[key.partition("/")[2]]})
    check(root, expected)
    assert before.items() <= shards(root).items(), "a shard was written"

    written = shards(root)
    packer.split(root, {"a": 0.5, "b": 0.5}, seed=3, split="train")
    dealt = {key.partition("/")[2]: key for key in content(root) if key[0] in "ab"}
    expected = {dealt.get(k.partition("/")[2], k) if k.startswith("train/") else k: h for k, h in expected.items()}
    check(root, expected)
    assert Counter(key[0] for key in expected)["a"] == 5

    packer.append(root, second, run=RUN)
    expected |= others
    check(root, expected)

    merged = tmp_path / "merged"
    result = packer.merge([root, first], merged, prefix_keys=True)
    assert result.linked == result.shards and result.symbolic == 0
    expected = {with_prefix(key, "set"): sample for key, sample in expected.items()}
    expected |= {with_prefix(key, first.name): sample for key, sample in content(first).items()}
    check(merged, expected)
    assert written.items() <= shards(root).items()
    shutil.rmtree(root)
    check(merged, expected)

    again = tmp_path / "again"
    packer.reshard(merged, again, to=FORMATS[FORMATS.index(to) - 1], run=RUN)
    check(again, expected)
    info = read_dataset_info(again)
    assert (info.edited, info.separate) == ((), ())
    assert operations(again) == ["drop", "relabel", "add-field", "split", "append", "merge", "reshard"]
    packer.index([again], workers=1)
    check(again, expected)


NO_SHARD_BYTES: dict[str, Callable[[Path, Path, Path], packer.SaveResult]] = {
    "drop": lambda root, other, out: packer.drop(root, where="width > 40"),
    "relabel": lambda root, other, out: packer.relabel(root, names={"cat": "dog"}),
    "split": lambda root, other, out: packer.split(root, {"train": 0.5, "val": 0.5}),
    "merge": lambda root, other, out: packer.merge([root, other], out),
    "subset": lambda root, other, out: packer.subset(root, out, lambda whole: whole.every(2)),
    "join": lambda root, other, out: packer.table(root).concat(packer.table(other)).where("width >= 40").save(),
}


@pytest.mark.parametrize("name", NO_SHARD_BYTES)
def test_index_operations_write_no_byte_of_a_shard(name: str, one: Path, two: Path, tmp_path: Path) -> None:
    before, old, both = {*shards(one).values(), *shards(two).values()}, content(one), content(one) | content(two)
    result = NO_SHARD_BYTES[name](one, two, tmp_path / "out")
    assert result.written_bytes == 0
    out = result.output
    assert set(shards(out).values()) <= before, "a shard is neither old nor a link to an old one"
    assert wrong(out) == [] and wrong(one) == []
    if name == "join":
        check(one, {key: sample for key, sample in both.items() if width_of(sample) >= 40})
    if out != one:  # a new set does not need the old one any more
        assert content(one) == old
        shutil.rmtree(one)
        assert wrong(out) == []


def test_links_to_another_file_system_are_symbolic_and_reported(one: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def refused(*arguments: object, **named: object) -> None:
        raise OSError(18, os.strerror(18))

    monkeypatch.setattr(os, "link", refused)
    out = tmp_path / "out"
    done = packer.subset(one, out, lambda whole: whole.limit(2))
    assert done.symbolic == done.linked == 2 and all(path.is_symlink() for path in out.glob("*.tar"))
    assert wrong(out) == []
    one.rename(tmp_path / "moved")
    with readers.open(out, "train") as reader, pytest.raises(readers.StaleIndexError, match=r"train-000000\.tar"):
        reader.read(0)
    assert wrong(out) != []


# --- append ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("source", ["a set that is linked", "its images", "a set of another format"])
def test_appending_unifies_classes_by_name(one: Path, two: Path, tmp_path: Path, source: str) -> None:
    before, states = content(one), shards(one)
    other = {"its images": two.with_name("two-images")}.get(source, two)
    if source == "a set of another format":
        other = convert(two, tmp_path / "hdf5", "hdf5").output
    result = packer.append(one, other, run=RUN)
    assert read_dataset_info(one).classes == ("cat", "dog", "eel")
    assert result.samples == result.samples_before + 7 == 21 and result.splits["test"] == 2
    check(one, before | content(two))
    linked = source == "a set that is linked"
    assert states.items() <= shards(one).items()
    assert (result.linked, bool(result.written_bytes)) == ((3, False) if linked else (0, True))
    assert operations(one) == ["append"]
    if not linked:  # shards with separate label numbers
        assert read_dataset_info(one).edited == ()
        packer.index([one], workers=1)
        check(one, before | content(two))


def test_a_split_that_the_set_lacks_is_linked(tmp_path: Path) -> None:
    one, other = (
        pack_tree(tmp_path / split, "tar", {split: {"cat": 2}}, seed) for seed, split in enumerate(("train", "val"))
    )
    expected = content(one) | content(other)
    assert packer.append(one, other, run=RUN).linked == 1
    check(one, expected)


def test_existing_samples_are_refused_or_skipped(one: Path, two: Path) -> None:
    packer.append(one, two, run=RUN)
    state = (one / "dataset.json").read_bytes()
    message = r"5 keys of the split train exist in .* already.*existing='skip'"
    with pytest.raises(readers.SourceError, match=message):
        packer.append(one, two, run=RUN)
    for source in (two, two.with_name("two-images")):
        assert packer.append(one, source, existing="skip", run=RUN).skipped == 7
    assert (one / "dataset.json").read_bytes() == state


def test_a_conversion_into_a_changed_set_is_not_complete(tmp_path: Path) -> None:
    tree, out = images_in(tmp_path / "images", 2), tmp_path / "out"
    convert(tree, out)
    packer.drop(out, keys=["cat/0"])
    with pytest.raises(readers.OutputError, match="overwrite=True"):
        convert(tree, out)
    assert convert(tree, out, overwrite=True).samples == 2
    names = {path.name for path in out.iterdir()}
    assert names == {"dataset.json", "README.md", "classes.txt", "train-000000.tar", "train.index"}


# --- sets that cannot be merged --------------------------------------------------------------------------------------
def test_sets_that_cannot_be_merged(one: Path, two: Path, tmp_path: Path) -> None:
    rows = "path,label\n" + "".join(f"train/eel/eel1t{i}.jpg,{i}\n" for i in range(3))
    (tmp_path / "n.csv").write_text(rows)
    table = packer.open_source(tmp_path / "n.csv", folder=two.with_name("two-images"))
    numbered = convert(table, tmp_path / "numbered").output
    for other, message in (
        (convert(two, tmp_path / "hdf5", "hdf5").output, r"format is 'tar'.*'hdf5'.*packer reshard .*--to tar"),
        (convert(two, tmp_path / "offset", label_offset=1).output, r"label offset is 0 .* and 1 .*packer reshard"),
        (convert(two, tmp_path / "deep", decode="unchanged").output, r"decode is 'RGB' .* 'unchanged'"),
        (one, r"the key 'cat/cat0t0' is in .*prefix_keys=True"),
        (numbered, r"numbered: has the label 2 and 0 class names"),
    ):
        with pytest.raises(readers.SourceError, match=message):
            packer.merge([one, other], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    packer.relabel(numbered, classes=["x", "dog", "z"])
    assert packer.merge([one, numbered], tmp_path / "out").classes == 4
    assert wrong(tmp_path / "out") == []


def test_fields_of_a_merged_set_are_those_of_all(one: Path, two: Path, tmp_path: Path) -> None:
    keys = [key.partition("/")[2] for key in content(two)]
    other = Path(shutil.copytree(two, tmp_path / "two"))
    masks_for(tmp_path / "masks", keys[:3])
    packer.add_field(other, tmp_path / "masks", "mask", run=RUN)
    expected = content(one) | content(other)
    packer.merge([one, other], tmp_path / "out")
    check(tmp_path / "out", expected)
    masks_for(tmp_path / "other", ["cat/cat0t0"])
    packer.add_field(one, tmp_path / "other", "mask", kind="file", run=RUN)
    message = r"the field mask has the kind 'mask', elsewhere the kind 'file'"
    with pytest.raises(readers.SourceError, match=message):
        packer.merge([one, other], tmp_path / "more")


def test_sets_with_two_kinds_of_labels_are_not_merged(tmp_path: Path) -> None:
    roots = []
    for number, label in enumerate((0.5, [0.5, 1.0, 2.0], np.array([1, 2, 3]))):
        roots.append(tmp_path / f"set{number}")
        with packer.writer(roots[-1], "tar") as out:
            for i in range(3):
                out.write(f"{number}-{i}", image=make_jpeg(i), label=label)
    for first, other in ((0, 1), (1, 0), (1, 2)):
        for change in (
            lambda a, b: packer.merge([a, b], tmp_path / "out"),
            lambda a, b: packer.append(a, b),
        ):
            with pytest.raises(
                readers.SourceError, match=r"labels \(target\) are .* all labels of a set have one dtype and shape"
            ):
                change(roots[first], roots[other])
    (tmp_path / "more.jsonl").write_text('{"path": "a.jpg", "target": [1.5, 2.5]}\n')
    (tmp_path / "a.jpg").write_bytes(make_jpeg(9))
    with pytest.raises(readers.SourceError, match=r"labels \(target\) are float32 \[2\], .* float32 \[\]"):
        packer.append(roots[0], tmp_path / "more.jsonl", run=RUN)
    assert wrong(roots[0]) == []
    dealt = packer.split(roots[0], {"a": 1}, tmp_path / "dealt").output
    assert packer.merge([roots[0], dealt], tmp_path / "out").samples == 6


# --- labels and splits ----------------------------------------------------------------------------------------------
def test_labels_from_a_table(one: Path, tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    state, expected = (one / "dataset.json").read_bytes(), content(one)
    for text, message in (
        ("key,label\nno/such,cat\n", r"labels.csv: line 2: no sample has the key 'no/such'"),
        ("key,label\ncat/cat0t0,7\n", r"line 2: the label is 7, expected -1 to 1"),
        ("key,label\ncat/cat0t0,cat\ncat/cat0t0,dog\n", r"line 3: the key 'cat/cat0t0' has the label 'dog' here"),
        ("name,label\na,b\n", r"no column 'key'; it has name, label"),
    ):
        table.write_text(text)
        with pytest.raises(readers.PackerError, match=message):
            packer.relabel(one, labels=table)
        assert (one / "dataset.json").read_bytes() == state
    table.write_text("key,label,split\ncat/cat0t0,fox,train\ndog/dog0t1,0,\ncat/cat0t1,,train\n")
    for key, label in (("train/cat/cat0t0", "fox"), ("train/dog/dog0t1", "cat"), ("train/cat/cat0t1", "")):
        expected[key] = labelled(expected[key], label)
    packer.relabel(one, labels=table)
    check(one, expected)
    assert read_dataset_info(one).classes == ("cat", "dog", "fox")
    packer.relabel(one, names={"cat": "1"})  # a class that is called "1", so 1 does not mean the position of a class
    table.write_text("key,label\ndog/dog0t1,1\n")
    packer.relabel(one, labels=table)
    assert content(one)["train/dog/dog0t1"].label == "1" == read_dataset_info(one).classes[0]
    packer.relabel(one, names={"1": "dog", "fox": "dog"})  # joined classes
    check(one, {key: labelled(sample, sample.label and "dog") for key, sample in expected.items()})
    assert read_dataset_info(one).classes == ("dog",)


@pytest.mark.parametrize(
    ("classes", "labels", "expected"),
    [
        (("cat", "dog"), {"0": "1", "1": "-1"}, [1, -1, 0]),
        (("1", "0"), {"0": "0", "1": 1, "2": "-1"}, [1, 0, -1]),
        ((), {"0": "2", "1": 1}, [2, 1, -1]),
        ((), {"0": "cat", "1": "-1", "2": "eel"}, [0, -1, 1]),
        ((), {"0": "cat", "1": "1", "2": "dog"}, "the label is 1, and others are names, such as 'cat'"),
        ((), {"0": "1", "1": "cat"}, "the label is 1, and others are names, such as 'cat'"),
        (("1", "0"), {"0": "01"}, "no class is called '01', and the classes of this set are called by numbers"),
        (("1", "0"), {"0": 2}, "no class is called '2', and the classes of this set are called by numbers"),
    ],
)
def test_numbers_are_labels_where_they_are_unambiguous(
    tmp_path: Path, classes: tuple[str, ...], labels: dict[str, Any], expected: Any
) -> None:
    root = written(tmp_path / "set", ("0", "1", "2"), classes)
    if isinstance(expected, str):
        with pytest.raises(readers.SourceError, match=expected):
            packer.relabel(root, labels=LabelChange.of(labels))
    else:
        packer.relabel(root, labels=LabelChange.of(labels))
        with readers.open(root) as reader:
            assert reader.labels.tolist() == expected


def test_shares_of_splits_are_exact_and_drawn_by_the_seed(tmp_path: Path) -> None:
    root = pack_tree(tmp_path / "set", "tar", {"train": {"cat": 20, "dog": 10}}, samples=30)
    whole = packer.table(root)
    fractions = {"train": 0.7, "val": 0.2, "test": 0.1}
    for stratify in (False, True):
        parts = whole.split(fractions, seed=1, stratify=stratify)
        assert parts.counts == {"train": 21, "val": 6, "test": 3}
        keys = [set(parts.keys(name)) for name in fractions]
        assert set.union(*keys) == set(whole.keys("train")) and sum(map(len, keys)) == 30
        assert parts.keys("val") == whole.split(fractions, seed=1, stratify=stratify).keys("val")
        assert parts.keys("val") != whole.split(fractions, seed=2, stratify=stratify).keys("val")
    assert [np.bincount(parts.labels(name)).tolist() for name in fractions] == [[14, 7], [4, 2], [2, 1]]
    for wrong_shares, message in (
        ({"a": 0.5}, "sum to 0.5, expected 1; add a split for the rest"),
        ({"a": 0.9, "b": 0.2}, "sum to 1.1, expected 1; make them smaller"),
        ({"a": 1.5, "b": -0.5}, "expected shares of 1"),
        ({"a b": 1}, "'a b'"),
    ):
        with pytest.raises(ValueError, match=message):
            whole.split(wrong_shares)
    with pytest.raises(readers.SourceError, match=r"no sample of 30 would be in 'rest'"):
        whole.split({"most": 0.999, "rest": 0.001})
    for just_over_1 in ([0.5, 0.5 + 9e-7], [0.3, 0.3, 0.4 - 9e-7], [1 / 3] * 3):
        assert sum(shares(50_000_000, just_over_1)) == 50_000_000


# --- a changed set is a set as any other ----------------------------------------------------------------------------
def test_a_changed_set_is_staged_ordered_packed_and_extracted(masked: Path, tmp_path: Path) -> None:
    packer.split(masked, {"train": 0.6, "val": 0.4}, seed=1)
    expected = content(masked)
    with readers.open(masked, "train") as reader:
        assert shard_starts(reader.split_info)[-1] == len(reader)
    check(convert(masked, tmp_path / "hdf5", "hdf5").output, expected)
    assert packer.extract(masked, tmp_path / "tree").files == sum(len(sample.fields) for sample in expected.values())
    with readers.stage(masked, tmp_path / "node", any_filesystem=True) as staged:
        assert content(staged) == expected
    shown = packer.inspect(masked).to_dict()
    assert [entry["operation"] for entry in shown["history"]] == ["add-field", "drop", "split"]


def test_readers_of_raw_shards_refuse_a_changed_set(masked: Path) -> None:
    with pytest.raises(readers.FormatError, match="dali would read the shards; pack it again with  packer reshard"):
        packer.export_index(masked, "dali")
    state = (masked / "dataset.json").read_bytes()
    with pytest.raises(readers.OutputError, match=r"cannot be rebuilt from its shards.*other samples.*packer inspect"):
        packer.index([masked], workers=1, accept_loss=True)
    assert (masked / "dataset.json").read_bytes() == state


WRONG_COLUMNS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "label": (lambda column: 1 - column, "the shard has the label"),
    "image.offset": (lambda column: column + 512, "the shard has none at"),
    "image.length": (lambda column: column - 1, "the shard has none at"),
    "mask.offset": (lambda column: np.where(column < 1 << 60, column + 512, column), "field mask: the shard has none"),
    "key": (lambda column: column[::-1], "the shard has the key"),
    "image.name": (lambda column: np.where(column == ord("j"), ord("k"), column), "the shard has the file name"),
}


def test_damage_of_a_changed_set_is_found(masked: Path, tmp_path: Path) -> None:
    """In the shards; and in the index, found by its shards, where dataset.json has the checksum of the wrong column."""
    for shard in (next(masked.glob("train.mask*.tar")), masked / "train-000000.tar"):
        data = flip(shard, 600)
        assert any(shard.name in line for line in wrong(masked)), f"{shard.name} is damaged"
        shard.write_bytes(data)
    assert wrong(masked) == []
    text = (masked / "dataset.json").read_text()
    for column, (change, message) in WRONG_COLUMNS.items():
        path = masked / read_dataset_info(masked).splits["train"].index / f"{column}.npy"
        data, values = path.read_bytes(), np.load(path)
        np.save(path, change(values).astype(values.dtype))
        described = json.loads(text)
        described["splits"]["train"]["columns"][path.name]["crc32c"] = f"{crc32c(path.read_bytes()):08x}"
        (masked / "dataset.json").write_text(json.dumps(described))
        assert any(message in line for line in wrong(masked)), column
        path.write_bytes(data)
        (masked / "dataset.json").write_text(text)


def test_a_set_with_a_damaged_shard_is_not_linked(one: Path, two: Path, tmp_path: Path) -> None:
    os.truncate(one / "train-000001.tar", 1000)
    for change in (NO_SHARD_BYTES["subset"], NO_SHARD_BYTES["merge"]):
        with pytest.raises(readers.StaleIndexError, match=r"train-000001.tar: has 1000 bytes, .* indexed"):
            change(one, two, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_resharding_in_place_and_pruning_free_the_space(one: Path) -> None:
    packer.drop(one, where='class_name == "dog"')
    expected, before = content(one), sum(state[1] for state in shards(one).values())
    packer.reshard(one, run=RUN)
    check(one, expected)
    assert read_dataset_info(one).edited == ()
    packer.index([one], workers=1)  # leaves the old shards in place
    check(one, expected)
    pruned = packer.prune(one)
    assert pruned.bytes > before and sum(state[1] for state in shards(one).values()) < before
    left = {path.name.partition(".")[0] for path in one.iterdir()} - {*DOCUMENTS, "README", "classes"}
    assert left == {"dataset", "train", "val"} and not [*one.glob("*.index")]
    check(one, expected)
    packer.index([one], workers=1)
    check(one, expected)


def test_a_table_of_a_set_that_was_changed_since_is_refused(one: Path) -> None:
    early = packer.table(one)
    packer.drop(one, keys=["cat/cat0t0"])
    with pytest.raises(readers.OutputError, match="has been changed since its table was opened"):
        early.where("width > 0").save()


# --- the options of a set --------------------------------------------------------------------------------------------
def images_in(folder: Path, count: int, first: int = 0, side: int = 80) -> Path:
    files = {f"train/cat/{i}.jpg": make_jpeg(i, (side, 60)) for i in range(first, first + count)}
    return tree_of(folder, files)


def test_sets_with_shards_of_the_same_names_are_appended_repeatedly(one: Path, tmp_path: Path) -> None:
    expected = content(one)
    for number in range(4):
        other = convert(images_in(tmp_path / f"{number}", 2, 10 * number), tmp_path / f"s{number}").output
        expected |= content(other)
        packer.append(one, other)
    check(one, expected)


@pytest.mark.parametrize(("how", "is_set"), [("resize_short", False), ("ops", True), ("codec", False)])
def test_appended_samples_are_packed_with_the_options_of_the_set(tmp_path: Path, how: str, is_set: bool) -> None:
    from readers.augment import CenterCrop, Resize

    if how == "ops":
        pytest.importorskip("torch", reason="changing images by ops needs torch")
    options: dict[str, Any] = {
        "resize_short": {"reencode": packer.Reencode(resize_short=32)},
        "ops": {"ops": [Resize(40), CenterCrop((32, 36))]},
        "codec": {"reencode": packer.Reencode("webp", quality=70)},
    }[how]
    first, more = images_in(tmp_path / "first", 3), images_in(tmp_path / "more", 3, 10)
    whole = images_in(images_in(tmp_path / "whole", 3), 3, 10)
    root, notes = convert(first, tmp_path / "set", **options).output, Notes()
    packer.append(root, convert(more, tmp_path / "other").output if is_set else more, run=RUN, watcher=notes)
    convert(whole, tmp_path / "expected", **options)
    check(root, content(tmp_path / "expected"))
    assert any(note.startswith("packing as this set was packed: ") for note in notes.lines)


def test_append_selects_samples_like_the_set(tmp_path: Path) -> None:
    first = tree_of(images_in(tmp_path / "first", 3), {"train/dog/d.jpg": make_jpeg(50, (80, 60))})
    root = convert(first, tmp_path / "set", where='width >= 64 and class_name in ("cat", "dog")').output
    files = {"train/cat/small.jpg": make_jpeg(3, (20, 20)), "train/eel/e.jpg": make_jpeg(4, (80, 60))}
    packer.append(root, tree_of(images_in(tmp_path / "more", 2, 10), files), run=RUN)
    assert {key.partition("/")[2] for key in content(root)} == {"cat/0", "cat/1", "cat/2", "cat/10", "cat/11", "dog/d"}


def test_options_that_cannot_be_repeated_are_an_error(one: Path, two: Path) -> None:
    record = json.loads((one / "dataset.json").read_text())
    for name, value in (("ops", ["__import__('os').system('x')"]), ("ops", ["Wave()"]), ("reencode", {"codec": "x"})):
        (one / "dataset.json").write_text(json.dumps(record | {"made": record["made"] | {"options": {name: value}}}))
        with pytest.raises(readers.SourceError, match="options that it was packed with cannot be repeated"):
            packer.append(one, two.with_name("two-images"), run=RUN)


# --- names -----------------------------------------------------------------------------------------------------------
def written(root: Path, keys: tuple[str, ...], classes: tuple[str, ...] = (), **options: Any) -> Path:
    with packer.writer(root, "tar", classes=classes, **options) as out:
        for number, key in enumerate(keys):
            out.write(key, image=make_jpeg(number), label=number % len(classes) if classes else None)
    return root


def test_splits_that_differ_only_by_case_are_not_merged(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a", ("1", "4"), split="VAL"), written(tmp_path / "b", ("2",), split="val")
    images = tree_of(tmp_path / "images", {"3.jpg": make_jpeg(3)})
    for change in (
        lambda: packer.merge([first, second], tmp_path / "out"),
        lambda: packer.append(first, second),
        lambda: packer.append(first, images, split="val", run=RUN),
        lambda: packer.split(first, {"VAL": 0.5, "val": 0.5}),
    ):
        with pytest.raises(readers.SourceError, match="the splits 'VAL' and 'val', whose names differ only in case"):
            change()


def test_sets_with_folders_of_one_name_are_merged_with_prefixes(tmp_path: Path) -> None:
    roots = [written(tmp_path / folder / "set", ("a", "b")) for folder in ("x", "y")]
    packer.merge([*roots, written(tmp_path / "z", ("a",)), roots[0]], tmp_path / "out", prefix_keys=True)
    names = ["set-0/a", "set-0/b", "set-1/a", "set-1/b", "z/a", "set-3/a", "set-3/b"]
    assert [*content(tmp_path / "out")] == [f"train/{name}" for name in names]


def test_keys_with_one_file_name_are_named_before_the_extraction(tmp_path: Path) -> None:
    root = written(tmp_path / "set", ("a/b", "a//b", "a/./c", "d"))
    with pytest.raises(readers.OutputError, match=r"a/b\.jpg: two samples of the set have this name"):
        packer.extract(root, tmp_path / "out", workers=1, overwrite=True)
    assert [*(tmp_path / "out").rglob("*.jpg")] == []
    assert packer.extract(root, tmp_path / "some", workers=1, keys=["a//b", "a/./c", "d"]).files == 3


def test_the_history_does_not_name_dropped_samples(one: Path) -> None:
    packer.drop(one, where='key == "cat/cat0t1"')
    packer.drop(one, where='aspect > 1.9 and class_name == "dog"')
    packer.drop(one, keys=["dog/dog0v0"])
    arguments = [dict(operation.arguments) for operation in read_dataset_info(one).history]
    kept = {"where": "aspect > 1.9 and class_name == 'dog'"}
    assert arguments == [{"where": "key == '…'"}, kept, {"keys": "listed"}]


def test_a_field_is_added_to_samples_whose_keys_begin_with_a_dot(tmp_path: Path) -> None:
    root = written(tmp_path / "set", (".a/1", "b/.2", "c"))
    names = (".a/1.txt", "b/.2.txt", "c.txt", ".git/config", ".git/config.x", ".DS_Store", ".a/more.txt")
    result = packer.add_field(root, tree_of(tmp_path / "texts", {name: name.encode() for name in names}), "caption")
    assert (result.with_field, result.unmatched) == (3, 1)
    with readers.open(root) as reader:
        assert [bytes(reader.read(i, "caption")).decode() for i in range(3)] == list(names[:3])


def test_a_set_does_not_name_the_folders_of_its_sources(tmp_path: Path) -> None:
    """Folder names may contain the name of a user, and sets are passed on; names of files and of the last folder
    stay."""
    home = tmp_path / "home-of-jane"
    home.mkdir()
    one, other = pack_tree(home / "one", "tar", COUNTS), pack_tree(home / "other", "tar", OTHERS, seed=1)
    masks_for(home / "masks", ["cat/cat0t0"])
    (home / "labels.csv").write_text("key,label\ncat/cat0t0,dog\n")
    packer.append(one, other, existing="skip", run=RUN)
    packer.append(one, pack_tree(home / "third", "hdf5", {"train": {"elk": 2}}, seed=2), run=RUN)
    packer.add_field(one, home / "masks", "mask", run=RUN)
    packer.relabel(one, labels=home / "labels.csv")
    dealt = packer.split(home / "other", {"c": 1.0}, home / "dealt", split="test").output
    packer.merge([other, dealt], home / "both", prefix_keys=True)
    convert([home / "one-images", home / "other-images"], home / "several")
    for root in (one, home / "both", home / "several"):
        texts = [path.read_text() for path in root.glob("*") if path.name in ("dataset.json", "README.md")]
        assert len(texts) == 2 and not [text for text in texts if "jane" in text], root
    info = read_dataset_info(one)
    assert info.made["source"] == "folder one-images + folder other-images"
    sources = [operation.arguments.get("source") for operation in info.history]
    assert sources[:3] == ["packed set other", "packed set third", "masks"]
    assert read_dataset_info(home / "several").made["source"] == "folder one-images, folder other-images"


# --- the commands ----------------------------------------------------------------------------------------------------
WHERE = 'min_side >= 24 and label in ("cat", 1)'
COMMANDS = {
    "append": ["{set}", "{other}", "--workers", "1"],
    "merge": ["{set}", "{other}", "-o", "{out}"],
    "split": ["{set}", "--fractions", "train=0.5,val=0.5", "--seed", "1", "--stratify"],
    "subset": ["{set}", "-o", "{out}", "--where", WHERE, "--every", "2", "--limit", "3"],
    "drop": ["{set}", "--keys", "{keys}"],
    "relabel": ["{set}", "--map", "cat=tiger"],
    "dedup": ["{set}", "--near", "0", "--workers", "1"],
    "add-field": ["{set}", "{masks}", "--name", "mask", "--workers", "1"],
    "reshard": ["{set}", "-o", "{out}", "--to", "hdf5", "--workers", "1"],
    "prune": ["{set}"],
}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process; returns its status, its output, and its text on stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_a_dry_run_changes_no_file_and_prints_the_effect(
    name: str, one: Path, two: Path, tmp_path: Path, run: Any
) -> None:
    out, keys = tmp_path / "out", tmp_path / "keys.txt"
    keys.write_text("cat/cat0t0\ndog/dog0t1\n")
    masks_for(tmp_path / "masks", ["cat/cat0t0"])
    places = {"set": one, "other": two, "out": out, "keys": keys, "masks": tmp_path / "masks"}
    arguments = [argument.format(**places) for argument in COMMANDS[name]]
    state = (one / "dataset.json").read_bytes()
    status, planned, errors = run(name, *arguments, "--dry-run", "--json")
    assert status == 0, errors
    assert (one / "dataset.json").read_bytes() == state and not out.exists()
    status, done, errors = run(name, *arguments, "--json")
    assert status == 0, errors
    would, did = json.loads(planned), json.loads(done)
    for key in ("samples", "splits", "classes", "groups", "files"):
        assert would.get(key) == did.get(key), key
    root = out if out.exists() else one
    assert wrong(root) == [] and not (root / ".packing").exists()


def test_append_accepts_the_naming_options_of_a_source(one: Path, tmp_path: Path, run: Any) -> None:
    tree_of(tmp_path / "scans" / "images", {f"{i}.jpg": make_jpeg(90 + i) for i in range(2)})
    table = tmp_path / "scans" / "new.csv"
    table.write_text("file,finding\n0.jpg,dog\n1.jpg,cat\n")
    options = ["--split", "train", "--workers", "1"]
    status, _, errors = run("append", one, table, *options)
    assert status == 1 and "name another folder with  --folder DIR" in errors
    named = ["--folder", table.parent / "images", "--label-column", "finding"]
    status, _, errors = run("append", one, table, *named, *options)
    assert (status, "warning" in errors) == (0, False), errors
    labels = {key.rpartition("/")[2]: sample.label for key, sample in content(one).items()}
    assert (labels["0"], labels["1"]) == ("dog", "cat")
    for name in ("cat", "fox"):  # no warning for a class that the set has
        tree_of(tmp_path / name, {f"train/{name}/new.jpg": make_jpeg(80)})
        status, _, errors = run("append", one, tmp_path / name, "--workers", "1")
        assert (status, "one class only" in errors) == (0, name == "fox"), errors


def test_drop_reports_remaining_bytes_and_how_to_remove_them(one: Path, run: Any) -> None:
    status, shown, errors = run("drop", one, "--where", 'key == "cat/cat0t1"')
    assert status == 0 and f"until  packer reshard {one}  and  packer prune {one}" in shown, errors
    for command in ("reshard", "prune"):
        assert run(command, one)[0] == 0
    assert not [path for path in one.rglob("*") if path.is_file() and b"cat0t1" in path.read_bytes()]


def test_errors_of_commands(one: Path, tmp_path: Path, run: Any) -> None:
    (tmp_path / "keys.txt").write_text("no/such\n")
    for arguments, status, message in (
        (["drop", one, "--where", "widht > 3"], 1, "at character 1: 'widht' is not known; there are label"),
        (["drop", one, "--keys", tmp_path / "keys.txt"], 1, "no sample has 1 key of those given: 'no/such'"),
        (["drop", one, "--where", 'label == "fox"'], 1, "no class 'fox'; there are 2: cat, dog"),
        (["drop", one, "--where", "width > 0"], 1, "none of the 14 samples is left"),
        (["split", one, "--fractions", "a=0.5,b"], 2, "'b' is not NAME=VALUE"),
        (["subset", one, "-o", one, "--every", "2"], 1, "holds a set; choose another output"),
        (["relabel", one, "--map", "fox=cat"], 1, "no class 'fox'"),
        (["merge", one, "-o", tmp_path / "o"], 2, "expected two sets or more"),
    ):
        exit_status, _, errors = run(*arguments)
        assert (exit_status, message in errors) == (status, True), errors
    assert not (tmp_path / "o").exists() and not (one / ".packing").exists()
