"""Mixtures of sets and buckets of shapes: exact shares, one bucket a step, and stops that lose and repeat no sample."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg, tree_of

import readers
from cache.errors import ResumeError
from packer.testing.samples import turned_image
from readers import Ranks
from readers.augment import AspectBuckets, RandomHorizontalFlip, ResizeToBucket
from readers.loader import ImageLoader
from readers.order import Bucketed, Mixed, Order, ResumeToken
from readers.order.schedule import Schedule, make_schedule


def schedules(order: Order, epoch: int, batch: int, world_size: int) -> list[Schedule]:
    return [make_schedule(order, epoch, batch, rank, world_size, "exact") for rank in range(world_size)]


def token_of(order: Order, epoch: int, cursor: int, samples: int) -> ResumeToken:
    """A token that went through JSON, as in a checkpoint."""
    token = ResumeToken(order.seed, epoch, cursor, "set", "", order.spec(), samples)
    return ResumeToken.from_dict(json.loads(json.dumps(token.to_dict())))


# --- mixtures -----------------------------------------------------------------------------------------------------
def whole(order: Order, epoch: int) -> np.ndarray:
    return order.indices(epoch, np.arange(len(order)))


@pytest.mark.parametrize(
    ("sizes", "weights", "samples", "quotas"),
    [
        ([300, 100], None, None, (300, 100)),
        ([1000, 10], [0.9, 0.1], 500, (450, 50)),
        ([3, 3, 3], [1, 1, 1], 10, (4, 3, 3)),
        ([5, 7, 0], [0, 2, 0], 9, (0, 9, 0)),
        ([4, 4], [1, 2], 0, (0, 0)),
    ],
)
def test_shares_are_exact_in_every_epoch(sizes: list[int], weights: Any, samples: Any, quotas: tuple[int, ...]) -> None:
    order = Mixed(sizes, weights, samples, seed=3)
    assert order.quotas == quotas and len(order) == sum(quotas)
    ends = np.cumsum(sizes)
    for epoch in range(5):
        drawn = ends.searchsorted(whole(order, epoch), side="right")
        assert np.array_equal(np.bincount(drawn, minlength=len(sizes)), quotas)


def test_no_sample_of_a_set_repeats_before_all_others_have_come() -> None:
    """Over epochs with half of one set and five times the other."""
    order = Mixed([100, 10], [1, 1], 100, seed=5)
    drawn = np.concatenate([whole(order, epoch) for epoch in range(8)])
    for first, size in ((0, 100), (100, 10)):
        # The epochs of a set follow one another; within an epoch, samples are in the order of its cycles only as a
        # whole.
        counts = np.bincount(drawn[(drawn >= first) & (drawn < first + size)] - first, minlength=size)
        assert counts.min() == counts.max() == 400 // size
    half = np.concatenate([whole(order, epoch) for epoch in (0, 1)])
    assert len(set(half[half < 100].tolist())) == 100
    assert len({tuple(whole(order, epoch)) for epoch in range(8)}) == 8


# --- buckets ------------------------------------------------------------------------------------------------------
def test_every_step_is_of_one_bucket_on_all_ranks() -> None:
    buckets = np.random.default_rng(0).integers(0, 5, 1000)
    for tail, batch in (("pad", 8), ("drop_last", 8), ("pad", (3, 8, 1, 5, 8))):
        order = Bucketed(buckets, batch, 3, tail, seed=1)  # type: ignore[arg-type]
        for epoch in (0, 4):
            ranks, seen = schedules(order, epoch, 8, 3), []
            assert {schedule.steps() for schedule in ranks} == {len(order.step_buckets(epoch))}
            for step, bucket in enumerate(order.step_buckets(epoch).tolist()):
                size = batch if isinstance(batch, int) else batch[bucket]
                for schedule in ranks:
                    rows = order.indices(epoch, schedule.positions(step))
                    assert len(rows) == size and set(buckets[rows]) == {bucket}
                    seen += rows.tolist()
            assert ranks[0].samples() * 3 == len(seen)
            left = order.left_out(epoch).tolist()
            assert sorted({*seen, *left}) == list(range(1000)) and not {*seen} & {*left}
            assert (len(seen) == len({*seen}) and left) if tail == "drop_last" else not left
            assert len(seen) - len({*seen}) < 5 * 8 * 3
    left_out = [Bucketed(buckets, 8, 3, "drop_last").left_out(epoch).tolist() for epoch in range(2)]
    assert left_out[0] != left_out[1]


@pytest.mark.parametrize("limit", [60, pytest.param(2000, marks=pytest.mark.faults)])
@pytest.mark.parametrize("kind", ["mixed", "pad", "drop_last"])
def test_stopping_anywhere_and_resuming_in_another_world(kind: str, limit: int) -> None:
    """Stops repeatedly in one epoch, with other numbers of ranks and other batches: no sample is lost or repeated."""
    draw, stops = random.Random(11), 0
    while stops < limit:
        n, epoch, seed = draw.randint(1, 400), draw.randint(0, 3), draw.randint(0, 1 << 40)
        buckets = np.array([draw.randint(0, 3) ** 2 // 3 for _ in range(n)])

        def make(world_size: int, batch: int) -> Order:
            if kind == "mixed":
                return Mixed([n, 7], [2, 1], seed=seed)  # noqa: B023
            sizes = batch if draw.random() < 0.5 else [draw.randint(1, batch) for _ in range(3)] + [batch]
            return Bucketed(buckets, sizes, world_size, kind, seed)  # type: ignore[arg-type]  # noqa: B023

        seen: list[int] = []
        world_size, batch = draw.randint(1, 5), draw.randint(1, 9)
        order, cursor = make(world_size, batch), 0
        while True:
            ranks = schedules(order, epoch, batch, world_size)
            steps = draw.randint(0, ranks[0].steps(cursor))
            for step in range(steps):
                of_step = [order.indices(epoch, rank.positions(step, cursor)) for rank in ranks]
                if kind != "mixed":
                    assert len({*map(len, of_step)}) == 1
                    assert len({*buckets[np.concatenate(of_step)]}) == 1, "a step has images of two shapes"
                seen += np.concatenate(of_step).tolist()
            cursor = ranks[0].cursor_after(steps - 1, cursor) if steps else cursor
            token = token_of(order, epoch, cursor, n)
            world_size, batch = draw.randint(1, 5), draw.randint(1, 9)
            order = token.resumed(make(world_size, batch))
            stops += 1
            if not schedules(order, epoch, batch, world_size)[0].steps(cursor):
                break
        counts = Counter(seen)
        if kind == "mixed":
            assert sorted(seen) == sorted(whole(order, epoch).tolist())
        elif kind == "pad":
            assert sorted(counts) == list(range(n))
        else:
            left = order.left_out(epoch).tolist()  # type: ignore[attr-defined]
            assert max(counts.values(), default=1) == 1 and sorted([*counts, *left]) == list(range(n))


def test_a_loop_with_another_step_size_than_its_order() -> None:
    order = Bucketed([0, 0, 1, 1], 2, 1)
    for batch, world_size in ((1, 1), (2, 2)):
        message = f"made for 1 ranks and batches of up to 2 samples, but this loop has {world_size} and {batch}"
        with pytest.raises(ValueError, match=message):
            make_schedule(order, 0, batch, 0, world_size, "exact")
    with pytest.raises(ValueError, match="no step of epoch 0 begins at the cursor 1"):
        make_schedule(order, 0, 2, 0, 1, "exact").steps(1)


SPECS = ["", "0:2*1;3:1*1", "1:2*1", "0:2*1;0:1*1", "0:0*1", "0:2*0", "0:2,2,2*1", "0:2", f"0:{1 << 31}*1", 7, None]


@pytest.mark.parametrize("steps", SPECS)
def test_forged_specs(steps: Any) -> None:
    order = Bucketed([0, 0, 1, 1], 2, 1)
    with pytest.raises(ResumeError, match=r"cannot continue with|no step of this order ends"):
        order.resumed({**order.spec(), "steps": steps}, 0, 4)


# --- shapes -------------------------------------------------------------------------------------------------------
def test_shapes_of_equal_area() -> None:
    buckets = AspectBuckets.of_area(512 * 512)
    assert buckets.shapes == ((640, 384), (576, 448), (512, 512), (448, 576), (384, 640))
    assert all(height * width <= 512 * 512 for height, width in buckets.shapes)
    assert AspectBuckets.of_area(64 * 64).shapes == ((64, 64),)
    assert len(AspectBuckets.of_area(1024 * 1024, max_aspect=4)) > 15
    sides = [(512, 512), (511, 512), (3000, 100), (100, 3000), (0, 0), (448, 576)]
    assert buckets.of_sides(*zip(*sides, strict=True)).tolist() == [2, 2, 0, 4, 2, 3]
    assert buckets.batch_sizes(4 * 512 * 512, multiple=2) == (4, 4, 4, 4, 4)
    assert buckets.batch_sizes(1) == (1,) * 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AspectBuckets(()), "one or more"),
        (lambda: AspectBuckets(((64, 0),)), "one or more"),
        (lambda: AspectBuckets(((64, 64), (32, 32))), "the same proportions"),
        (lambda: AspectBuckets.of_area(100), "at least multiple x multiple"),
        (lambda: AspectBuckets.of_area(1 << 16, max_aspect=0.5), "max_aspect of at least 1"),
        (lambda: AspectBuckets.of_area(1 << 16).batch_sizes(0), "are 1 or more"),
        (lambda: ResizeToBucket([(8, 8)], crop="left"), "crop is one of center, random"),  # type: ignore[arg-type]
    ],
)
def test_impossible_shapes(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


SHAPES = AspectBuckets(((48, 24), (32, 32), (24, 48)))


@pytest.fixture(scope="module")
def mixed_shapes(tmp_path_factory: pytest.TempPathFactory, pack: Callable[..., Path]) -> Path:
    sizes = [(64, 64), (40, 90), (90, 40), (20, 30), (100, 77)]
    root = tmp_path_factory.mktemp("shapes") / "images"
    files = {f"a/{i:02}.jpg": make_jpeg(i, sizes[i % 5]) for i in range(29)}
    turned = {f"a/turned{i}.jpg": turned_image(5 + 8 * i, (90, 40)) for i in range(3)}  # a quarter
    return pack(tree_of(root, {**files, **turned}))


@pytest.mark.parametrize("crop", ["center", "random"])
def test_a_loader_makes_each_batch_of_one_shape(mixed_shapes: Path, crop: Any) -> None:
    with readers.open(mixed_shapes) as reader:
        of = SHAPES.of(reader.info)
        assert Counter(of.tolist()) == {0: 6 + 6 + 3, 1: 6 + 5, 2: 6}  # (20, 30) is nearer to 1:2
        ops = [ResizeToBucket(SHAPES, crop), RandomHorizontalFlip()]
        ranks = [
            ImageLoader(
                reader, 4, order=Bucketed(of, 4, 2, seed=3), augment=ops, ranks=Ranks(rank, 2),
                fields=("image", "index"), threads=2,
            )
            for rank in range(2)
        ]  # fmt: skip
        seen: list[int] = []
        for step, batches in enumerate(zip(*ranks, strict=True)):
            shapes = {tuple(images.shape[1:]) for images, _ in batches}
            bucket = int(ranks[0].order.step_buckets(0)[step])  # type: ignore[attr-defined]
            assert shapes == {(3, *SHAPES.shapes[bucket])}
            assert {len(images) for images, _ in batches} == {4}
            seen += [row for _, rows in batches for row in rows.tolist()]
        assert {*seen} == {*range(32)}


def test_a_bad_sample_is_replaced_by_another_of_its_shape(tmp_path: Path) -> None:
    files = {f"a/{i:02}.jpg": make_jpeg(i, [(64, 64), (90, 40)][i % 2]) for i in range(24)}
    root = tree_of(tmp_path / "images", files)
    damaged = root / "a" / "03.jpg"
    damaged.write_bytes(damaged.read_bytes()[:-60])
    with readers.open_folder(root) as reader:
        order = Bucketed(SHAPES.of(reader.info), 4, 1, seed=3)
        options: Any = {"fields": ("image", "index"), "on_error": "substitute", "threads": 1}
        loader = ImageLoader(reader, 4, order=order, augment=[ResizeToBucket(SHAPES)], **options)
        with pytest.warns(UserWarning, match="bad samples were replaced"):
            rows = [row for images, rows in loader for row in rows.tolist() if len(images) == 4]
    # Without a header, sample 3 counts as a square; with the other 12 squares it fills 4 steps.
    assert len(rows) == 28 and {*rows} == {*range(24)} - {3} and all(bad.index == 3 for bad in loader.bad_samples)
