"""`packer export-index`."""

from __future__ import annotations

import click

from cache.text import plural
from packer.cli.progress import watcher
from packer.cli.text import json_option, print_json, show
from packer.exported_index import TARGETS, Target, export_index

__all__ = ["command"]


@click.command("export-index", short_help="Write the index files of other readers.")
@click.argument("path", metavar="DIR", type=click.Path(exists=True))
@click.option("--for", "target", type=click.Choice(TARGETS), required=True, help="Who will read: dali and rocal want "
              "<shard>.idx, tfrecord <shard>.tfindex, wids <split>.wids.json.")  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(file_okay=False), help="Where the files go. Default: beside the shards."
)
@click.option("--split", metavar="NAME", help="Only this split.")
@json_option
def command(path: str, target: Target, output: str | None, split: str | None, as_json: bool) -> None:
    """Write the index files with which the readers of DALI, rocAL, tfrecord or wids read the shards in DIR themselves.

    Tar and TFRecord shards have such readers, HDF5 shards do not. The shards are not changed.
    """
    result = export_index(path, target, output=output, split=split, watcher=watcher(as_json))
    if as_json:
        print_json(result.to_dict())
        return
    files = len(result.files)
    where = result.files[0].parent if result.files else result.path
    show(f"{where}: {plural(files, 'index file')} for {target}, {plural(result.samples, 'sample')}")
