"""Options for files that a command writes after its work: what would prevent that is said before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from packer.tools.report import require_charts

__all__ = ["report_option", "written_file"]

F = TypeVar("F", bound=Callable[..., Any])


def written_file(flag: str, help: str, check: Callable[[], object] = lambda: None) -> Callable[[F], F]:
    """An option for a file to write. check: raises what would prevent it, besides a directory that does not exist."""

    def checked(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
        if path is not None:
            if not path.parent.is_dir():
                raise click.UsageError(f"{flag} {path}: there is no directory {path.parent}")
            check()
        return path

    kind = click.Path(path_type=Path, dir_okay=False)
    return click.option(flag, type=kind, metavar="FILE", callback=checked, help=help)


def report_option(help: str) -> Callable[[F], F]:
    """--html FILE, a report with charts."""
    return written_file("--html", f"{help} Needs the extra report.", require_charts)
