"""Cached readers: each cached sample is read once, by any process; rewritten files are noticed; filling before and
ahead of training; which samples are compressed; without a usable cache, training continues uncached."""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cached_sources import SlowReader, SlowStore, images, pack_set
from conftest import make_jpeg
from loader_options import grouped
from namespaces import run_with_dev_shm
from PIL import Image

import readers
from cache import SharedByteCache, list_caches
from cache.errors import BadSampleError, CacheDirectoryError, DamagedSampleError, UnknownNameError
from cache.filesystem import cache_budget
from cache.stores import Buffer, Extents
from readers import Ranks
from readers.augment import CenterCrop, RandomHorizontalFlip, RandomResizedCrop, Resize
from readers.caching.form import compress as compressed
from readers.caching.form import compressed_share, decompress
from readers.caching.store import EVERYTHING, Subset
from readers.decode import decode_image
from readers.order import NodeLocal, Sequential, Shuffled

KEEPS = ("encoded", "recoded:16@80", "decoded:16")
SAMPLES = 4  # of a folder that is rewritten


@pytest.fixture(params=("shards", "folder"))
def base(request: pytest.FixtureRequest, packed: Path, tree: Path) -> Iterator[Any]:
    """36 samples, 12 in each of cat, dog, owl."""
    with readers.open_folder(tree, "train") if request.param == "folder" else readers.open(packed, "train") as opened:
        yield opened


@pytest.fixture
def shards(packed: Path) -> Iterator[Any]:
    with readers.open(packed, "train") as opened:
        yield opened


def kept_samples(reader: Any) -> set[int]:
    return {i for i in range(36) if reader.kept.keeps(i)}


# --- reads of the source --------------------------------------------------------------------------------------------
def test_fingerprints(base: Any, place: dict[str, Any]) -> None:
    """The encoded bytes of a set have one fingerprint, each decoded form another."""
    made = [readers.cached(base, keep=keep, **place).fingerprint for keep in (*KEEPS, "recoded:16@81", "decoded")]
    assert made[0] == base.fingerprint and len(set(made)) == 5
    assert readers.cached(base, 0.5, "decoded:16", **place).fingerprint == made[2]


@pytest.mark.parametrize(
    ("keep", "share", "kept"), [("encoded", "25%", 9), ("recoded:16@80", 0.5, 18), ("decoded:16", 1.0, 36)]
)
def test_the_hit_rate_equals_the_cached_share(
    base: Any, keep: str, share: Any, kept: int, place: dict[str, Any]
) -> None:
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


def test_the_capacity_is_a_limit(base: Any, place: dict[str, Any]) -> None:
    """The first reader that opens a cache sets the limit: later readers keep the same samples, with any capacity."""
    limit = 16_000
    reader = readers.cached(base, limit, fields=["image"], **place)
    images(reader)
    stats = reader.stats()
    assert stats.capacity_bytes <= limit and 0 < stats.present == stats.kept < 36 and stats.passed == 36 - stats.kept
    slow = SlowReader(base)
    again = readers.cached(slow, 0.9, fields=["image"], **place)
    slow.reads.clear()
    images(again)
    assert sorted(slow.reads) == sorted(set(range(36)) - kept_samples(reader)) and kept_samples(again) == kept_samples(
        reader
    )
    more = readers.cached(base, "18kB", **{**place, "job": "more"})
    assert set(range(36)) > kept_samples(more) > kept_samples(reader), "a larger cache lacks samples of a smaller one"
    assert kept_samples(readers.cached(base, "1GiB", **{**place, "job": "most"})) == set(range(36))
    with pytest.warns(UserWarning, match=r"of 10 bytes keeps no sample.*one takes up to (\d,\d+) bytes, all 36 take"):
        assert readers.cached(base, "10B", **{**place, "job": "least"}).stats().kept == 0


