"""`packer order`."""

from __future__ import annotations

import click

from packer.cli.place import SetPlace
from packer.cli.text import bar, human_bytes, json_option, print_json, show
from packer.conversion.options import parse_size
from packer.inspection import OrderReport, compare_orders

__all__ = ["command"]


@click.command("order", short_help="Compare ways to shuffle a packed set.")
@click.argument("path", metavar="DIR", type=SetPlace())
@click.option("--split", help="Default: the only split, or train.")
@click.option("--block-bytes", default="8MiB", show_default=True, metavar="SIZE", help="Consecutive bytes of a block.")
@click.option(
    "--window", "windows", multiple=True, type=click.IntRange(min=1), help="Blocks in memory at a time; repeatable."
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0))
@json_option
def command(path: str, split: str | None, block_bytes: str, windows: tuple[int, ...], seed: int, as_json: bool) -> None:
    """Tell what each order of the samples in DIR costs in bytes read, and how well it mixes them.

    Local disks read samples one by one nearly for free; slow and remote storage wants a block shuffle.
    """
    options = {"windows": windows} if windows else {}
    reports = compare_orders(path, split, block_bytes=parse_size(block_bytes), seed=seed, **options)
    if as_json:
        print_json([report.to_dict() for report in reports])
    else:
        show(*describe(reports, block_bytes))


def describe(reports: list[OrderReport], block_bytes: str) -> list[str]:
    """The comparison as lines."""
    lines = [
        "                     bytes read per byte used                 mixes, against",
        "order                4 KiB reads   1 MiB reads   memory      a global shuffle",
    ]
    for report in reports:
        small, large = report.amplification.values()
        memory = human_bytes(report.memory_bytes) if report.memory_bytes else ""
        costs = f"{report.name:20s} {small:11.2f} {large:13.2f}   {memory:9s}"
        lines.append(f"{costs} {report.quality:5.2f} {bar(report.quality, 20)}")
    use = "readers.order.block_shuffled(reader, seed, window=…)"
    return [*lines, f"Blocks hold {block_bytes} and are read once. In training: {use}"]
