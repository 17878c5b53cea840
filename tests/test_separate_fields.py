"""A field in separate shards, of a set that was changed later: every way of reading returns the same bytes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import tree_of
from remote_servers import FileServer
from set_cases import pack_tree

import packer
import readers
from readers.dali import external_source
from readers.fields import encode_field
from readers.order import NodeLocal


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Masks for two of three samples, then samples dropped; tests may not write to it."""
    root = tmp_path_factory.mktemp("fields")
    pack_tree(root / "set", "tar", {"train": {"cat": 12, "dog": 9}}, samples=5)
    keys = packer.table(root / "set").keys("train")
    masks = {
        f"{key}.png": bytes(encode_field("mask", np.full((4, 5), i, np.uint8))) for i, key in enumerate(keys) if i % 3
    }
    shards, run = packer.Shards(size=150), packer.Run(workers=1)
    packer.add_field(root / "set", tree_of(root / "masks", masks), "mask", shards=shards, run=run)
    packer.drop(root / "set", where="width == 48")
    return root / "set"


@contextmanager
def from_an_address(root: Path, folder: Path) -> Iterator[readers.Reader]:
    server = FileServer(root.parent)
    try:
        with readers.open(f"http://127.0.0.1:{server.address[1]}/{root.name}") as reader:
            yield reader
    finally:
        server.close()


@contextmanager
def from_a_part(root: Path, folder: Path) -> Iterator[readers.Reader]:
    """The samples of one node of three, from its copy alone: the source has been moved by then."""
    with readers.stage(root, folder / "node", part=(1, 3), any_filesystem=True) as local, readers.open(local) as reader:
        part = NodeLocal(len(reader), nodes=3).local_part(1)
        with reader.select(indices=np.arange(part.start, part.stop)) as chosen:
            yield chosen


@contextmanager
def from_a_cache(root: Path, folder: Path) -> Iterator[readers.Reader]:
    with readers.open(root) as base, readers.cached(base, directory=folder, fields=("image", "mask")) as reader:
        reader.read_many(range(len(reader)))
        yield reader


@contextmanager
def twice(root: Path, folder: Path) -> Iterator[readers.Reader]:
    both = readers.concat([readers.open(root), readers.open(root)])
    with both.select(indices=np.arange(len(both))[len(both) // 2 :]) as second:
        yield second


WAYS: dict[str, Callable[[Path, Path], Any]] = {
    "files": lambda root, folder: readers.open(root),
    "mapped": lambda root, folder: readers.open(root, backend="mmap"),
    "verified": lambda root, folder: readers.open(root, verify=True),
    "pickled": lambda root, folder: pickle.loads(pickle.dumps(readers.open(root))),
    "selected": lambda root, folder: readers.open(root).select(where='has("mask") and label == 1'),
    "address": from_an_address,
    "part": from_a_part,
    "cache": from_a_cache,
    "second of two": twice,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_read_a_separate_field(
    way: str, changed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKER_CACHE_DIR", str(tmp_path / "index-cache"))
    with readers.open(changed) as plain:
        masks = {key: bytes(plain.read(i, "mask")) for i, key in enumerate(plain.keys) if plain.has(i, "mask")}
        images = {key: bytes(plain.read(i)) for i, key in enumerate(plain.keys)}
    assert 0 < len(masks) < len(images) == 17
    with WAYS[way](changed, tmp_path) as reader:
        have = [i for i in range(len(reader)) if reader.has(i, "mask")]
        expected = [masks[reader.keys[i]] for i in have]
        assert expected and [bytes(reader.read(i, "mask")) for i in have] == expected
        reader.prefetch(have, "mask")
        assert [bytes(data) for data in reader.read_many(have[::-1], "mask")] == expected[::-1]
        assert [bytes(data) for data in reader.stream(have, "mask")] == expected
        assert [bytes(reader.read(i)) for i in range(len(reader))] == [images[key] for key in reader.keys]
        assert {s.key for s in reader if "mask" in s.fields} == {reader.keys[i] for i in have}
        for i in range(len(reader)):
            if i not in have:
                with pytest.raises(readers.UnknownNameError, match="has no field 'mask'"):
                    reader.read(i, "mask")


def test_dali_reads_a_changed_set(changed: Path) -> None:
    pytest.importorskip("nvidia.dali.fn")
    from nvidia.dali import pipeline_def

    with readers.open(changed) as reader:

        @pipeline_def(batch_size=4, num_threads=1, device_id=None)
        def pipe() -> Any:
            return external_source(reader, 4, shuffle=False)

        built = pipe()
        built.build()
        images, labels = built.run()
        assert [images.at(i).tobytes() for i in range(4)] == [bytes(reader.read(i)) for i in range(4)]
        assert [int(labels.at(i)[0]) for i in range(4)] == reader.labels[:4].tolist()
