"""Ops in DALI graphs against the same ops in our loader: the same random numbers, and pixels within the limits of
docs/dali.md."""

from __future__ import annotations

from typing import Any

import dali_cases  # noqa: F401  skips these without DALI
import numpy as np
import pytest
import torch
from augment_cases import LOAD, photo
from conftest import tree_of
from image_cases import encoded
from PIL import Image

import readers
from readers import Decode, Ranks, augment
from readers.augment import (
    CenterCrop,
    ColorJitter,
    Crop,
    CutMix,
    GaussianBlur,
    MixUp,
    Normalize,
    Op,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Recipe,
    Resize,
    Stage,
    TrivialAugmentWide,
)
from readers.dali import DaliLoader, PipelineOptions, Source, celeba, classification, pipeline
from readers.loader import ImageLoader

EVERY_CHANGE = TrivialAugmentWide()
# (ops, largest difference, mean difference), of 255. Both executors decode the whole image, and round at the ends of
# parts.
CASES: dict[str, tuple[list[Op], float, float]] = {
    "greyscale": ([RandomGrayscale(0.5)], 1, 0.01),
    "hue": ([ColorJitter(hue=0.5)], 1, 0.01),
    "jitter": ([ColorJitter(0.4, 0.4, 0.4, 0.1)], 1, 0.01),
    "rotation": ([RandomRotation(180)], 1, 0.01),
    "rotation to the nearest pixel": ([RandomRotation(180, "nearest")], 255, 0.2),
    "blur": ([GaussianBlur((0.3, 3.0), p=0.7)], 1, 0.01),
    "erasing": ([RandomErasing(0.8, value=(10, 20, 30))], 0, 0.0),
    "normalize": ([Normalize((0.5,) * 3, (0.2,) * 3)], 0.01, 0.01),
    "flips before a crop": ([RandomVerticalFlip(), RandomHorizontalFlip(), RandomCrop(50), RandomVerticalFlip()], 0, 0),
    "padded": ([RandomCrop(70, padding=12), RandomVerticalFlip()], 0, 0.0),
    "resized": ([Resize(44), RandomCrop((30, 50), padding=(2, 12)), RandomHorizontalFlip(), RandomGrayscale()], 6, 0.5),
    "bicubic": ([RandomResizedCrop(48, (0.6, 1.0), interpolation="bicubic"), RandomVerticalFlip()], 6, 0.5),
    "evaluation": (classification(32, train=False), 6.1, 0.5),
    "celeba": (celeba(28, crop=Crop(7, 3, 40, 40)), 6.1, 0.5),
    "load before a crop": ([*LOAD * 2, RandomCrop(50)], 1, 0.01),
    "load before a resize": ([*LOAD * 4, Resize(48), CenterCrop(40)], 6, 0.5),
    "three parts": (
        [
            *(RandomCrop((60, 64)), ColorJitter(0.4, 0.4, 0.4, 0.1), RandomVerticalFlip(), RandomCrop(60, padding=4)),
            *(RandomHorizontalFlip(), GaussianBlur(), RandomVerticalFlip(), RandomErasing(), RandomHorizontalFlip()),
            *(RandomCrop(40), RandomVerticalFlip(), RandomGrayscale()),
        ],
        1,
        0.01,
    ),
}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> readers.Reader:
    """24 photographs of 72 to 99 pixels a side, upright and rotated."""
    images = [Image.fromarray(photo(i, 72 + 9 * (i % 4), 75 + 8 * (i % 3))) for i in range(24)]
    files = {f"{i:02d}.png": encoded(image, "PNG", 1 + i % 8) for i, image in enumerate(images)}
    return readers.open_folder(tree_of(tmp_path_factory.mktemp("photos"), files))


def apart(reader: readers.Reader, ops: list[Op], **options: Any) -> tuple[float, float]:
    """The (largest, mean) difference between DALI's images and ours, of 255, over an epoch."""
    loader: Any = ImageLoader(reader, 8, augment=ops, seed=2, decode=Decode(compose="exact"))
    dali_loader = DaliLoader(reader, 8, augment=ops, seed=2, **options)
    differences = [images.float() - other.float() for (images, _), (other, _) in zip(loader, dali_loader, strict=True)]
    normalize = Recipe(ops).normalize
    difference = torch.cat(differences).abs() * (255 * normalize.std[0] if normalize else 1)
    return float(difference.max()), float(difference.mean())


