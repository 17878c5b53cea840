"""Flags in messages: the library names arguments, as overwrite=True; the command line shows --overwrite."""

from __future__ import annotations

import re

import click

__all__ = ["learn_flags", "with_flags"]

_ARGUMENT = re.compile(r"\b([a-z][a-z_]*)=('[^']*'|[A-Za-z0-9_]+)")
_flags: dict[str, str] = {}


def learn_flags(command: click.Command | None) -> None:
    """Remember the options of a command and its subcommands."""
    for part in command.commands.values() if isinstance(command, click.Group) else ():
        learn_flags(part)
    for option in command.params if command is not None else ():
        if isinstance(option, click.Option):
            _flags[str(option.name)] = max(option.opts, key=len)


def with_flags(message: str) -> str:
    """A message with flags in place of arguments, but for what follows "(in Python:"."""

    def flag(found: re.Match[str]) -> str:
        name, value = found[1], found[2].strip("'")
        if name not in _flags:
            return found[0]
        return _flags[name] if value == "True" else f"{_flags[name]} {value}"

    text, mark, rest = message.partition("(in Python:")
    return _ARGUMENT.sub(flag, text) + mark + rest