def test_a_node_caches_its_part(shards: Any, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The node is given by number, or numbered as the launcher does."""
    for name, value in {"RANK": 3, "SIZE": 6, "LOCAL_RANK": 1, "LOCAL_SIZE": 2}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    with readers.cached(shards, partition="node", **place) as second:
        assert kept_samples(second) == set(NodeLocal(36, nodes=3).local_part(1))
    with pytest.raises(ValueError, match=r"partition is 'node', or \(node, nodes\) .* not 'rank'"):
        readers.cached(shards, partition="rank", **place)
    parts = [readers.cached(shards, partition=(node, 3), **place) for node in range(3)]
    order = NodeLocal(36, nodes=3)
    for node, reader in enumerate(parts):
        assert kept_samples(reader) == set(order.local_part(node))
        assert images(reader) == images(shards) and reader.stats().present == 12
    assert sum(reader.stats().capacity_bytes for reader in parts) < 2 * int(shards.sizes().sum()) + 3 * 8192


def test_after_closing_reads_go_to_the_source(base: Any, place: dict[str, Any]) -> None:
    expected = images(base)
    with readers.cached(base, **place) as reader:
        views = [reader.read_many(range(36)) for _ in range(2)][1]
    assert [bytes(data) for data in views] == expected, "a view did not outlive the reader"
    assert images(reader) == expected and reader.stats().kept == 0
    reader.close()
    nothing = readers.cached(base, 0.0, **place)
    assert images(nothing) == expected and nothing.stats().capacity_bytes == 0


def test_a_second_epoch_of_a_loader_reads_nothing(base: Any, place: dict[str, Any]) -> None:
    """Headers, for which a folder has to read its files, are cached as well."""
    slow = SlowReader(base)
    with readers.cached(slow, **place) as reader:
        for epoch in range(3):
            slow.reads.clear()
            assert len(batches(reader)) == 4
            assert bool(slow.reads) == (epoch == 0)


# --- wrong bytes ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("keep", "check"),
    [("encoded", "first"), ("encoded", "always"), ("recoded:16@80", "first"), ("decoded:16", "always")],
)
def test_wrong_bytes_are_read_again(base: Any, keep: str, check: Any, place: dict[str, Any], spoil: Any) -> None:
    reader = readers.cached(base, keep=keep, check=check, **place)
    expected = images(reader)
    spoil(reader, 7)
    assert images(reader) == expected, "the wrong bytes came from the source"
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


# --- arguments, and the choice of cached samples --------------------------------------------------------------------
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
        ({"fields": ["mask"]}, "no field 'mask'"),
    ],
)
def test_arguments_that_are_not_valid(
    shards: Any, options: dict[str, Any], message: str, place: dict[str, Any]
) -> None:
    with pytest.raises((ValueError, UnknownNameError), match=message):
        readers.cached(shards, **options, **place)


@pytest.mark.parametrize(("samples", "listed"), [(0, False), (1, True), (37, False), (5000, True)])
def test_the_choice_fits_and_is_as_large_as_possible(samples: int, listed: bool) -> None:
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
            assert larger > limit, "the next sample would have fitted, too"


def test_the_choice_is_frozen() -> None:
    """Jobs of other versions share caches with this version."""
    kept = np.concatenate(list(Subset(range(1000)).limited(10, lambda run: run * 0 + 1).kept())).tolist()
    assert kept == [2, 100, 145, 148, 350, 532, 601, 646, 686, 762]


# --- pixels ---------------------------------------------------------------------------------------------------------
def test_cached_pixels_after_the_first_ops(shards: Any, place: dict[str, Any]) -> None:
    reader = readers.cached(shards, keep=readers.Decoded([Resize(20), CenterCrop((8, 12))]), **place)
    assert {decode_image(data).shape for data in reader.read_many(range(36))} == {(8, 12, 3)}


def test_cached_pixels_are_upright_and_shrunk(tmp_path: Path, place: dict[str, Any]) -> None:
    """Every orientation, and media types other than JPEG."""
    (tmp_path / "tree").mkdir()
    picture = Image.linear_gradient("L").resize((120, 90)).convert("RGB")
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        picture.save(tmp_path / f"tree/{orientation}.jpg", exif=exif, quality=95)
    for kind in ("png", "bmp", "webp", "gif", "tif"):
        picture.convert("L").save(tmp_path / f"tree/9{kind}.{kind}")
    plain = readers.open_folder(tmp_path / "tree")
    for keep in ("recoded:40@95", "decoded:40"):
        reader = readers.cached(plain, keep=keep, **place)
        for index in range(len(reader)):
            original, kept = decode_image(plain.read(index)), decode_image(reader.read(index))
            size = (53, 40) if original.shape[0] > original.shape[1] else (40, 53)
            assert kept.shape[:2] == size
            resized = Image.fromarray(np.ascontiguousarray(original)).resize(size[::-1], Image.Resampling.BILINEAR)
            assert np.abs(np.asarray(resized).astype(int) - kept).mean() < 4


def batches(reader: Any, epochs: int = 1, **options: Any) -> list[tuple[np.ndarray, list[int]]]:
    loader_module = pytest.importorskip("readers.loader")
    ops = options.pop("augment", [RandomResizedCrop(12), RandomHorizontalFlip()])
    loader = loader_module.ImageLoader(
        reader, 8, seed=4, **grouped({"augment": ops, "ranks": Ranks(rank=0, world_size=1), "threads": 2, **options})
    )
    return [(images.numpy().copy(), labels.tolist()) for _ in range(epochs) for images, labels in loader]


def test_batches_from_cached_encoded_bytes_are_the_same(shards: Any, place: dict[str, Any]) -> None:
    with readers.cached(shards, 0.5, **place) as reader:
        for (seen, labels), (pixels, numbers) in zip(batches(reader, 2), batches(shards, 2), strict=True):
            assert labels == numbers and np.array_equal(seen, pixels)
        assert reader.stats().hits > 0


def test_cached_pixels_equal_those_of_the_loader(tmp_path: Path, place: dict[str, Any]) -> None:
    """Within 2 of 255, also for images that are shrunk so much that chroma is decoded at reduced resolution."""
    (tmp_path / "tree" / "a").mkdir(parents=True)
    for seed, side in enumerate([140, 160, 180, 340]):
        pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "tree" / "a" / f"{seed}.jpg", quality=95)
    options: dict[str, Any] = {"tail": "exact", "shuffle": False}
    with readers.open_folder(tmp_path / "tree") as base:
        (expected, _), *_ = batches(base, augment=[Resize(64), CenterCrop(56)], **options)
        with readers.cached(base, keep="decoded:64", **place) as reader:
            (made, _), *_ = batches(reader, augment=[CenterCrop(56)], **options)
    worst = np.abs(made.astype(int) - expected).reshape(4, -1).max(1).tolist()
    assert max(worst) <= 2, f"differences by image: {worst}"


def test_a_token_belongs_to_one_form(shards: Any, place: dict[str, Any]) -> None:
    loader_module = pytest.importorskip("readers.loader")
    token = loader_module.ImageLoader(shards, 8, seed=4).state_dict()
    encoded, decoded = (readers.cached(shards, keep=keep, **place) for keep in ("encoded", "decoded"))
    loader_module.ImageLoader(encoded, 8, seed=4).load_state_dict(token)
    with pytest.raises(readers.ResumeError, match="the resume token is of the data set"):
        loader_module.ImageLoader(decoded, 8, seed=4).load_state_dict(token)
    encoded.close()
    decoded.close()


# --- rewritten files ------------------------------------------------------------------------------------------------
def fill(folder: Path, seed: int) -> list[bytes]:
    """JPEGs with the same names, sizes and old times for every seed."""
    folder.mkdir(exist_ok=True)
    payloads = [make_jpeg(seed + number).ljust(4000, b"\0") for number in range(SAMPLES)]
    for number, payload in enumerate(payloads):
        (folder / f"{number}.jpg").write_bytes(payload)
        os.utime(folder / f"{number}.jpg", ns=(10**18, 10**18))
    return payloads


def opened(folder: Path, place: dict[str, Any], **options: Any) -> Any:
    return readers.cached(readers.open_folder(folder), **options, **place)


def test_folders_share_only_identical_files(tmp_path: Path, place: dict[str, Any]) -> None:
    """Names, sizes and times equal those of another folder, or of the same folder before it was rewritten."""
    left, right = fill(tmp_path / "left", 1), fill(tmp_path / "right", 100)
    (tmp_path / "link").symlink_to("left")
    with opened(tmp_path / "left", place) as first, opened(tmp_path / "right", place) as second:
        assert images(first) == images(first) == left
        assert images(second) == images(second) == right, "pixels of the other folder"
        with opened(tmp_path / "link", place) as same:
            assert images(same) == left and same.stats().hits == 2 * SAMPLES
        now = fill(tmp_path / "left", 200)
        with opened(tmp_path / "left", place) as after:
            assert images(after) == images(after) == now, "pixels of files that were overwritten"


@pytest.mark.parametrize(("keep", "over"), [("encoded", "folder"), ("decoded:16", "selection"), ("encoded", "pickled")])
def test_check_always_detects_a_rewritten_file(tmp_path: Path, place: dict[str, Any], keep: str, over: str) -> None:
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
    """Otherwise the next reader that lists the restored old files with their times would get the pixels of the new
    ones."""
    old = fill(tmp_path / "folder", 1)
    with opened(tmp_path / "folder", place) as reader:
        shutil.copytree(tmp_path / "folder", tmp_path / "backup")
        new = fill(tmp_path / "folder", 100)
        assert reader.prefill(threads=1) == SAMPLES and reader.stats().present == 0
        assert images(reader) == new and reader.stats().present == 0
        assert reader.stats().passed == SAMPLES and old != new


# --- filling before and ahead of the readers ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("keep", "order", "threads"),
    [("encoded", None, 1), ("recoded:16", Shuffled(36, seed=2), 1), ("decoded:16", Shuffled(36, seed=2), 3)],
)
def test_prefill(shards: Any, keep: str, order: Any, threads: int, place: dict[str, Any]) -> None:
    slow = SlowReader(shards)
    reader = readers.cached(slow, 0.5, keep, **place)
    slow.reads.clear()
    seen: list[tuple[int, int]] = []
    assert reader.prefill(threads, order=order, progress=lambda *done: seen.append(done)) == 18
    kept = sorted(kept_samples(reader))
    assert sorted(slow.reads) == kept and seen[-1][0] == 18 and seen == sorted(seen)
    assert seen[-1][1] == sum(len(reader.read(i)) for i in kept)
    slow.reads.clear()
    assert reader.prefill(threads) == 18 and slow.reads == [], "samples were not all cached"
    reader.prefetch(range(36))
    assert slow.prefetched == [i for i in range(36) if i not in kept]
    expected = [bytes(reader.keep.convert(image)) for image in images(shards)]
    slow.reads.clear()
    assert images(reader) == expected and len(slow.reads) == 18
    with pytest.raises(ValueError, match="threads is at least 1, not 0"):
        reader.prefill(0)


class Raced(SlowStore):
    """A source that another process reads, too: before the first answer it has filled the first two blocks."""

    other: Any = None

    def read(self, extents: Extents) -> list[Buffer]:
        if self.other is not None:
            self.other.read_many(range(8))
            self.other = None
        return super().read(extents)


def test_a_process_skips_blocks_that_another_is_filling(
    shards: Any, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = itertools.chain([0], itertools.repeat(6))
    monkeypatch.setattr("random.randrange", lambda stop: next(starts))
    other = readers.cached(SlowReader(shards), 1.0, fields=["image"], **place)
    raced = Raced(shards.store)
    reader = readers.cached(readers.Reader(shards.table, raced), 1.0, fields=["image"], **place)
    raced.reads.clear()
    raced.other = other
    assert reader.prefill(1) == 36
    blocks = [number // 4 for number in raced.reads[::4]]
    assert blocks == [0, 6, 7, 8, 2, 3, 4, 5], "block 1 was cached before, and block 0 by the time of its answer"
    assert reader.stats().present == 36 and images(reader) == images(shards)


def test_ranks_share_the_filling(shards: Any, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank starts at a different block, and ahead of training each fills its share."""

    def as_rank(rank: int, count: int) -> tuple[Any, SlowReader]:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}.items():
            monkeypatch.setenv(name, str(value))
        slow = SlowReader(shards)
        reader = readers.cached(slow, **{**place, "job": f"rank{rank} of {count}"})
        slow.reads.clear()
        return reader, slow

    for rank, first in ((0, 0), (1, 8), (3, 24)):
        reader, slow = as_rank(rank, 4)
        assert reader.prefill(1) == 36 and slow.reads[0] == first
    filled = []
    for rank in range(2):
        reader, slow = as_rank(rank, 2)
        assert reader.fill_ahead(Sequential(36), epoch=0).wait(300)
        filled.append(slow.reads)
    assert sorted(filled[0] + filled[1]) == list(range(36)) and min(map(len, filled)) > 0


