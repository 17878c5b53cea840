"""One cache, many processes: forked, spawned, and those of a DataLoader; and the loaders that read through it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cached_sources import SlowReader, images
from loader_options import grouped
from PIL import Image
from suites.shared_caches import HAS_MPI, MPIEXEC

import readers
from cache import list_caches
from readers import Ranks, augment
from readers.order import Shuffled

METHODS = ("fork", "spawn")


def fill_and_report(reader: Any) -> tuple[list[bytes], int]:
    """What a process reads, and how many reads of the source that took."""
    found = images(reader)
    return found, len(reader.store.source.reads)


def open_and_report(path: Path, place: dict[str, Any], capacity: Any) -> list[int]:
    with readers.open(path, "train") as base, readers.cached(base, capacity, **place) as reader:
        images(reader)
        return [i for i in range(36) if reader.kept.keeps(i)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("keep", ["encoded", "decoded:16"])
@pytest.mark.parametrize("memory", ["named", "without a name"])
def test_what_one_process_has_read_all_have(
    packed: Path, place: dict[str, Any], method: str, keep: str, memory: str
) -> None:
    """Where there is no tmpfs, a process and its children share memory without a name, which no other can open."""
    context = multiprocessing.get_context(method)
    options = place if memory == "named" else {"backend": "memfd"}
    with readers.open(packed, "train") as base:
        reader = readers.cached(SlowReader(base), 0.5, keep, **options)
        expected = [bytes(reader.keep.convert(image)) for image in images(base)]
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            assert pool.submit(fill_and_report, reader).result(timeout=300)[0] == expected
        reader.store.source.reads.clear()
        assert images(reader) == expected
        assert len(reader.store.source.reads) == 18, "the half that has a slot was filled by the other process"
        with ProcessPoolExecutor(3, mp_context=context) as pool:
            reader.store.source.reads.clear()
            for found, reads in pool.map(fill_and_report, [reader] * 6, timeout=300):
                assert found == expected and reads % 18 == 0
        assert reader.stats().puts >= 18 and reader.stats().present == 18
        if memory != "named":
            with readers.cached(base, 0.5, keep, backend="memfd") as other:
                assert other.stats().present == 0 and list_caches() == [], "another memory, and none has a name"
        reader.close()
    assert list(place["directory"].glob("packer-cache*")) == []


RANKS = """
import sys
from mpi4py import MPI
import readers

world = MPI.COMM_WORLD
with readers.open(sys.argv[1], "train") as base:
    expected = [bytes(data) for data in base.read_many(range(36))]
    with readers.cached(base, 1.0, backend="mpi", comm=world) as reader:
        mine = range(world.rank, 36, world.size)
        assert [bytes(reader.read(i)) for i in mine] == [expected[i] for i in mine]
        world.Barrier()
        stats = reader.stats()
        assert (stats.present, stats.misses, stats.users) == (36, 36, world.size), stats
        assert [bytes(data) for data in reader.read_many(range(36))] == expected
        world.Barrier()
        assert reader.stats().hits == 36 * world.size and reader.stats().misses == 36
print("good", flush=True)
"""


@pytest.mark.skipif(not HAS_MPI or MPIEXEC is None, reason="mpi4py or mpiexec is not installed")
def test_a_window_of_mpi(packed: Path, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    command = [str(MPIEXEC), "-n", "3", sys.executable, str(script), str(packed)]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environ)
    assert done.returncode == 0 and done.stdout.count("good") == 3, done.stdout + done.stderr


@pytest.mark.parametrize("method", METHODS)
def test_jobs_keep_the_same_samples(packed: Path, place: dict[str, Any], method: str) -> None:
    """Independent processes at the same time, with the same options and others."""
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(4, mp_context=context) as pool:
        tasks = [pool.submit(open_and_report, packed, {**place, "job": f"job{n % 2}"}, 0.5) for n in range(8)]
        kept = [task.result(timeout=300) for task in tasks]
    assert all(some == kept[0] for some in kept) and len(kept[0]) == 18
    assert list(place["directory"].glob("packer-cache*")) == []


def test_a_pickle_is_small(packed: Path, place: dict[str, Any]) -> None:
    with readers.open(packed, "train") as base, readers.cached(base, **place) as reader:
        expected = images(reader)
        text = pickle.dumps(reader)
        again = pickle.loads(text)
        assert len(text) < 10_000 and images(again) == expected and again.stats().hits == 36
        again.close()
        assert images(reader) == expected


def test_a_persistent_cache_outlives_its_job(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next job too."""
    with readers.open(packed, "train") as base:
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        with readers.cached(base, persist=True, directory=tmp_path) as reader:
            assert reader.prefill() == 36
        monkeypatch.setenv("SLURM_JOB_ID", "18")
        with readers.cached(base, persist=True, directory=tmp_path) as reader:
            assert reader.stats().present == 36 and images(reader) == images(base)
            assert reader.stats().misses == 0
    assert len(list(tmp_path.glob("packer-cache*"))) == 1


