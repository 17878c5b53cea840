"""`--html FILE`: a diagnosis as a page, with what it was measured on."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Callable
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import click

from cache.messages import human_bytes
from cache.node import available_memory_bytes, usable_cpus
from packer import __version__
from packer.report import require_charts, write_page
from packer.report.comparisons import places_page
from packer.report.diagnosis import diagnosis_page
from readers.diagnosis import Diagnosis
from readers.diagnosis.places import Places

__all__ = ["check_html", "environment", "html_option", "save_html"]

F = TypeVar("F", bound=Callable[..., Any])
_PACKAGES = ("numpy", "torch", "torchvision", "Pillow", "simplejpeg")

html_option = click.option("--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Also write "
    "the result as a page with charts, in one file that needs nothing else.")  # fmt: skip


def check_html(path: Path | None) -> None:
    """Refuse what would fail after the measurement: no such directory, no matplotlib."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise click.UsageError(f"--html {path}: there is no directory {path.parent}; make it first")
    require_charts()


def save_html(path: Path | None, result: Diagnosis | Places, what: str) -> None:
    """Write the page, where one is wanted. what: the loader or the set, as the user names it."""
    if path is None:
        return
    title = f"packer diagnose {what}"
    page = (
        diagnosis_page(result, title, environment())
        if isinstance(result, Diagnosis)
        else places_page(result, title, environment())
    )
    write_page(path, page)
    click.echo(f"packer: the report is in {path}", err=True)


def environment() -> list[tuple[str, str]]:
    """What the figures depend on: command, time, machine, versions."""
    versions = [f"packer {__version__}", f"Python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            pass
    memory = human_bytes(available_memory_bytes())
    return [
        ("command", shlex.join(["packer", *sys.argv[1:]])),
        ("date", datetime.now().astimezone().isoformat(" ", "seconds")),
        ("machine", f"{platform.node()}: {usable_cpus()} CPUs that may be used, {memory} of memory available"),
        ("system", platform.platform()),
        ("versions", ", ".join(versions)),
    ]
