"""A row of the table of tips, and where tips are from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from readers.diagnosis.evidence import Evidence
from readers.diagnosis.findings import Change

__all__ = ["DALI", "HPC", "PART_8", "SOURCES", "WORKERS", "Sources", "Suggestion", "Tip", "in_ms", "option"]

PART_8 = "PyTorch Model Performance Analysis and Optimization, part 8"
DALI = "Accelerate computer vision training using GPU preprocessing with NVIDIA DALI on Amazon SageMaker"
HPC = "Working with Data on GPUs: I/O, Data Transfer & Generation"

WORKERS = ("num_workers", "threads")
Sources: TypeAlias = tuple[tuple[str, int], ...]

# Every tip of each source, in its order; a row of the table cites them by (source, number from 1).
SOURCES: dict[str, tuple[str, ...]] = {
    PART_8: (
        "a machine with enough network bandwidth",
        "fast storage: a local SSD rather than an object store",
        "more out of the storage: partitions, parallel downloads",
        "compress raw data",
        "group small samples into larger files",
        "a fast tool for transfers",
        "tune how data are fetched: chunk size, concurrency",
        "number of workers, prefetch factor",
        "processing ahead of training",
        "a machine with the right ratio of CPUs to GPUs",
        "order of the transforms: a crop before a blur",
        "compile Python: Numba, JAX",
        "operators in C++",
        "auxiliary CPU machines",
        "transforms on the GPU",
        "threads and memory of the operating system",
        "pinned memory and copies that do not block, a prefetcher to the GPU",
        "8-bit integers to floats on the GPU",
        "half precision before the copy",
        "one-hot vectors on the GPU",
        "bit masks for binary values",
        "sparse representations",
        "no padding",
        "copy nothing that is not needed",
    ),
    DALI: (
        "decoding and augmentation on the GPU",
        "GPU memory left for preprocessing: a smaller batch",
        "watch the CPUs and the GPU over time",
        "a machine with the right ratio of CPUs to GPUs",
        "number of workers that balances the CPUs",
        "mind what the file system can serve at a time",
        "a batch size that is neither too large nor too small",
        "low precision as long as possible",
        "builds that use the vector instructions of the CPU",
        "augmentation in the preparation of the data",
        "prepared data that do not grow",
        "preprocessing on other machines",
        "network bandwidth of those machines",
    ),
    HPC: (
        "dummy data on the GPU show what could be gained",
        "a larger batch",
        "find the best file system",
        "node-local file systems",
        "parallel I/O of libraries such as HDF5, in place of many small files",
        "cache compressed data, not decoded ones",
        "one copy in shared memory for all workers",
        "files in /dev/shm or another tmpfs, and clean up",
        "a cache of bytes in memory, without a tmpfs",
        "cache a part",
        "shuffle on the node, and between nodes now and then",
        "more CPU cores",
        "a better decoder",
        "a balance of compression and CPU time",
        "a faster library for augmentation",
        "decode on the GPU",
        "decompress on the GPU",
        "augment on the GPU",
        "generate data on the GPU",
        "train with generated data first, and with the data set at the end",
    ),
}


@dataclass(frozen=True)
class Suggestion:
    """What a row makes of evidence that triggers it. seconds: predicted of a step, None if that cannot be said."""

    why: str
    how: str
    seconds: float | None = None
    change: Change | None = None


@dataclass(frozen=True)
class Tip:
    """A row. check: what the evidence calls for, None if nothing. idle: also if the data keep up with the training."""

    id: str
    title: str
    sources: Sources
    check: Callable[[Evidence], Suggestion | None]
    idle: bool = False


def option(e: Evidence, kind: str, value: int, names: tuple[str, str]) -> tuple[str, Change]:
    """An option with a new value, and the change that `apply` makes. names: of a DataLoader, of an ImageLoader."""
    how = f"{names[e.facts.loader == 'ImageLoader']}={value}"
    return how, Change(kind, value, how)


def in_ms(seconds: float) -> str:
    """12.3 ms."""
    return f"{1e3 * seconds:.1f} ms"
