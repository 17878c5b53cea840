"""`packer index` and `packer export-index`: shards made elsewhere as a set, and sets for other readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cache.messages import plural
from packer.adoption import index
from packer.cli.convert import engine_options, field_columns
from packer.cli.screen import with_flags
from packer.cli.text import (
    json_option,
    new_split_option,
    show_result,
    split_option,
    watcher,
    workers_option,
)
from packer.exported_index import TARGETS, Target, export_index

__all__ = ["command", "export_command"]


@click.command("index")
@click.argument("shards", nargs=-1, required=True, metavar="SHARD...", type=click.Path(exists=True))
@click.option("-o", "--output", type=click.Path(), metavar="OUT", help="Where the index goes, with links to the "
              "shards. Default: the folder of the shards.")  # fmt: skip
@new_split_option("Split of all these shards. Default: read off each file name.")
@click.option("--image-key", metavar="KEY", help="What the shards call the image: a tar extension (jpg;png), an "
              "Example feature, an HDF5 data set.")  # fmt: skip
@click.option("--label-key", metavar="KEY", help="What the shards call the label.")
@click.option(
    "--field", "fields", callback=field_columns, multiple=True, metavar="NAME=KEY", help="A further field and its key."
)
@click.option("--label-offset", type=int, metavar="N", help="Labels in the shards start at N (1: as in the ImageNet "
              "TFRecords); those of readers start at 0.")  # fmt: skip
@click.option(
    "--classes",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Text file of class names, one a line.",
)
@click.option("--accept-loss", is_flag=True, help="Continue although shards are missing, or the existing set would "
              "lose samples, splits, classes or fields.")  # fmt: skip
@click.option("--checksums/--no-checksums", help="Write SHA256SUMS, for  sha256sum -c  (packer verify --sums: later).")
@workers_option
@engine_options
@json_option
def command(shards: tuple[str, ...], output: str | None, classes: str | None, as_json: bool, **options: Any) -> None:
    """Make a set of each SHARD (a file, or a directory of them) without copying them.

    Takes WebDataset tars, TFRecords of tf.train.Example and flat HDF5 files, also those that packer wrote and whose
    index is lost or stale. An existing set is compared first: a loss of samples, splits or classes is refused, and
    nothing is changed.
    """
    names = None if classes is None else _class_names(Path(classes))
    result = index(shards, output, classes=names, watcher=watcher(as_json), **options)

    def lines() -> list[str]:
        splits = ", ".join(f"{name} {count:,}" for name, count in result.splits.items())
        shown = plural(result.shards, f"{result.format} shard")
        first = f"{result.output}: {plural(result.samples, 'sample')} ({splits}) in {shown}"
        return [first, *(f"  warning: {with_flags(warning)}" for warning in result.warnings)]

    show_result(result, as_json, lines)


def _class_names(path: Path) -> list[str]:
    names = [name.strip() for name in path.read_text(encoding="utf-8").splitlines()]
    while names and not names[-1]:
        names.pop()
    if "" in names:
        raise click.BadParameter(f"line {names.index('') + 1} of {path} is empty; a label would have no name")
    return names


@click.command("export-index")
@click.argument("path", metavar="SET", type=click.Path(exists=True))
@click.option("--for", "target", type=click.Choice(TARGETS), required=True, help="Who will read: dali and rocal want "
              "<shard>.idx, tfrecord <shard>.tfindex, wids <split>.wids.json.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(file_okay=False), metavar="DIR", help="Directory of the files. "
              "Default: that of SET.")  # fmt: skip
@split_option()
@json_option
def export_command(path: str, target: Target, output: str | None, split: str | None, as_json: bool) -> None:
    """Write the index files with which the readers of DALI, rocAL, tfrecord or wids read the shards of SET themselves.

    Tar and TFRecord shards have such readers, HDF5 shards do not. The shards are not changed.
    """
    result = export_index(path, target, output=output, split=split, watcher=watcher(as_json))

    def lines() -> list[str]:
        where = result.files[0].parent if result.files else result.path
        return [f"{where}: {plural(len(result.files), 'index file')} for {target}, {plural(result.samples, 'sample')}"]

    show_result(result, as_json, lines)
