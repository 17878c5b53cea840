"""Filling a cache before and ahead of its readers, and what is compressed in it."""

from __future__ import annotations

import io
import itertools
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cached_sources import SlowReader, SlowStore, images, pack_set
from PIL import Image

import readers
from cache.stores import Buffer, Extents
from readers.caching.form import compress as compressed
from readers.caching.form import compressed_share, decompress
from readers.decode import decode_image
from readers.order import Sequential, Shuffled


@pytest.fixture
def base(packed: Path) -> Any:
    with readers.open(packed, "train") as reader:
        yield reader


# --- filling ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("keep", ["encoded", "recoded:16", "decoded:16"])
@pytest.mark.parametrize("order", [None, Shuffled(36, seed=2)])
@pytest.mark.parametrize("threads", [1, 3])
def test_prefill(base: Any, keep: str, order: Any, threads: int, place: dict[str, Any]) -> None:
    slow = SlowReader(base)
    reader = readers.cached(slow, 0.5, keep, **place)
    slow.reads.clear()
    seen: list[tuple[int, int]] = []
    assert reader.prefill(threads, order=order, progress=lambda *done: seen.append(done)) == 18
    kept = [i for i in range(36) if reader.kept.keeps(i)]
    assert sorted(slow.reads) == kept and seen[-1][0] == 18 and seen == sorted(seen)
    assert seen[-1][1] == sum(len(reader.read(i)) for i in kept)
    slow.reads.clear()
    assert reader.prefill(threads) == 18 and slow.reads == [], "all of it was there"
    expected = [bytes(reader.keep.convert(image)) for image in images(base)]
    slow.reads.clear()
    assert images(reader) == expected and len(slow.reads) == 18
    with pytest.raises(ValueError, match="threads is at least 1, not 0"):
        reader.prefill(0)


class Raced(SlowStore):
    """A source from which another process reads as well: by the first answer it has filled the first two blocks."""

    other: Any = None

    def read(self, extents: Extents) -> list[Buffer]:
        if self.other is not None:
            self.other.read_many(range(8))
            self.other = None
        return super().read(extents)