# --- loaders ------------------------------------------------------------------------------------------------------
def batches(reader: Any, epochs: int = 1, **options: Any) -> list[tuple[np.ndarray, list[int]]]:
    loader_module = pytest.importorskip("readers.loader")
    ops = options.pop("augment", [augment.RandomResizedCrop(12), augment.RandomHorizontalFlip()])
    loader = loader_module.ImageLoader(
        reader, 8, seed=4, **grouped({"augment": ops, "ranks": Ranks(rank=0, world_size=1), "threads": 2, **options})
    )
    return [(images.numpy().copy(), labels.tolist()) for _ in range(epochs) for images, labels in loader]


@pytest.mark.parametrize("capacity", [0.5, 1.0])
def test_batches_of_encoded_bytes_are_the_same(packed: Path, place: dict[str, Any], capacity: float) -> None:
    with readers.open(packed, "train") as base, readers.cached(base, capacity, **place) as reader:
        expected = batches(base, 2)
        for (seen, labels), (pixels, numbers) in zip(batches(reader, 2), expected, strict=True):
            assert labels == numbers and np.array_equal(seen, pixels)
        assert reader.stats().hits > 0


@pytest.mark.parametrize("keep", ["recoded:16@97", "decoded:16"])
@pytest.mark.parametrize("capacity", [0.0, 0.5, 1.0])
def test_batches_of_other_forms_are_close(packed: Path, place: dict[str, Any], keep: str, capacity: float) -> None:
    with readers.open(packed, "train") as base, readers.cached(base, capacity, keep, **place) as reader:
        expected = batches(base, 2, augment=[augment.Resize(16), augment.CenterCrop(16)])
        found = batches(reader, 2, augment=[augment.CenterCrop(16), augment.RandomHorizontalFlip(0)])
        limit = 2.0 if keep.startswith("decoded") else 15.0  # 4:2:0 on tiny noise
        for (seen, labels), (pixels, numbers) in zip(found, expected, strict=True):
            assert labels == numbers and np.abs(seen.astype(int) - pixels).mean() < limit


def test_a_second_epoch_reads_nothing(tree: Path, place: dict[str, Any]) -> None:
    """Headers included, which a folder has to read files for."""
    slow = SlowReader(readers.open_folder(tree, "train"))
    reader = readers.cached(slow, **place)
    for epoch in range(3):
        slow.reads.clear()
        assert len(batches(reader)) == 4
        assert bool(slow.reads) == (epoch == 0)
    reader.close()


def test_tokens_are_of_one_form(packed: Path, place: dict[str, Any]) -> None:
    loader_module = pytest.importorskip("readers.loader")
    with readers.open(packed, "train") as base:
        token = loader_module.ImageLoader(base, 8, seed=4).state_dict()
        encoded, decoded = (readers.cached(base, keep=keep, **place) for keep in ("encoded", "decoded"))
        loader_module.ImageLoader(encoded, 8, seed=4).load_state_dict(token)
        with pytest.raises(readers.ResumeError, match="the resume token is of the data set"):
            loader_module.ImageLoader(decoded, 8, seed=4).load_state_dict(token)
        encoded.close()
        decoded.close()


@pytest.mark.parametrize("method", METHODS)
def test_workers_of_a_dataloader(packed: Path, place: dict[str, Any], method: str) -> None:
    torch_readers = pytest.importorskip("readers.torch")
    from torch.utils.data import DataLoader

    with readers.open(packed, "train") as base, readers.cached(base, keep="decoded:16", **place) as reader:
        dataset = torch_readers.ImageDataset(reader, [augment.CenterCrop(16)])
        sampler = torch_readers.EpochSampler(Shuffled(36, seed=1), reader, rank=0, world_size=1)
        loader = DataLoader(dataset, 6, sampler=sampler, num_workers=2, multiprocessing_context=method)
        seen = sorted(label for _, labels in loader for label in labels.tolist())
        assert seen == sorted(reader.labels.tolist()) and reader.stats().present == 36
        assert sum(1 for _ in loader) == 6 and reader.stats().hits >= 36
    assert [name for name in os.listdir(place["directory"]) if name.startswith("packer-cache")] == []


def test_decoded_pixels_are_those_of_the_loader(tmp_path: Path, place: dict[str, Any]) -> None:
    """Within 2 of 255: also of images that are shrunk so much that colours are decoded coarsely."""
    (tmp_path / "tree" / "a").mkdir(parents=True)
    for seed, side in enumerate([140, 160, 180, 340]):
        pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "tree" / "a" / f"{seed}.jpg", quality=95)
    with readers.open_folder(tmp_path / "tree") as base:
        (expected, _), *_ = batches(
            base, augment=[augment.Resize(64), augment.CenterCrop(56)], tail="exact", shuffle=False
        )
        with readers.cached(base, keep="decoded:64", **place) as reader:
            (found, _), *_ = batches(reader, augment=[augment.CenterCrop(56)], tail="exact", shuffle=False)
    worst = np.abs(found.astype(int) - expected).reshape(4, -1).max(1).tolist()
    assert max(worst) <= 2, f"differences by image: {worst}"
