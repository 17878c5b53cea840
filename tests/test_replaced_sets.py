"""A set that is replaced under its readers: the error says so and when to open the set again, without advice to
rebuild."""

from __future__ import annotations

import errno
import io
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from set_cases import convert
from torch.utils.data import DataLoader

import packer
import readers
from cache.errors import DamagedSampleError, DatasetError, StaleIndexError
from cache.stores import files
from packer.testing.children import in_child
from readers.augment import CenterCrop, Resize
from readers.loader import ImageLoader
from readers.order import Sequential
from readers.reader import Reader
from readers.torch import EpochSampler, ImageDataset, ImageStream

AGAIN = r"open it again when"


@pytest.fixture(scope="module")
def base(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets of the same splits, the other one with fewer samples; and twins in tar and HDF5. Tests may not change
    them."""
    base = tmp_path_factory.mktemp("replaced")
    few = Path(shutil.copytree(tree, base / "few"))
    for path in sorted((few / "train" / "cat").iterdir())[:5]:
        path.unlink()
    convert(tree, base / "set", samples=7)
    convert(few, base / "other", samples=7)
    for to in ("tar", "hdf5"):
        for first in (0, 1):
            convert(shades(base / to / f"images{first}", first), base / to / f"set{first}", to, samples=4)
    return base


@pytest.fixture
def packed(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base / "set", tmp_path / "set"))


@pytest.fixture
def other(base: Path) -> Path:
    return base / "other"


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """System calls of these names fail as on NFS after the file was replaced on the server."""
    broken: set[str] = set()

    def replaced(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *arguments: Any) -> Any:
            if name in broken and (name != "open" or str(first).endswith(".tar")):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return real(first, *arguments)

        return call

    for name in ("open", "pread", "preadv"):
        monkeypatch.setattr(os if name == "open" else files, name, replaced(name, getattr(os, name)))
    yield broken
    broken.clear()


@pytest.mark.parametrize("failing", [("pread", "preadv"), ("open",)], ids="-".join)
def test_a_stale_handle_says_that_the_set_changed(packed: Path, stale: set[str], failing: tuple[str, ...]) -> None:
    calls: list[Callable[[Any], Any]] = [
        lambda reader: reader.read(3),
        lambda reader: reader.read_many([3, 9]),
        lambda reader: reader[3],
        lambda reader: list(reader.stream([3])),
        lambda reader: pickle.loads(pickle.dumps(reader)).read(3),
    ]
    for call in calls:
        with readers.open(packed, "train") as reader:
            if "open" not in failing:
                reader.read(3)
            stale.update(failing)
            with pytest.raises(StaleIndexError, match=rf"train-00000\d.tar: .*file server.*ESTALE.*{AGAIN}") as caught:
                call(reader)
            assert isinstance(caught.value, readers.PackerError) and "packer index" not in str(caught.value)
            stale.clear()
            assert len(reader.read(3)) > 0, "the reader does not work again"


def test_other_failures_of_a_read_name_the_shard(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with readers.open(packed, "train") as reader:
        monkeypatch.setattr("cache.stores.files.pread", broken)
        with pytest.raises(StaleIndexError, match=r"train-000000.tar: cannot be read: Input/output error"):
            reader.read(3)


@pytest.mark.parametrize("state", ["under way", "done"])
def test_reading_a_set_while_it_is_replaced(packed: Path, other: Path, state: str) -> None:
    """The advice to rebuild the index would damage the new set."""
    with readers.open(packed, "train") as reader:
        replace(packed, other)
        assert len(reader.labels) == 36, "labels are those of the new set"
        if state == "under way":
            (packed / "dataset.json").unlink()
        with pytest.raises(StaleIndexError, match=f"(has been replaced|is being replaced).*{AGAIN}") as caught:
            reader.read_many(range(36))
    assert "packer index" not in str(caught.value).partition("(")[0]


@pytest.mark.parametrize("state", ["under way", "done"])
def test_opening_a_set_while_it_is_replaced(
    packed: Path, other: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """dataset.json was read before the replacement, the index after it."""
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
    with readers.open(packed, "train") as reader, pytest.raises(StaleIndexError, match=r"as indexed.*packer index"):
        reader.read(0)
    (packed / "train.index" / "shard.npy").unlink()
    with pytest.raises(DatasetError, match="missing index column; unless the set is being replaced right now"):
        readers.open(packed, "train")


# --- another set of the same names and sizes ----------------------------------------------------------------------
SAMPLES = 20


def shades(root: Path, first: int) -> Path:
    """20 images of one size, each in one grey; the bright ones are those of class "b" if `first` is 0, else those of
    "a"."""
    for number in range(SAMPLES):
        bright = (number % 2 + first) % 2
        path = root / "train" / "ab"[number % 2] / f"{number:02d}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (100 + 100 * bright + number,) * 3).save(path)
    return root


@pytest.fixture
def twins(request: pytest.FixtureRequest, base: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Two sets that differ in the order of their bright and dark images, and in nothing that `stat` shows."""
    folder = Path(shutil.copytree(base / getattr(request, "param", "tar"), tmp_path / "twins"))
    made = folder / "set0", folder / "set1"
    sizes = [{path.name: path.stat().st_size for path in root.glob("train-*")} for root in made]
    assert len(sizes[0]) == 5 and sizes[0] == sizes[1]
    return made


IN_HDF5_TOO = pytest.mark.parametrize("twins", ["tar", "hdf5"], indirect=True)


def is_right(data: Any, label: int) -> bool:
    """Whether the brightness of an image matches its label in the first of the twins."""
    return (int(np.asarray(Image.open(io.BytesIO(bytes(data))))[0, 0, 0]) >= 200) == bool(label)


@IN_HDF5_TOO
@pytest.mark.parametrize(("backend", "reads"), [("pread", "read"), ("mmap", "read_many")])
def test_no_sample_of_the_new_set_is_returned_for_the_opened_set(
    twins: tuple[Path, Path], backend: Any, reads: str
) -> None:
    packed, other = twins
    with readers.open(packed, backend=backend) as reader:
        reader.read(0)
        replace(packed, other)
        read = reader.read if reads == "read" else lambda index: reader.read_many([index])[0]
        assert all(is_right(read(index), label) for index, label in enumerate(reader.labels[:4])), "of an open shard"
        for index in range(4, SAMPLES):
            with pytest.raises(StaleIndexError, match=rf"^{packed}: the set has been replaced.*{AGAIN}.*train-\d+"):
                read(index)
        with pytest.raises(StaleIndexError, match=rf"^{packed}: the set has been replaced.*{AGAIN}"):
            reader.keys[0]


@pytest.mark.parametrize("state", ["under way", "done"])
def test_an_unpickled_reader_reads_the_opened_set_or_raises(twins: tuple[Path, Path], state: str) -> None:
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

    def read() -> None:
        with pytest.raises(StaleIndexError, match="has been replaced"):
            reader.read(9)

    with readers.open(packed) as reader:
        reader.read(0)
        replace(packed, other)
        in_child(read)


def test_a_cache_returns_its_samples_and_stores_none_of_another_set(twins: tuple[Path, Path]) -> None:
    packed, other = twins
    with readers.open(packed) as reader:
        fingerprint = reader.fingerprint
    with readers.open(other) as reader:
        assert reader.fingerprint != fingerprint, "one cache would serve both sets"
    with readers.cached(readers.open(packed), 10 << 20, compress=False) as cached:
        cached.read_many(range(4))
        replace(packed, other)
        assert all(is_right(cached.read(index), cached.labels[index]) for index in range(4))
        with pytest.raises(StaleIndexError, match="has been replaced"):
            cached.read_many(range(SAMPLES))


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize(
    ("consumer", "on_error"), [("ImageLoader", "skip"), ("ImageDataset", "substitute"), ("ImageStream", "skip")]
)
def test_a_replaced_set_is_never_a_bad_sample(
    packed: Path, other: Path, twins: tuple[Path, Path], is_read: bool, consumer: str, on_error: Any
) -> None:
    """Also if the files are overwritten in place, as by `cp -r`: then the bytes of open shards are not images."""
    packed, other = (packed, other) if is_read else twins
    reader = readers.open(packed, "train")
    if is_read:
        reader.read_many(range(len(reader)))
        for path in other.rglob("*.*"):
            if path.is_file() and path.suffix != ".npy":
                (packed / path.relative_to(other)).write_bytes(path.read_bytes())
    else:
        replace(packed, other)
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


def test_a_shard_in_place_of_another_is_not_read(twins: tuple[Path, Path]) -> None:
    """dataset.json and the sizes are unchanged."""
    packed, other = twins
    shard = sorted(path.name for path in packed.glob("train-*") if path.is_file())[2]
    with readers.open(packed) as reader:
        os.replace(other / shard, packed / shard)
        with pytest.raises(StaleIndexError, match=rf"{shard}: not the shard that was indexed.*packer verify"):
            reader.read(9)
        assert is_right(reader.read(4), reader.labels[4])


def test_a_damaged_sample_is_not_a_replaced_shard_and_intact_samples_can_be_read(
    twins: tuple[Path, Path], tmp_path: Path
) -> None:
    packed, _ = twins
    with readers.open(packed) as reader:
        ranges = [reader.byte_range(index) for index in (7, 5, 6)]
        for path, offset, length in ranges:
            with open(path, "r+b") as file:
                file.seek(offset)
                file.write(bytes(length))
            if (path, offset, length) == ranges[0]:  # four samples in the shard
                assert is_right(reader.read(4), reader.labels[4]) and not any(reader.read(7))
    with readers.open(packed) as reader, pytest.raises(StaleIndexError, match="not the shard that was indexed"):
        reader.read(4)
    with readers.open(packed, verify=True) as reader:
        assert is_right(reader.read(4), reader.labels[4])
        with pytest.raises(DamagedSampleError, match="sample 5"):
            reader.read(5)
    saved = convert(packed, tmp_path / "saved", on_error="skip")
    assert (saved.samples, saved.left_out) == (SAMPLES - 3, {"skipped": 3})


# --- sets that count as unchanged ---------------------------------------------------------------------------------
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
    "packed again": lambda packed: convert(packed.with_name("images0"), packed, samples=4, overwrite=True),
    "appended": appended,
    "relabelled": lambda packed: packer.relabel(packed, names={"a": "b"}),
    "resharded": resharded,
    "indexed": packer.index,
}


