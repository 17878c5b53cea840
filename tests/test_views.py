"""Several views of each sample, and batches with mixed images: independent random numbers, the same for any number of
threads, after a resume and with bad samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_jpeg, tree_of
from loader_options import grouped

import readers
from readers import Decode, Threads, Views
from readers.augment import (
    CenterCrop,
    ColorJitter,
    CutMix,
    MixUp,
    Normalize,
    Op,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Recipe,
)
from readers.loader import ImageLoader
from readers.torch import ImageDataset

COUNT = 40
OPS: list[Op] = [RandomResizedCrop(24), RandomHorizontalFlip(), ColorJitter(0.4)]
FIELDS = ("image", "label", "index")


def write_images(folder: Path, bad: tuple[int, ...] = ()) -> readers.Reader:
    images = [make_jpeg(i, (60, 44)) for i in range(COUNT)]
    images = [data[: len(data) // 2] if i in bad else data for i, data in enumerate(images)]
    return readers.open_folder(tree_of(folder, {f"class {i % 4}/{i:02d}.jpg": data for i, data in enumerate(images)}))


@pytest.fixture
def reader(tmp_path: Path) -> readers.Reader:
    return write_images(tmp_path)


def run(loader: ImageLoader) -> list[Any]:
    """Batches in which images are always by view."""
    return [(batch[0] if isinstance(batch[0], tuple) else (batch[0],), *batch[1:]) for batch in loader]


def same(batches: list[Any], others: list[Any]) -> bool:
    return len(batches) == len(others) and all(
        len(a[0]) == len(b[0]) and all(map(torch.equal, [*a[0], *a[1:]], [*b[0], *b[1:]]))
        for a, b in zip(batches, others, strict=True)
    )


def check_threads_and_resume(reader: readers.Reader, **options: Any) -> list[Any]:
    """The batches, which must not depend on the number of threads or on a resume."""
    expected = run(ImageLoader(reader, 8, fields=FIELDS, **grouped({"threads": 1, **options})))
    assert same(
        expected, run(ImageLoader(reader, 8, fields=FIELDS, **grouped({"threads": Threads(4, prefetch=1), **options})))
    )
    begun, resumed = (ImageLoader(reader, 8, fields=FIELDS, **grouped({"threads": 2, **options})) for _ in range(2))
    under_way = iter(begun)
    next(under_way), next(under_way)
    resumed.load_state_dict(begun.state_dict())
    assert same(expected[2:], run(resumed))
    return expected


# --- views ------------------------------------------------------------------------------------------------------------
def test_views_show_the_same_samples_with_independent_random_numbers(reader: readers.Reader) -> None:
    single = run(ImageLoader(reader, 8, augment=OPS, seed=3, fields=FIELDS))
    double = run(ImageLoader(reader, 8, augment=Views(OPS, 2), seed=3, fields=FIELDS))
    for (views, *rest), ((first, second), *others) in zip(single, double, strict=True):
        assert torch.equal(views[0], first) and first.shape == second.shape and first.stride() == second.stride()
        assert all(map(torch.equal, rest, others))
        assert not any(map(torch.equal, first, second))
    sides, positions = np.full(4000, 500), np.arange(4000)
    plans = [Recipe(OPS).plan(1, 0, positions, sides, sides, view=view) for view in range(3)]
    areas = [plan.boxes.height * plan.boxes.width for plan in plans]
    assert np.abs(np.corrcoef(areas) - np.eye(3)).max() < 0.05
    assert abs(np.mean(plans[0].hflip == plans[1].hflip) - 0.5) < 0.05


@pytest.mark.parametrize("layout", ["channels_last", "NCHW", "NHWC"])
def test_views_do_not_depend_on_threads_batches_or_a_resume(reader: readers.Reader, layout: Any) -> None:
    options: dict[str, Any] = {"augment": [*OPS, Normalize((0.5,) * 3, (0.5,) * 3)], "views": 3, "seed": 1}
    batches = check_threads_and_resume(reader, layout=layout, **options)
    half = run(ImageLoader(reader, 4, **grouped({"threads": 2, "decode": Decode(layout=layout), **options})))
    for view in range(3):
        together = torch.cat([batch[0][view] for batch in batches])
        assert torch.allclose(together, torch.cat([batch[0][view] for batch in half]))


def test_each_view_may_have_different_ops(reader: readers.Reader) -> None:
    """As DINO's global and local crops."""
    views: list[list[Op]] = [OPS, OPS, *[[RandomResizedCrop(12, scale=(0.05, 0.4))]] * 4]
    ((images, labels), *_) = ImageLoader(reader, 8, augment=Views(views))
    assert [tuple(view.shape) for view in images] == [(8, 3, 24, 24)] * 2 + [(8, 3, 12, 12)] * 4
    assert labels.shape == (8,) and len({view.numpy().tobytes() for view in images}) == 6


