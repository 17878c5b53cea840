"""A set that is replaced under its readers: an error that says so and when to open it again, not advice to rebuild."""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import pickle
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cached_sources import pack_set
from PIL import Image
from torch.utils.data import DataLoader

import packer
import readers
from cache.errors import DamagedSampleError, DatasetError, StaleIndexError
from readers.augment import CenterCrop, Resize
from readers.loader import ImageLoader
from readers.order import Sequential
from readers.reader import Reader
from readers.torch import EpochSampler, ImageDataset, ImageStream

AGAIN = r"open it again when"


@pytest.fixture
def packed(tree: Path, tmp_path: Path) -> Path:
    return pack_set(tree, tmp_path / "set")


@pytest.fixture
def other(tree: Path, tmp_path: Path) -> Path:
    """Another set of the same splits, with fewer samples."""
    few = tmp_path / "few"
    shutil.copytree(tree, few)
    for path in sorted((few / "train" / "cat").iterdir())[:5]:
        path.unlink()
    return pack_set(few, tmp_path / "other")


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """System calls of these names fail as on NFS after the server's file was replaced."""
    broken: set[str] = set()

    def replaced(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *arguments: Any) -> Any:
            if name in broken and (name != "open" or str(first).endswith(".tar")):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return real(first, *arguments)

        return call

    for name in ("open", "pread", "preadv"):
        monkeypatch.setattr(os, name, replaced(name, getattr(os, name)))
    yield broken
    broken.clear()


READS: dict[str, Callable[[Any], Any]] = {
    "read": lambda reader: reader.read(3),
    "read_many": lambda reader: reader.read_many([3, 9]),
    "item": lambda reader: reader[3],
    "stream": lambda reader: list(reader.stream([3])),
    "copy": lambda reader: pickle.loads(pickle.dumps(reader)).read(3),
}


@pytest.mark.parametrize("call", READS)
@pytest.mark.parametrize("failing", [("pread", "preadv"), ("open",)], ids="-".join)
def test_a_stale_handle_says_that_the_set_changed(
    packed: Path, stale: set[str], call: str, failing: tuple[str, ...]
) -> None:
    with readers.open(packed, "train") as reader:
        if "open" not in failing:
            reader.read(3)
        stale.update(failing)
        with pytest.raises(StaleIndexError, match=rf"train-00000\d.tar: .*file server.*ESTALE.*{AGAIN}") as caught:
            READS[call](reader)
        assert isinstance(caught.value, readers.PackerError) and "packer index" not in str(caught.value)
        stale.clear()
        assert len(reader.read(3)) > 0, "the reader works again"


