"""A rank of the MPI rows of `s003.py`: all ranks of the node share one byte cache in an MPI window.

    mpiexec -n 2 python benchmarks/seeds/s003_mpi.py SET read|decode|check --seconds S --batch N

Together they fill the window; then each reads its own part in random order. The first rank prints what they did, as
JSON: images/s of all of them, or with `check` the checksums of each image and of its pixels, and the label.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import zlib
from pathlib import Path
from typing import Any

import experiment  # noqa: F401  (puts the repository on the path)
import numpy as np
import simplejpeg
from mpi4py import MPI

import readers


def work(reader: Any, indices: list[int], arguments: argparse.Namespace) -> tuple[int, float]:
    """Images and seconds of reading, or decoding into batches, until the time is over."""
    batch = np.empty((arguments.batch, 224, 224, 3), np.uint8)
    target = memoryview(bytearray(1 << 20))
    started, count, seconds = time.perf_counter(), 0, 0.0
    while seconds < arguments.seconds:
        for index in indices:
            data = reader.read(index)
            if arguments.mode == "decode":
                batch[count % arguments.batch] = simplejpeg.decode_jpeg(data, "RGB")
            else:
                target[: len(data)] = data
            count += 1
            if not count % 64 and time.perf_counter() - started > arguments.seconds:
                break
        seconds = time.perf_counter() - started
    return count, seconds


def checksums(reader: Any, indices: list[int]) -> list[tuple[int, int, int]]:
    """Of each image, of its pixels, and its label."""
    found = []
    for index in indices:
        data = reader.read(index)
        pixels = simplejpeg.decode_jpeg(data, "RGB")
        found.append((zlib.crc32(data), zlib.crc32(pixels), int(reader.labels[index])))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("set", type=Path)
    parser.add_argument("mode", choices=("read", "decode", "check"))
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=64)
    arguments = parser.parse_args()
    world = MPI.COMM_WORLD
    with readers.cached(readers.open(arguments.set), 1.0, backend="mpi", comm=world) as reader:
        reader.prefill()
        world.Barrier()
        stats = reader.stats()
        if stats.present != len(reader):
            raise RuntimeError(f"{stats.present} of {len(reader)} images are in the window")
        indices = list(range(world.rank, len(reader), world.size))
        random.Random(world.rank).shuffle(indices)
        found: Any = (checksums if arguments.mode == "check" else work)(
            reader, indices, *([] if arguments.mode == "check" else [arguments])
        )
        everything = world.gather(found)
        if world.rank == 0:
            if arguments.mode == "check":
                print(json.dumps([one for part in everything for one in part]))
            else:
                print(json.dumps({"images_s": sum(count / seconds for count, seconds in everything)}))
        world.Barrier()


if __name__ == "__main__":
    main()
