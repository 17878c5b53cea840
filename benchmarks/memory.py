"""Memory: the largest process of a conversion, for any size of shards.

python benchmarks/memory.py --tree TREE --work DIR [--rounds 1] …
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from harness import Benchmark, Contender, contender, main, slug
from machine import folder_bytes, peak_memory, reset_peak, warm
from report import Claim, Column

__all__ = ["BENCHMARK"]

FORMATS = ("hdf5", "tfrecord", "tar")
_SIZES = {
    "one shard": {"samples": 1 << 40},
    "64 MiB": {"size": 64 << 20},
    "4 MiB": {"size": 4 << 20},
}


def _register(container: str, title: str) -> None:
    @contender(f"ours: {container} {title}", imports=f"packer.conversion.run packer.formats.{container}")
    def convert(tree: str, output: str) -> Any:
        import packer

        return packer.convert(tree, container, output, run=packer.Run(workers=2), shards=packer.Shards(**_SIZES[title]))


for _container in FORMATS:
    for _title in _SIZES:
        _register(_container, _title)


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Convert once. The calling process writes a set of one shard; two workers write a set of more shards."""
    output = Path(arguments.work) / slug(chosen.name)
    shutil.rmtree(output, ignore_errors=True)
    reset_peak()
    result = chosen.function(str(arguments.tree), str(output))
    figures = {
        **peak_memory(),
        "shards": result.shards,
        "largest_mb": result.shard_bytes / result.shards / 1e6,
    }
    figures["out_mb"] = folder_bytes(output) / 1e6
    shutil.rmtree(output)
    return figures


BENCHMARK = Benchmark(
    title="Peak memory of a conversion",
    columns=(
        Column("peak_mb", "largest process MB (min–max)", "{:,.1f}"),
        Column("peak_self_mb", "calling process MB", "{:,.1f}"),
        Column("peak_child_mb", "largest worker MB", "{:,.1f}"),
        Column("shards", "shards"),
        Column("largest_mb", "MB a shard", "{:,.1f}"),
        Column("out_mb", "output MB"),
    ),
    key="peak_mb",
    limits=(),
    measure=measure,
    less_is_better=True,
    before=lambda chosen, arguments: warm([arguments.tree]),
    claims=tuple(Claim(f"ours: {name} {title}", "peak_mb", at_most=300) for name in FORMATS for title in _SIZES),
)


if __name__ == "__main__":
    main(
        BENCHMARK,
        __doc__,
        tree="folder of class folders of image files",
        work="folder for the outputs, which are removed afterwards",
    )
