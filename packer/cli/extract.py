"""`packer extract`."""

from __future__ import annotations

import click

from cache.text import plural
from packer.cli.place import SetPlace
from packer.cli.progress import watcher
from packer.cli.text import human_bytes, json_option, print_json, show
from packer.extraction import LABELS_FILE, extract

__all__ = ["command"]


@click.command("extract", short_help="Write the original files back.")
@click.argument("path", metavar="DIR", type=SetPlace(local=True))
@click.option("-o", "--output", type=click.Path(), required=True, help="Where the tree goes.")
@click.option("--split", metavar="NAME", help="Only this split.")
@click.option("--keys", multiple=True, metavar="PATTERN", help="Only keys that match, as 'n01440764/*'; repeatable.")
@click.option("--overwrite", is_flag=True, help="Replace files that are there with other bytes.")
@json_option
def command(path: str, output: str, split: str | None, keys: tuple[str, ...], overwrite: bool, as_json: bool) -> None:
    """Write the files of the set in DIR, with their original names and bytes, every checksum verified."""
    result = extract(path, output, split=split, keys=keys, overwrite=overwrite, watcher=watcher(as_json))
    if as_json:
        print_json(result.to_dict())
        return
    kept = f", {result.kept:,} were there already" if result.kept else ""
    show(f"{result.output}: {plural(result.files, 'file')}, {human_bytes(result.bytes)}{kept}")
    if result.labels_file:
        show(f"  labels: {result.output}/{LABELS_FILE}")
