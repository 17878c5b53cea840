"""The reference of commands, generated from click's own help: a page for each task of `packer --help`.

Writes reference/commands.rst and reference/commands-TASK.rst into the source folder before a build; git ignores them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from sphinx.application import Sphinx

from packer.cli.group import cli

__all__ = ["escaped", "setup", "write"]


_INTRO = """The text of ``packer COMMAND --help``, by task.

Results go to stdout, progress and messages to stderr. The exit status is 0 (done), 1 (failed, or damage found),
2 (usage) or 130 (interrupted). With ``--json`` the result is JSON, and so is a failure:
``{"error": {"type", "message", "status"}}``. In Python the same work is done by
:doc:`functions <python-packer>`, which return a result object and raise the errors of ``cache.errors``."""


class _Sections(click.HelpFormatter):
    """Keeps the sections of a help text and their entries."""

    def __init__(self) -> None:
        super().__init__()
        self.sections: dict[str, list[str]] = {}

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.sections[name] = []
        yield

    def write_dl(self, rows: Any, col_max: int = 30, col_spacing: int = 2) -> None:
        self.sections[[*self.sections][-1]] += [name.strip() for name, _ in rows]


def escaped(text: str) -> str:
    """Escape the markup of reStructuredText; text between backticks becomes code."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(
        f"``{part[1:-1]}``" if part.startswith("`") and len(part) > 2 else re.sub(r"([\\*|_`])", r"\\\1", part)
        for part in parts
    )


def _paragraphs(help: str) -> Iterator[str]:
    """The paragraphs of a help text; text after \\b is printed unchanged."""
    for part in re.split(r"\n\s*\n", help.strip()):
        lines = part.splitlines()
        if lines[0].strip() == "\b":
            yield "\n".join(["::", "", *(f"    {line}" for line in lines[1:])])
        else:
            yield escaped(" ".join(line.strip() for line in lines))


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    for param in command.get_params(context):
        record = param.get_help_record(context) if isinstance(param, click.Option) else None
        if record is not None:
            names, help = record
            yield f".. option:: {names}\n\n    {escaped(' '.join(help.split()))}"


def _command(name: str, command: click.Command, parent: click.Context, mark: str) -> list[str]:
    context = click.Context(command, info_name=name, parent=parent)
    usage = " ".join(command.collect_usage_pieces(context))
    path = context.command_path
    lines = [path, mark * len(path), f".. program:: {path}", f"::\n\n    {path} {usage}"]
    lines += _paragraphs((command.help or "").partition("\f")[0])
    lines += _options(command, context)
    for part, subcommand in getattr(command, "commands", {}).items():
        lines += _command(part, subcommand, context, "~")
    return lines


def write(folder: Path) -> None:
    """Write the pages. An unchanged page is not written, so that it is not built again."""
    context, sections = click.Context(cli, info_name="packer"), _Sections()
    cli.format_commands(context, sections)
    pages = {}
    for task, names in sections.sections.items():
        lines = [task, "=" * len(task)]
        for name in names:
            command = cli.get_command(context, name)
            assert command is not None
            lines += _command(name, command, context, "-")
        pages[f"commands-{task.lower().replace(' ', '-')}"] = "\n\n".join(lines).replace(f"{task}\n\n=", f"{task}\n=")
    intro = ["Commands", "========", _INTRO]
    tree = ".. toctree::\n    :maxdepth: 2\n\n" + "".join(f"    {name}\n" for name in pages)
    pages["commands"] = "\n\n".join([*intro, *_paragraphs(cli.help or ""), tree])
    folder.mkdir(exist_ok=True)
    for name, text in pages.items():
        text = re.sub(r"^(.+)\n\n((=|-|~)\3{2,})$", r"\1\n\2", text, flags=re.MULTILINE)
        path = folder / f"{name}.rst"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", lambda app: write(Path(app.srcdir) / "reference"))
    return {"parallel_read_safe": True}
