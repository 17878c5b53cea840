"""`packer monitor -- COMMAND`: resources that a command uses while it runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from packer.cli import flags
from packer.cli.screen import width
from packer.cli.signals import CommandSignals
from packer.tools.monitor import Sampler
from packer.tools.monitor.record import read_usage, usage_lines
from packer.tools.report import require_charts, write_page
from packer.tools.report.pages import usage_page

__all__ = ["report_option", "written_file"]


# ------------------------------------------------------------------------------
# Options for files that a command writes when it ends; obstacles are reported before it starts.


F = TypeVar("F", bound=Callable[..., Any])


def written_file(flag: str, help: str, check: Callable[[], object] = lambda: None) -> Callable[[F], F]:
    """An option for a file to write. check: raises on an obstacle other than a missing directory."""

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


_COLUMNS = 110


@click.command("monitor", options_metavar="[OPTIONS] --")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write the record: "
    "JSON lines, complete at any time.")  # fmt: skip
@click.option("--interval", type=flags.Duration(), default="0.5s", show_default=True, metavar="TIME",
              help="Between two samples.")  # fmt: skip
@report_option("Write a report with a heat map, in one file.")
@flags.json_option
@click.argument("run", nargs=-1, type=click.UNPROCESSED, required=True, metavar="COMMAND...")
def command(output: Path | None, interval: float, html: Path | None, as_json: bool, run: tuple[str, ...]) -> int:
    """Run COMMAND and record the use of CPUs, memory, disks, network, filesystems and GPUs.

    COMMAND gets stdin, stdout and signals, and its exit status is returned. At the end a table with the percentiles of
    each device and their interpretation is printed on stderr; with --json, everything on stdout.

    To mark epochs, and to count steps and images per second, use packer.monitor in the training code.
    """
    signals = CommandSignals(lambda: False, lambda: None)
    with signals.handling():
        with Sampler(output, interval=interval) as sampler:
            status = signals.run(run, {})
        usage = sampler.usage()
        if html is not None:
            facts = [("command", shlex.join(run)), ("exit status", str(status))]
            write_page(html, usage_page(usage, f"What {Path(run[0]).name} used", facts, sampler.notes))
        if as_json:
            flags.print_json({**usage.to_dict(), "command": list(run), "status": status, "verdict": read_usage(usage)})
        else:
            notes = [f"note: {note}" for note in sampler.notes]
            kept = [
                f"{subject} is in {path}" for subject, path in (("the record", output), ("the report", html)) if path
            ]
            flags.show("", *usage_lines(usage, width(sys.stderr, _COLUMNS)), *notes, *kept, err=True)
    return status
