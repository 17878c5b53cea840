"""`packer diagnose --compare FILE FILE`: two records of utilisation side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from packer.cli.report import report_option
from packer.cli.text import json_option, show_result, width
from packer.tools.monitor import load
from packer.tools.monitor.record import compare, comparison_lines
from packer.tools.report import write_page
from packer.tools.report.pages import comparison_page

__all__ = ["DiagnoseOrCompare", "compare_command", "compare_option"]

_record = click.Path(exists=True, dir_okay=False, path_type=Path)
compare_option = click.option(
    "--compare", nargs=2, type=_record, expose_value=False, metavar="FILE FILE",
    help="Instead: compare two runs, each a record of packer monitor or the JSON of a diagnosis.",
)  # fmt: skip


class DiagnoseOrCompare(click.Command):
    """A command that with --compare is another one: it needs no loader and no step."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if any(word.partition("=")[0] == "--compare" for word in args):
            return compare_command.make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command("diagnose")
@click.option("--compare", "paths", nargs=2, type=_record, required=True, metavar="FILE FILE", help="The two records.")
@report_option("Write a report with both heat maps, one over the other.")
@json_option
def compare_command(paths: tuple[Path, Path], html: Path | None, as_json: bool) -> None:
    """Compare two runs, each a record of `packer monitor`, of packer.monitor, or the JSON of a diagnosis."""
    result = compare(*map(load, paths))
    if html is not None:
        write_page(html, comparison_page(result, (paths[0].name, paths[1].name)))
    show_result(result, as_json, lambda: comparison_lines(result, width()))
