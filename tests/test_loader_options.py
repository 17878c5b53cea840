"""Options by subject, and the names that they had as arguments of their own one release ago."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import readers
from readers import Decode, FieldOptions, Ranks, Threads, Views
from readers.augment import CenterCrop, RandomHorizontalFlip
from readers.dali import DaliLoader, Source
from readers.dali import external_source as dali_source
from readers.loader import ImageLoader
from readers.rocal import external_source as rocal_source
from readers.torch import EpochBatchSampler, EpochSampler, ImageDataset, ImageStream

OPS = [CenterCrop(32), RandomHorizontalFlip()]
PUBLIC = [ImageLoader, DaliLoader, Source, dali_source, rocal_source, ImageDataset, ImageStream]
OLD_AND_NEW: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ranks": ({"rank": 1, "world_size": 2, "tail": "pad"}, {"ranks": Ranks(1, 2, "pad")}),
    "decode": (
        {"dtype": torch.float16, "layout": "NHWC", "exact_colours": True},
        {"decode": Decode(dtype=torch.float16, layout="NHWC", exact_colours=True)},
    ),
    "threads": ({"threads": 1, "prefetch": 2, "pin_memory": False}, {"threads": Threads(1, 2, False)}),
    "views": ({"augment": OPS, "views": 2}, {"augment": Views(OPS, 2)}),
    "views of ops each": ({"views": [OPS, OPS[:1]]}, {"augment": Views([OPS, OPS[:1]])}),
    "fields": (
        {"fields": ("image", "index"), "field_options": FieldOptions(mask_fill=7)},
        {"fields": FieldOptions(names=("image", "index"), mask_fill=7)},
    ),
}


@pytest.fixture(scope="module")
def reader(photos: Path, pack: Callable[..., Path]) -> Iterator[readers.Reader]:
    with readers.open(pack(photos, samples_per_shard=20)) as opened:
        yield opened


def batches(reader: readers.Reader, options: dict[str, Any]) -> list[Any]:
    return [
        list(batch) for batch in ImageLoader(reader, 8, **({} if "views" in options else {"augment": OPS}) | options)
    ]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    return len(one) == len(other) and all(map(same, one, other))


@pytest.mark.parametrize("case", OLD_AND_NEW)
def test_old_names_warn_and_mean_the_same(reader: readers.Reader, case: str) -> None:
    old, new = OLD_AND_NEW[case]
    with pytest.warns(DeprecationWarning, match="= is deprecated: write  ") as warned:
        before = batches(reader, old)
    assert {Path(one.filename).name for one in warned} == {Path(__file__).name}
    assert same(before, batches(reader, new))


def test_old_names_and_new_ones_mix(reader: readers.Reader) -> None:
    with pytest.warns(DeprecationWarning):
        loader = ImageLoader(reader, 8, augment=OPS, ranks=Ranks(0, 2), tail="exact")
    assert same(list(loader), batches(reader, {"ranks": Ranks(0, 2, "exact")}))


def test_an_option_of_one_value_is_no_option(reader: readers.Reader) -> None:
    with pytest.warns(DeprecationWarning, match="prefetch= is deprecated: leave it out"):
        rocal_source(reader, 4, prefetch=2).close()
    with pytest.raises(ValueError, match="prefetch is always 2"):
        rocal_source(reader, 4, prefetch=3)


@pytest.mark.parametrize("public", [*PUBLIC, EpochSampler, EpochBatchSampler], ids=lambda one: one.__name__)
def test_public_names_have_twelve_parameters_at_most(public: Any) -> None:
    assert len(inspect.signature(public).parameters) <= 12


def test_a_name_that_never_was_is_refused(reader: readers.Reader) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        ImageLoader(reader, 8, colour="RGB")  # type: ignore[call-arg]


@pytest.mark.parametrize("options", [{"ops": OPS, "count": 0}, {"ops": [OPS, OPS], "count": 2}, {"ops": [*OPS, OPS]}])
def test_views_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"count of views|not both"):
        Views(**options)