def test_a_process_that_meets_another_continues_elsewhere(
    base: Any, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = itertools.chain([0], itertools.repeat(6))
    monkeypatch.setattr("random.randrange", lambda stop: next(starts))
    other = readers.cached(SlowReader(base), 1.0, fields=["image"], **place)
    raced = Raced(base.store, 0.0, {})
    reader = readers.cached(readers.Reader(base.table, raced), 1.0, fields=["image"], **place)
    raced.reads.clear()
    raced.other = other
    assert reader.prefill(1) == 36
    blocks = [number // 4 for number in raced.reads[::4]]
    assert blocks == [0, 6, 7, 8, 2, 3, 4, 5], "block 1 was there, and block 0 when it came"
    assert reader.stats().present == 36 and images(reader) == images(base)


@pytest.mark.parametrize(("rank", "first"), [(0, 0), (1, 8), (3, 24)])
def test_ranks_start_filling_at_blocks_of_their_own(
    base: Any, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch, rank: int, first: int
) -> None:
    set_ranks(monkeypatch, rank, 4)
    slow = SlowReader(base)
    reader = readers.cached(slow, **place)
    slow.reads.clear()
    assert reader.prefill(1) == 36 and slow.reads[0] == first


def set_ranks(monkeypatch: pytest.MonkeyPatch, rank: int, count: int) -> None:
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}.items():
        monkeypatch.setenv(name, str(value))


def test_fill_ahead_is_ahead(base: Any, place: dict[str, Any]) -> None:
    order = Shuffled(36, seed=1)
    slow = SlowReader(base)
    reader = readers.cached(slow, **place)
    slow.reads.clear()
    ahead = reader.fill_ahead(order, epoch=2, start=16)
    assert ahead.wait(300) and ahead.filled == 20 and not ahead.running
    assert sorted(slow.reads) == sorted(order.indices(2, np.arange(16, 36)).tolist())
    slow.reads.clear()
    reader.read_many(order.indices(2, np.arange(16, 36)))
    assert slow.reads == []


def test_fill_ahead_ends_with_its_reader(base: Any, place: dict[str, Any]) -> None:
    reader = readers.cached(SlowReader(base, seconds=0.05), **place)
    first = reader.fill_ahead(Sequential(36), epoch=0)
    second = reader.fill_ahead(Sequential(36), epoch=1)
    assert not first.running, "a second call stops the first"
    reader.close()
    assert not second.running
    assert not [thread for thread in threading.enumerate() if thread.name == "packer-fill-ahead"]


def test_fill_ahead_raises_the_error_of_the_source(base: Any, place: dict[str, Any]) -> None:
    slow = SlowReader(base)
    reader = readers.cached(slow, **place)
    slow.store.broken[7] = OSError("the disk has gone")
    with pytest.raises(OSError, match="the disk has gone"):
        reader.fill_ahead(Sequential(36), epoch=0).wait(300)
    with pytest.raises(OSError, match="the disk has gone"):
        reader.prefill(threads=2)


def test_ranks_share_the_filling(base: Any, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    filled = []
    for rank in range(2):
        set_ranks(monkeypatch, rank, 2)
        slow = SlowReader(base)
        reader = readers.cached(slow, **{**place, "job": f"rank{rank}"})
        slow.reads.clear()
        assert reader.fill_ahead(Sequential(36), epoch=0).wait(300)
        filled.append(slow.reads)
    assert sorted(filled[0] + filled[1]) == list(range(36)) and min(map(len, filled)) > 0


def test_cached_samples_are_not_prefetched(base: Any, place: dict[str, Any]) -> None:
    slow = SlowReader(base)
    reader = readers.cached(slow, 0.5, **place)
    reader.prefill()
    reader.prefetch(range(36))
    assert slow.prefetched == [i for i in range(36) if not reader.kept.keeps(i)]


# --- compression --------------------------------------------------------------------------------------------------
def bitmap(seed: int) -> bytes:
    out = io.BytesIO()
    Image.linear_gradient("L").resize((40, 30 + seed % 3)).rotate(seed).convert("RGB").save(out, "BMP")
    return out.getvalue()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bitmaps and some JPEGs, each with a caption; the last one without."""
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
        assert list(reader.store.terms.packed) == (["image"] if compress else [])
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


def test_what_pays() -> None:
    rng = np.random.default_rng(1)
    texts = [f'{{"caption": "a picture of {i}", "source": "somewhere", "width": {i * 7}}}'.encode() for i in range(200)]
    noise = [rng.bytes(500) for _ in range(50)]
    assert (
        compressed_share([text * 20 for text in texts]) < 0.5 and compressed_share([bitmap(i) for i in range(20)]) < 0.9
    )
    assert compressed_share(noise) == compressed_share([]) == 1
    assert compressed_share([b"\xff\xd8\xff" + bytes(1000)] * 20) == 1, "JPEGs are stored as they are"


def test_frames_and_payloads_are_distinguished() -> None:
    """Also where a payload looks like a frame."""
    frame = bytes(compressed(b"a" * 500))
    for data in (b"", b"x", b"a" * 500, os.urandom(300), frame, frame[:7], b"\x28\xb5\x2f\xfd", bitmap(1)):
        assert bytes(decompress(memoryview(compressed(data)))) == data
    with pytest.raises(ValueError, match="a damaged zstd frame of 6 bytes"):
        decompress(frame[:6])


def test_broken_frames_are_read_again(mixed: Path, place: dict[str, Any], spoil: Any) -> None:
    with readers.open(mixed) as base:
        reader = readers.cached(base, **place)
        expected = images(reader)
        stored = reader.store.shared.get(reader.store.slots.first("image") + 3)
        assert bytes(stored[:4]) == b"\x28\xb5\x2f\xfd"
        spoil(reader, 3, at=4)
        assert images(reader) == expected and reader.stats().dropped == 1


# --- pixels -------------------------------------------------------------------------------------------------------
def test_images_come_upright_and_shrunk(tmp_path: Path, place: dict[str, Any]) -> None:
    """Every orientation, and media other than JPEG."""
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
            original, found = decode_image(plain.read(index)), decode_image(reader.read(index))
            size = (53, 40) if original.shape[0] > original.shape[1] else (40, 53)
            assert found.shape[:2] == size
            resized = Image.fromarray(np.ascontiguousarray(original)).resize(size[::-1], Image.Resampling.BILINEAR)
            assert np.abs(np.asarray(resized).astype(int) - found).mean() < 4
