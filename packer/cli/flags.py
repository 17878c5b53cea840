"""Messages of the library, in which arguments are named as in Python, in the words of the command line.

overwrite=True is --overwrite there, on_error='skip' is --on-error skip, and so for every option of the command that
runs. Imports click alone, so that `packer --help` is quick.
"""

from __future__ import annotations

import re

import click

__all__ = ["learn_flags", "with_flags"]

_ARGUMENT = re.compile(r"\b([a-z][a-z_]*)=('[^']*'|[A-Za-z0-9_]+)")
_flags: dict[str, str] = {}


def learn_flags(command: click.Command | None) -> None:
    """Take up the options of a command, and of those below it."""
    for part in command.commands.values() if isinstance(command, click.Group) else ():
        learn_flags(part)
    for option in command.params if command is not None else ():
        if isinstance(option, click.Option):
            _flags[str(option.name)] = max(option.opts, key=len)


def with_flags(message: str) -> str:
    """A message with the flags in place of the arguments; what follows "(in Python:" stays."""

    def flag(found: re.Match[str]) -> str:
        name, value = found[1], found[2].strip("'")
        if name not in _flags:
            return found[0]
        return _flags[name] if value == "True" else f"{_flags[name]} {value}"

    text, mark, rest = message.partition("(in Python:")
    return _ARGUMENT.sub(flag, text) + mark + rest
