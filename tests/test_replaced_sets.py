"""A set that is replaced under its readers: an error that says so and when to open it again, not advice to rebuild."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cached_sources import pack_set

import readers
from cache.errors import DatasetError, StaleIndexError

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
    opened = readers.index.open_regular

    def meanwhile(path: Path) -> Any:
        monkeypatch.setattr("readers.index.open_regular", opened)
        replace(packed, other)
        if state == "under way":
            (packed / "dataset.json").unlink()
        raise ValueError("the file has changed")

    monkeypatch.setattr("readers.index.open_regular", meanwhile)
    with pytest.raises(StaleIndexError, match=f"(has been replaced|is being replaced).*{AGAIN}"):
        readers.open(packed, "train")


def test_a_damaged_set_is_still_a_damaged_set(packed: Path) -> None:
    (packed / "train-000000.tar").write_bytes(b"short")
    with readers.open(packed, "train") as reader, pytest.raises(StaleIndexError, match=r"were indexed.*packer index"):
        reader.read(0)
    (packed / "train.index" / "shard.npy").unlink()
    with pytest.raises(DatasetError, match="missing index column; unless the set is being replaced right now"):
        readers.open(packed, "train")


def replace(packed: Path, other: Path) -> None:
    """As  packer convert --overwrite  does: what is there goes first, dataset.json comes last."""
    shutil.rmtree(packed)
    shutil.copytree(other, packed)
