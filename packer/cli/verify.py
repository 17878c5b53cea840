"""`packer verify` and `packer extract`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import click

from cache.messages import plural
from packer.cli.convert import engine_options
from packer.cli.text import SetPlace, human_bytes, json_option, show_result, split_option, watcher, workers_option
from packer.extraction import extract
from packer.verification import VerifyResult, verify
from readers.staging import LABELS_FILE

__all__ = ["command", "extract_command"]

_SHOWN = 50


@click.command("verify")
@click.argument("path", metavar="SET", type=SetPlace())
@click.option("--deep", is_flag=True, help="Also the checksum of each whole shard, the format's own checksums, and a "
              "full decode of every image.")  # fmt: skip
@click.option("--against", type=SetPlace(local=True), metavar="SOURCE", help="Compare with the original source.")
@click.option("--sums", is_flag=True, help="Write SHA256SUMS, for  sha256sum -c , if the set is whole.")
@workers_option
@engine_options
@json_option
def command(path: str, as_json: bool, **options: Any) -> None:
    """Check SET: size of every shard, structure, CRC32C of every sample, index against shards.

    SET may be an address; then the CRC32C of every shard and the index are checked.

    Exits with 1 and names each damaged sample where anything is wrong.
    """
    result = verify(path, watcher=watcher(as_json), **options)
    show_result(result, as_json, lambda: _verified(result))
    if not result.ok:
        sys.exit(1)


def _verified(result: VerifyResult) -> Iterator[str]:
    yield from (f"DAMAGED {problem}" for problem in result.problems[:_SHOWN])
    if result.problem_count > _SHOWN:
        yield f"… and {result.problem_count - _SHOWN:,} more; --json lists them"
    state = "OK" if result.ok else plural(result.problem_count, "problem")
    what = f"{plural(result.samples, 'sample')} in {plural(result.shards, 'shard')}, {human_bytes(result.shard_bytes)}"
    same = f", compared with {result.against}" if result.against else ""
    left = f" ({result.left_out:,} left out when it was packed)" if result.left_out else ""
    written = "; SHA256SUMS is written" if result.sums else ""
    yield f"{result.path}: {state}: {what}{same}{left}{written}"


@click.command("extract")
@click.argument("path", metavar="SET", type=SetPlace(local=True))
@click.option("-o", "--output", type=click.Path(), required=True, metavar="DIR", help="Where the tree goes.")
@split_option()
@click.option("--keys", multiple=True, metavar="PATTERN", help="Only keys that match, as 'n01440764/*'; repeatable.")
@click.option("--overwrite", is_flag=True, help="Replace files that are there with other bytes.")
@workers_option
@engine_options
@json_option
def extract_command(path: str, output: str, as_json: bool, **options: Any) -> None:
    """Write the files of SET, with their original names and bytes, every checksum verified."""
    result = extract(path, output, watcher=watcher(as_json), **options)

    def lines() -> Iterator[str]:
        kept = f", {result.kept:,} were there already" if result.kept else ""
        yield f"{result.output}: {plural(result.files, 'file')}, {human_bytes(result.bytes)}{kept}"
        if result.labels_file:
            yield f"  labels: {result.output}/{LABELS_FILE}"

    show_result(result, as_json, lines)
