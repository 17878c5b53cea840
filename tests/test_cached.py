"""Cached readers: each kept sample is read once, and rewritten files are noticed."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cached_sources import SlowReader, images
from conftest import make_jpeg

import readers
from cache.errors import BadSampleError, DamagedSampleError, UnknownNameError
from readers.augment import CenterCrop, Resize
from readers.caching.store import EVERYTHING, Subset
from readers.decode import decode_image
from readers.order import NodeLocal, Shuffled

KEEPS = ("encoded", "recoded:16@80", "decoded:16")
SAMPLES = 4  # of a folder that is rewritten


@pytest.fixture(params=("shards", "folder"))
def base(request: pytest.FixtureRequest, packed: Path, tree: Path) -> Iterator[Any]:
    """36 samples, 12 in each of cat, dog, owl."""
    with readers.open_folder(tree, "train") if request.param == "folder" else readers.open(packed, "train") as opened:
        yield opened


def kept_samples(reader: Any) -> set[int]:
    return {i for i in range(36) if reader.kept.keeps(i)}


def test_fingerprints(base: Any, place: dict[str, Any]) -> None:
    """Encoded bytes are the same set; other forms are another one, each."""
    found = [readers.cached(base, keep=keep, **place).fingerprint for keep in (*KEEPS, "recoded:16@81", "decoded")]
    assert found[0] == base.fingerprint and len(set(found)) == 5
    assert readers.cached(base, 0.5, "decoded:16", **place).fingerprint == found[2]


# --- reads of the source ---------------------------------------------------------------------------------
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize(("share", "kept"), [("25%", 9), (0.5, 18), (1.0, 36)])
def test_the_hit_rate_is_the_share(base: Any, keep: str, share: Any, kept: int, place: dict[str, Any]) -> None:
    slow = SlowReader(base)
    reader = readers.cached(slow, share, keep, **place)
    order = Shuffled(36, seed=3)
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
    assert set(range(36)) > kept_samples(more) > kept_samples(reader), "a larger cache keeps what a smaller one does"
    assert kept_samples(readers.cached(base, "1GiB", **{**place, "job": "most"})) == set(range(36))
    with pytest.warns(UserWarning, match=r"of 10 bytes keeps no sample.*one takes up to (\d,\d+) bytes, all 36 take"):
        assert readers.cached(base, "10", **{**place, "job": "least"}).stats().kept == 0


def test_later_readers_keep_the_same_samples(base: Any, place: dict[str, Any]) -> None:
    """With any capacity: the existing segment decides."""
    slow = SlowReader(base)
    first = readers.cached(slow, 0.5, **place)
    second = readers.cached(slow, 0.9, **place)
    assert kept_samples(first) == kept_samples(second) and len(kept_samples(first)) == 18
    images(first)
    slow.reads.clear()
    images(second)
    assert sorted(slow.reads) == sorted(set(range(36)) - kept_samples(first))


def test_no_room_passes_everything_through(base: Any, place: dict[str, Any], no_room: None) -> None:
    with pytest.warns(UserWarning, match=r"no room for a cache of [\d,]+ bytes in .*packer cache ls"):
        reader = readers.cached(base, "1GiB", "decoded:16", **place)
    assert images(reader) == [bytes(reader.keep.convert(image)) for image in images(base)]
    assert reader.stats().kept == 0 and reader.prefill() == 0


def test_a_node_keeps_its_part(base: Any, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By its number, or as the launcher numbers the nodes."""
    for name, value in {"RANK": 3, "SIZE": 6, "LOCAL_RANK": 1, "LOCAL_SIZE": 2}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    with readers.cached(base, partition="node", **place) as second:
        assert kept_samples(second) == set(NodeLocal(36, nodes=3).local_part(1))
    with pytest.raises(ValueError, match=r"partition is 'node', or \(node, nodes\) .* not 'rank'"):
        readers.cached(base, partition="rank", **place)
    parts = [readers.cached(base, partition=(node, 3), **place) for node in range(3)]
    order = NodeLocal(36, nodes=3)
    for node, reader in enumerate(parts):
        assert kept_samples(reader) == set(order.local_part(node))
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
        held = [reader.read_many(range(36)) for _ in range(2)][1]
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


