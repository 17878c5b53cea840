"""The group of all commands. Errors become one line, or JSON, and an exit status.

commands.txt contains the words of usage lines and, for each command, its section, its purpose, the module and name to
load it from, aliases that people try, and examples of two lines: the purpose, and the line to type. Names in examples
mean the same everywhere: images is a folder of images, images-hdf5 (-tar, -tfrecord) a set made from it. Library
messages name arguments, such as overwrite=True; the command line shows its own flags instead. This module imports click
alone, so that `packer --help` is fast.
"""

from __future__ import annotations

import difflib
import errno
import functools
import importlib
import io
import json
import os
import re
import sys
import traceback
from dataclasses import dataclass, field
from typing import Any, NoReturn

import click

from cache.errors import PackerError
from cache.messages import printable
from packer.cli.interrupt import INTERRUPTED, leave_at_once, started
from packer.cli.screen import learn_flags, stop_logging, verbose_option, version_lines, with_flags

__all__ = ["COMMANDS", "WORDS", "cli", "run"]


@dataclass
class Entry:
    """The entry of a command in commands.txt; a subcommand has only examples.

    home: "module:name" below packer.cli. others: aliases. examples: (purpose, line) pairs.
    """

    task: str
    home: str = ""
    others: tuple[str, ...] = ()
    help: str = ""
    examples: list[tuple[str, str]] = field(default_factory=list)


def _read_entries() -> tuple[dict[str, str], dict[str, Entry]]:
    words: dict[str, str] = {}
    entries: dict[str, Entry] = {}
    task, purpose, entry = "", "", Entry("")
    with open(os.path.join(os.path.dirname(__file__), "commands.txt"), encoding="utf-8") as file:
        lines = file.read().splitlines()
    for line in filter(None, lines):
        text = line.strip()
        if line.startswith("== "):
            task = text[3:]
        elif task == "Words":
            word, meaning = text.split(maxsplit=1)
            words[word] = meaning
        elif line[0] != " ":
            name, home, others = (*text.split(" : "), "", "")[:3]
            entry = entries[name] = Entry(task, home, tuple(others.split()))
        elif text.startswith("# "):
            purpose = text[2:]
        elif purpose:
            entry.examples.append((purpose, text))
            purpose = ""
        else:
            entry.help = text
    return words, entries


WORDS, COMMANDS = _read_entries()
_TOP = {name: entry for name, entry in COMMANDS.items() if entry.home}
_ADVICE = {
    errno.ENOSPC: "free space there and run the same command again; completed shards are kept",
    errno.EDQUOT: "free space there (your quota is used up) and run the same command again; completed shards are kept",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f) or make smaller shards, and run the same command again",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOMEM: "free memory, or run with fewer --workers",
}
_OURS = "(module|from) '(packer|readers|cache)[.']"
_INTERRUPTED_STATUS = 130
_TRACEBACK = "PACKER_TRACEBACK"


def _show_examples(command: click.Command, path: str) -> None:
    """Add the examples to the help of a command and of those below it."""
    for name, part in command.commands.items() if isinstance(command, click.Group) else ():
        _show_examples(part, f"{path} {name}")
    if path in COMMANDS and not command.epilog:
        lines = (line for purpose, example in COMMANDS[path].examples for line in (f"  # {purpose}", f"  {example}"))
        command.epilog = "\n".join(["\b", "Examples:", *lines])