def test_fill_ahead_is_ahead_and_ends_with_its_reader(shards: Any, place: dict[str, Any]) -> None:
    order = Shuffled(36, seed=1)
    slow = SlowReader(shards)
    reader = readers.cached(slow, **place)
    slow.reads.clear()
    ahead = reader.fill_ahead(order, epoch=2, start=16)
    assert ahead.wait(300) and ahead.filled == 20 and not ahead.running
    assert sorted(slow.reads) == sorted(order.indices(2, np.arange(16, 36)).tolist())
    slow.reads.clear()
    reader.read_many(order.indices(2, np.arange(16, 36)))
    assert slow.reads == []
    slow.store.seconds = 0.05
    first = reader.fill_ahead(Sequential(36), epoch=0)
    second = reader.fill_ahead(Sequential(36), epoch=1)
    assert not first.running, "a second call stops the first"
    reader.close()
    assert not second.running
    assert not [thread for thread in threading.enumerate() if thread.name == "packer-fill-ahead"]


def test_filling_raises_the_error_of_the_source(shards: Any, place: dict[str, Any]) -> None:
    slow = SlowReader(shards)
    reader = readers.cached(slow, **place)
    slow.store.broken[7] = OSError("the disk has gone")
    with pytest.raises(OSError, match="the disk has gone"):
        reader.fill_ahead(Sequential(36), epoch=0).wait(300)
    with pytest.raises(OSError, match="the disk has gone"):
        reader.prefill(threads=2)


