"""Where the bytes of the images come from in `s003.py`: files, memory, or both. One image at a time.

A source is a context manager: inside it `read(i)` gives the bytes of image i, and `labels[i]` its label. What it takes
to fill a memory is done before it is entered. Each source numbers the images its own way.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import experiment  # noqa: F401  (puts the other folders on the path)
from harness import REPOSITORY, NotHere
from machine import list_tree

__all__ = ["SOURCES", "Place", "Source", "cached", "example", "prepare"]

_MEMORY = Path("/dev/shm")


class Source(NamedTuple):
    """read: the bytes of an image. labels: of all."""

    read: Callable[[int], Any]
    labels: list[int]


@dataclass(frozen=True)
class Place:
    """A folder with the same images three times: files in class folders, a packed set, files in /dev/shm."""

    root: Path

    @property
    def tree(self) -> Path:
        return self.root / "tree"

    @property
    def packed(self) -> Path:
        return self.root / "packed"

    @property
    def shared(self) -> Path:
        """A link to the staged copy; there only while the process that staged it runs."""
        return self.root / "shared"


def example(name: str) -> Any:
    """A module of examples/."""
    import importlib
    import sys

    folder = str(REPOSITORY / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def prepare(place: Place, count: int, given: Path | None, stack: ExitStack) -> dict[str, float]:
    """Make what is missing; the copy in /dev/shm is removed with `stack`. Returns the seconds that each took.

    given: a folder of JPEGs to make the images from, in place of random text.
    """
    import images

    import packer
    import readers

    seconds, started = {}, time.perf_counter()

    def lap(name: str) -> None:
        nonlocal started
        now = time.perf_counter()
        seconds[name], started = now - started, now

    place.root.mkdir(parents=True, exist_ok=True)
    if given is not None:
        images.make(place.tree, count, size=(224, 224), classes=2, source=given)
    elif not place.tree.exists():
        example("make_text").write_text(place.tree, count)
    lap("making")
    if not place.packed.exists():
        packer.convert(place.tree, to="hdf5", output=place.packed)
    lap("packing")
    place.shared.unlink(missing_ok=True)
    if _MEMORY.is_dir():
        target = stack.enter_context(tempfile.TemporaryDirectory(prefix="s003-", dir=_MEMORY))
        staged = readers.stage(place.packed, target, form="files", cleanup="atexit")
        place.shared.symlink_to(stack.enter_context(staged))
        stack.callback(place.shared.unlink, missing_ok=True)
    lap("staging")
    return seconds


def _files_of(folder: Path) -> Source:
    found = list_tree(folder)

    def read(index: int) -> bytes:
        with open(found[index][0], "rb") as file:
            return file.read()

    return Source(read, [label for _, label in found])


@contextmanager
def _files(place: Place) -> Iterator[Source]:
    yield _files_of(place.tree)


@contextmanager
def _shared_files(place: Place) -> Iterator[Source]:
    if not place.shared.exists():
        raise NotHere("there is no /dev/shm here")
    yield _files_of(place.shared)


@contextmanager
def _byte_array(place: Place) -> Iterator[Source]:
    """The document's cache: all bytes end to end, and where each image ends; shared with the workers, who are forks."""
    import numpy as np

    files = _files_of(place.tree)
    images = [files.read(index) for index in range(len(files.labels))]
    ends = np.cumsum([len(image) for image in images])
    starts = ends - [len(image) for image in images]
    array = np.frombuffer(mmap.mmap(-1, int(ends[-1])), np.uint8)
    for start, end, image in zip(starts, ends, images, strict=True):
        array[start:end] = np.frombuffer(image, np.uint8)
    yield Source(lambda index: array[starts[index] : ends[index]], files.labels)


@contextmanager
def cached(place: Place, capacity: float = 1.0, keep: str = "encoded") -> Iterator[Any]:
    """Our cache over the files, filled: a reader."""
    import readers

    base = readers.open_folder(place.tree)
    with readers.cached(base, capacity, keep, job=f"s003-{os.getpid()}") as reader:
        reader.prefill()
        yield reader


@contextmanager
def _byte_cache(place: Place) -> Iterator[Source]:
    with cached(place) as reader:
        yield Source(reader.read, reader.labels.tolist())


@contextmanager
def _half_cached(place: Place) -> Iterator[Source]:
    with cached(place, 0.5) as reader:
        yield Source(reader.read, reader.labels.tolist())


@contextmanager
def _packed(place: Place) -> Iterator[Source]:
    import readers

    with readers.open(place.packed) as reader:
        yield Source(reader.read, reader.labels.tolist())


SOURCES: dict[str, Callable[[Place], Any]] = {
    "files": _files,
    "files in /dev/shm": _shared_files,
    "byte array": _byte_array,
    "packed set": _packed,
    "byte cache": _byte_cache,
    "half in the byte cache": _half_cached,
}
