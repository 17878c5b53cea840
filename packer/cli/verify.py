"""`packer verify`."""

from __future__ import annotations

import sys

import click

from cache.text import plural
from packer.cli.place import SetPlace
from packer.cli.progress import watcher
from packer.cli.text import human_bytes, json_option, print_json, show, workers_option
from packer.verification import verify

__all__ = ["command"]

_SHOWN = 50


@click.command("verify", short_help="Check every byte of a packed set.")
@click.argument("path", metavar="DIR", type=SetPlace())
@click.option("--deep", is_flag=True, help="Also the checksum of each whole shard, the format's own checksums, and a "
              "full decode of every image.")  # fmt: skip
@click.option("--against", type=SetPlace(local=True), metavar="SOURCE", help="Compare with the original source.")
@workers_option
@json_option
def command(path: str, deep: bool, against: str | None, workers: int | None, as_json: bool) -> None:
    """Check the set in DIR: size of every shard, structure, CRC32C of every sample, index against shards.

    DIR may be an address; then the CRC32C of every shard and the index are checked.

    Exits with 1 and names each damaged sample where anything is wrong.
    """
    result = verify(path, deep=deep, against=against, workers=workers, watcher=watcher(as_json))
    if as_json:
        print_json(result.to_dict())
    else:
        for problem in result.problems[:_SHOWN]:
            show(f"DAMAGED {problem}")
        if result.problem_count > _SHOWN:
            show(f"… and {result.problem_count - _SHOWN:,} more; --json lists them")
        state = "OK" if result.ok else plural(result.problem_count, "problem")
        what = (
            f"{plural(result.samples, 'sample')} in {plural(result.shards, 'shard')}, {human_bytes(result.shard_bytes)}"
        )
        same = f", compared with {result.against}" if result.against else ""
        left = f" ({result.left_out:,} left out when it was packed)" if result.left_out else ""
        show(f"{result.path}: {state}: {what}{same}{left}")
    if not result.ok:
        sys.exit(1)
