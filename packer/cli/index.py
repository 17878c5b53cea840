"""`packer index`."""

from __future__ import annotations

from pathlib import Path

import click

from cache.text import plural
from packer.adoption import index
from packer.cli.convert import field_columns
from packer.cli.progress import watcher
from packer.cli.text import json_option, print_json, show, split_name, workers_option

__all__ = ["command"]


@click.command("index", short_help="Adopt shards made elsewhere, or rebuild an index.")
@click.argument("shards", nargs=-1, required=True, type=click.Path(exists=True))
@click.option("-o", "--output", type=click.Path(), help="Where the index goes, with links to the shards. Default: "
              "beside the shards.")  # fmt: skip
@click.option("--split", callback=split_name, metavar="NAME", help="Split of all these shards. Default: read off "
              "each file name.")  # fmt: skip
@click.option("--image-key", metavar="KEY", help="What the shards call the image: a tar extension (jpg;png), an "
              "Example feature, an HDF5 data set.")  # fmt: skip
@click.option("--label-key", metavar="KEY", help="What the shards call the label.")
@click.option(
    "--field", "fields", callback=field_columns, multiple=True, metavar="NAME=KEY", help="A further field and its key."
)
@click.option("--label-offset", type=int, metavar="N", help="Labels in the shards start at N (1: as in the ImageNet "
              "TFRecords); those of readers start at 0.")  # fmt: skip
@click.option("--classes", type=click.Path(exists=True, dir_okay=False), help="Text file of class names, one a line.")
@click.option("--accept-loss", is_flag=True, help="Go on although shards are missing, or the set that is there would "
              "lose samples, splits, classes or fields.")  # fmt: skip
@workers_option
@json_option
def command(
    shards: tuple[str, ...],
    output: str | None,
    split: str | None,
    image_key: str | None,
    label_key: str | None,
    fields: dict[str, str],
    label_offset: int | None,
    classes: str | None,
    accept_loss: bool,
    workers: int | None,
    as_json: bool,
) -> None:
    """Make a set of SHARDS (files, or directories of them) without copying them.

    Takes WebDataset tars, TFRecords of tf.train.Example and flat HDF5 files, also those that packer wrote and whose
    index is lost or stale. A set that is there is compared first: what would lose samples, splits or classes of it is
    refused, and nothing is changed.
    """
    result = index(
        shards,
        output,
        split=split,
        image_key=image_key,
        label_key=label_key,
        fields=fields,
        label_offset=label_offset,
        classes=None if classes is None else _class_names(Path(classes)),
        accept_loss=accept_loss,
        workers=workers,
        watcher=watcher(as_json),
    )
    if as_json:
        print_json(result.to_dict())
        return
    splits = ", ".join(f"{name} {count:,}" for name, count in result.splits.items())
    shown = plural(result.shards, f"{result.format} shard")
    show(f"{result.output}: {plural(result.samples, 'sample')} ({splits}) in {shown}")
    for warning in result.warnings:
        show(f"  warning: {warning}")


def _class_names(path: Path) -> list[str]:
    names = [name.strip() for name in path.read_text(encoding="utf-8").splitlines()]
    while names and not names[-1]:
        names.pop()
    if "" in names:
        raise click.BadParameter(f"line {names.index('') + 1} of {path} is empty; a label would have no name")
    return names
