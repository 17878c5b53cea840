"""Parts of the pytest plug-ins: small packed sets that replace the toy data sets in tests of state."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packer
import readers
from readers.augment import RandomHorizontalFlip, RandomResizedCrop
from readers.torch import ImageDataset

_FOLDER = tempfile.TemporaryDirectory()
_used: list[int] = []


@cache
def packed(size: int) -> readers.Reader:
    """A packed set of `size` noisy PNGs of 16 x 16 pixels; the label of image i is i."""
    draw, folder, keys = np.random.default_rng(size), Path(_FOLDER.name) / str(size), [f"{i:03}" for i in range(size)]
    with packer.writer(folder, "hdf5", classes=keys) as out:
        for i, key in enumerate(keys):
            out.write(key, label=i, image=draw.integers(0, 256, (16, 16, 3), np.uint8))
    return readers.open(folder, "train")


class Images(ImageDataset):
    """Items (image, label). number: items are labels, although images are read. draws: random crops and flips."""

    def __init__(self, size: int, *, draws: bool = False, number: bool = False, slow: int = -1) -> None:
        _used.append(size)
        super().__init__(packed(size), [RandomResizedCrop(8), RandomHorizontalFlip()] if draws else None)
        self._number, self._slow = number, slow

    def _items(self, indices: Sequence[int], *, together: bool = False) -> Any:
        time.sleep(self._slow in indices)
        items, images = super()._items(indices, together=together and not self._number)
        return ([label for _, label in items], None) if self._number else (items, images)


def apply(items: list[pytest.Item], names: Mapping[str, Any], not_ours: Mapping[str, str]) -> None:
    """Replace names in the modules of tests. not_ours: reasons to skip tests, by part of their name."""
    for item in items:
        vars(item.module).update((name, names[name]) for name in names.keys() & vars(item.module).keys())
        for part in (part for part in not_ours if part in item.nodeid):
            item.add_marker(pytest.mark.skip(reason=not_ours[part]))


@pytest.fixture(autouse=True)
def is_ours() -> Iterator[None]:
    """Fail tests that used no packed set, because they show nothing about packer."""
    _used.clear()
    yield
    assert _used, "the test used no packed set"