class _Commands(click.Group):
    """Loads the module of a command when it is used, so that `packer --help` is fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_TOP, *_installed_commands()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _TOP:
            return _installed_commands().get(cmd_name)
        module, _, name = _TOP[cmd_name].home.partition(":")
        command: click.Command = getattr(importlib.import_module(f"packer.cli.{module}"), name)
        _show_examples(command, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and name not in self.list_commands(ctx):
            meant = [command for command, entry in _TOP.items() if name.lower() in entry.others]
            close = meant or difflib.get_close_matches(name, _TOP, cutoff=0.7)
            ctx.fail(f"No such command {name!r}." + (f" Did you mean {' or '.join(close)}?" if close else ""))
        resolved = super().resolve_command(ctx, args)
        learn_flags(resolved[1])
        started()
        return resolved

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {}
        for name, entry in _TOP.items():
            rows.setdefault(entry.task, []).append((name, entry.help))
        for name, part in _installed_commands().items():
            rows.setdefault("Of other packages", []).append((name, part.get_short_help_str()))
        longest = max(map(len, _TOP))
        for task, commands in rows.items():
            with formatter.section(task):
                formatter.write_dl([(name.ljust(longest), help) for name, help in commands])


@functools.cache
def _installed_commands() -> dict[str, click.Command]:
    """The commands of other distributions, from the entry points of packer.commands.

    Files are searched for that group first, since importlib.metadata would take longer than the rest of a help page.
    """
    if not any(map(_names_commands, sys.path)):
        return {}
    from cache.plugins import installed_points, load_point

    points = installed_points("packer.commands", _TOP)
    commands = {point.name: load_point(point, click.Command) for point in points}
    return {name: command for name, command in commands.items() if command is not None}


def _names_commands(folder: str) -> bool:
    """Whether metadata in a folder of sys.path has an entry point of packer.commands."""
    try:
        with os.scandir(folder or ".") as entries:
            places = [entry.path for entry in entries if entry.name.endswith((".dist-info", ".egg-info"))]
    except OSError:
        return False
    for place in places:
        try:
            with open(os.path.join(place, "entry_points.txt"), "rb") as file:
                if b"[packer.commands]" in file.read():
                    return True
        except OSError:
            continue
    return False


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo("\n".join(version_lines()))
        ctx.exit()


@click.group(
    cls=_Commands,
    epilog="\n".join(["\b", "Words:", *(f"  {word:8}{meaning}" for word, meaning in WORDS.items())]),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version,
              help="Show the versions of packer and its main dependencies.")  # fmt: skip
@verbose_option
def cli() -> None:
    """Pack image datasets into standard shards with one index; check, change, stage, cache and read them.

    \b
      packer convert images --to hdf5       pack a folder into images-hdf5
      packer verify images-hdf5             check every byte
      packer inspect images-hdf5            show its content
    """


def run(arguments: list[str] | None = None) -> NoReturn:
    """Run a command and exit."""
    arguments = sys.argv[1:] if arguments is None else arguments
    before_command = arguments[: arguments.index("--")] if "--" in arguments else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # print characters that the terminal's encoding lacks as escapes
            stream.reconfigure(errors="backslashreplace")
    try:
        status = _status_of(arguments, "--json" in before_command)
    except KeyboardInterrupt:  # a second one, while the first was being handled
        status = _INTERRUPTED_STATUS
    finally:
        stop_logging()
    if status == _INTERRUPTED_STATUS:
        leave_at_once()
    sys.exit(status)


def _status_of(arguments: list[str], as_json: bool) -> int:
    """Run a command and return its exit status; failures have been reported."""
    try:
        status: Any = cli.main(args=arguments, prog_name="packer", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        kind = "UsageError" if isinstance(error, click.UsageError) else "ClickException"
        values = _values_of(error, arguments) if isinstance(error, click.BadOptionUsage) else ""
        shown = io.StringIO()
        error.show(file=shown)  # usage, a pointer to the help, the error
        text = shown.getvalue().rstrip("\n")
        return _fail(kind, error.format_message() + values, error.exit_code, as_json, text + values)
    except (click.Abort, KeyboardInterrupt):
        return _fail("KeyboardInterrupt", INTERRUPTED, _INTERRUPTED_STATUS, as_json)
    except BrokenPipeError:
        _give_up_stdout()  # the reader of the output has gone: exit quietly
        return 1
    except Exception as error:
        if os.environ.get(_TRACEBACK):
            traceback.print_exc()
        message = with_flags(_message_of(error))
        if type(error) is ValueError:  # the library rejected an argument
            return _fail("UsageError", message, 2, as_json)
        return _fail(type(error).__name__, message, 1, as_json)
    return int(status or 0)


def _values_of(error: click.BadOptionUsage, arguments: list[str]) -> str:
    """The values of an option that was given without one; click does not say which command it belongs to."""
    context = click.Context(cli, info_name="packer")
    for word in arguments:
        if isinstance(context.command, click.Group) and (below := context.command.get_command(context, word)):
            context = click.Context(below, info_name=word, parent=context)
    error.ctx = context
    options = [option for option in context.command.params if error.option_name in option.opts]
    return "".join(f" {record[0]}" for option in options if (record := option.get_help_record(context)))


def _fail(kind: str, message: str, status: int, as_json: bool, shown: str = "") -> int:
    """Report a failure on stderr, and with --json also on stdout."""
    text = shown or (message if message.startswith("packer: ") else f"packer: {message}")
    click.echo(printable(text), err=True)
    try:
        if as_json:
            document = {"error": {"type": kind, "message": message.removeprefix("packer: "), "status": status}}
            click.echo(json.dumps(document, indent=1))
        sys.stdout.flush()
    except OSError:
        _give_up_stdout()
    return status


def _message_of(error: Exception) -> str:
    """The message of an error: what, where, what to do."""
    if isinstance(error, MemoryError):
        return f"not enough memory; {_ADVICE[errno.ENOMEM]}"
    if isinstance(error, OSError) and not isinstance(error, PackerError):
        problem = error.strerror or str(error) or type(error).__name__
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        advice = f"; {_ADVICE[error.errno]}" if error.errno in _ADVICE else ""
        return f"{where}{problem}{advice}"
    if isinstance(error, (PackerError, ValueError)):
        return str(error) or type(error).__name__
    if isinstance(error, (AttributeError, ImportError)) and re.search(_OURS, str(error)):
        return (
            f"{error}: another package may have overwritten a part of this one; run  packer doctor , or install packer "
            f"in a separate environment"
        )
    return (
        f"unexpected {type(error).__name__}: {error}; this is a defect of packer: run the same command with "
        f"{_TRACEBACK}=1 and report what it prints"
    )


def _give_up_stdout() -> None:
    """Prevent errors at exit because output cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
