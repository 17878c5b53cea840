"""`packer parity`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

import readers
from packer.cli.text import json_option, print_json, show

if TYPE_CHECKING:
    from readers.parity import Parity

__all__ = ["command"]


@click.command("parity", short_help="Compare decoders and resizers with Pillow.")
@click.argument("path", metavar="DIR", type=click.Path(exists=True))
@click.option("--split", help="Default: the only split, or train.")
@click.option("--samples", default=200, show_default=True, type=click.IntRange(min=1), help="Images, drawn by --seed.")
@click.option("--size", default=224, show_default=True, type=click.IntRange(1, 4096), help="Side of the resized boxes.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0))
@click.option("--device", default="cpu", show_default=True, help="Where to decode and resize: cpu, cuda, cuda:1, …")
@json_option
def command(path: str, split: str | None, samples: int, size: int, seed: int, device: str, as_json: bool) -> None:
    """Tell how far the pixels of each decoder and resizer are from Pillow's, on images of DIR."""
    from readers.loader.loader import find_device
    from readers.parity import compare_with_pillow

    with readers.open(path, split) as reader:
        found = compare_with_pillow(reader, samples=samples, size=size, seed=seed, device=find_device(device))
    if as_json:
        print_json([row.to_dict() for row in found])
    else:
        show(*describe(found))


def describe(rows: list[Parity]) -> list[str]:
    """The comparison as lines; differences of 255."""
    lines = ["                              images  its own      mean  worst image  largest"]
    for row in rows:
        name = f"{row.what:9s} {row.name:19s}"
        if row.reason:
            lines.append(f"{name} did not run: {row.reason}")
            continue
        own = f"{row.by_device}" if row.what == "decoder" and row.name != "cpu" else ""
        lines.append(f"{name} {row.images:6d} {own:>8s} {row.mean:9.3f} {row.worst_image:12.3f} {row.largest:8d}")
    return lines
