"""DALI on the CPU: its own readers, our shards behind its webdataset reader, our external source; and our loader.

    python benchmarks/dali.py --task imagenet|celeb --tree TREE --work DIR [--rounds 3]

All DALI rows but the last have the same graph: decode a random box (or the middle of a face) only, resize it with
antialiasing, flip it by DALI's random numbers. Sets, clock and columns are the same as in `pipeline.py`; DALI and our
package must be installed in one environment.
"""

from __future__ import annotations

import argparse

import pipeline
from harness import Benchmark
from pipeline_rows import register_rows
from report import PEERS, Claim, Column


def _benchmark(arguments: argparse.Namespace) -> Benchmark:
    register_rows("dali")
    arguments.work.mkdir(parents=True, exist_ok=True)
    batch = arguments.batch or pipeline.BATCH[arguments.task]
    return Benchmark(
        title=f"DALI on the CPU, {arguments.task}, {arguments.workers} threads, batches of {batch}, warm page cache",
        columns=(
            Column("images_s", "images/s (min–max)"),
            Column("first_s", "first batch s", "{:.2f}"),
            Column("cpu_us", "CPU µs/image"),
            Column("pss_mb", "PSS MB"),
        ),
        key="images_s",
        limits=(("images_s", PEERS),),
        measure=pipeline.measure,
        before=pipeline.before,
        claims=(
            Claim("ours: DALI, external source, views [u8]", "images_s", 1.0, "DALI, file reader [u8]"),
            Claim("ours: ImageLoader [u8]", "images_s", 1.0, PEERS),
        ),
    )


if __name__ == "__main__":
    pipeline.run(_benchmark, __doc__)