# --- compression ----------------------------------------------------------------------------------------------------
def bitmap(seed: int) -> bytes:
    out = io.BytesIO()
    Image.linear_gradient("L").resize((40, 30 + seed % 3)).rotate(seed).convert("RGB").save(out, "BMP")
    return out.getvalue()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bitmaps and some JPEGs, each with a caption."""
    root = tmp_path_factory.mktemp("mixed")
    rows = ["path\tlabel\tcaption"]
    for number in range(80):
        name = f"{number:03d}.{'jpg' if number % 8 == 0 else 'bmp'}"
        if number % 8:
            (root / name).write_bytes(bitmap(number))
        else:
            Image.linear_gradient("L").rotate(number).save(root / name, "JPEG")
        rows.append(f"{name}\t{number % 3}\tA photograph of object number {number}, taken from the usual distance")
    (root / "list.tsv").write_text("\n".join(rows) + "\n")
    return pack_set(root / "list.tsv", tmp_path_factory.mktemp("mixed-set") / "set")


@pytest.mark.parametrize("compress", [True, False])
def test_compression_round_trip(mixed: Path, compress: bool, place: dict[str, Any]) -> None:
    with readers.open(mixed) as base:
        assert set(base.fields) == {"image", "json"}
        reader = readers.cached(base, compress=compress, check="always", **place)
        assert list(reader.store.settings.packed) == (["image"] if compress else [])
        for field in base.fields:
            expected = [bytes(data) for data in base.read_many(range(80), field)]
            for _ in range(2):
                assert [bytes(data) for data in reader.read_many(range(80), field)] == expected
                assert [bytes(reader.read(i, field)) for i in range(80)] == expected
        assert [sample.fields.keys() for sample in reader] == [sample.fields.keys() for sample in base]
        stats = reader.stats()
        payload = sum(int(base.sizes(field).sum()) for field in base.fields)
        assert stats.present == 80 and stats.dropped == 0
        assert stats.put_bytes < 0.7 * payload if compress else stats.put_bytes >= payload
        assert stats.capacity_bytes < (0.9 if compress else 1.1) * payload + 30_000


def test_which_payloads_are_compressed() -> None:
    rng = np.random.default_rng(1)
    texts = [f'{{"caption": "a picture of {i}", "source": "somewhere", "width": {i * 7}}}'.encode() for i in range(200)]
    noise = [rng.bytes(500) for _ in range(50)]
    assert compressed_share([text * 20 for text in texts]) < 0.5
    assert compressed_share([bitmap(i) for i in range(20)]) < 0.9
    assert compressed_share(noise) == compressed_share([]) == 1
    assert compressed_share([b"\xff\xd8\xff" + bytes(1000)] * 20) == 1, "a JPEG was compressed again"


def test_frames_and_payloads_are_distinguished(mixed: Path, place: dict[str, Any], spoil: Any) -> None:
    """Also where a payload looks like a frame; a broken frame is read again from the source."""
    frame = bytes(compressed(b"a" * 500))
    for data in (b"", b"x", b"a" * 500, os.urandom(300), frame, frame[:7], b"\x28\xb5\x2f\xfd", bitmap(1)):
        assert bytes(decompress(memoryview(compressed(data)))) == data
    with pytest.raises(ValueError, match="a damaged zstd frame of 6 bytes"):
        decompress(frame[:6])
    with readers.open(mixed) as base:
        reader = readers.cached(base, **place)
        expected = images(reader)
        stored = reader.store.shared.get(reader.store.slots.first("image") + 3)
        assert bytes(stored[:4]) == b"\x28\xb5\x2f\xfd"
        spoil(reader, 3, at=4)
        assert images(reader) == expected and reader.stats().dropped == 1


# --- one cache, many processes --------------------------------------------------------------------------------------
def fill_and_report(reader: Any) -> tuple[list[bytes], int]:
    """Reports the samples that a process reads, and its number of reads from the source."""
    return images(reader), len(reader.store.source.reads)


@pytest.mark.parametrize(
    ("method", "keep", "memory"),
    [
        ("fork", "encoded", "named"),
        ("fork", "decoded:16", "without a name"),
        ("spawn", "encoded", "without a name"),
        ("spawn", "decoded:16", "named"),
    ],
)
def test_samples_read_by_one_process_are_cached_for_all(
    shards: Any, place: dict[str, Any], elsewhere: Callable[..., Any], method: str, keep: str, memory: str
) -> None:
    """Without a tmpfs, a process and its children share unnamed memory, which no other process can open."""
    options = place if memory == "named" else {"backend": "memfd"}
    reader = readers.cached(SlowReader(shards), 0.5, keep, **options)
    expected = [bytes(reader.keep.convert(image)) for image in images(shards)]
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("fork")) as pool:
        forked = lambda function, *arguments: pool.submit(function, *arguments).result(timeout=300)  # noqa: E731
        assert (forked if method == "fork" else elsewhere)(fill_and_report, reader)[0] == expected
        reader.store.source.reads.clear()
        assert images(reader) == expected
        assert len(reader.store.source.reads) == 18, "the other process has not filled the half with slots"
        reader.store.source.reads.clear()
        for made, reads in pool.map(fill_and_report, [reader] * 6, timeout=300):
            assert made == expected and reads % 18 == 0
    assert reader.stats().puts >= 18 and reader.stats().present == 18
    if memory != "named":
        with readers.cached(shards, 0.5, keep, backend="memfd") as other:
            assert other.stats().present == 0, "the memory differs"
            assert not any(os.getpid() in info.users for info in list_caches()), "the memory has a name"
    reader.close()
    assert list(place["directory"].glob("packer-cache*")) == []


def open_and_report(path: Path, place: dict[str, Any], capacity: Any) -> set[int]:
    with readers.open(path, "train") as base, readers.cached(base, capacity, **place) as reader:
        images(reader)
        return kept_samples(reader)


def test_jobs_keep_the_same_samples(packed: Path, place: dict[str, Any]) -> None:
    """Independent processes at the same time, with the same options and with others."""
    with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("fork")) as pool:
        tasks = [pool.submit(open_and_report, packed, {**place, "job": f"job{n % 2}"}, 0.5) for n in range(8)]
        kept = [task.result(timeout=300) for task in tasks]
    assert all(some == kept[0] for some in kept) and len(kept[0]) == 18
    assert list(place["directory"].glob("packer-cache*")) == []


def test_workers_of_a_dataloader(shards: Any, place: dict[str, Any], elsewhere: Callable[..., Any]) -> None:
    """Forked workers, and a reader as a spawned worker would get it."""
    torch_readers = pytest.importorskip("readers.torch")
    from torch.utils.data import DataLoader

    with readers.cached(shards, keep="decoded:16", **place) as reader:
        dataset = torch_readers.ImageDataset(reader, [CenterCrop(16)])
        sampler = torch_readers.EpochSampler(Shuffled(36, seed=1), reader, rank=0, world_size=1)
        loader = DataLoader(dataset, 6, sampler=sampler, num_workers=2, multiprocessing_context="fork")
        seen = sorted(label for _, labels in loader for label in labels.tolist())
        assert seen == sorted(reader.labels.tolist()) and reader.stats().present == 36
        assert sum(1 for _ in loader) == 6 and reader.stats().hits >= 36
        assert elsewhere(labels_of, dataset) == reader.labels.tolist()
    assert [name for name in os.listdir(place["directory"]) if name.startswith("packer-cache")] == []


def labels_of(dataset: Any) -> list[int]:
    return [dataset[i][1] for i in range(len(dataset))]


def test_a_pickle_is_small(shards: Any, place: dict[str, Any]) -> None:
    with readers.cached(shards, **place) as reader:
        expected = images(reader)
        text = pickle.dumps(reader)
        again = pickle.loads(text)
        assert len(text) < 10_000 and images(again) == expected and again.stats().hits == 36
        again.close()
        assert images(reader) == expected


def test_a_persistent_cache_outlives_its_job(shards: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next job reads from it, too."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with readers.cached(shards, persist=True, directory=tmp_path) as reader:
        assert reader.prefill() == 36
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    with readers.cached(shards, persist=True, directory=tmp_path) as reader:
        assert reader.stats().present == 36 and images(reader) == images(shards)
        assert reader.stats().misses == 0
    assert len(list(tmp_path.glob("packer-cache*"))) == 1


# --- where no cache can be opened as asked for ----------------------------------------------------------------------
OPEN: dict[str, Any] = {"fingerprint": "set", "kind": "encoded", "slots": 8, "capacity_bytes": 4096, "job": "test"}


def open_in(folder: Path) -> SharedByteCache:
    return SharedByteCache.open(**OPEN, directory=folder)


def take_name(path: Path) -> None:
    """Create the name first, as any user with write access to /dev/shm can."""
    if os.geteuid() == 0:
        path.touch(0o600)
        os.chown(path, 12345, -1)
    else:
        path.symlink_to("elsewhere")


def test_a_reader_works_uncached_where_all_names_are_in_use(shards: Any, tmp_path: Path) -> None:
    """With one warning; opening the cache itself raises an error of this project."""
    while True:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader = readers.cached(shards, "1MiB", directory=tmp_path, job="test")
        if not reader.stats().capacity_bytes:
            break
        (path,) = [path for path in tmp_path.iterdir() if path.lstat().st_uid == os.geteuid() and not path.is_symlink()]
        reader.close()
        take_name(path)
        assert len(list(tmp_path.iterdir())) < 10, "the search for a free name must end"
    with pytest.warns(UserWarning, match="so all samples are read without a cache") as warned:
        reader = readers.cached(shards, "1MiB", directory=tmp_path, job="test")
    assert len(warned) == 1 and images(reader) == images(shards) and reader.stats().kept == 0


@pytest.mark.parametrize("capacity", ["auto", "1MiB", 0.5])
def test_a_reader_works_uncached_without_the_directory(shards: Any, tmp_path: Path, capacity: Any) -> None:
    with pytest.warns(UserWarning, match="without a cache.*No such file.*another tmpfs") as warned:
        reader = readers.cached(shards, capacity, directory=tmp_path / "none", job="test")
    assert len(warned) == 1 and images(reader) == images(shards)
    for call in (lambda: cache_budget(tmp_path / "none").bytes, lambda: open_in(tmp_path / "none")):
        with pytest.raises(CacheDirectoryError, match="No such file") as caught:
            call()
        assert isinstance(caught.value, readers.PackerError) and isinstance(caught.value, OSError)


def test_a_reader_works_uncached_without_room(shards: Any, place: dict[str, Any], no_room: None) -> None:
    with pytest.warns(UserWarning, match=r"no room for a cache of [\d,]+ bytes in .*packer cache ls"):
        reader = readers.cached(shards, "1GiB", "decoded:16", **place)
    assert images(reader) == [bytes(reader.keep.convert(image)) for image in images(shards)]
    assert reader.stats().kept == 0 and reader.prefill() == 0


STUCK = """
import os, signal, sys
from cache import SharedByteCache
if sys.argv[2] == "fallocate":
    os.posix_fallocate = lambda *_: (print(flush=True), os.kill(os.getpid(), getattr(signal, sys.argv[3])))