@pytest.mark.parametrize("threads", [1, 3])
def test_a_bad_sample_is_bad_in_all_its_views(tmp_path: Path, threads: int) -> None:
    bad = (3, 4, 17)
    reader = write_images(tmp_path, bad)
    numbers = {int(reader.keys[i].rpartition("/")[2].split(".")[0]): i for i in range(COUNT)}
    options: dict[str, Any] = {"augment": [CenterCrop(32)], "views": 2, "shuffle": False, "fields": FIELDS}
    options |= {"threads": threads}
    with pytest.warns(UserWarning, match="3 bad samples were skipped"):
        skipped = run(loader := ImageLoader(reader, 10, on_error="skip", **grouped(options)))
    assert sorted(sample.index for sample in loader.bad_samples) == sorted(numbers[i] for i in bad)
    assert sum(len(index) for *_, index in skipped) == COUNT - 3
    with pytest.warns(UserWarning, match="3 bad samples were replaced"):
        replaced = run(ImageLoader(reader, 10, on_error="substitute", **grouped(options)))
    for images, _, indices in [*skipped, *replaced]:
        assert torch.equal(*images), "these views have no random ops, so both show the sample of the index"
        assert all(len(view) == len(indices) for view in images)
    assert not {numbers[i] for i in bad} & {int(i) for *_, index in replaced for i in index}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"views": 0}, "count of views is at least 1"),
        ({"augment": [[OPS], [OPS]], "views": 2}, "not both"),
        ({"views": [OPS, [*OPS, Normalize((0.5,) * 3, (0.5,) * 3)]]}, "all views must have the same normalize"),
        ({"augment": [*OPS, MixUp()], "views": 2}, "MixUp and CutMix do not work with several views"),
    ],
)
def test_impossible_views(reader: readers.Reader, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageLoader(reader, 8, **grouped(options))


# --- mixed batches ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", [MixUp(0.4), CutMix()], ids=["mixup", "cutmix"])
@pytest.mark.parametrize("normalize", [False, True])
def test_mixed_batches_follow_the_formula(reader: readers.Reader, op: Op, normalize: bool) -> None:
    ops = [*OPS, *([Normalize((0.5,) * 3, (0.5,) * 3)] if normalize else [])]
    plain = run(ImageLoader(reader, 8, augment=ops, seed=6))
    mixed = run(ImageLoader(reader, 8, augment=[*ops, op], seed=6))
    owns = []
    for step, (((before,), labels), ((after,), shares)) in enumerate(zip(plain, mixed, strict=True)):
        sharp = torch.nn.functional.one_hot(labels, 4).to(torch.float32)
        images, expected = Recipe([*ops, op]).mix(6, 0, 8 * step, before.clone(), sharp)
        assert shares.dtype == torch.float32 and torch.equal(shares, expected) and torch.equal(after, images)
        assert torch.allclose(shares.sum(1), torch.ones(8)) and after.dtype == before.dtype
        owns.append(float((shares * sharp).sum(1).min()))
    assert len(set(owns)) > 1, "all batches have the same share"


@pytest.mark.parametrize("ops", [[MixUp(0.4)], [CutMix(p=0.5), MixUp(0.4, p=0.5)]], ids=["mixup", "both"])
def test_mixed_batches_do_not_depend_on_threads_or_a_resume(reader: readers.Reader, ops: list[Op]) -> None:
    check_threads_and_resume(reader, augment=[*OPS, *ops], seed=2)


def test_skipped_samples_are_not_mixed_in(tmp_path: Path) -> None:
    reader = write_images(tmp_path, (3, 4, 17))
    options: dict[str, Any] = {"shuffle": False, "on_error": "skip", "fields": FIELDS}
    with pytest.warns(UserWarning, match="3 bad samples were skipped"):
        plain = run(ImageLoader(reader, 10, **grouped({"augment": [CenterCrop(32)], **options})))
    with pytest.warns(UserWarning, match="3 bad samples were skipped"):
        mixed = run(ImageLoader(reader, 10, **grouped({"augment": [CenterCrop(32), MixUp()], **options})))
    for step, (((before,), labels, _), ((after,), shares, _)) in enumerate(zip(plain, mixed, strict=True)):
        sharp = torch.nn.functional.one_hot(labels, 4).to(torch.float32)
        images, expected = Recipe([CenterCrop(32), MixUp()]).mix(0, 0, 10 * step, before.clone(), sharp)
        assert torch.equal(after, images) and torch.equal(shares, expected)


def test_ops_on_batches_need_labels_and_a_loader_of_batches(tmp_path: Path, reader: readers.Reader) -> None:
    flat = readers.open_folder(tree_of(tmp_path / "flat", {f"{i}.jpg": make_jpeg(i, (40, 40)) for i in range(4)}))
    with pytest.raises(ValueError, match="no sample of this set has one: leave them out"):
        ImageLoader(flat, 2, augment=[CenterCrop(32), MixUp()])
    with pytest.raises(
        ValueError, match="ImageDataset makes single samples, but MixUp is for batches: use ImageLoader"
    ):
        ImageDataset(reader, [CenterCrop(32), MixUp()])
