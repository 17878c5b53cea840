"""Duplicates: identical bytes and similar images, in all splits; which duplicate is kept."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import tree_of
from PIL import Image
from set_cases import content, convert, wrong

import packer
import readers
from packer.sets.duplicates import BITS, difference_hash, near_pairs
from packer.sets.pieces import LabelChange
from packer.testing.samples import make_image


def encoded_again(data: bytes, size: tuple[int, int], **options: object) -> bytes:
    out = io.BytesIO()
    Image.open(io.BytesIO(data)).resize(size, Image.Resampling.LANCZOS).save(out, **options)
    return out.getvalue()


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Three pictures: one twice in train and once in val, one in four encodings, one alone; and two plain ones."""
    first, second, third = (make_image(seed, (192, 144), quality=95) for seed in (1, 2, 3))
    files = {
        "train/a/first.jpg": first,
        "train/a/same.jpg": first,
        "train/b/second.jpg": second,
        "train/b/small.jpg": encoded_again(second, (128, 96), format="JPEG", quality=70),
        "train/b/second.png": encoded_again(second, (192, 144), format="PNG"),
        "train/c/third.jpg": third,
        "train/c/black.png": make_plain((0, 0, 0)),
        "train/c/white.png": make_plain((255, 255, 255)),
        "val/a/again.jpg": first,
        "val/b/large.webp": encoded_again(second, (384, 288), format="WEBP", quality=80),
    }
    return convert(tree_of(tmp_path / "images", files), tmp_path / "set").output


def make_plain(colour: tuple[int, int, int]) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (96, 96), colour).save(out, "PNG")
    return out.getvalue()


def groups_of(result: packer.DedupResult) -> list[dict[str, bool]]:
    return [{f"{member.split}/{member.key}": member.kept for member in group} for group in result.groups]


SAME = {"train/a/first": True, "train/a/same": False, "val/a/again": False}
ALIKE = ("train/b/second.jpg", "train/b/second.png", "train/b/small", "val/b/large")


def test_the_same_bytes_are_found_in_all_splits(packed: Path, tmp_path: Path) -> None:
    before = content(packed)
    planned = packer.dedup(packed, dry_run=True)
    assert groups_of(planned) == [SAME] and planned.saved is not None
    assert (planned.across_splits, planned.across_classes) == (1, 0)
    packer.relabel(packed, labels=LabelChange.of({"a/same": "b"}), output=tmp_path / "other")
    assert packer.dedup(tmp_path / "other", dry_run=True).across_classes == 1
    assert content(packed) == before
    result = packer.dedup(packed, tmp_path / "out")
    assert (result.duplicates, result.unread) == (2, 0) and content(packed) == before
    left = {key: sample for key, sample in before.items() if SAME.get(key, True)}
    assert content(tmp_path / "out") == left and wrong(tmp_path / "out") == []
    assert packer.dedup(tmp_path / "out").saved is None, "duplicates are left"
    copy = packer.dedup(tmp_path / "out", tmp_path / "copy")  # the output is written all the same
    assert copy.saved is not None and copy.saved.linked and copy.duplicates == 0
    assert content(tmp_path / "copy") == left and wrong(tmp_path / "copy") == []


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, ["train/a/first", "train/b/second.jpg"]),
        ({"keep": "largest", "workers": 2}, ["train/a/first", "val/b/large"]),
        ({"prefer": "val"}, ["val/a/again", "val/b/large"]),
        ({"prefer": "train", "keep": "largest"}, ["train/a/first", "train/b/second.png"]),
    ],
)
def test_similar_images(packed: Path, options: dict[str, Any], kept: list[str]) -> None:
    result = packer.dedup(packed, near=8, **{"workers": 1, **options})
    groups = groups_of(result)
    assert [set(group) for group in groups] == [set(SAME), set(ALIKE)]
    assert [key for group in groups for key, stays in group.items() if stays] == kept
    assert sorted(content(packed)) == sorted([*kept, "train/c/third", "train/c/black", "train/c/white"])


def test_equal_checksums_are_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"train/a/{seed}.png": make_image(seed, (16, 16), format="BMP") for seed in range(3)}
    convert(tree_of(tmp_path / "images", files), tmp_path / "set")
    column = readers.Table.field_column
    monkeypatch.setattr(
        readers.Table,
        "field_column",
        lambda table, field, name: column(table, field, name) * (name != "crc32c"),
    )
    assert packer.dedup(tmp_path / "set", dry_run=True).groups == ()


def test_near_pairs_are_all_pairs_within_the_threshold() -> None:
    random = np.random.default_rng(0)
    hashes = random.integers(0, 1 << 63, (40, 2), np.uint64)
    for number in range(20, 40):  # copies of earlier hashes with some bits flipped
        hashes[number] = hashes[number - 20]
        for bit in random.choice(BITS, number - 20, replace=False):
            hashes[number, bit // 64] ^= np.uint64(1) << np.uint64(bit % 64)
    for threshold in (0, 5, 20):
        expected = {
            (a, b)
            for a, b in itertools.combinations(range(40), 2)
            if sum(bin(int(x)).count("1") for x in hashes[a] ^ hashes[b]) <= threshold
        }
        pairs = {tuple(pair) for block in near_pairs(hashes, threshold) for pair in block.tolist()}
        assert pairs == expected and len(expected) >= threshold


def test_the_input_of_a_hash() -> None:
    image = make_image(5, (200, 150), quality=95)
    own = difference_hash(image)
    assert own is not None and difference_hash(make_plain((90, 90, 90))) is None
    for other, most in ((encoded_again(image, (100, 75), format="JPEG"), 8), (make_image(6, (200, 150)), BITS)):
        hashed = difference_hash(other)
        assert hashed is not None
        distance = sum(bin(int(x)).count("1") for x in own ^ hashed)
        assert (distance <= most) and (most < BITS or distance > 30)
    tiny = difference_hash(make_image(7, (8, 4)))
    assert tiny is not None and tiny.shape == (2,)


def test_bad_arguments(packed: Path) -> None:
    for options, message in (
        ({"near": 21}, "near is 21, expected 0 to 20"),
        ({"keep": "last"}, "keep must be one of first, largest"),
        ({"prefer": "test"}, "no split 'test'; it has train, val"),
    ):
        with pytest.raises(ValueError, match=message):
            packer.dedup(packed, **options)
