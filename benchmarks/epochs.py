"""Training epochs from a slow source: read directly, staged before, staged in the background in two orders, cached.

    python benchmarks/epochs.py --tree TREE --work DIR --target DIR [--bandwidth 20] [--latency 5] [--rounds 3] …

Packs the tree once into DIR/set (not timed). Each row is a process that runs two epochs of ImageLoader with
RandomResizedCrop(224) and a flip. The time includes staging. The source is `slow_source.SlowSource` over the packed
set.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Benchmark, Contender, contender, main, pack_set, slug
from machine import folder_bytes, prime, warm
from report import Claim, Column
from slow_source import SlowSource

from readers import Ranks

__all__ = ["measure"]

SOURCE, STAGED, LIMIT = "source, global shuffle", "ours: staged before", "limit: local from the start"
GLOBAL, FIRST = "ours: background, global shuffle", "ours: background, staged first"
_BATCH, _CROP, _SEED = 64, 224, 1
_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Training:
    """A row's arguments: it opens a reader and an order of this packed set. to: a directory of this node."""

    made: Path
    to: Path
    window: int

    def source(self) -> Any:
        import readers

        return readers.open(self.made, "train")


@contender(LIMIT, slow=False)
@contender(SOURCE)
@contextmanager
def source(job: Training) -> Iterator[Any]:
    yield job.source(), None


@contender("ours: cached while it is read", note="encoded, in /dev/shm, from the source in a global shuffle")
@contextmanager
def cached(job: Training) -> Iterator[Any]:
    import readers

    with readers.cached(job.source(), 1.0, job=f"benchmark-{os.getpid()}") as reader:
        yield reader, None


@contextmanager
def staged(job: Training, background: bool) -> Iterator[Any]:
    import readers

    with readers.stage(job.made, job.to, background=background) as path:
        yield readers.open(path, "train", fallback=job.made if background else None), None


contender(STAGED, note="the first epoch begins when all shards are staged")(functools.partial(staged, background=False))
contender(GLOBAL)(functools.partial(staged, background=True))


@contender(FIRST, patience=_PATIENCE_SECONDS, note="waits for a shard that is being copied")
@contender("ours: background, staged first, no patience", patience=0.0)
@contextmanager
def staged_first(job: Training, patience: float = 0.0) -> Iterator[Any]:
    import readers
    from readers.order import staged_first

    order = staged_first(job.source().split_info, _SEED, job.window)
    with readers.stage(job.made, job.to, background=True, order=order) as path:
        yield readers.open(path, "train", fallback=job.made, patience_seconds=patience), order


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of two epochs, the first with staging; the first epoch's share of local reads; bytes from the source."""
    import torch

    torch.set_num_threads(1)
    made, to = pack_set(arguments), _target(arguments, chosen.name)
    size = folder_bytes(made)
    prime(size + (1 << 28))
    job = Training(made, to, arguments.window)
    fast = not chosen.options.get("slow", True)
    slow = SlowSource(made, 1e12 if fast else arguments.bandwidth * 1e6, 0.0 if fast else arguments.latency / 1e3)
    options = {"patience": chosen.options["patience"]} if "patience" in chosen.options else {}
    started = time.perf_counter()
    with slow, chosen.function(job, **options) as (reader, order):
        ends, figures = [started], {"before_s": time.perf_counter() - started}
        for _ in _epochs(reader, order, arguments.threads):
            ends.append(time.perf_counter())
            stats = getattr(reader.store, "stats", lambda: None)()
            if len(ends) == 2 and hasattr(stats, "local_share"):
                figures["local"] = stats.local_share
                figures["waited_s"] = stats.waited_seconds
    shutil.rmtree(to, ignore_errors=True)
    return {
        **figures,
        "first_s": ends[1] - ends[0],
        "second_s": ends[2] - ends[1],
        "both_s": ends[2] - ends[0],
        "moved": 0.0 if fast else slow.read_bytes / size,
    }


def _epochs(reader: Any, order: Any, threads: int) -> Iterator[int]:
    """Run two epochs; yields at the end of each."""
    from readers.augment import RandomHorizontalFlip, RandomResizedCrop
    from readers.loader import ImageLoader

    ops = [RandomResizedCrop(_CROP), RandomHorizontalFlip()]
    loader = ImageLoader(
        reader,
        _BATCH,
        augment=ops,
        order=order,
        seed=_SEED,
        ranks=Ranks(tail="exact", rank=0, world_size=1),
        threads=threads,
    )
    for epoch in range(2):
        for _ in loader:
            pass
        yield epoch


def before(chosen: Contender, arguments: argparse.Namespace) -> None:
    """Pack the set if needed, and bring it into the page cache, from which the simulated source reads it."""
    made = pack_set(arguments, shard_size=int(arguments.shard_mb * 1e6))
    shutil.rmtree(_target(arguments, chosen.name), ignore_errors=True)
    _target(arguments, chosen.name).mkdir(parents=True)
    warm([made])


def _target(arguments: argparse.Namespace, name: str) -> Path:
    return Path(arguments.target) / f"epochs-benchmark-{slug(name)}"


BENCHMARK = Benchmark(
    title="Epochs from a slow source",
    columns=(
        Column("before_s", "s before the first request", "{:.2f}"),
        Column("first_s", "first epoch and staging, s", "{:.2f}"),
        Column("second_s", "second epoch, s", "{:.2f}"),
        Column("both_s", "both, s", "{:.2f}"),
        Column("local", "local reads, first epoch", "{:.2f}"),
        Column("waited_s", "s waited", "{:.2f}"),
        Column("moved", "bytes from the source / set", "{:.2f}"),
    ),
    key="both_s",
    limits=(("both_s", SOURCE),),
    measure=measure,
    before=before,
    claims=(Claim(GLOBAL, "first_s", 1.0, FIRST), Claim(FIRST, "moved", at_most=1.05)),
    less_is_better=True,
)


if __name__ == "__main__":
    main(
        BENCHMARK,
        __doc__,
        tree="folder of image files in train/<class>/",
        work="folder for the packed set",
        target="folder to stage to",
        bandwidth=(20.0, "MB/s of the source"),
        latency=(5.0, "milliseconds per request to the source"),
        shard_mb=(8.0, "size of a shard in MB"),
        window=(4, "shards that a batch of the staged-first order mixes"),
        threads=(2, "threads of the loader"),
    )