@pytest.mark.parametrize("change", SAME)
def test_a_moved_or_changed_set_is_read_in_its_old_state(twins: tuple[Path, Path], change: str) -> None:
    packed, _ = twins
    with readers.open(packed) as reader:
        pickled, labels, images = pickle.dumps(reader), reader.labels.tolist(), list(map(bytes, reader.stream()))
    with readers.open(packed) as reader:
        reader.read(0)
        SAME[change](packed)
        for opened in (reader, pickle.loads(pickled)):
            assert [bytes(data) for data in opened.read_many(range(SAMPLES))] == images
            assert opened.labels.tolist() == labels and sorted(opened.keys)[0] == "a/00"
            opened.close()
            assert bytes(opened.read(SAMPLES - 1)) == images[-1]


def test_a_pruned_shard_is_reported_as_that_of_a_replaced_set(twins: tuple[Path, Path]) -> None:
    packed, _ = twins
    with readers.open(packed) as reader:
        resharded(packed)
        packer.prune(packed)
        with pytest.raises(StaleIndexError, match=rf"the set has been replaced.*{AGAIN}"):
            reader.read(9)


def test_a_partial_copy_of_a_replaced_set_is_read_as_far_as_possible(twins: tuple[Path, Path], tmp_path: Path) -> None:
    packed, other = twins
    copy = tmp_path / "copy"
    shutil.copytree(packed, copy, ignore=shutil.ignore_patterns("*00003*"))
    with readers.open(copy, fallback=packed) as reader:
        replace(packed, other)
        assert all(is_right(reader.read(index), reader.labels[index]) for index in range(12))
        with pytest.raises(StaleIndexError, match=rf"^{packed}: the set has been replaced"):
            reader.read(13)


def test_a_table_of_a_replaced_set_makes_no_set(twins: tuple[Path, Path], tmp_path: Path) -> None:
    """Rows of the old index would refer to shards of the new set."""
    packed, other = twins
    table = packer.table(packed)
    replace(packed, other)
    with pytest.raises(StaleIndexError, match="has been replaced"):
        table.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_opening_a_set_looks_at_no_shard(twins: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A set may have ten thousand shards."""
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


def replace(packed: Path, other: Path) -> None:
    """Replace a set as  packer convert --overwrite  does: old files are removed first, dataset.json is written last."""
    shutil.rmtree(packed)
    shutil.copytree(other, packed)
