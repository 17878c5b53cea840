"""The code blocks of README.md and docs, run as printed.

The first word of a fence decides what happens to the block; further words modify that:

    python                runs; the blocks of a page share their names, as in a notebook
    python needs=NAME     runs where that package is installed (needs=a,b: both); otherwise it is only parsed
    bash                  runs, by sh -eu
    console               lines that begin with "$ " run, by sh; the lines that follow are what they print
    … parse               does not run, because it needs a cluster, a network or a GPU: Python is compiled, and its
                          imports from this project are looked up; packer lines of a script are parsed by the command;
                          the text after "parse:" is the reason
    … file=NAME           is written to this file, for later blocks of the page

Blocks in other languages are ignored. Blocks in an HTML comment run and are not shown. A packer or Python line without
shell syntax is a fork of a warm process, as are the ranks that torchrun would start: that saves the time of their
imports.

In printed output … matches any text within a line, and a line with only … matches any lines. Progress, numbers, units
after them, bars and runs of spaces are not compared, so that a page can show the output for a real set.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import io
import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import click

import packer
from packer.cli.group import cli
from packer.testing.samples import make_image
from suites.programs import run_packer

__all__ = ["RUN", "Block", "Page", "Place", "blocks_of", "matches"]

RUN = ("python", "bash", "console")
OURS = ("packer", "readers", "cache")
_FENCE = re.compile(r"^( *)(?P<mark>`{3,})(?P<info>[^\n`]*)\n(?P<text>.*?)^\1(?P=mark) *$", re.MULTILINE | re.DOTALL)
_PROGRESS = re.compile(r"^packer: +(listing|\d+ ?%).*\n?", re.MULTILINE)
_TORCHRUN = re.compile(r"python -m torch\.distributed\.run --standalone --nproc-per-node (\d+) \w+\.py")
_SECONDS = 300


@dataclass(frozen=True)
class Block:
    """A fenced block. line: the number of its first line of text, from 1."""

    page: str
    line: int
    language: str
    words: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in RUN and "parse" not in self.words and not self.option("file")

    def option(self, name: str) -> str:
        """The value of a word name=VALUE, or ""."""
        return next((word[len(name) + 1 :] for word in self.words if word.startswith(f"{name}=")), "")


def blocks_of(path: Path) -> list[Block]:
    text, blocks = path.read_text(encoding="utf-8"), []
    for fence in _FENCE.finditer(text):
        language, *words = fence["info"].split() or [""]
        if "parse:" in words:  # the following words are the reason
            words[words.index("parse:") :] = ["parse"]
        line = text.count("\n", 0, fence.start()) + 2
        blocks.append(Block(path.name, line, language, tuple(words), textwrap.dedent(fence["text"])))
    return blocks


@dataclass
class Place:
    """Folders to copy for each page: imagenette2 and packed sets of it, all small, with the names of the full-size
    ones."""

    root: Path
    made: set[str] = field(default_factory=set)

    def copy(self, blocks: Sequence[Block], to: Path) -> None:
        """Copy the folders that the blocks of a page name, except sets that the blocks make themselves."""
        to.mkdir()
        text = "".join(block.text for block in blocks)
        run = "".join(block.text for block in blocks if block.runs)
        for name in ("imagenette2", *(f"imagenette2-{format}" for format in ("hdf5", "tfrecord", "tar"))):
            format = name.partition("-")[2]
            makes_it = re.search(rf"^(\$ )?packer convert imagenette2(\.tgz)? --to {format}\s*$", run, re.M)
            if name in text and not (format and makes_it):
                self._make(name, format)
                shutil.copytree(self.root / name, to / name, symlinks=True)

    def _make(self, name: str, format: str) -> None:
        if name in self.made:
            return
        self.made.add(name)
        if format:
            self._make("imagenette2", "")
            options: dict[str, Any] = {"shards": packer.Shards(samples=40), "run": packer.Run(workers=1)}
            packer.convert(self.root / "imagenette2", to=format, output=self.root / name, **options)
            return
        classes = ("01440764", "02102040", "02979186", "03000684", "03028079")
        classes += ("03394916", "03417042", "03425413", "03445777", "03888257")
        for split, count in (("train", 32), ("val", 5)):
            for number, wnid in enumerate(classes):
                folder = self.root / name / split / f"n{wnid}"
                folder.mkdir(parents=True)
                for image in range(count):
                    stem = f"n{wnid}_{image + (10 if split == 'train' else 1010)}"
                    if (split, number, image) == ("train", 0, 0):
                        stem = "ILSVRC2012_val_00000293"
                    data = make_image(1 + number + 10 * image + 1000 * (split == "val"), (96, 72))
                    (folder / f"{stem}.JPEG").write_bytes(data)


class Page:
    """Runs the blocks of a page in the current folder."""

    def __init__(self, programs: Path) -> None:
        """programs: a folder with `packer` and `python`, as a shell looks for them."""
        self.names: dict[str, Any] = {"__name__": "__main__"}
        programs.mkdir(exist_ok=True)
        for name, arguments in (("packer", "-m packer "), ("python", ""), ("python3", "")):
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
            (programs / name).chmod(0o755)
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join((str(programs), os.environ["PATH"])),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(packer.__file__).parent.parent), *paths))),
        }

    def do(self, block: Block) -> None:
        """Run a block, or the part of it that can run."""
        missing = [name for name in block.option("needs").split(",") if name and not _installed(name)]
        if name := block.option("file"):
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(block.text, encoding="utf-8")
            if block.language == "python":
                _parse_python(block)
        elif block.language not in RUN:
            return
        elif block.language == "python":
            _parse_python(block) if missing or not block.runs else self._python(block)
        elif missing or not block.runs:
            _parse_shell(block)
        elif block.language == "bash":
            self._bash(block)
        else:
            self._console(block)

    def _python(self, block: Block) -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec"), self.names)

    def _bash(self, block: Block) -> None:
        commands = [_simple(line) for line in _lines(block.text)]
        if all(commands):
            for command in commands:
                output, status = self._run(command)
                assert status == 0, f"{block}: {shlex.join(command)} ends with {status}\n{output}"
            return
        done = self._sh(["-euc", block.text])
        assert done.returncode == 0, f"{block}: ends with {done.returncode}\n{done.stdout}"

    def _console(self, block: Block) -> None:
        steps = _steps(block)
        commands = [_simple(command) for command, _ in steps]
        results = [self._run(command) for command in commands] if all(commands) else self._together(steps)
        for (command, expected), (output, status) in zip(steps, results, strict=True):
            assert matches(expected, output), f"{block}: $ {command}\nprints\n{output}\nand the page says\n{expected}"
            assert status == 0 or expected.strip(" …\n"), f"{block}: $ {command}\nends with {status}\n{output}"

    def _run(self, words: Sequence[str]) -> tuple[str, int]:
        """The output of a command, and its exit status."""
        if words[0] == "packer":
            done = run_packer(*words[1:], stderr=subprocess.STDOUT, timeout=_SECONDS)
            return done.stdout, done.returncode
        launched = _TORCHRUN.match(shlex.join(words))
        if launched is None:
            return _forked(words[1:], [{}])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            world = {"WORLD_SIZE": launched[1], "LOCAL_WORLD_SIZE": launched[1], "MASTER_ADDR": "127.0.0.1",
                     "MASTER_PORT": str(free.getsockname()[1])}  # fmt: skip
        ranks = [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(int(launched[1]))]
        return _forked(words[6:], ranks)

    def _together(self, steps: Sequence[tuple[str, str]]) -> list[tuple[str, int]]:
        """Run commands in one shell; returns the output and the exit status of each."""
        mark, lines = "\x1e", []
        for command, _ in steps:
            lines += [command, f"status=$?; printf '{mark}%d{mark}' $status; (exit $status)"]
        parts = self._sh(["-uc", "\n".join(lines)]).stdout.split(mark)
        results = [(output, int(status)) for output, status in zip(parts[::2], parts[1::2], strict=False)]
        return results + [(parts[-1], 1)] * (len(steps) - len(results))

    def _sh(self, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        options: dict[str, Any] = {"env": self.environment, "text": True, "timeout": _SECONDS, "check": False}
        return subprocess.run(["sh", *arguments], **streams, **options)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent
        return False


def _steps(block: Block) -> list[tuple[str, str]]:
    """The commands of a console block, each with its expected output."""
    steps: list[tuple[str, str]] = []
    continued = False
    for line in block.text.splitlines(keepends=True):
        if line.startswith("$ "):
            steps.append((line[2:].rstrip("\n"), ""))
        elif continued:
            steps[-1] = (f"{steps[-1][0]}\n{line.removeprefix('> ').rstrip()}", "")
        else:
            assert steps, f"{block}: a console begins with a command: $ packer …"
            steps[-1] = (steps[-1][0], steps[-1][1] + line)
        continued = not steps[-1][1] and steps[-1][0].endswith("\\")
    return steps


def _lines(script: str) -> list[str]:
    """The commands of a script, one string each, without comments and empty lines."""
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in script.replace("\\\n", " ").splitlines())
    return [line for line in lines if line]


def _simple(command: str) -> list[str]:
    """The words of a packer, Python or torchrun line that needs no shell; otherwise none."""
    bare = re.sub(r"'[^']*'", "", re.sub(r"(^|\s)#.*", "", command))
    words = [] if re.search(r"[$*?`~|;&<>(){}\\\[]", bare) else shlex.split(command, comments=True)
    if words[:1] == ["packer"]:
        return [] if "--" in words else words
    return words if re.match(r"python \w+\.py\b", shlex.join(words)) or _TORCHRUN.match(shlex.join(words)) else []


def _forked(words: Sequence[str], processes: Sequence[dict[str, str]]) -> tuple[str, int]:
    """The output of forks of this process that run a file with arguments, one fork for each set of variables; and their
    status."""

    def work(variables: dict[str, str], output: str) -> None:
        sys.stdout = sys.stderr = file = open(output, "a", encoding="utf-8")  # the end of the process closes the file
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        os.environ.update(variables)
        sys.argv, sys.path[:0] = list(words), [os.getcwd()]
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)  # a fork does not inherit the threads of this process
        runpy.run_path(words[0], run_name="__main__")

    with tempfile.NamedTemporaryFile() as output:
        fork = multiprocessing.get_context("fork").Process
        children = [fork(target=work, args=(variables, output.name)) for variables in processes]
        for child in children:
            child.start()
        for child in children:
            child.join(_SECONDS)
            child.kill()
        return Path(output.name).read_text(encoding="utf-8"), int(any(child.exitcode != 0 for child in children))


def _masked(text: str) -> str:
    text = re.sub(r"\d+(?:[.,:]\d+)*", "0", text)
    text = re.sub(r"\b0 ?(?:[kMGTP]i?)?B\b", "0 B", text)
    text = re.sub(r"\b0 ?(?:[nµm]?s|min|h)\b", "0 s", text)
    text = re.sub(r"[▏▎▍▌▋▊▉█▁▂▃▄▅▆▇]+", "█", text)
    return "\n".join(re.sub(r"[ ─-]+", " ", line).rstrip() for line in text.strip().splitlines())


def matches(expected: str, output: str) -> bool:
    """Whether a command printed what the page says."""
    expected, output = (_PROGRESS.sub("", text) for text in (expected, output))
    pattern = ""
    for line in _masked(expected).splitlines():
        if line.strip() == "…":
            pattern += r"(?:.*\n)*"
        else:
            pattern += r"[^\n]*".join(map(re.escape, line.split("…"))) + "\n"
    return re.fullmatch(pattern, f"{_masked(output)}\n" if output.strip() else "") is not None


def _parse_python(block: Block) -> None:
    """Compile a block, and look up its imports from our packages."""
    tree = ast.parse(block.text, str(block))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OURS:
            module = _module(str(node.module))
            for name in node.names if module else ():
                known = hasattr(module, name.name) or importlib.util.find_spec(f"{node.module}.{name.name}")
                assert known, f"{block}: {node.module} has no {name.name}"


def _module(name: str) -> Any:
    """A module; None for a module of packer that needs a package that is not installed."""
    assert importlib.util.find_spec(name), f"there is no module {name}"
    try:
        return importlib.import_module(name)
    except ImportError as error:
        assert (error.name or "").partition(".")[0] not in OURS, error
        return None


def _parse_shell(block: Block) -> None:
    """Parse a script with sh, and its packer lines with the commands themselves."""
    script = block.text
    if block.language == "console":
        script = "\n".join(command for command, _ in _steps(block))
    checked = subprocess.run(["sh", "-n"], input=script, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert checked.returncode == 0, f"{block}: {checked.stderr}"
    _parse_commands(script, str(block))


def _parse_commands(script: str, where: str) -> None:
    """Parse every `packer …` of a script, including option values. Variables are replaced by 1."""
    for arguments in _commands_in(script):
        try:
            _parse_packer(arguments)
        except click.ClickException as error:
            raise AssertionError(f"{where}: packer {shlex.join(arguments)}: {error.format_message()}") from error


def _commands_in(script: str) -> Iterator[list[str]]:
    for line in _lines(script):
        for match in re.finditer(r"(?:^|(?<=[\s(;|&=`\"']))packer (?!=)", line):
            text = "".join(
                part if part.startswith("'") else re.sub(r"\$(?:\w+|\{[^}]*\}|\([^)]*\))", "1", part)
                for part in re.split(r"('[^']*')", line[match.end() :])
            )
            words = shlex.shlex(text.replace("`", ";"), posix=True, punctuation_chars="();<>|&")
            words.whitespace_split = True
            arguments: list[str] = []
            with contextlib.suppress(ValueError):  # the quote of an outer command
                for word in words:
                    if set(word) <= set("();<>|&"):
                        break
                    arguments.append(word)
            yield arguments


def _parse_packer(arguments: Sequence[str]) -> None:
    """Parse the arguments of packer as the command does, except that files need not exist.

    Raises click.ClickException for an unknown command or option, or a value that is not valid.
    """

    def unchecked(self: click.Path, value: Any, param: Any, ctx: Any) -> Any:
        return self.coerce_path_result(value)

    with (
        mock.patch.object(click.Path, "convert", unchecked),
        mock.patch.object(click.Command, "invoke", lambda self, ctx: None),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        cli.main(list(arguments), prog_name="packer", standalone_mode=False)
