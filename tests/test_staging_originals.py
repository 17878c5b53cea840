"""A set staged as files is the folder that it was packed from, for programs that know nothing of packer."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import files_of, make_jpeg, tree_of
from suites.programs import run_packer
from suites.staging import Notes

import packer
import readers
from cache.staging import copies
from packer.testing.samples import overwrite


@pytest.mark.parametrize("to", ["hdf5", "tfrecord", "tar"])
def test_the_copy_is_the_original_tree(tree: Path, tmp_path: Path, to: str) -> None:
    source = packer.convert(
        tree, to=to, output=tmp_path / "set", run=packer.Run(workers=1), shards=packer.Shards(shuffle=5, samples=7)
    ).output
    with (first := readers.stage(source, tmp_path / "node", form="files")) as local:
        assert files_of(local) == files_of(tree)
    with (again := readers.stage(source, tmp_path / "node", form="files", verify=True)) as found:
        assert found == local and again.counts.copied == 0 and again.counts.found == first.counts.copied == 45
    with readers.stage(source, tmp_path / "node") as shards:
        assert shards != local and local.is_dir(), "the two copies of a set do not replace one another"
    assert len(packer.clean_staged(source, tmp_path / "node").removed) == 2


def test_nothing_but_the_tree_is_in_it(tmp_path: Path) -> None:
    """Every folder is a class to torchvision's ImageFolder, hidden ones too."""
    tree_of(tmp_path / "tree", {f"{name}/{i}.jpg": make_jpeg(i) for i, name in enumerate(["cat", "dog"])})
    source = packer.convert(tmp_path / "tree", to="tar", output=tmp_path / "set", run=packer.Run(workers=1)).output
    with (staged := readers.stage(source, tmp_path / "node", form="files")) as local:
        assert sorted(path.name for path in local.iterdir()) == ["cat", "dog"] and staged.path == local
    assert len(packer.clean_staged(local, tmp_path / "node").removed) == 1, "by the directory that was printed"


def test_a_copy_in_part_is_completed(source: Path, tree: Path, tmp_path: Path) -> None:
    with readers.stage(source, tmp_path, form="files", splits="val") as local:
        assert {name.partition("/")[0] for name in files_of(local)} == {"val"}
    with readers.stage(source, tmp_path, form="files") as whole:
        damaged, missing = sorted(path for path in whole.rglob("*.JPEG"))[:2]
        damaged.write_bytes(damaged.read_bytes()[::-1])
        missing.unlink()
    with (mended := readers.stage(source, tmp_path, form="files", verify=True)) as whole:
        assert (mended.counts.copied, mended.counts.damaged) == (2, 1)
        assert files_of(whole) == files_of(tree)


def test_an_unmodified_program_reads_a_folder_of_images(source: Path, tree: Path, tmp_path: Path) -> None:
    program = (
        "import os, pathlib; print(len([*pathlib.Path(os.environ['PACKER_STAGED']).glob('train/*/*.JPEG')])); exit(3)"
    )
    done = run_packer(
        "stage",
        source,
        "--as",
        "files",
        "--target",
        tmp_path,
        "--cleanup",
        "atexit",
        "--",
        sys.executable,
        "-c",
        program,
    )
    assert (done.returncode, int(done.stdout)) == (3, len([*tree.glob("train/*/*")])), done.stderr
    assert not [*tmp_path.glob("packer-staged-*/*-files-*")], "cleaned up"


def test_labels_that_folders_do_not_show_are_in_a_table(tmp_path: Path) -> None:
    tree_of(tmp_path / "images", {f"{i}.jpg": make_jpeg(i) for i in range(4)})
    (tmp_path / "labels.csv").write_text("path,label\n" + "".join(f"images/{i}.jpg,{i % 2}\n" for i in range(4)))
    source = packer.convert(
        tmp_path / "labels.csv", to="tar", output=tmp_path / "set", run=packer.Run(workers=1)
    ).output
    with readers.stage(source, tmp_path / "node", form="files") as local:
        rows = [*csv.DictReader((local / "labels.csv").read_text().splitlines())]
        with readers.open(source) as reader:
            assert {row["path"]: int(row["label"]) for row in rows} == {
                reader.name(i): int(reader.labels[i]) for i in range(4)
            }
        assert all((local / row["path"]).is_file() for row in rows)


def test_damage_in_the_source_is_not_staged(tree: Path, tmp_path: Path) -> None:
    source = packer.convert(tree, to="tar", output=tmp_path / "set", run=packer.Run(workers=1)).output
    with readers.open(source, "train") as reader:
        overwrite(reader, 3, bytes(reader.read(3))[::-1])
    with (
        pytest.raises(readers.StagingError, match=r"CRC32C.*run  packer verify"),
        readers.stage(source, tmp_path / "node", form="files"),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "files", "fraction": 0.5}, "whole splits"),
        ({"form": "files", "part": (0, 2)}, "whole splits"),
        ({"form": "files", "background": True}, "whole splits"),
        ({"form": "zip"}, "shards, files"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        readers.stage(tmp_path, **options)


def test_more_names_than_a_record_holds_are_refused(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(copies, "MAX_RECORD_BYTES", 1000)
    with (
        pytest.raises(readers.StagingError, match="1,000 are the limit"),
        readers.stage(source, tmp_path, form="files", watcher=Notes()),
    ):
        pass


def test_neighbours_are_read_together(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = list[int]()
    read_many = readers.Reader.read_many

    def counted(self: readers.Reader, indices: Any, field: str = "image") -> Any:
        reads.append(len(np.asarray(indices)))
        return read_many(self, indices, field)

    monkeypatch.setattr(readers.Reader, "read_many", counted)
    with readers.stage(source, tmp_path, form="files", threads=4):
        assert sum(reads) == 45 and len(reads) <= 4
