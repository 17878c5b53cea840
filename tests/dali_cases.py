"""Helpers for the tests of DALI: DALI itself, or the reason to skip them; crops; comparisons of two loaders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from readers.augment import RandomHorizontalFlip, RandomResizedCrop
from readers.dali import DaliLoader
from readers.loader import ImageLoader

try:
    import nvidia.dali as dali
    from nvidia.dali import fn
except (ImportError, OSError) as error:
    pytest.skip(f"DALI is not installed: {error}", allow_module_level=True)

__all__ = [
    "CROPS",
    "MEAN_DIFFERENCE",
    "MOST_DIFFERENCE",
    "WITH_PROCESSES",
    "dali",
    "fn",
    "labels_of",
    "same_epochs",
    "same_pixels",
]

WITH_PROCESSES = [
    pytest.mark.usefixtures("processes_end"),
    # DALI leaves a socket to the garbage collector when it spawns a worker.
    pytest.mark.filterwarnings("ignore:unclosed <socket.socket:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*unclosed <socket.socket:pytest.PytestUnraisableExceptionWarning"),
]
CROPS = [RandomResizedCrop(32), RandomHorizontalFlip()]
# Differences of 255: both resize by a triangle filter and round; DALI's weights come from a table.
MEAN_DIFFERENCE, MOST_DIFFERENCE = 0.5, 6


def same_pixels(images: Any, others: Any, scale: float = 1.0) -> None:
    difference = np.abs(np.asarray(images, np.float64) - np.asarray(others, np.float64)) * scale
    assert images.shape == others.shape
    assert difference.mean() <= MEAN_DIFFERENCE and difference.max() < MOST_DIFFERENCE + 0.01


def same_epochs(loader: ImageLoader, dali: DaliLoader, epochs: int = 2, scale: float = 1.0) -> None:
    for _ in range(epochs):
        for (images, labels), (others, other_labels) in zip(loader, dali, strict=True):
            assert np.asarray(labels).tolist() == np.asarray(other_labels).tolist()
            same_pixels(images, others, scale)


def labels_of(loader: DaliLoader) -> list[list[int]]:
    return [np.asarray(labels).tolist() for _, labels in loader]
