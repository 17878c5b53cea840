"""Grain over `GrainSource`: orders, shards, worker processes, checkpoints, and the items of a source. Not collected:
`test_training_kills.py` runs this file in a separate process."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg, pack_few, tree_of
from suites.programs import run_python

import packer
import readers
from cache.errors import BadSampleError, UnknownNameError
from readers import Decode
from readers.augment import RandomHorizontalFlip, RandomResizedCrop
from readers.caching import cached
from readers.decode import decode_image
from readers.frameworks.grain import GrainSource
from readers.loader import ImageLoader
from readers.torch import ImageDataset, Place

COUNT, BATCH = 30, 4
FIELDS = ("image", "label", "key")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_few(tmp_path_factory.mktemp("grain"), COUNT, (8, 8))


@pytest.fixture
def grain() -> Any:
    module = pytest.importorskip("grain", reason="grain is not installed")
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # the worker processes of Grain read these variables
    return module


def keys_of(batches: Any) -> list[str]:
    return [key for batch in batches for key in batch["key"]]


# --- the source -----------------------------------------------------------------------------------------------------
def test_a_sample_equals_that_of_the_reader(reader: readers.Reader) -> None:
    source = pickle.loads(pickle.dumps(GrainSource(reader, (*FIELDS, "index"))))
    assert len(source) == COUNT and repr(source) == repr(GrainSource(reader, (*FIELDS, "index")))
    sample = source[np.int64(4)]
    assert (sample["image"] == decode_image(reader.read(4))).all()
    assert [sample[name] for name in ("label", "key", "index")] == [int(reader.labels[4]), reader.keys[4], 4]
    assert GrainSource(reader, decode=False)[4]["image"] == bytes(reader.read(4))
    with pytest.raises(UnknownNameError, match="mask"):
        GrainSource(reader, ("mask",))
    with pytest.raises(IndexError):
        source[COUNT]


def test_images_equal_those_of_the_loader(reader: readers.Reader) -> None:
    images, _ = next(iter(ImageLoader(reader, BATCH, shuffle=False, decode=Decode(layout="NHWC"), threads=1)))
    with cached(reader, keep="decoded", backend="memfd") as kept:
        for source in (GrainSource(reader), GrainSource(kept), GrainSource(kept)):
            assert all((source[i]["image"] == images[i].numpy()).all() for i in range(BATCH))


def test_labels_of_fractions_and_lacking_fields(tmp_path: Path) -> None:
    with packer.writer(tmp_path / "set", "tar") as out:
        for i in (2, 1, 0):
            extra = {"mask": np.full((8, 8), i, np.uint8)} if i else {}
            out.write(f"{i}", image=make_jpeg(i, (8, 8)), label=i / 4, **extra)
    with readers.open(tmp_path / "set") as opened:
        samples = [GrainSource(opened, ("label", "mask"))[i] for i in range(3)]
    assert [float(sample["label"]) for sample in samples] == [0.5, 0.25, 0]
    assert [None if sample["mask"] is None else int(sample["mask"][0, 0]) for sample in samples] == [2, 1, None]


def test_a_bad_sample_is_named_or_replaced_by_the_same_one(tmp_path: Path) -> None:
    bad = make_jpeg(2)[:100]
    files = {f"{i}.jpg": make_jpeg(i, (8, 8)) for i in range(6)} | {"2.jpg": bad}
    opened = readers.open_folder(tree_of(tmp_path / "images", files))
    with pytest.raises(BadSampleError, match=r"sample 2 \(2\): .*truncated"):
        GrainSource(opened)[2]
    source = GrainSource(opened, FIELDS, on_error="substitute")
    replaced = source[2]
    assert replaced["key"] != "2" and replaced["key"] == source[2]["key"]
    assert (replaced["image"] == decode_image(files[f"{replaced['key']}.jpg"])).all()
    with pytest.raises(ValueError, match="on_error is one of raise, substitute, not 'skip'"):
        GrainSource(opened, on_error="skip")  # type: ignore[arg-type]


# --- Grain ----------------------------------------------------------------------------------------------------------
def map_dataset(grain: Any, source: GrainSource, shard: slice = slice(None)) -> Any:
    return grain.MapDataset.source(source)[shard].shuffle(seed=1).batch(BATCH)


def data_loader(grain: Any, source: GrainSource, workers: int = 0, shard: Any = None) -> Any:
    shards = shard or grain.sharding.NoSharding()
    sampler = grain.samplers.IndexSampler(len(source), shards, shuffle=True, num_epochs=1, seed=1)
    batch = grain.transforms.Batch(BATCH, drop_remainder=False)
    return grain.DataLoader(data_source=source, sampler=sampler, operations=[batch], worker_count=workers)


Make = Callable[[Any, GrainSource], Any]
PIPELINES: dict[str, Make] = {
    "MapDataset": lambda grain, source: map_dataset(grain, source).to_iter_dataset(),
    "DataLoader": data_loader,
}
IN_PROCESSES: dict[str, Make] = {
    "MapDataset": lambda grain, source: (
        map_dataset(grain, source).to_iter_dataset().mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
    ),
    "DataLoader": lambda grain, source: data_loader(grain, source, 2),
}


def check_resume(grain: Any, make: Make, reader: readers.Reader) -> None:
    """Compare the continuation after a state in mid-epoch, as bytes, in new objects with the uninterrupted run."""

    def begin() -> Any:
        return iter(make(grain, GrainSource(reader, FIELDS)))

    iterator = begin()
    seen = [key for _ in range(3) for key in next(iterator)["key"]]
    state = iterator.get_state()
    whole = seen + keys_of(iterator)
    assert len(whole) == len(set(whole)) == COUNT
    for more in (0, 1, 0, 2):  # a chain of resumes, some of them without a step
        restored = begin()
        restored.set_state(state if isinstance(state, bytes) else json.loads(json.dumps(state)))
        seen += [key for _ in range(more) for key in next(restored)["key"]]
        state = restored.get_state()
    assert seen + keys_of(restored) == whole


@pytest.mark.parametrize("name", PIPELINES)
def test_a_state_in_mid_epoch_continues_exactly(grain: Any, reader: Any, name: str) -> None:
    check_resume(grain, PIPELINES[name], reader)


@pytest.mark.faults
@pytest.mark.parametrize("name", IN_PROCESSES)
def test_a_state_in_mid_epoch_continues_exactly_with_worker_processes(grain: Any, reader: Any, name: str) -> None:
    check_resume(grain, IN_PROCESSES[name], reader)


@pytest.mark.faults
def test_the_checkpoint_handler_saves_and_restores(grain: Any, packed: Path, tmp_path: Path) -> None:
    """Runs in another process, since the handler starts JAX, and a process should not fork afterwards."""
    code = f"""
