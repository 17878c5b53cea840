"""The images of `s000.py`, as files and as a packed set, and what its rows are asked for."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import images
from machine import warm

__all__ = ["BATCH", "BOX", "COMPARED", "HEIGHT", "SIZE", "WIDTH", "Job", "make_images", "make_job"]

# Top, left, height and width of what is cut out of CelebA's images, and the side of what is made of it.
BOX, SIZE = (40, 15, 148, 148), 64
WIDTH, HEIGHT = 178, 218
BATCH = 128
COMPARED = 1024  # images of an epoch that is compared
_QUALITY = 60  # 7 to 8 kB an image, as CelebA's


@dataclass(frozen=True)
class Job:
    """tree: class folders of JPEGs. packed: the same as a set. workers: processes or threads of a row.

    in_order: DataLoaders take the samples in our order, in place of their own shuffle.
    """

    tree: Path
    packed: Path
    batch: int
    workers: int
    seed: int = 1
    in_order: bool = False


def make_job(arguments: argparse.Namespace, count: int) -> Job:
    """For the first `count` images; see `make_images`."""
    tree, packed = (arguments.work / f"faces-{count}{form}" for form in ("", "-hdf5"))
    return Job(tree, packed, BATCH, arguments.workers)


def make_images(arguments: argparse.Namespace, count: int) -> None:
    """Make files and set of `count` images. CelebA's aligned images are taken as they are, others are made as large.

    Ends the program where `--images` has none.
    """
    import packer

    job, source = make_job(arguments, count), arguments.images
    try:
        size = None if _are_faces(source) else (WIDTH, HEIGHT)
        images.make(job.tree, count, size=size, source=source, quality=_QUALITY)
    except (ValueError, OSError) as error:
        sys.exit(f"s000: {error}")
    packer.convert(job.tree, "hdf5", job.packed, overwrite=True)
    warm([job.tree, job.packed])


def _are_faces(source: Path | None) -> bool:
    """Whether the images are of the size of CelebA's, by the first."""
    from PIL import Image

    first = None if source is None else next(source.rglob("*.jpg"), None)
    if first is None:
        return False
    with Image.open(first) as image:
        return image.size == (WIDTH, HEIGHT)
