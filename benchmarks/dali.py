"""DALI on the CPU: its own readers, our shards behind its webdataset reader, our external source; and our loader.

    python benchmarks/dali.py --task imagenet|celeb --tree TREE --work DIR [--rounds 3]

All DALI rows but the last have one graph: a random box (or the middle of a face), decoded alone, resized with
antialiasing, flipped by DALI's random numbers. Sets, clock and columns are those of `pipeline.py`; DALI and our package
are needed in one environment.
"""

from __future__ import annotations

import argparse
import glob
import os
from pathlib import Path
from typing import Any

import pipeline as loaders
import pipeline_sets as sets
from harness import CONTENDERS, Benchmark, main
from pipeline_job import Job, MakeLoader, pipeline
from pipeline_rows import dali_graph
from report import PEERS, Claim, Column

CONTENDERS.clear()  # those of pipeline.py

_FILES, _TAR = "DALI, file reader", "DALI, webdataset reader on our tar, our index"
_VIEWS, _BATCHES, _SAMPLES = (
    f"ours: DALI, external source, {how}" for how in ("views", "worker processes, batches", "worker processes, samples")
)
_LOADER, _DALI_LOADER = "ours: ImageLoader", "ours: DaliLoader"
_OURS = "torch readers.loader readers.augment"
_THEIRS = "numpy nvidia.dali packer readers.dali"
_PREFETCH = 2


@pipeline(_FILES, data=["tree"], imports=_THEIRS, note="its own shuffle, of 1,024 samples")
def file_reader(job: Job) -> MakeLoader:
    from nvidia.dali import fn

    return dali_graph(job, lambda: fn.readers.file(file_root=str(job.tree), random_shuffle=True))


@pipeline(_TAR, data=[sets.TAR], imports=_THEIRS, note="as above; `packer.export_index` wrote the index")
def webdataset_reader(job: Job) -> MakeLoader:
    from nvidia.dali import fn

    import packer

    folder = job.output(sets.TAR)
    indexes = [str(file) for file in packer.export_index(folder, "dali").files]
    paths = sorted(glob.glob(os.path.join(folder, "*.tar")))
    return dali_graph(
        job,
        lambda: fn.readers.webdataset(paths=paths, index_paths=indexes, ext=["jpg", "cls"], random_shuffle=True),
    )


def _external(job: Job, workers: int = 0, **options: Any) -> MakeLoader:
    import readers
    from readers.dali import external_source

    reader = readers.open(job.output(sets.HDF5))
    return dali_graph(
        job,
        lambda: external_source(reader, job.batch, seed=1, parallel=workers > 0, ahead=_PREFETCH, **options),
        max(1, workers),
    )


@pipeline(_VIEWS, data=[sets.HDF5], imports=_THEIRS, note="read in the training process; global shuffle")
def external_views(job: Job) -> MakeLoader:
    return _external(job)


@pipeline(_BATCHES, data=[sets.HDF5], imports=_THEIRS, note="read by two more processes of DALI")
def external_batches(job: Job) -> MakeLoader:
    return _external(job, job.workers)


@pipeline(_SAMPLES, data=[sets.HDF5], imports=_THEIRS, note="as above")
def external_samples(job: Job) -> MakeLoader:
    return _external(job, job.workers, per="sample")


@pipeline(_DALI_LOADER, data=[sets.HDF5], imports=f"{_THEIRS} {_OURS}", note="crops drawn by us; torch tensors")
def dali_loader(job: Job) -> MakeLoader:
    from pipeline_rows import ops

    import readers
    from readers.dali import DaliLoader, PipelineOptions

    reader, options = readers.open(job.output(sets.HDF5)), PipelineOptions(threads=job.workers, prefetch=_PREFETCH)
    return lambda: DaliLoader(reader, job.batch, augment=ops(job), options=options, seed=1)


@pipeline(_LOADER, data=[sets.HDF5], imports=_OURS)
def image_loader(job: Job) -> MakeLoader:
    from pipeline_rows import ops

    import readers
    from readers.loader import ImageLoader

    reader = readers.open(job.output(sets.HDF5))
    return lambda: ImageLoader(reader, job.batch, augment=ops(job), threads=job.workers, seed=1)


def _benchmark(arguments: argparse.Namespace) -> Benchmark:
    batch = arguments.batch or loaders.BATCH[arguments.task]
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
        measure=loaders.measure,
        before=loaders.before,
        claims=(
            Claim(f"{_VIEWS} [u8]", "images_s", 1.0, f"{_FILES} [u8]"),
            Claim(f"{_LOADER} [u8]", "images_s", 1.0, PEERS),
        ),
    )


def _parser() -> argparse.ArgumentParser:
    parser = loaders.parser()
    parser.description = (__doc__ or "").partition("\n")[0]
    return parser


if __name__ == "__main__":
    Path(_parser().parse_args().work).mkdir(parents=True, exist_ok=True)
    main(_benchmark(_parser().parse_args()), _parser())
