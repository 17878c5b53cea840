"""Writing to an existing folder: foreign files are not changed, moved or removed, whatever dataset.json names.

No command waits for a FIFO in place of a file.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import signal
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import Hanging, convert, files_of, make_jpeg
from suites.programs import Notes, run_python

import packer
import readers
from cache.errors import OutputError, PackerError
from cache.messages import Silent
from readers.staging import set_files

BROKEN = b"\xff\xd8\xff no image"


@pytest.fixture(scope="module")
def packed(tree: Path, pack: Callable[..., Path]) -> Callable[[str], Path]:
    """The tree in a format; tests may not write to it."""
    return lambda to="tar": pack(tree, to, samples_per_shard=12)


@pytest.fixture
def out(packed: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of the packed tree."""
    return Path(shutil.copytree(packed(), tmp_path / "out"))


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """Foreign files, which must not change."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in ("x.npy", "train-000000.tar", "thesis.tex"):
        (folder / name).write_bytes(name.encode())
    before = files_of(folder)
    yield folder
    assert files_of(folder) == before, "files outside the output were changed"


def edited(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the record of train in dataset.json."""
    path = root / "dataset.json"
    content = json.loads(path.read_text())
    change(content["splits"]["train"])
    path.write_text(json.dumps(content))


def refused(source: Path, out: Path, message: str, **options: Any) -> None:
    """Replacing the set must fail, and leave the set unchanged."""
    before = files_of(out)
    with pytest.raises(OutputError, match=message):
        convert(source, out, overwrite=True, **options)
    assert files_of(out) == before, "the old set was changed"


# --- overwrite ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("hostile", ["link/x", "link/thesis.tex", "link", ".packing", "../outside"])
def test_overwrite_removes_nothing_outside_the_set(tree: Path, out: Path, outside: Path, hostile: str) -> None:
    """Where dataset.json leads through a link or outside the set, the set stays unchanged and the command fails."""
    (out / "link").symlink_to(outside)

    def change(split: dict[str, Any]) -> None:
        if hostile.endswith(".tex"):
            split["shards"][0]["path"] = hostile
        else:
            split["index"] = hostile

    edited(out, change)
    refused(tree, out, r"link: is a link|belongs to the set|leads outside.*it is unknown what")


def test_overwrite_removes_nothing_but_columns_from_an_index(tree: Path, out: Path) -> None:
    """The index is a folder with files of the user."""
    (out / "train.index").rename(out / "photos")
    (out / "photos/holiday.jpg").write_bytes(b"precious")
    edited(out, lambda split: split.update(index="photos"))
    convert(tree, out, overwrite=True)
    assert (out / "photos/holiday.jpg").read_bytes() == b"precious"
    (out / "train.index/notes.txt").write_bytes(b"precious")
    refused(tree, out, r"train.index: is in the way.*move it", split="train")


