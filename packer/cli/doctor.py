"""`packer doctor` and `packer completion`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from cache.files import atomic_write
from cache.messages import plural, table, wrapped
from packer.cli import flags
from packer.cli.screen import width
from packer.tools.doctor import Health, examine

__all__ = ["command", "completion_command"]

_MARKS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}
# Where each shell looks for the user's completions, below $XDG_DATA_HOME or $XDG_CONFIG_HOME.
_PLACES = {
    "bash": ("XDG_DATA_HOME", ".local/share", "bash-completion/completions/packer"),
    "fish": ("XDG_CONFIG_HOME", ".config", "fish/completions/packer.fish"),
    "zsh": ("XDG_DATA_HOME", ".local/share", "zsh/site-functions/_packer"),
}


@click.command("doctor")
@click.argument("directory", required=False, metavar="[DIR]", type=click.Path(exists=True, file_okay=False))
@flags.json_option
def command(directory: str | None, as_json: bool) -> None:
    """Check this environment (packages, limits, shared memory, storage, GPUs), and recommend remedies.

    DIR is a directory for packed sets. A small test file is written to it, and removed.

    Exits with 1 if something does not work.
    """
    result = examine(directory)
    flags.show_result(result, as_json, lambda: _lines(result))
    if result.problems:
        sys.exit(1)


def _lines(result: Health) -> Iterator[str]:
    missing = [check for check in result.checks if check.about[0] == "[" and check.state == "note"]
    rows = [(check.about, _MARKS[check.state], check.found) for check in result.checks if check not in missing]
    if missing:
        names = ", ".join(check.about.strip("[]") for check in missing)
        rows.append(("extras", "note", f"not installed: {names}; to install one:  {missing[0].advice}"))
    yield from table(("what", "", ""), rows, width())[1:]
    for check in result.checks:
        if check.advice and check not in missing:
            for line in wrapped(f"{check.about}: {check.advice}", width()):
                yield flags.Emphasis(line) if check.state == "problem" else line
    yield plural(result.problems, "problem") if result.problems else "no problems"


@click.command("completion")
@click.argument("shell", required=False, type=click.Choice(sorted(_PLACES)))
@click.option("--print", "only_print", is_flag=True, help="Print the script without installing it.")
@flags.json_option
def completion_command(shell: str | None, only_print: bool, as_json: bool) -> None:
    """Install completion of commands and options for SHELL. Default: the one of $SHELL."""
    shell = shell or Path(os.environ.get("SHELL", "")).name
    kind = get_completion_class(shell) if shell in _PLACES else None
    if kind is None:
        raise click.UsageError(f"$SHELL is {shell or 'not set'}; name one of {', '.join(sorted(_PLACES))}")
    root = click.get_current_context().find_root().command
    script = kind(root, {}, "packer", "_PACKER_COMPLETE").source()
    if only_print:
        flags.print_json({"shell": shell, "script": script}) if as_json else click.echo(script)
        return
    variable, default, name = _PLACES[shell]
    base = os.environ.get(variable, "")
    path = (Path(base) if os.path.isabs(base) else Path.home() / default) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, script.encode())
    if as_json:
        flags.print_json({"shell": shell, "path": str(path)})
        return
    flags.show(f"{path}: completion of packer for {shell}; open a new shell to use it")
    if shell == "zsh":
        flags.show(f"if zsh does not find it, write into ~/.zshrc, before compinit:  fpath+=({path.parent})")