else:
    os.link = lambda *_: (print(flush=True), os.kill(os.getpid(), getattr(signal, sys.argv[3])))
given = {"fingerprint": "set", "slots": 8, "capacity_bytes": 4096, "job": "test"}
SharedByteCache.open(kind=sys.argv[4], directory=sys.argv[1], **given)
"""


def stuck(folder: Path, at: str, how: str, kind: str = "encoded") -> subprocess.Popen[bytes]:
    """A process that makes a segment and is stopped by a signal before this call."""
    process = subprocess.Popen([sys.executable, "-c", STUCK, folder, at, how, kind], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"\n"
    return process


def test_a_stopped_maker_blocks_others_only_briefly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache.shared.file.STANDSTILL_SECONDS", 0.2)
    with stuck(tmp_path, "fallocate", "SIGSTOP") as process:
        try:
            with pytest.warns(UserWarning, match=r"another name.*no progress for 0.2 s; it may have been stopped"):
                first = open_in(tmp_path)
            with pytest.warns(UserWarning, match="another name"), open_in(tmp_path) as second:
                assert first.put(0, b"x") and second.get(0) == b"x", "the running processes share no cache"
            first.close()
        finally:
            process.kill()
    with open_in(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == [], "files of the stopped process are not removed by the next"


@pytest.mark.parametrize("at", ["fallocate", "link"])
def test_the_next_cache_removes_files_of_killed_makers(tmp_path: Path, at: str) -> None:
    """Files of any data set are removed, since that set may never be opened again."""
    with stuck(tmp_path, at, "SIGKILL", kind="of another set") as process:
        assert process.wait(300) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    with open_in(tmp_path):
        assert left not in tmp_path.iterdir(), f"{left} is never removed"


TRAIN = """
import sys, warnings, readers
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    reader = readers.cached(readers.open(sys.argv[1], "train"), job="test")
for warning in warned:
    print(warning.message, file=sys.stderr)