@pytest.mark.parametrize("kind", ["shard", "linked shard", "manifest", "image", "quarantined"])
def test_overwrite_refuses_a_source_that_it_would_remove(tree: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    bad = Path(shutil.copytree(tree, tmp_path / "bad"))
    (bad / "train/cat/broken.jpg").write_bytes(BROKEN)
    convert(bad, out, "tfrecord", on_error="quarantine")
    source = shard = next(out.glob("train-*.tfrecord"))
    if kind == "manifest":
        source = out / "left-out.jsonl"
        source.write_text(json.dumps({"path": str(tree / "train/cat/cat_000.JPEG")}) + "\n")
    elif kind == "image":
        source = tmp_path / "m.csv"
        source.write_text(f"path\n{out}/quarantine/train/cat/broken.jpg\n{tree}/val/cat/cat_000.JPEG\n")
    elif kind == "linked shard":
        source = tmp_path / "link.tfrecord"
        source.symlink_to(shard)
    elif kind == "quarantined":
        source = out / "quarantine"
    refused(source, out, r"belongs to the set in .*out, which overwrite=True would remove", on_error="skip")


def test_overwrite_leaves_shards_that_packer_did_not_write(
    tree: Path, packed: Callable[..., Path], tmp_path: Path
) -> None:
    """An adopted folder of foreign shards; links to foreign shards belong to packer, the shards do not."""
    foreign, notes = tmp_path / "theirs", Notes()
    foreign.mkdir()
    for shard in packed("tfrecord").glob("*.tfrecord"):
        shutil.copy(shard, foreign / f"theirs-{shard.name}")
    shards = files_of(foreign)
    packer.index([foreign], workers=1)
    convert(tree, foreign, overwrite=True, watcher=notes)
    assert shards.items() <= files_of(foreign).items()
    assert any("these shards are kept, because packer did not write them: theirs-" in line for line in notes.lines)
    assert packer.verify(foreign, against=tree, workers=1).ok

    linked = tmp_path / "linked"
    packer.index([packed()], linked, workers=1)
    before = files_of(packed())
    convert(tree, linked, "hdf5", overwrite=True)
    assert not [path for path in linked.iterdir() if path.is_symlink()] and files_of(packed()) == before
    assert packer.verify(linked, against=tree, workers=1).ok

    in_the_way = tmp_path / "in the way"
    in_the_way.mkdir()
    shutil.copy(packed() / "train-000000.tar", in_the_way)
    packer.index([in_the_way], accept_loss=True, workers=1)
    refused(tree, in_the_way, r"train-000000.tar: is in the way of the new set")


def test_overwrite_notes_what_it_removes(tree: Path, out: Path, tmp_path: Path) -> None:
    less, notes = tmp_path / "less", Notes()
    shutil.copytree(tree / "train", less / "train", ignore=shutil.ignore_patterns("owl"))
    convert(less, out, overwrite=True, watcher=notes)
    text = "\n".join(notes.lines)
    assert f"replacing the set in {out}: 45 samples (train 36, val 9), 3 classes, by 24 samples, 2 classes" in text
    assert "splits that the new set does not have: val" in text
    assert "classes that the new set does not have: owl" in text


@pytest.mark.parametrize(
    "content", ["{", '{"kind": "packer-dataset", "version": 99}', None], ids=["cut", "newer", "FIFO"]
)
def test_overwrite_does_not_replace_an_unreadable_set(
    tree: Path, out: Path, hanging: Hanging, content: str | None
) -> None:
    (out / "dataset.json").unlink()
    if content is None:
        os.mkfifo(out / "dataset.json")
    else:
        (out / "dataset.json").write_text(content)
    hanging(partial(refused, tree, out, "it is unknown what overwrite=True would remove; repair the set"))


KILLED_INDEX = """
import os, sys
import packer.adoption
packer.adoption.run_shards = lambda *args, **options: os.kill(os.getpid(), 9)
packer.index([sys.argv[1]], workers=1)
"""


def test_a_killed_index_does_not_turn_a_folder_of_shards_into_an_output(
    tree: Path, packed: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "theirs"
    out.mkdir()
    for shard in packed().glob("*.tar"):
        shutil.copy(shard, out)
    before = files_of(out)
    assert run_python("-c", KILLED_INDEX, out).returncode == -signal.SIGKILL and (out / ".packing").is_dir()
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="not empty and not a packed set"):
            convert(tree, out, overwrite=overwrite)
    assert files_of(out) == before
    assert packer.index([out], workers=1).samples == 45


# --- the working folder ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["lock", "plan.json", "plan.json.new", "train-000000.tar.tmp", "."])
@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_a_prepared_working_folder_is_neither_followed_nor_waited_for(
    tree: Path, tmp_path: Path, outside: Path, hanging: Hanging, name: str, kind: str
) -> None:
    """Foreign files are not written through links, and a FIFO blocks no command. The folder is refused or moved
    aside."""
    out = tmp_path / "out"
    work = out / ".packing"
    (out if name == "." else work).mkdir(parents=True)
    place = work if name == "." else work / name
    if kind == "link":
        place.symlink_to(outside if name == "." else outside / "thesis.tex")
    else:
        os.mkfifo(place)
    pack = partial(convert, tree, out, samples=36)
    if name in ("lock", "plan.json", "."):
        with pytest.raises(OutputError, match=rf"{place}: is a "):
            hanging(pack)
    else:
        hanging(pack)
        assert packer.verify(out, against=tree, workers=1).ok


def test_no_conversion_runs_under_the_lock_of_a_removed_folder(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In forced order: the second opens the lock, the first ends and removes its folder, the second gets its lock."""
    out, real, ended = tmp_path / "out", fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        if not ended:
            ended.append(True)
            shutil.rmtree(out / ".packing")
        real(descriptor, operation)

    class Busy(Silent):
        def begin(self, *args: object, **options: object) -> None:
            with pytest.raises(OutputError, match="another command is writing here"):
                convert(tree, out)
            refused.append(True)

    refused: list[bool] = []
    monkeypatch.setattr(fcntl, "flock", flock)
    convert(tree, out, watcher=Busy())
    assert ended and refused, "the steps ran in another order"
    assert packer.verify(out, against=tree, workers=1).ok


# --- names and addresses -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["x" * 251 + ".jpg", "猫" * 83 + ".jpg"], ids=["ASCII", "UTF-8"])
def test_names_of_maximal_length(tmp_path: Path, name: str) -> None:
    """Quarantined and extracted: temporary names are not longer than the name of the file."""
    source = tmp_path / "src/cat"
    source.mkdir(parents=True)
    (source / name).write_bytes(make_jpeg(1))
    (source / f"b{name[1:]}").write_bytes(BROKEN)
    out = convert(tmp_path / "src", tmp_path / "out", on_error="quarantine").output
    assert list(files_of(Path(out) / "quarantine")) == [f"train/cat/b{name[1:]}"]
    packer.extract(out, tmp_path / "back")
    assert files_of(tmp_path / "back") == {f"cat/{name}": make_jpeg(1)}


def test_names_too_long_for_a_file_are_shortened(tmp_path: Path) -> None:
    archive, notes = tmp_path / "a.tar", Notes()
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        for name in (f"{'猫' * 100}good.jpg", f"{'é' * 200}1.jpg", f"{'é' * 200}2.jpg"):
            member = tarfile.TarInfo(name)
            payload = make_jpeg(1) if "good" in name else BROKEN
            member.size = len(payload)
            tar.addfile(member, io.BytesIO(payload))
    out = convert(archive, tmp_path / "out", "hdf5", on_error="quarantine").output
    kept = list(files_of(Path(out) / "quarantine"))
    assert len(kept) == 2 and all(name.startswith("train/éé") and name.endswith(".jpg") for name in kept), kept
    assert packer.extract(out, tmp_path / "back", watcher=notes).renamed == 1
    assert "1 name too long for a file, and shortened" in notes.lines[-1]
    ((name, payload),) = files_of(tmp_path / "back").items()
    assert name.startswith("猫猫") and name.endswith(".jpg") and payload == make_jpeg(1)
    assert packer.extract(out, tmp_path / "back").kept == 1


@pytest.mark.parametrize("address", ["s4://b/x", "file:///tmp/x", "hdfs://h/x", Path("s3://b/x")], ids=str)
def test_an_unsupported_address_does_not_become_a_directory(
    tree: Path, packed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str | Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: packer.convert(tree, "tar", address, run=packer.Run(workers=1)),
        lambda: packer.extract(packed(), address),
        lambda: packer.index([packed() / "train-000000.tar"], address, workers=1),
        lambda: packer.export_index(packed(), "wids", output=address),
    ):
        with pytest.raises(OutputError, match=r"is not a local directory.* s3://, gs://, az://"):
            call()
    assert list(tmp_path.iterdir()) == []


# --- a FIFO in place of a file of a set: every command fails at once, and none waits for a writer -----------------
@pytest.fixture(scope="module")
def whole(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set with files that were left out; read-only."""
    root = tmp_path_factory.mktemp("fifos")
    shutil.copytree(tree / "val", root / "source/val")
    (root / "source/val/cat/broken.jpg").write_bytes(b"\xff\xd8\xff")
    return convert(root / "source", root / "set", on_error="skip").output


def read_all(root: Path) -> None:
    with readers.open(root) as reader:
        reader.table.columns.check()
        for i in range(len(reader)):
            reader.read(i)


def checked(root: Path, against: Path | None = None) -> None:
    result = packer.verify(root, against=against, workers=1)
    if not result.ok:
        raise readers.DatasetError(result.problems[0].what)


COMMANDS: dict[str, Callable[[Path, Path], object]] = {
    "read": lambda root, out: read_all(root),
    "inspect": lambda root, out: packer.inspect(root),
    "verify": lambda root, out: checked(root),
    "extract": lambda root, out: packer.extract(root, out),
    "convert": lambda root, out: convert(root, out, "hdf5"),
    "overwrite": lambda root, out: convert(root.parent / "source", root, "hdf5", overwrite=True),
    "export-index": lambda root, out: packer.export_index(root, "dali", output=out),
    "stage": lambda root, out: set_files(root),
}
READ = {  # which commands read which file; the others work without it
    "dataset.json": set(COMMANDS),
    "val.index/label.npy": {"read", "verify", "extract", "convert", "inspect"},
    "val.index/key.npy": {"read", "verify", "extract", "convert"},
    "val-000000.tar": {"read", "verify", "extract", "convert", "export-index"},
    "left-out.jsonl": {"against"},
}


@pytest.mark.parametrize("name", READ)
def test_a_fifo_in_a_set_is_an_error_at_once(whole: Path, tmp_path: Path, hanging: Hanging, name: str) -> None:
    root = tmp_path / "set"
    shutil.copytree(whole, root)
    shutil.copytree(whole.parent / "source", tmp_path / "source")
    (root / name).unlink()
    os.mkfifo(root / name)
    commands = COMMANDS | {"against": lambda root, out: checked(root, tmp_path / "source")}
    for command, call in commands.items():
        if command in READ[name]:
            with pytest.raises(PackerError, match=name.rpartition("/")[2]):
                hanging(lambda: call(root, tmp_path / command))  # noqa: B023
        elif command not in ("overwrite", "against"):
            hanging(lambda: call(root, tmp_path / command))  # noqa: B023
