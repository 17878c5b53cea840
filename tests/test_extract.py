"""Extraction writes the original tree, and nothing outside the output or over foreign files."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from conftest import Hanging, files_of, make_jpeg, tree_of
from set_cases import FORMATS, convert, damage
from suites.containers import tar_of, write

import packer
import readers
from packer.testing.children import forked, killed_in_child
from readers.staging import LabelRow, label_table


@pytest.fixture
def packed(tree: Path, pack: Callable[..., Path]) -> Path:
    """The tree in tars, one a split; tests may not write to it."""
    return pack(tree)


@pytest.mark.parametrize("to", FORMATS)
def test_the_tree_comes_back(tree: Path, tmp_path: Path, to: str) -> None:
    packed = convert(tree, tmp_path / "set", to, shuffle=3).output
    result = packer.extract(packed, tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(tree)
    assert (result.files, result.kept, result.labels_file) == (45, 0, False)
    assert packer.extract(packed, tmp_path / "back").kept == 45  # the second run has nothing to do


def test_keys_and_split(tree: Path, packed: Path, tmp_path: Path) -> None:
    packer.extract(packed, tmp_path / "back", split="val", keys=["dog/*", "owl/owl_001"])
    assert sorted(files_of(tmp_path / "back")) == [
        "val/dog/dog_000.JPEG", "val/dog/dog_001.JPEG", "val/dog/dog_002.JPEG", "val/owl/owl_001.JPEG",
    ]  # fmt: skip
    with pytest.raises(readers.UnknownNameError, match=r"no key matches fish/\*"):
        packer.extract(packed, tmp_path / "none", keys=["fish/*"])


def test_files_in_the_way(tree: Path, packed: Path, tmp_path: Path) -> None:
    target = tree_of(tmp_path / "back", {"train/cat/cat_000.JPEG": b"mine"}) / "train/cat/cat_000.JPEG"
    with pytest.raises(readers.OutputError, match="exists with other bytes; pass overwrite=True"):
        packer.extract(packed, tmp_path / "back")
    assert target.read_bytes() == b"mine"
    packer.extract(packed, tmp_path / "back", overwrite=True)
    assert files_of(tmp_path / "back") == files_of(tree)


def test_damage_is_never_extracted(packed: Path, tmp_path: Path) -> None:
    packed = Path(shutil.copytree(packed, tmp_path / "set"))
    damage(packed, 0)
    with pytest.raises(readers.DamagedSampleError, match="cat/cat_000"):
        packer.extract(packed, tmp_path / "back")


def test_a_hostile_set_writes_nothing_outside(tmp_path: Path) -> None:
    packed = convert(tree_of(tmp_path / "src", {"c/xx.jpg": make_jpeg(1)}), tmp_path / "set").output
    key = packed / "train.index" / "key.npy"
    key.write_bytes(key.read_bytes().replace(b"c/xx", b"../x"))
    content = json.loads((packed / "dataset.json").read_text())
    del content["splits"]["train"]["columns"]  # an attacker can forge these, too
    (packed / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(readers.OutputError, match=r"'\.\./x\.jpg', which leads out of"):
        packer.extract(packed, tmp_path / "deep/back")
    assert files_of(tmp_path / "deep") == {}


def test_links_in_the_output_are_not_followed(tree: Path, packed: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "back").mkdir()
    (tmp_path / "back/train").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(readers.OutputError, match=r"is a link, expected a folder; nothing below it is .*written"):
        packer.extract(packed, tmp_path / "back")
    assert files_of(tmp_path / "elsewhere") == {}


def test_only_files_are_overwritten(tree: Path, packed: Path, tmp_path: Path, hanging: Hanging) -> None:
    """A link, FIFO or folder in place of a file or of labels.csv, with and without --overwrite."""
    thesis = tmp_path / "thesis.tex"
    thesis.write_bytes(b"precious")
    for name, source in (("train/cat/cat_000.JPEG", packed), ("labels.csv", labelled(tree, tmp_path))):
        target = tmp_path / "back" / name
        for make in (partial(target.symlink_to, thesis), partial(os.mkfifo, target), target.mkdir):
            shutil.rmtree(tmp_path / "back", ignore_errors=True)
            target.parent.mkdir(parents=True)
            make()
            for overwrite in (False, True):
                message = rf"{target.name}: is in the way \(a (link|FIFO|folder)\)"
                with pytest.raises(readers.OutputError, match=message):
                    hanging(partial(packer.extract, source, tmp_path / "back", overwrite=overwrite))
    assert thesis.read_bytes() == b"precious"


def test_no_user_file_is_mistaken_for_a_temporary_one(tree: Path, packed: Path, tmp_path: Path) -> None:
    user_file = tree_of(tmp_path / "back", {"train/cat/.cat_000.JPEG.part": b"mine"}) / "train/cat/.cat_000.JPEG.part"
    packer.extract(packed, tmp_path / "back")
    assert user_file.read_bytes() == b"mine"
    user_file.unlink()
    assert files_of(tmp_path / "back") == files_of(tree)


def labelled(tree: Path, tmp_path: Path) -> Path:
    """A set of two splits whose folders do not show the labels; one image is in both splits."""
    rows = [f"{tree}/{split}/{name}/{name}_00{n}.JPEG,{name},{split}" for split in ("train", "val")
            for name in ("cat", "dog") for n in range(3)]  # fmt: skip
    rows.append(f"{tree}/train/cat/cat_001.JPEG,cat,val")
    (tmp_path / "m.csv").write_text("\n".join(["path,label,split", *rows]) + "\n")
    source = packer.open_source(tmp_path / "m.csv", folder=tree)
    return convert(source, tmp_path / "set").output


def rows_of(folder: Path) -> list[list[str]]:
    with open(folder / "labels.csv", newline="") as file:
        return sorted(csv.reader(file))


def test_an_image_in_two_splits_comes_back_once_with_both_labels(tree: Path, tmp_path: Path) -> None:
    packed = labelled(tree, tmp_path)
    result = packer.extract(packed, tmp_path / "back")
    assert (result.files, result.kept, result.labels_file) == (12, 1, True)
    both = [row for row in rows_of(tmp_path / "back") if row[0] == "train/cat/cat_001.JPEG"]
    assert both == [["train/cat/cat_001.JPEG", "0", "cat", "train"], ["train/cat/cat_001.JPEG", "0", "cat", "val"]]
    assert convert(tmp_path / "back/labels.csv", tmp_path / "again").splits == {"train": 6, "val": 7}
    # Extracting splits one by one or at once ends with all labels.
    for split in ("val", "train", "val"):
        packer.extract(packed, tmp_path / "parts", split=split)
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "back") and len(rows_of(tmp_path / "parts")) == 14
    with forked(partial(packer.extract, packed, tmp_path / "at once", split="train")):
        packer.extract(packed, tmp_path / "at once", split="val")
    assert files_of(tmp_path / "at once").keys() == files_of(tmp_path / "parts").keys()
    assert rows_of(tmp_path / "at once") == rows_of(tmp_path / "parts")


def test_a_foreign_table_of_labels_is_kept(tree: Path, tmp_path: Path) -> None:
    packed = labelled(tree, tmp_path)
    table = tree_of(tmp_path / "back", {"labels.csv": b"image,age\nx.jpg,4\n"}) / "labels.csv"
    with pytest.raises(readers.OutputError, match=r"labels.csv: exists, and is not a table of labels .*overwrite=True"):
        packer.extract(packed, tmp_path / "back")
    assert table.read_text() == "image,age\nx.jpg,4\n"
    packer.extract(packed, tmp_path / "back", overwrite=True)
    assert len(rows_of(tmp_path / "back")) == 14
    table.write_text(table.read_text().replace("cat_000.JPEG,0,cat", "cat_000.JPEG,1,dog"))
    with pytest.raises(readers.OutputError, match=r"says 1 'dog' of .*cat_000.JPEG', the set says 0 'cat'"):
        packer.extract(packed, tmp_path / "back")


def test_files_of_a_killed_extraction_are_removed_by_the_next(tree: Path, packed: Path, tmp_path: Path) -> None:
    def killed() -> None:
        os.rename = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        packer.extract(packed, tmp_path / "back", workers=1)

    killed_in_child(killed)
    assert len(files_of(tmp_path / "back")) == 2
    packer.extract(packed, tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(tree) and not (tmp_path / "back/.extracting").exists()


def test_labels_csv_has_no_formulas_and_the_names_come_back(tmp_path: Path) -> None:
    """Cells that begin with =, +, - or @ get an apostrophe, which packer removes when it reads the table."""
    names = ["=cmd|' /C calc'!A0", "+1", "-2", "@sum", "'=quoted", "'plain", "\ttab"]
    rows = [LabelRow(f"={i}.jpg", str(i), name, "train") for i, name in enumerate(names)]
    text = label_table(rows)
    cells = [cell for row in list(csv.reader(io.StringIO(text.decode(), newline="")))[1:] for cell in row]
    assert not [cell for cell in cells if cell[:1] in "=+-@\t\r"]
    tree_of(tmp_path / "tree", {"labels.csv": text} | {row.path: make_jpeg(i) for i, row in enumerate(rows)})
    source = packer.open_source(tmp_path / "tree" / "labels.csv", label_column="class")
    convert(source, tmp_path / "set")
    with readers.open(tmp_path / "set") as reader:
        classes = {key: reader.classes[label] for key, label in zip(reader.keys, reader.labels, strict=True)}
    assert classes == {f"={i}": name.strip() for i, name in enumerate(names)}
    packer.extract(tmp_path / "set", tmp_path / "back", workers=1)
    before = (tmp_path / "back" / "labels.csv").read_bytes()
    packer.extract(tmp_path / "set", tmp_path / "back", workers=1)  # reads the table, and recognises its rows
    assert (tmp_path / "back" / "labels.csv").read_bytes() == before and b"\n=" not in before


def test_labels_that_folders_do_not_show(tmp_path: Path) -> None:
    """WebDataset shards have labels but no class folders: labels.csv keeps the labels, and a conversion reads it."""
    samples = [(f"{i:04d}", make_jpeg(i), b"%d" % (i % 2), b'{"id": %d}' % i) for i in range(4)]
    members = [
        (f"{key}.{end}", part) for key, *data in samples for end, part in zip(("jpg", "cls", "json"), data, strict=True)
    ]
    write(tmp_path / "train-000000.tar", tar_of(*members))
    adopted = packer.index([tmp_path / "train-000000.tar"], tmp_path / "set", workers=1).output
    assert packer.extract(adopted, tmp_path / "back").labels_file
    with open(tmp_path / "back/labels.csv", newline="") as file:
        rows = [(row["path"], row["label"], row["split"]) for row in csv.DictReader(file)]
    assert rows == [(f"{i:04d}.jpg", str(i % 2), "train") for i in range(4)]
    assert json.loads((tmp_path / "back/0002.json").read_text()) == {"id": 2}