data = [bytes(image) for image in reader.read_many(range(36))]
assert data == [bytes(image) for image in reader.read_many(range(36))] and len(data) == 36
stats = reader.stats()
print(len(warned), stats.kept, stats.hits)
"""


def test_without_or_with_a_small_dev_shm(packed: Path, tmp_path: Path) -> None:
    """A container's 64 MiB, scaled down as the set is to ImageNet, is used with a warning."""
    done = run_with_dev_shm("", tmp_path / "dev", sys.executable, "-c", TRAIN, packed)
    assert (done.returncode, done.stdout) == (0, "1 0 0\n"), done.stderr
    assert "without a cache" in done.stderr and "/dev/shm" in done.stderr
    done = run_with_dev_shm("size=208k", tmp_path / "small", sys.executable, "-c", TRAIN, packed)
    assert done.returncode == 0, done.stderr
    warned, kept, hits = map(int, done.stdout.split())
    assert warned == 1 and "--shm-size" in done.stderr and "--ipc=host" in done.stderr, done.stderr
    assert kept == hits > 0, f"{kept} of 36 samples were cached: {done.stderr}"


@pytest.mark.parametrize("command", ["convert", "verify"])
def test_commands_work_without_dev_shm(tree: Path, packed: Path, tmp_path: Path, command: str) -> None:
    """Worker processes share locks in /dev/shm, so one process does the work and says why."""
    more = [tree, "-o", tmp_path / "out", "--to", "tar"] if command == "convert" else [packed]
    words = [sys.executable, "-m", "packer", command, *more, "--workers", "2"]
    done = run_with_dev_shm("", tmp_path / "dev", *words)
    assert done.returncode == 0, done.stderr
    assert "this process does all the work; mount a tmpfs there" in done.stderr
    assert command == "verify" or (tmp_path / "out" / "dataset.json").exists()


NO_FILES = """
import sys, tempfile, packer
def made(*_, **__):
    raise AssertionError("a file that a kill would leave")
tempfile.mkstemp = tempfile.mkdtemp = made
shards, run = packer.Shards(samples=9), packer.Run(workers=2)
print(packer.convert(sys.argv[1], "tar", sys.argv[2], shards=shards, run=run).samples)
"""


def test_workers_share_no_file_that_a_kill_would_leave(tree: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", NO_FILES, str(tree), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "45\n"), done.stderr
