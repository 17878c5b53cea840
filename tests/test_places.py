"""`packer diagnose --places`: a sample is read everywhere, its copies never stay, and a bad place is a line."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cached_sources import SlowReader
from click.testing import CliRunner
from suites.children import in_child
from suites.programs import run_packer
from suites.staging import wait_for

import readers
from cache.filesystem import Free, cached_share, drop, filesystem_type
from packer.cli.group import cli
from readers.diagnosis import Places, measure_places
from readers.diagnosis.text import places_lines

FAST = {"batch_size": 4, "seconds": 0.5}


def left_in(*places: Path) -> list[Path]:
    return [path for place in places for path in place.glob(".packer-*")]


@pytest.mark.parametrize("packed_set", [True, False], ids=["set", "folder"])
def test_the_same_samples_are_read_everywhere(packed_set: bool, tree: Path, source: Path, tmp_path: Path) -> None:
    reader = readers.open(source, "train") if packed_set else readers.open_folder(tree, "train")
    memory = Path("/dev/shm")
    result = measure_places(reader, [tmp_path, memory], **FAST)
    forms = ["shards"] if packed_set else ["files", "shards"]
    assert [row.form for row in result.rows] == [forms[0], *forms, *forms]
    assert [row.path for row in result.rows[1:]] == [str(place) for place in (tmp_path, memory) for _ in forms]
    total = int(reader.sizes().sum())
    for row in result.rows:
        assert not row.error and (row.samples, row.bytes) == (len(reader), total)
        assert (row.cold is None) == bool(row.note) and row.warm is not None
        assert (row.opening is not None) == (row.form == "files")
        for reads in filter(None, (row.cold, row.warm)):
            for times in (reads.single, reads.batch):
                assert 0 < times.p50 <= times.p90 <= times.p99 and times.count >= 8
    assert {row.note for row in result.rows if row.filesystem == "tmpfs"} == {"memory is its medium"}
    assert not left_in(tmp_path, memory)


def test_the_faster_place_is_advised(source: Path, tree: Path, tmp_path: Path) -> None:
    reader = readers.open(source, "train")
    target = tmp_path / "with a space"
    target.mkdir()
    result = measure_places(SlowReader(reader, 0.02), [target, tmp_path / "missing"], **FAST)
    assert result.best == 1 and result.gain > 0.01 and str(target) in result.advice
    assert result.commands == (f"packer stage {source} --target '{target}'",)
    assert run_packer("stage", source, "--target", target).returncode == 0
    folder = readers.open_folder(tree, "train")
    here = measure_places(folder, [tmp_path / "missing"], **FAST)
    assert len(here.rows) == 2 and here.best == 0 and not here.commands and "none of the places" in here.advice


def test_no_more_than_the_limit_is_copied(source: Path, tmp_path: Path) -> None:
    reader = readers.open(source, "train")
    limit = int(reader.sizes().sum()) // 2
    rows = measure_places(reader, [tmp_path], limit_bytes=limit, **FAST).rows
    assert 0 < rows[1].bytes <= limit and rows[1].samples == rows[0].samples


def test_places_that_cannot_be_used_are_rows(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    refusing = {"read-only": errno.EROFS, "foreign": errno.EACCES}
    make = os.mkdir

    def mkdir(path: str, *options: Any) -> None:
        for name, number in refusing.items():
            if name in str(path):
                raise OSError(number, os.strerror(number), path)
        make(path, *options)

    for name in (*refusing, "full", "good"):
        make(tmp_path / name)
    monkeypatch.setattr(os, "mkdir", mkdir)
    room = lambda path, filesystem: Free(0 if path.name == "full" else 1 << 40, 1 << 20)  # noqa: E731
    monkeypatch.setattr("readers.diagnosis.places.free_space", room)
    names = ["missing", "file", *refusing, "full", "good"]
    rows = measure_places(readers.open(source, "train"), [tmp_path / name for name in names], **FAST).rows[1:]
    expected = ["No such file", "Not a directory", "Read-only", "Permission denied", "no room", ""]
    assert all(words in row.error for words, row in zip(expected, rows, strict=True)), rows
    assert not rows[-2].warm and rows[-1].warm


def test_a_place_that_fills_up_is_a_row(source: Path, tmp_path: Path) -> None:
    """A limit of the size of files stands for a full disk."""

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        reader = readers.open(source, "train")
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        row = measure_places(reader, [tmp_path], **FAST).rows[1]
        assert "too large" in row.error and row.warm is None
        assert not left_in(tmp_path)

    in_child(work)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_copies_are_removed_after_a_signal(number: signal.Signals, source: Path, tmp_path: Path) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, as below nohup, and so by the command")
    command = [sys.executable, "-m", "packer", "diagnose", source, "--places", tmp_path, "--seconds", "500"]
    process = subprocess.Popen([*map(str, command), "--split", "train"], stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: left_in(tmp_path), "the copy")
        process.send_signal(number)
        process.send_signal(number)
        assert process.wait(300) == 128 + number
    finally:
        process.kill()
        _, errors = process.communicate()
    assert not left_in(tmp_path) and "Traceback" not in errors


def test_the_command_prints_a_table_or_json(source: Path, tmp_path: Path) -> None:
    places = f"{tmp_path},{tmp_path / 'missing'}"
    given = ("diagnose", source, "--split", "train", "--places", places, "--seconds", 1)
    shown = run_packer(*given)
    assert shown.returncode == 0 and "No such file or directory" in shown.stdout and "p99" in shown.stdout, shown.stderr
    document = json.loads(run_packer(*given, "--json").stdout)["places"]
    assert [row["error"] for row in document["rows"]] == ["", "", "No such file or directory"]
    page = tmp_path / "places.html"
    assert f"the report is in {page}" in run_packer(*given, "--html", page, check=True).stdout
    assert "No such file or directory" in page.read_text() and page.read_text().count("<svg") == 2
    whole = CliRunner().invoke(cli, [*map(str, given), "--simulate-step", "1ms", "--image-size", "16", "--json"])
    assert {"rungs", "places"} <= set(json.loads(whole.stdout)), whole.stderr


def test_an_address_is_read_from_its_server(web: Any, packed: Path, tmp_path: Path) -> None:
    result: Places = measure_places(readers.open(f"{web.url}/{packed.name}", "train"), [tmp_path], **FAST)
    assert "server" in result.rows[0].note and not result.rows[1].error
    assert all(command.startswith(f"packer stage {web.url}/{packed.name}") for command in result.commands)


def test_the_table_fits_a_terminal(source: Path, tmp_path: Path) -> None:
    places = measure_places(readers.open(source, "train"), [tmp_path, tmp_path / "missing"], **FAST)
    lines = places_lines(places, 80)
    table = lines[: lines.index(next(line for line in lines if "No such file" in line)) + 1]
    assert max(map(len, table)) <= 80 and "batch p50" in "".join(table)


@pytest.mark.parametrize("layout", ["file", "a/b/c/file", "set"])
def test_a_folder_says_what_packing_gains(layout: str, source: Path, tmp_path: Path, jpeg: Any) -> None:
    for i in range(8 if layout != "set" else 0):
        path = tmp_path / layout.replace("file", f"{i}.jpg")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(i))
    given = ["--batch-size", "2", "--image-size", "16", "--simulate-step", "1ms", "--seconds", "0.5", "--json"]
    given += ["--split", "train"] if layout == "set" else []
    done = CliRunner().invoke(cli, ["diagnose", str(source if layout == "set" else tmp_path), *given])
    assert done.exit_code == 0, done.stderr
    notes = [note for note in json.loads(done.stdout)["notes"] if "packer convert" in note]
    assert len(notes) == (layout != "set") and all("as files" in note and "packed" in note for note in notes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--places", ","), "names no directory"),
        (("--batch-sizes", "0,8", "--simulate-step", "1ms"), "not valid batch sizes"),
        (("--batch-sizes", "8"), "--simulate-step"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: tuple[str, ...], words: str, source: Path) -> None:
    done = run_packer("diagnose", source, *arguments)
    assert done.returncode == 2 and words in done.stderr


def test_only_a_set_has_places() -> None:
    script = Path(__file__).with_name("diagnosis_loaders.py")
    done = run_packer("diagnose", f"{script}:plain_loader", "--places", "/dev/shm")
    assert done.returncode == 2 and "DataLoader" in done.stderr and "a SET" in done.stderr


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"seconds": 0.0}, {"limit_bytes": 0}])
def test_arguments_are_checked(options: dict[str, Any], source: Path) -> None:
    with pytest.raises(ValueError, match="positive"):
        measure_places(readers.open(source, "train"), [], **options)


# --- the page cache --------------------------------------------------------------------------------------------------
def test_a_part_of_a_file_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(4 << 20))
    if filesystem_type(path) in ("tmpfs", "ramfs"):
        pytest.skip("files of a tmpfs are nowhere but in memory, so they cannot be dropped")
    first, second = (0, 2 << 20), (2 << 20, 2 << 20)
    drop(path)
    assert cached_share(path, [first, second]) == 0.0
    path.read_bytes()
    assert cached_share(path, [first, second]) == 1.0
    drop(path, [second], synced=True)
    shares = cached_share(path, [first]), cached_share(path, [second])
    assert shares == (1.0, 0.0)
    (tmp_path / "empty").touch()
    assert cached_share(tmp_path / "empty", [(0, 0)]) is None