def test_other_failures_of_a_read_name_the_shard(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with readers.open(packed, "train") as reader:
        monkeypatch.setattr(os, "pread", broken)
        with pytest.raises(StaleIndexError, match=r"train-000000.tar: cannot be read: Input/output error"):
            reader.read(3)


@pytest.mark.parametrize("state", ["under way", "done"])
def test_reading_a_set_while_it_is_replaced(packed: Path, other: Path, state: str) -> None:
    """The advice to rebuild the index would spoil the new set."""
    with readers.open(packed, "train") as reader:
        replace(packed, other)
        assert len(reader.labels) == 36, "labels of the new set"
        if state == "under way":
            (packed / "dataset.json").unlink()
        with pytest.raises(StaleIndexError, match=f"(has been replaced|is being replaced).*{AGAIN}") as caught:
            reader.read_many(range(36))
    assert "packer index" not in str(caught.value).partition("(")[0]


@pytest.mark.parametrize("state", ["under way", "done"])
def test_opening_a_set_while_it_is_replaced(
    packed: Path, other: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """dataset.json was read before, the index after the replacement."""
    opened = readers.table.open_regular

    def meanwhile(path: Path) -> Any:
        monkeypatch.setattr("readers.table.open_regular", opened)
        replace(packed, other)
        if state == "under way":
            (packed / "dataset.json").unlink()
        raise ValueError("the file has changed")

    monkeypatch.setattr("readers.table.open_regular", meanwhile)
    with pytest.raises(StaleIndexError, match=f"(has been replaced|is being replaced).*{AGAIN}"):
        readers.open(packed, "train")


def test_a_damaged_set_is_still_a_damaged_set(packed: Path) -> None:
    (packed / "train-000000.tar").write_bytes(b"short")
    with readers.open(packed, "train") as reader, pytest.raises(StaleIndexError, match=r"were indexed.*packer index"):
        reader.read(0)
    (packed / "train.index" / "shard.npy").unlink()
    with pytest.raises(DatasetError, match="missing index column; unless the set is being replaced right now"):
        readers.open(packed, "train")


# --- another set of the same names and sizes ----------------------------------------------------------------------
SAMPLES = 20


def shades(root: Path, first: int) -> Path:
    """20 images of one size and one grey each; those of the class "b" are the bright ones of `first` 0, else of 1."""
    for number in range(SAMPLES):
        bright = (number % 2 + first) % 2
        path = root / "train" / "ab"[number % 2] / f"{number:02d}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (100 + 100 * bright + number,) * 3).save(path)
    return root


@pytest.fixture(params=["tar", "hdf5"])
def twins(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """Two sets that differ in the order of their bright and dark images, and in nothing that `stat` shows."""
    made = []
    for first in (0, 1):
        source = shades(tmp_path / f"images{first}", first)
        made.append(
            packer.convert(
                source,
                request.param,
                tmp_path / f"set{first}",
                run=packer.Run(workers=1),
                shards=packer.Shards(samples=4),
            ).output
        )
    sizes = [{path.name: path.stat().st_size for path in root.glob("train-*")} for root in made]
    assert len(sizes[0]) == 5 and sizes[0] == sizes[1]
    return made[0], made[1]


def is_right(data: Any, label: int) -> bool:
    """Whether an image has the brightness that its label stands for in the first of the twins."""
    return (int(np.asarray(Image.open(io.BytesIO(bytes(data))))[0, 0, 0]) >= 200) == bool(label)


@pytest.mark.parametrize("backend", ["pread", "mmap"])
@pytest.mark.parametrize("reads", ["read", "read_many"])
def test_no_sample_of_a_replaced_set_is_taken_for_one_of_the_set_that_was_opened(
    twins: tuple[Path, Path], backend: Any, reads: str
) -> None:
    packed, other = twins
    with readers.open(packed, backend=backend) as reader:
        reader.read(0)
        replace(packed, other)
        read = reader.read if reads == "read" else lambda index: reader.read_many([index])[0]
        assert all(is_right(read(index), label) for index, label in enumerate(reader.labels[:4])), "open since before"
        for index in range(4, SAMPLES):
            with pytest.raises(StaleIndexError, match=rf"^{packed}: the set has been replaced.*{AGAIN}.*train-\d+"):
                read(index)
        with pytest.raises(StaleIndexError, match=rf"^{packed}: the set has been replaced.*{AGAIN}"):
            reader.keys[0]


@pytest.mark.parametrize("state", ["under way", "done"])
def test_an_unpickled_reader_is_of_the_set_that_was_opened_or_an_error(twins: tuple[Path, Path], state: str) -> None:
    packed, other = twins
    with readers.open(packed) as reader:
        pickled = pickle.dumps(reader)
    assert is_right(pickle.loads(pickled).read(3), reader.labels[3])
    replace(packed, other)
    if state == "under way":
        (packed / "dataset.json").unlink()
    with pytest.raises(StaleIndexError, match=f"(has been replaced|is being replaced).*{AGAIN}"):
        pickle.loads(pickled)


def test_a_forked_reader_notices_that_the_set_was_replaced(twins: tuple[Path, Path]) -> None:
    packed, other = twins

    def read(found: Any) -> None:
        try:
            found.put(f"read {len(reader.read(9))} bytes")
        except StaleIndexError as error:
            found.put(str(error))

    with readers.open(packed) as reader:
        reader.read(0)
        replace(packed, other)
        context = multiprocessing.get_context("fork")
        found = context.Queue()
        child = context.Process(target=read, args=(found,))
        child.start()
        assert "has been replaced" in found.get(timeout=60)
        child.join(60)


def test_a_cache_hands_out_what_it_holds_and_takes_nothing_of_another_set(twins: tuple[Path, Path]) -> None:
    packed, other = twins
    with readers.cached(readers.open(packed), 10 << 20, compress=False) as cached:
        cached.read_many(range(4))
        replace(packed, other)
        assert all(is_right(cached.read(index), cached.labels[index]) for index in range(4))
        with pytest.raises(StaleIndexError, match="has been replaced"):
            cached.read_many(range(SAMPLES))


@pytest.mark.parametrize("on_error", ["raise", "skip", "substitute"])
@pytest.mark.parametrize("consumer", ["ImageLoader", "ImageDataset", "ImageStream"])
def test_a_replaced_set_is_never_a_bad_sample(twins: tuple[Path, Path], consumer: str, on_error: Any) -> None:
    packed, other = twins
    reader = readers.open(packed)
    replace(packed, other)
    with pytest.raises(StaleIndexError, match="has been replaced"):
        train(consumer, reader, on_error)


@pytest.mark.parametrize("on_error", ["raise", "skip", "substitute"])
@pytest.mark.parametrize("consumer", ["ImageLoader", "ImageDataset", "ImageStream"])
def test_a_set_that_is_written_over_in_place_has_no_bad_samples(
    packed: Path, other: Path, consumer: str, on_error: Any
) -> None:
    """As `cp -r` does: what is read of shards that are open is no image then."""
    reader = readers.open(packed, "train")
    reader.read_many(range(len(reader)))
    for path in other.rglob("*.*"):
        if path.is_file() and path.suffix != ".npy":
            (packed / path.relative_to(other)).write_bytes(path.read_bytes())
    with pytest.raises(StaleIndexError, match="has been replaced"):
        train(consumer, reader, on_error)


def train(consumer: str, reader: Reader, on_error: Any) -> None:
    """One epoch."""
    if consumer == "ImageLoader":
        list(ImageLoader(reader, 4, augment=[Resize(16), CenterCrop(16)], on_error=on_error, threads=1))
    elif consumer == "ImageDataset":
        dataset = ImageDataset(reader, on_error=on_error)
        list(DataLoader(dataset, batch_size=4, collate_fn=list))
    else:
        dataset = ImageDataset(reader, on_error=on_error)
        list(ImageStream(dataset, EpochSampler(Sequential(len(reader))), 4, collate=list))


def test_a_shard_in_the_place_of_another_is_not_read(twins: tuple[Path, Path]) -> None:
    """dataset.json has not changed, nor have sizes."""
    packed, other = twins
    shard = sorted(path.name for path in packed.glob("train-*") if path.is_file())[2]
    with readers.open(packed) as reader:
        os.replace(other / shard, packed / shard)
        with pytest.raises(StaleIndexError, match=rf"{shard}: not the shard that was indexed.*packer verify"):
            reader.read(9)
        assert is_right(reader.read(4), reader.labels[4])


def test_one_damaged_sample_does_not_make_another_shard(twins: tuple[Path, Path]) -> None:
    packed, _ = twins
    with readers.open(packed) as reader:
        path, offset, length = reader.byte_range(7)
        with open(path, "r+b") as file:
            file.seek(offset + length - 1)
            file.write(b"x")
        assert is_right(reader.read(4), reader.labels[4]) and bytes(reader.read(7)[-1:]) == b"x"


def test_what_is_whole_of_a_damaged_shard_can_be_read_with_checksums(twins: tuple[Path, Path], tmp_path: Path) -> None:
    packed, _ = twins
    with readers.open(packed) as reader:
        ranges = [reader.byte_range(index) for index in (5, 6, 7)]
    for path, offset, length in ranges:
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(bytes(length))
    with readers.open(packed) as reader, pytest.raises(StaleIndexError, match="not the shard that was indexed"):
        reader.read(4)
    with readers.open(packed, verify=True) as reader:
        assert is_right(reader.read(4), reader.labels[4])
        with pytest.raises(DamagedSampleError, match="sample 5"):
            reader.read(5)
    saved = packer.convert(packed, "tar", tmp_path / "saved", run=packer.Run(workers=1, on_error="skip"))
    assert (saved.samples, saved.left_out) == (SAMPLES - 3, {"skipped": 3})


# --- what is still the same set -----------------------------------------------------------------------------------
def copied(packed: Path) -> None:
    shutil.copytree(packed, packed.with_name("again"))
    shutil.rmtree(packed)
    packed.with_name("again").rename(packed)


def linked(packed: Path) -> None:
    shutil.copytree(packed, packed.with_name("linked"), copy_function=os.link)
    shutil.rmtree(packed.with_name("linked"))


def touched(packed: Path) -> None:
    for path in packed.rglob("*"):
        os.utime(path)


def packed_again(packed: Path) -> None:
    source = packed.with_name("images0")
    container = "hdf5" if list(packed.glob("*.h5")) else "tar"
    packer.convert(
        source, container, packed, run=packer.Run(workers=1), shards=packer.Shards(samples=4), overwrite=True
    )


def appended(packed: Path) -> None:
    for name in ("more", "most"):
        shades(packed.with_name(name), 1)
        for path in packed.with_name(name).rglob("*.bmp"):
            path.rename(path.with_name(f"{name}-{path.name}"))
        packer.append(packed, packed.with_name(name))


def resharded(packed: Path) -> None:
    packer.drop(packed, where="key == 'a/02'")
    packer.reshard(packed, shards=packer.Shards(size=3000))


SAME: dict[str, Callable[[Path], Any]] = {
    "copied": copied,
    "linked": linked,
    "touched": touched,
    "packed again": packed_again,
    "appended": appended,
    "relabelled": lambda packed: packer.relabel(packed, names={"a": "b"}),
    "resharded": resharded,
    "indexed": packer.index,
}


@pytest.mark.parametrize("change", SAME)
def test_a_set_that_was_moved_or_changed_is_read_as_it_was(twins: tuple[Path, Path], change: str) -> None:
    packed, _ = twins
    with readers.open(packed) as reader:
        pickled, labels, images = pickle.dumps(reader), reader.labels.tolist(), list(map(bytes, reader.stream()))
    with readers.open(packed) as reader:
        reader.read(0)
        SAME[change](packed)
        for one in (reader, pickle.loads(pickled)):
            assert [bytes(data) for data in one.read_many(range(SAMPLES))] == images
            assert one.labels.tolist() == labels and sorted(one.keys)[0] == "a/00"
            one.close()
            assert bytes(one.read(SAMPLES - 1)) == images[-1]


def test_a_shard_that_was_pruned_is_of_a_set_that_is_no_longer_there(twins: tuple[Path, Path]) -> None:
    packed, _ = twins
    with readers.open(packed) as reader:
        resharded(packed)
        packer.prune(packed)
        with pytest.raises(StaleIndexError, match=rf"the set has been replaced.*{AGAIN}"):
            reader.read(9)


def test_a_copy_of_a_replaced_set_is_read_as_far_as_it_goes(twins: tuple[Path, Path], tmp_path: Path) -> None:
    packed, other = twins
    copy = tmp_path / "copy"
    shutil.copytree(packed, copy, ignore=shutil.ignore_patterns("*00003*"))
    with readers.open(copy, fallback=packed) as reader:
        replace(packed, other)
        assert all(is_right(reader.read(index), reader.labels[index]) for index in range(12))
        with pytest.raises(StaleIndexError, match=rf"^{packed}: the set has been replaced"):
            reader.read(13)


def test_a_table_makes_no_set_of_a_replaced_one(twins: tuple[Path, Path], tmp_path: Path) -> None:
    """Rows of the old index would be those of shards of the new set."""
    packed, other = twins
    table = packer.table(packed)
    replace(packed, other)
    with pytest.raises(StaleIndexError, match="has been replaced"):
        table.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_opening_a_set_looks_at_no_shard(twins: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A set may have ten thousand of them."""
    seen: list[str] = []

    def noting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            seen.append(str(path))
            return real(path, *arguments, **options)

        return call

    for name in ("open", "stat", "lstat"):
        monkeypatch.setattr(os, name, noting(getattr(os, name)))
    with readers.open(twins[0]) as reader:
        pickle.loads(pickle.dumps(reader))
    assert any("dataset.json" in path for path in seen) and not any("train-" in path for path in seen)


def test_an_unfinished_set_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "set" / ".packing").mkdir(parents=True)
    with pytest.raises(DatasetError, match="an unfinished conversion") as caught:
        readers.open(tmp_path / "set")
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1


def replace(packed: Path, other: Path) -> None:
    """As  packer convert --overwrite  does: what is there goes first, dataset.json comes last."""
    shutil.rmtree(packed)
    shutil.copytree(other, packed)
