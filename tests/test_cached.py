"""Cached readers: readers like any other, that read each kept sample once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cached_sources import SlowReader, images

import readers
from cache.errors import BadSampleError, DamagedSampleError, UnknownNameError
from readers.augment import CenterCrop, Resize
from readers.caching.budget import EVERYTHING, Subset
from readers.decode import decode_image
from readers.order import NodeLocal, Shuffled

KEEPS = ("encoded", "recoded:16@80", "decoded:16")
INDICES = [30, 2, 2, -1, 17, 0]


@pytest.fixture(params=("shards", "folder", "selection"))
def base(request: pytest.FixtureRequest, packed: Path, tree: Path) -> Iterator[Any]:
    """36 samples, 12 in each of cat, dog, owl."""
    opened: Any = readers.open_folder(tree, "train") if request.param == "folder" else readers.open(packed, "train")
    with opened:
        yield opened.select(indices=range(36)) if request.param == "selection" else opened


# --- a reader like any other --------------------------------------------------------------------------------------


def test_fingerprints(base: Any, place: dict[str, Any]) -> None:
    """Encoded bytes are the same set; other forms are another one, each."""
    found = [readers.cached(base, keep=keep, **place).fingerprint for keep in (*KEEPS, "recoded:16@81", "decoded")]
    assert found[0] == base.fingerprint and len(set(found)) == 5
    assert readers.cached(base, 0.5, "decoded:16", **place).fingerprint == found[2]


# --- what is read from the source ---------------------------------------------------------------------------------
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_the_hit_rate_is_the_share(base: Any, keep: str, share: float, place: dict[str, Any]) -> None:
    slow = SlowReader(base)
    reader = readers.cached(slow, share, keep, **place)
    order = Shuffled(36, seed=3)
    kept = round(share * 36)
    slow.reads.clear()
    for epoch in range(3):
        slow.reads.clear()
        for start in range(0, 36, 8):
            reader.read_many(order.indices(epoch, np.arange(start, min(start + 8, 36))))
        assert len(slow.reads) == (36 if epoch == 0 else 36 - kept)
    stats = reader.stats()
    assert (stats.samples, stats.kept, stats.present) == (36, kept, kept)
    assert (stats.hits, stats.misses, stats.passed) == (2 * kept, kept, 3 * (36 - kept))
    assert stats.hit_rate == pytest.approx(stats.hits / 108) and stats.filled == 1
    assert stats.to_dict()["hit_rate"] == stats.hit_rate and stats.used_bytes <= stats.capacity_bytes


def test_bytes_are_a_limit(base: Any, place: dict[str, Any]) -> None:
    limit = 16_000
    reader = readers.cached(base, limit, **place)
    images(reader)
    stats = reader.stats()
    assert stats.capacity_bytes <= limit and 0 < stats.present == stats.kept < 36 and stats.passed == 36 - stats.kept
    more = readers.cached(base, "18kB", **{**place, "job": "more"})
    assert set(range(36)) > kept_of(more) > kept_of(reader), "a larger cache keeps what a smaller one does"
    assert kept_of(readers.cached(base, "1GiB", **{**place, "job": "most"})) == set(range(36))
    assert readers.cached(base, "10", **{**place, "job": "least"}).stats().kept == 0


def kept_of(reader: Any) -> set[int]:
    return {i for i in range(36) if reader.kept.keeps(i)}


def test_who_comes_later_keeps_the_same(base: Any, place: dict[str, Any]) -> None:
    """Whatever it asks for: the segment that is there decides."""
    slow = SlowReader(base)
    first = readers.cached(slow, 0.5, **place)
    second = readers.cached(slow, 0.9, **place)
    assert kept_of(first) == kept_of(second) and len(kept_of(first)) == 18
    images(first)
    slow.reads.clear()
    images(second)
    assert sorted(slow.reads) == sorted(set(range(36)) - kept_of(first))


def test_no_room_passes_everything_through(base: Any, place: dict[str, Any], no_room: None) -> None:
    with pytest.warns(UserWarning, match=r"no room for a cache of [\d,]+ bytes in .*packer cache ls"):
        reader = readers.cached(base, "1GiB", "decoded:16", **place)
    assert images(reader) == [bytes(reader.keep.convert(image)) for image in images(base)]
    assert reader.stats().kept == 0 and reader.prefill() == 0


def test_a_node_keeps_its_part(base: Any, place: dict[str, Any]) -> None:
    parts = [readers.cached(base, partition=(node, 3), **place) for node in range(3)]
    order = NodeLocal(36, nodes=3)
    for node, reader in enumerate(parts):
        assert kept_of(reader) == set(order.local_part(node))
        assert images(reader) == images(base) and reader.stats().present == 12
    assert sum(reader.stats().capacity_bytes for reader in parts) < 2 * int(base.sizes().sum()) + 3 * 8192


def test_only_some_fields(base: Any, place: dict[str, Any]) -> None:
    reader = readers.cached(base, fields=["image"], **place)
    images(reader)
    assert reader.stats().present == 36
    with pytest.raises(UnknownNameError, match="no field 'mask'"):
        readers.cached(base, fields=["mask"], **place)


def test_after_closing_reads_go_to_the_source(base: Any, place: dict[str, Any]) -> None:
    expected = images(base)
    with readers.cached(base, **place) as reader:
        held = reader.read_many(range(36))
        held = reader.read_many(range(36))
    assert [bytes(data) for data in held] == expected, "views outlive the reader"
    assert images(reader) == expected and reader.stats().kept == 0
    reader.close()


# --- wrong bytes --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("check", ["first", "always"])
def test_wrong_bytes_are_read_again(base: Any, keep: str, check: Any, place: dict[str, Any], spoil: Any) -> None:
    reader = readers.cached(base, keep=keep, check=check, **place)
    expected = images(reader)
    spoil(reader, 7)
    assert images(reader) == expected, "the wrong one came from the source"
    assert reader.stats().dropped == 1 and images(reader) == expected
    spoil(reader, 7)
    assert (images(reader) == expected) == (check == "always")


def test_bad_samples_are_nobodys_business_but_the_readers(base: Any, place: dict[str, Any]) -> None:
    slow = SlowReader(base, broken={5: DamagedSampleError("broken"), 6: BadSampleError("bad")})
    reader = readers.cached(slow, **place)
    assert reader.prefill(threads=2) == 36 and reader.stats().present == 34
    for index, kind in ((5, DamagedSampleError), (6, BadSampleError)):
        with pytest.raises(kind):
            reader.read_many([index, 1])
        assert bytes(reader.read(index + 2)) == bytes(base.read(index + 2))
    assert reader.image_info([4, 5]).height.tolist() == [24, 24 if base.table.has_headers else 0]


# --- arguments ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 1.5}, "a share is from 0 to 1, not 1.5"),
        ({"capacity": -1}, "capacity is -1 bytes"),
        ({"capacity": "much"}, "'much' is not a valid size"),
        ({"capacity": None}, "a share from 0 to 1, not None"),
        ({"keep": "encode"}, "keep is encoded, recoded:SIDE"),
        ({"keep": "recoded:0"}, "a short side of 1 to 65535"),
        ({"check": "often"}, "check is one of never, first, always"),
        ({"partition": (3, 3)}, r"partition is \(node, nodes\)"),
        ({"fields": []}, "name at least one field"),
    ],
)
def test_arguments_that_mean_nothing(base: Any, options: dict[str, Any], message: str, place: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        readers.cached(base, **options, **place)


def test_percent_is_a_share(base: Any, place: dict[str, Any]) -> None:
    assert readers.cached(base, "25%", **place).stats().kept == 9


# --- the choice ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("samples", [0, 1, 37, 5000])
@pytest.mark.parametrize("listed", [False, True])
def test_the_choice_fits_and_is_as_large_as_it_can_be(samples: int, listed: bool) -> None:
    rows = np.arange(3, 3 + samples) if listed else range(3, 3 + samples)
    sizes = np.random.default_rng(1).integers(0, 1000, samples)
    for limit in (0, 1, int(sizes.sum()) // 3, max(0, int(sizes.sum()) - 1), int(sizes.sum())):
        choice = Subset(rows).limited(limit, lambda run: sizes[run - 3])
        mask = choice.mask(np.arange(samples + 10))
        assert mask.tolist() == [choice.keeps(i) for i in range(samples + 10)]
        total = int(sizes[mask[3 : 3 + samples]].sum())
        assert total == choice.total(lambda run: sizes[run - 3]) <= limit or choice.threshold == EVERYTHING
        if choice.threshold != EVERYTHING:
            larger = Subset(rows, choice.threshold + 1).total(lambda run: sizes[run - 3])
            assert larger > limit, "the next one would not have fitted"


def test_the_choice_is_frozen() -> None:
    """Jobs of other versions share caches with this one."""
    kept = np.concatenate(list(Subset(range(1000)).limited(10, lambda run: run * 0 + 1).kept())).tolist()
    assert kept == [2, 100, 145, 148, 350, 532, 601, 646, 686, 762]


def test_pixels_after_the_first_ops(base: Any, place: dict[str, Any]) -> None:
    reader = readers.cached(base, keep=readers.Decoded([Resize(20), CenterCrop((8, 12))]), **place)
    assert {decode_image(data).shape for data in reader.read_many(range(36))} == {(8, 12, 3)}
