"""What the experiment on loading faces relies on: how it recognises samples, and its distance of two sets of images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import packer

FOLDER = Path(packer.__file__).resolve().parent.parent / "benchmarks" / "seeds"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    for folder in (FOLDER.parent, FOLDER):
        monkeypatch.syspath_prepend(str(folder))
    import s000

    return s000


# --- the Fréchet distance ---------------------------------------------------------------------------------------------
def test_the_distance_of_normal_distributions(parts: Any) -> None:
    draw = np.random.default_rng(1)
    features = draw.normal(size=(500, 6)) @ draw.normal(size=(6, 6))
    distance = parts.frechet_distance
    assert distance(features, features) == pytest.approx(0, abs=1e-9)
    shift = np.arange(6.0)
    assert distance(features, features + shift) == pytest.approx(float(shift @ shift))
    # Of C and 9 C: tr(C + 9 C - 2 * 3 C).
    centred = features - features.mean(axis=0)
    assert distance(centred, 3 * centred) == pytest.approx(4 * float(np.trace(np.cov(features, rowvar=False))))
    # Those of independent coordinates: the squares of the differences of the deviations.
    scales = np.array([0.0, 1.0, 2.0, 3.0, 0.5, 4.0])
    white = np.linalg.qr(draw.normal(size=(500, 7)) - 0)[0]
    white = white[:, 1:] - white[:, 1:].mean(axis=0)
    white = white @ np.linalg.inv(np.linalg.cholesky(np.cov(white, rowvar=False))).T
    assert distance(white, white * scales) == pytest.approx(float(((1 - scales) ** 2).sum()))


def test_features_see_what_images_look_like(parts: Any) -> None:
    network, distance = parts.feature_network(), parts.frechet_distance
    noise = torch.randint(0, 256, (3, 100, 3, 64, 64), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    smooth = (noise[2].float() / 2 + 64).byte()
    first, second, third = (network(images) for images in (noise[0], noise[1], smooth))
    assert first.shape == (100, 32) and np.array_equal(network(noise[0]), first)
    assert distance(first, third) > 10 * distance(first, second)


# --- which sample an image is -----------------------------------------------------------------------------------------
COUNT, BATCH = 24, 8


@pytest.fixture
def reference(parts: Any) -> Any:
    """Two files of each of twelve images."""
    images = np.random.default_rng(1).integers(0, 256, (12, 3, 64, 64)).astype(np.uint8)
    return parts.Reference(images, np.arange(COUNT) % 12, np.arange(COUNT) % 3)


def epoch(reference: Any, order: Any, flipped: Any, labels: Any, noise: float = 0.0) -> Iterator[tuple[Any, Any]]:
    images = reference.images[reference.image_of[order]].astype(np.float32)
    images = np.where(np.asarray(flipped)[:, None, None, None], images[..., ::-1], images) + noise
    for start in range(0, len(order), BATCH):
        rows = slice(start, start + BATCH)
        yield torch.from_numpy(images[rows] / 127.5 - 1), torch.from_numpy(labels[rows].copy())
    raise AssertionError("no more than an epoch is needed")


def test_samples_are_recognised_by_their_pixels(parts: Any, reference: Any) -> None:
    draw = np.random.default_rng(2)
    order, flipped = draw.permutation(COUNT), draw.random(COUNT) < 0.5
    labels = reference.labels[order]
    found = parts.compare(epoch(reference, order, flipped, labels), reference)
    assert (found["images"], found["whole"]) == (COUNT, COUNT) and found["worst"] < 1e-3
    assert found["flipped"] == flipped.mean()
    noisy = parts.compare(epoch(reference, order, ~flipped, labels, noise=2.0), reference)
    assert (noisy["mean"], noisy["largest"]) == (pytest.approx(2.0, abs=1e-3), pytest.approx(2.0, abs=1e-3))
    assert noisy["order"] == found["order"] and noisy["flips"] != found["flips"]
    other = parts.compare(epoch(reference, order[::-1], flipped, labels[::-1]), reference)
    assert other["whole"] == COUNT and other["order"] != found["order"]


@pytest.mark.parametrize("fault", ["a sample twice", "labels of the neighbour"])
def test_a_wrong_sample_or_label_is_noticed(fault: str, parts: Any, reference: Any) -> None:
    order, labels = np.arange(COUNT), reference.labels.copy()
    if fault == "a sample twice":
        order[5] = 4
        labels = reference.labels[order]
    else:
        labels[:BATCH] = np.roll(labels[:BATCH], 1)
    found = parts.compare(epoch(reference, order, np.zeros(COUNT, bool), labels), reference)
    assert found["images"] == COUNT and found["whole"] < COUNT
