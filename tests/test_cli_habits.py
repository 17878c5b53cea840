"""Habits that all commands share: words, examples, widths, errors, statuses, colours, logs, versions, progress."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shlex
import shutil
import struct
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import click
import pytest
from conftest import make_jpeg, tree_of

import packer
from packer.cli.flags import Emphasis, show
from packer.cli.group import COMMANDS as ENTRIES
from packer.cli.group import WORDS, cli, run
from packer.cli.screen import ProgressDisplay

Packer = Callable[..., "tuple[int, str, str]"]


def commands(command: click.Command = cli, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command with its path, as "cache warm"; the hidden one of `packer stage SET` is called "stage"."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        part = command.get_command(context, name)
        assert part is not None
        yield from commands(part, path if part.hidden else f"{path} {name}".strip())


COMMANDS = dict(commands())
PATHS = sorted({*COMMANDS, "cache", ""})


@pytest.fixture
def cli_run(capsys: pytest.CaptureFixture[str]) -> Packer:
    """Runs a command in this process: status, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            run([str(argument) for argument in arguments])
        return (int(ended.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the examples name."""
    root = tmp_path_factory.mktemp("examples")
    splits = {"train": range(4), "val": range(4, 8)}
    names = [f"{split}/{name}/{n}.jpg" for split, numbers in splits.items() for name in ("cat", "dog") for n in numbers]
    tree_of(root / "images", {name: make_jpeg(seed, (240, 224)) for seed, name in enumerate(names)})
    tree_of(root / "more", {"train/cat/19.jpg": make_jpeg(50)})
    tree_of(root / "new", {"cat/18.jpg": make_jpeg(51)})
    tree_of(root / "masks", {"cat/0.png": b"", "train.py": b"", "before.jsonl": b"{}", "after.jsonl": b"{}"})
    for name in ("train.py", "before.jsonl", "after.jsonl"):
        (root / "masks" / name).rename(root / name)
    shutil.make_archive(str(root / "images"), "tar", root / "images")
    for to in ("hdf5", "tar", "tfrecord"):
        packer.convert(root / "images", to, root / f"images-{to}", run=packer.Run(workers=1))
    tree_of(root / "other", {"train/owl/17.jpg": make_jpeg(52)})
    packer.convert(root / "other", "hdf5", root / "other-hdf5", run=packer.Run(workers=1))
    tree_of(root, {"keys.txt": b"dog/3\n", "labels.csv": b"key,label\ncat/0,dog\n"})
    tree_of(root / "captions", {"cat/0.txt": b"a cat"})
    (root / "masks/cat/0.png").unlink()
    tree_of(root / "masks", {"cat/1.png": _png()})
    shutil.copytree(root / "images-tar", root / "shards", ignore=shutil.ignore_patterns("*.json", "*.index", "*.md"))
    return root


def _png() -> bytes:
    import io

    from PIL import Image

    memory = io.BytesIO()
    Image.new("L", (64, 48)).save(memory, "png")
    return memory.getvalue()


# --- help -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", PATHS)
def test_help_fits_a_terminal_and_ends_with_examples(path: str, cli_run: Packer) -> None:
    status, shown, _ = cli_run(*path.split(), "--help")
    assert status == 0 and [line for line in shown.splitlines() if len(line) > 80] == []
    if path:
        assert shown.index("Examples:") > shown.index("--help")
        assert 2 <= len(ENTRIES[path].examples) <= 4
    if path not in ("", "cache"):
        assert "--json" in shown and "--verbose" in shown


def test_every_command_is_in_the_help_once(cli_run: Packer) -> None:
    shown = cli_run("--help")[1]
    for name in cli.list_commands(click.Context(cli)):
        assert len(re.findall(rf"^  {name} ", shown, re.MULTILINE)) == 1
    assert all(re.search(rf"^ +{word} ", shown, re.MULTILINE) for word in WORDS)


EXAMPLE_LINES = [
    (path, shlex.split(line, comments=True))
    for path, entry in ENTRIES.items()
    if path in PATHS
    for _, text in entry.examples
    for line in re.findall(r"packer [^)&]+", text)
]
# What is only parsed: it needs another machine, a training, a while, or changes this machine.
PARSED = ("commit", "diagnose", "monitor", "serve", "simulate", "advise", "completion", "doctor", "parity", "view")


def _is_run(path: str, words: list[str]) -> bool:
    text = " ".join(words)
    elsewhere = any(part in text for part in ("s3://", "--task", "-- python", "$SLURM", "/local", "/scratch"))
    return path.partition(" ")[0] not in (*PARSED, "cache", "stage") and not elsewhere


@pytest.mark.parametrize(("path", "words"), EXAMPLE_LINES, ids=[" ".join(words)[7:] for _, words in EXAMPLE_LINES])
def test_examples_are_commands(path: str, words: list[str], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed by the command itself: options, numbers of arguments, values, files that must exist."""
    monkeypatch.chdir(place)
    name, *arguments = words[1:]
    command: click.Command = cli.get_command(click.Context(cli), name)  # type: ignore[assignment]
    context = click.Context(cli, info_name="packer")
    while isinstance(command, click.Group):
        context = command.make_context(name, arguments, context)
        name, command, arguments = command.resolve_command(context, [*context._protected_args, *context.args])
    assert command.make_context(name, arguments, context).params


def test_examples_run(place: Path, tmp_path: Path, cli_run: Packer, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one folder, with the set as it was; on one CPU, so that no process is started."""
    failed = {}
    shutil.copytree(place, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        lines = [words[1:] for path, words in EXAMPLE_LINES if _is_run(path, words)]
        for words in lines:
            shutil.rmtree("images-hdf5")
            shutil.copytree(place / "images-hdf5", "images-hdf5")
            status, out, err = cli_run(*words)
            if status:
                failed[" ".join(words)] = out + err
    finally:
        os.sched_setaffinity(0, cpus)
    assert len(lines) > 30 and not failed, "\n".join(f"{line}\n   {said}" for line, said in failed.items())


# --- errors and statuses --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", COMMANDS)
def test_errors_are_json_on_request_and_typos_get_a_suggestion(path: str, cli_run: Packer) -> None:
    status, out, err = cli_run(*path.split(), "--jsn", "--json")
    error = json.loads(out)["error"]
    assert (status, error["status"], error["type"]) == (2, 2, "UsageError") and "Traceback" not in err
    assert "--json" in error["message"].partition("Did you mean")[2], error["message"]
    assert cli_run(*path.split(), "--jsn")[1] == "", "without --json stdout is for results"


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("verfy images-hdf5", 2, "No such command 'verfy'. Did you mean verify?"),
        ("frobnicate", 2, "No such command 'frobnicate'."),
        ("list", 2, "Did you mean inspect?"),
        ("check images-hdf5", 2, "Did you mean verify?"),
        ("cache lss", 2, "Did you mean 'ls'?"),
        ("", 2, "Usage: packer"),
        ("verify", 2, "Missing argument 'SET'"),
        ("verify nothing-here", 2, "nothing-here"),
        ("verify images", 1, "not a packed set"),
        ("verify images-hdf5 --workers 1", 0, ""),
        ("extract images-hdf5 -o images --workers 1 --keys 'nothing/*'", 1, "nothing/*"),
        ("subset images-hdf5 -o x", 2, "say which samples"),
        ("subset images-hdf5 -o x --where nonsense", 2, "nonsense"),
        ("monitor -- false", 1, ""),
        ("stage images-hdf5 --bandwidth fast", 2, "'fast'"),
    ],
)
def test_statuses(
    line: str, status: int, said: str, place: Path, cli_run: Packer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    found, out, err = cli_run(*shlex.split(line))
    assert found == status and said in (out + err).replace("\n", " ") and "Traceback" not in err


# --- terminals ------------------------------------------------------------------------------------------------------
@pytest.fixture
def terminal() -> Iterator[Callable[[int], tuple[object, Callable[[int], None], Callable[[], str]]]]:
    """Opens a terminal of some columns: its stream, how to resize it, and what it was sent."""
    opened = []

    def open_terminal(columns: int) -> tuple[object, Callable[[int], None], Callable[[], str]]:
        ours, theirs = pty.openpty()
        stream = os.fdopen(theirs, "w", encoding="utf-8")
        opened.append((ours, stream))

        def sent() -> str:
            """All until now; a terminal may take a moment to hand it over."""
            stream.write("\0")
            stream.flush()
            text = b""
            while not text.endswith(b"\0"):
                text += os.read(ours, 1 << 16)
            return text[:-1].decode()

        def resize(columns: int) -> None:
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

        resize(columns)
        return stream, resize, sent

    yield open_terminal
    for ours, stream in opened:
        stream.close()
        os.close(ours)


@pytest.mark.parametrize(("columns", "then"), [(20, 300), (300, 20), (80, 79), (33, 33)])
def test_a_bar_fits_the_terminal_also_when_that_is_resized(columns: int, then: int, terminal: Callable) -> None:  # type: ignore[type-arg]
    stream, resize, sent = terminal(columns)
    counts = iter([(640_000, 70_000_000_000, 3), (640_001, 70_000_000_001, 4)])
    over = threading.Event()

    def done() -> tuple[int, int, int]:
        found = next(counts, None)
        if found is None:
            over.set()
            return 640_002, 70_000_000_002, 5
        if found[2] == 4:
            resize(then)  # after the width was read for this line
        return found

    display = ProgressDisplay(stream)
    display.begin(1_281_167, 140_000_000_000, done)
    assert over.wait(300)
    display.note("a note")
    display.end()
    first, second, third = [line for line in re.split(r"\r\x1b\[K|\r?\n", sent()) if "%" in line][:3]
    assert len(first) < columns and len(second) < columns and len(third) < then, (first, second, third)
    assert "50%" in first and "50%" in third
    for line, size in ((first, columns), (third, then)):
        assert ("left out" in line) == (size > 70), line
        assert ("█" in line) == (size == 300), line


def test_a_note_does_not_get_mixed_with_the_bar(terminal: Callable) -> None:  # type: ignore[type-arg]
    stream, _, sent = terminal(100)
    drawn = threading.Event()
    display = ProgressDisplay(stream)
    display.begin(100, 0, lambda: (drawn.set(), (50, 1000))[1])  # type: ignore[func-returns-value]
    assert drawn.wait(300)
    display.note("found \x1b[2J")
    display.end()
    shown = sent()
    assert "\r\x1b[Kpacker: found \\x1b[2J\r\n" in shown or shown.startswith("packer: found"), repr(shown)
    assert not shown.rstrip("\n").endswith("%") and "\x1b[2J" not in shown


def test_colours_are_for_terminals_that_want_them(terminal: Callable, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[type-arg]
    stream, _, sent = terminal(80)
    monkeypatch.setattr(sys, "stdout", stream)
    for name, value, coloured in (("NO_COLOR", "1", False), ("TERM", "dumb", False), ("TERM", "xterm", True)):
        with monkeypatch.context() as patch:
            patch.delenv("NO_COLOR", raising=False)
            patch.setenv("TERM", "xterm")
            patch.setenv(name, value)
            show(Emphasis("look"))
            assert ("\x1b[33m" in sent()) == coloured, (name, value)


# --- logs and versions ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("convert images --to tar -o {out}/set --workers 1", ["2 shards of tar planned", "000000.tar: done, 1 of 2"]),
        ("verify images-tar --workers 1", ["opened ", "train-000000.tar (8 samples, ", "done, 2 of 2"]),
        ("index shards -o {out}/set --workers 1", ["2 tar shards (train 1, val 1); the index goes to", "done, 2 of 2"]),
        ("stage images-tar --target {out} --any-filesystem", ["to copy by", "train-000000.tar: ", "CRC32C"]),
        ("inspect images-tar", ["opened ", "images-tar (train): 8 samples"]),
    ],
)  # fmt: skip
def test_verbose_says_what_is_done_and_nothing_else_does(
    line: str, said: list[str], place: Path, tmp_path: Path, cli_run: Packer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    status, out, err = cli_run(*line.format(out=tmp_path / "a").split(), "-v", "--json")
    assert status == 0 and json.loads(out), err
    logged = [text for text in err.splitlines() if re.match(r"packer: +\d+\.\d{3} s  ", text)]
    assert logged == err.splitlines(), "with --json there are no notes"
    assert "packer 0.1.0, Python" in logged[0] and "of memory in one process" in logged[-1]
    for text in said:
        assert any(text in entry for entry in logged), err
    quiet = cli_run(*line.format(out=tmp_path / "b").split(), "--json")
    assert quiet[0] == 0 and quiet[2] == ""


def test_what_is_listed_and_left_out_is_said(tmp_path: Path, cli_run: Packer) -> None:
    files = {"cat/1.jpg": make_jpeg(1), "cat/.2.jpg": b"", "cat/3.jpg": make_jpeg(1)[:-9]}
    line = ("convert", tree_of(tmp_path / "in", files), "--to", "tar", "-o", tmp_path / "out", "--on-error", "skip")
    status, out, err = cli_run(*line, "--workers", 1)
    assert status == 0 and "listed 2 samples (train 2), 1 class, " in err and "left out 1 file: 1 hidden" in err
    assert "left out: 1 skipped" in out


def test_versions_of_what_matters_are_shown(cli_run: Packer) -> None:
    status, shown, _ = cli_run("--version")
    assert status == 0 and shown.startswith(f"packer {packer.__version__}\nPython ")
    for name in ("numpy", "h5py", "pillow", "simplejpeg", "crc32c", "zstandard", "click", "lazy_loader"):
        assert f"{name} {metadata.version(name)}" in shown