def test_bad_samples_are_errors_of_their_readers_only(base: Any, place: dict[str, Any]) -> None:
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
        ({"partition": (3, 3)}, r"partition is 'node', or \(node, nodes\)"),
        ({"fields": []}, "name at least one field"),
    ],
)
def test_arguments_that_are_not_valid(base: Any, options: dict[str, Any], message: str, place: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        readers.cached(base, **options, **place)


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


# --- files that are rewritten under their names ---
def fill(folder: Path, seed: int) -> list[bytes]:
    """JPEGs with the same names and sizes for every seed, and the same old times."""
    folder.mkdir(exist_ok=True)
    payloads = [make_jpeg(seed + number).ljust(4000, b"\0") for number in range(SAMPLES)]
    for number, payload in enumerate(payloads):
        (folder / f"{number}.jpg").write_bytes(payload)
        os.utime(folder / f"{number}.jpg", ns=(10**18, 10**18))
    return payloads


def opened(folder: Path, place: dict[str, Any], **options: Any) -> Any:
    return readers.cached(readers.open_folder(folder), **options, **place)


def test_folders_of_the_same_names_and_sizes_share_nothing(tmp_path: Path, place: dict[str, Any]) -> None:
    left, right = fill(tmp_path / "left", 1), fill(tmp_path / "right", 100)
    with opened(tmp_path / "left", place) as first, opened(tmp_path / "right", place) as second:
        assert images(first) == images(first) == left
        assert images(second) == images(second) == right, "pixels of the other folder"


def test_a_rewritten_folder_has_another_cache(tmp_path: Path, place: dict[str, Any]) -> None:
    """Even where the new files have the sizes and modification times of the old ones."""
    fill(tmp_path / "folder", 1)
    with opened(tmp_path / "folder", place) as before:
        images(before)
        now = fill(tmp_path / "folder", 100)
        with opened(tmp_path / "folder", place) as after:
            assert images(after) == images(after) == now, "pixels of files that were overwritten"


def test_one_folder_by_two_paths_is_one_cache(tmp_path: Path, place: dict[str, Any]) -> None:
    expected = fill(tmp_path / "folder", 1)
    (tmp_path / "link").symlink_to("folder")
    with opened(tmp_path / "folder", place) as first, opened(tmp_path / "link", place) as second:
        assert images(first) == images(second) == expected
        assert second.stats().hits == SAMPLES


@pytest.mark.parametrize("keep", ["encoded", "decoded:16"])
@pytest.mark.parametrize("over", ["folder", "selection", "pickled"])
def test_check_always_sees_a_rewritten_file(tmp_path: Path, place: dict[str, Any], keep: str, over: str) -> None:
    fill(tmp_path / "folder", 1)
    base: Any = readers.open_folder(tmp_path / "folder")
    base = base.select(indices=range(SAMPLES)) if over == "selection" else base
    with readers.cached(base, keep=keep, check="always", **place) as reader:
        seen = pickle.loads(pickle.dumps(reader)) if over == "pickled" else reader
        images(seen)
        expected = [bytes(seen.keep.convert(image)) for image in fill(tmp_path / "folder", 100)]
        for _ in range(3):
            assert images(seen) == expected and bytes(seen.read(2)) == expected[2]
        assert seen.stats().present == 0, "files that differ from the listing are not kept"


def test_files_that_changed_since_the_listing_are_never_stored(tmp_path: Path, place: dict[str, Any]) -> None:
    """Or the next one to list the old files again, restored with their times, would get the new ones' pixels."""
    old = fill(tmp_path / "folder", 1)
    with opened(tmp_path / "folder", place) as reader:
        shutil.copytree(tmp_path / "folder", tmp_path / "backup")
        new = fill(tmp_path / "folder", 100)
        assert reader.prefill(threads=1) == SAMPLES and reader.stats().present == 0
        assert images(reader) == new and reader.stats().present == 0
        assert reader.stats().passed == SAMPLES and old != new