import grain, readers
from etils import epath
from readers.frameworks.grain import GrainSource
source = GrainSource(readers.open({str(packed)!r}), ("key",))
data = grain.MapDataset.source(source).shuffle(seed=1).batch({BATCH}).to_iter_dataset()
handler, place, iterator = grain.checkpoint.CheckpointHandler(), epath.Path({str(tmp_path)!r}), iter(data)
next(iterator)
handler.save(place, iterator)
rest = [key for batch in iterator for key in batch["key"]]
assert len(rest) == {COUNT - BATCH}
assert [key for batch in handler.restore(place, iter(data)) for key in batch["key"]] == rest
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


def test_worker_processes_read_by_themselves(grain: Any, reader: Any) -> None:
    options = grain.MultiprocessingOptions(num_workers=1)
    source = GrainSource(reader, FIELDS)
    batches = list(map_dataset(grain, source).to_iter_dataset().mp_prefetch(options))
    assert keys_of(batches) == keys_of(map_dataset(grain, source).to_iter_dataset())
    for batch in batches:
        for key, image in zip(batch["key"], batch["image"], strict=True):
            assert (image == source[reader.table.find(key)]["image"]).all()


def test_shards_of_processes_make_an_epoch(grain: Any, reader: Any) -> None:
    source = GrainSource(reader, FIELDS)
    for shards in (
        [map_dataset(grain, source, slice(number, None, 2)).to_iter_dataset() for number in range(2)],
        [data_loader(grain, source, shard=grain.sharding.ShardOptions(number, 2)) for number in range(2)],
    ):
        parts = [keys_of(shard) for shard in shards]
        assert len(parts[0]) == len(parts[1]) and sorted(parts[0] + parts[1]) == sorted(reader.keys)


def test_a_checkpoint_of_another_set_is_refused(grain: Any, reader: Any) -> None:
    """Grain's data loader compares the `repr` of sources, its data sets do not."""
    iterator = iter(data_loader(grain, GrainSource(reader, FIELDS)))
    next(iterator)
    other = iter(data_loader(grain, GrainSource(reader.select(indices=range(COUNT)), FIELDS)))
    with pytest.raises(ValueError, match="DataSource in checkpoint does not match"):
        other.set_state(iterator.get_state())


def test_ops_of_a_data_set_draw_by_the_place_in_the_run(grain: Any, reader: Any) -> None:
    """The recipe of docs/jax.md: boxes are drawn afresh in each epoch, and a restored run draws the same boxes."""
    ops = [RandomResizedCrop(4), RandomHorizontalFlip()]
    dataset = ImageDataset(reader, ops, fields={"image": "image", "key": "key"})

    def load(index: int, rng: np.random.Generator) -> dict[str, Any]:
        item = dataset[Place(index, 0, int(rng.integers(1 << 62)), index)]
        return {name: np.asarray(value) for name, value in item.items()}

    data = grain.MapDataset.range(COUNT).shuffle(seed=1).repeat(2).random_map(load, seed=2).batch(BATCH)
    data = data.to_iter_dataset()
    iterator = iter(data)
    batches = [next(iterator) for _ in range(5)]
    state = iterator.get_state()
    rest, again = list(iterator), iter(data)
    again.set_state(state)
    for expected, resumed in zip(rest, again, strict=True):
        assert all((expected[name] == resumed[name]).all() for name in expected)
    images: dict[str, list[Any]] = {}
    for batch in [*batches, *rest]:
        for key, image in zip(batch["key"].tolist(), batch["image"], strict=True):
            images.setdefault(key, []).append(image)
    assert {len(of_key) for of_key in images.values()} == {2}
    assert sum(not np.array_equal(*of_key) for of_key in images.values()) > COUNT // 2


def test_the_source_needs_no_torch(packed: Path) -> None:
    code = f"""
import sys; sys.modules["torch"] = sys.modules["grain"] = None
import readers
from readers.frameworks.grain import GrainSource
print(GrainSource(readers.open({str(packed)!r}))[0]["image"].shape)
"""
    done = run_python("-c", code)
    assert (done.returncode, done.stdout) == (0, "(8, 8, 3)\n"), done.stderr
