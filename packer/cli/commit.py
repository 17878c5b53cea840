"""`packer commit`: the last step of a conversion by the tasks of an array job."""

from __future__ import annotations

import click

from packer.cli.convert import summary
from packer.cli.text import json_option, show_result, watcher
from packer.conversion.run import commit

__all__ = ["command"]


@click.command("commit")
@click.argument("output", metavar="OUT", type=click.Path(file_okay=False))
@json_option
def command(output: str, as_json: bool) -> None:
    """Make a set of what the tasks of  packer convert … --task I/N  have packed into OUT.

    Where shards are missing, it says which tasks to run again, and changes nothing.
    """
    result = commit(output, watcher=watcher(as_json))
    show_result(result, as_json, lambda: summary(result, rates=False))