@pytest.mark.parametrize("name", CASES)
def test_dali_gives_the_same_images(name: str, reader: readers.Reader) -> None:
    ops, most, mean = CASES[name]
    ops = ops if Recipe(ops).out_size else [CenterCrop(64), *ops]
    measured = apart(reader, ops)
    assert measured[0] <= most and measured[1] <= mean, measured


def test_every_change_of_randaugment(reader: readers.Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """One change for each image. Where two pixels are equally near, nearest-neighbour sampling may choose either; DALI
    equalizes by a different formula."""
    bounds = [(1, 0.02)] + [(255, 0.02)] * 4 + [(255, 0.2)] + [(1, 0.02)] * 7 + [(64, 2.5)]
    plan = TrivialAugmentWide.plan

    def plan_each(op: TrivialAugmentWide, planner: Any, u: Any) -> None:
        u[:, 0] = (np.arange(len(u)) % 14 + 0.5) / 14
        plan(op, planner, u)

    monkeypatch.setattr(TrivialAugmentWide, "plan", plan_each)
    loaders = (kind(reader, 24, augment=[CenterCrop(68), EVERY_CHANGE], seed=2) for kind in (ImageLoader, DaliLoader))
    plain, other = (torch.stack([images.float() for _ in range(3) for images, _ in loader]) for loader in loaders)
    for change, (most, mean) in enumerate(bounds):
        difference = (plain[:, change::14] - other[:, change::14]).abs()
        assert float(difference.max()) <= most and float(difference.mean()) <= mean, change


def test_several_changes_are_made_in_their_order(reader: readers.Reader) -> None:
    assert apart(reader, [RandAugment(3, 15), RandomHorizontalFlip(), CenterCrop(64)])[1] < 2.5


def test_a_resumed_epoch_has_the_same_augmentation(reader: readers.Reader) -> None:
    ops: list[Op] = [RandomRotation(20), Resize(48), CenterCrop(40), ColorJitter(0.4, 0.4, 0.4, 0.1), RandAugment()]
    whole, begun, resumed = (DaliLoader(reader, 8, augment=ops, seed=7, ranks=Ranks(tail="exact")) for _ in range(3))
    expected = [images for images, _ in whole]
    for _ in zip(range(1), begun, strict=False):
        state = begun.state_dict()
    resumed.load_state_dict(state)
    rest = [images for images, _ in resumed]
    assert len(rest) == 2 and all(map(torch.equal, expected[1:], rest))


@pytest.mark.parametrize("op", [MixUp(), CutMix(), RandomErasing(value="random")])
def test_ops_that_dali_does_not_execute_are_refused_by_name(op: Op, reader: readers.Reader) -> None:
    with pytest.raises(ValueError, match=rf"DALI pipelines do not execute {type(op).__name__}\(.*: use ImageLoader"):
        DaliLoader(reader, 8, augment=[CenterCrop(32), op])


def test_every_pixel_op_is_executed_or_refused() -> None:
    made = {type(op) for ops, *_ in CASES.values() for op in ops} | {RandAugment, TrivialAugmentWide}
    kinds = {getattr(augment, name) for name in augment.ops.__all__ if isinstance(getattr(augment, name), type)}
    pixels = {kind for kind in kinds if getattr(kind, "stage", None) is Stage.PIXELS}
    assert pixels <= made


def test_the_graph_of_ops_for_a_gpu_can_be_defined(reader: readers.Reader) -> None:
    """Running the graph needs a GPU."""
    ops = [op for ops, *_ in CASES.values() for op in ops if op.stage is Stage.PIXELS]
    source = Source(reader, 8, augment=[*ops, CenterCrop(32), RandAugment()])
    made = pipeline(source, PipelineOptions(device="cuda", device_id=0))
    made._build_graph()
    on_the_cpu = {type(node._op).__name__ for node in made._ops if node._op.device == "cpu"}
    assert on_the_cpu == {"ExternalSource", "Cast", "Reshape", "_TensorSubscript"}, "the pixels are not on the GPU"
