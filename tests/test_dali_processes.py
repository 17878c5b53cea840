"""DALI's worker processes, and errors: a bad sample is named, skipped or replaced, and nothing hangs."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dali_cases import CROPS, WITH_PROCESSES, dali, fn, labels_of, same_epochs
from image_cases import encoded
from loader_options import grouped
from PIL import Image
from suites.programs import run_python

import readers
from cache.errors import BadSampleError, MissingExtraError, WorkerError
from readers import Decode, Ranks
from readers.augment import (
    CenterCrop,
    MixUp,
    Resize,
)
from readers.dali import DaliLoader, PipelineOptions, classification, external_source
from readers.loader import ImageLoader
from readers.order import Shuffled

pytestmark = WITH_PROCESSES


@pytest.fixture(scope="module")
def packed(photos: Path, pack: Callable[..., Path]) -> Callable[[str], Path]:
    return lambda to: pack(photos, to, samples_per_shard=16)


@pytest.fixture
def reader(packed: Callable[[str], Path]) -> Iterator[readers.Reader]:
    with readers.open(packed("hdf5")) as reader:
        yield reader


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_two_workers_make_the_same_batches_as_none(reader: readers.Reader, start_method: Any) -> None:
    alone = DaliLoader(reader, 8, augment=CROPS, seed=3, ranks=Ranks(tail="exact"))
    options = PipelineOptions(workers=2, start_method=start_method)
    together = DaliLoader(reader, 8, augment=CROPS, seed=3, ranks=Ranks(tail="exact"), options=options)
    for _ in range(2):
        for (images, labels), (others, other_labels) in zip(alone, together, strict=True):
            assert torch.equal(images, others) and torch.equal(labels, other_labels)
    assert len(multiprocessing.active_children()) >= 2, "no worker was started: this test shows nothing"
    together.close()


@pytest.mark.parametrize("conditionals", [False, True])
def test_samples_one_by_one(reader: readers.Reader, conditionals: bool) -> None:
    @dali.pipeline_def(batch_size=8, num_threads=1, device_id=None, py_num_workers=2, py_start_method="fork")
    def labels_only(per: Any, parallel: bool) -> Any:
        return external_source(reader, 8, seed=5, parallel=parallel, per=per)[::-1]

    def epoch(**options: Any) -> list[list[int]]:
        pipe, found = labels_only(enable_conditionals=conditionals, **options), []
        while True:
            try:
                found.append(np.array(pipe.run()[0].as_array()).ravel().tolist())
            except StopIteration:
                return found

    expected = epoch(per="batch", parallel=False)
    assert len(expected) == 5 and epoch(per="sample", parallel=False) == expected
    assert epoch(per="sample", parallel=True) == expected == epoch(per="batch", parallel=True)


def test_leaving_early_ends_the_workers(reader: readers.Reader) -> None:
    before = set(multiprocessing.active_children())  # a pool that other tests share
    loader = DaliLoader(reader, 8, augment=CROPS, options=PipelineOptions(workers=2, start_method="fork"))
    for _ in loader:
        assert len(set(multiprocessing.active_children()) - before) == 2
        break
    assert set(multiprocessing.active_children()) <= before
    assert len(labels_of(loader)) == 5


def test_a_program_ends_with_a_loop_under_way(packed: Callable[[str], Path]) -> None:
    """With finalizers that were registered before DALI's workers started; `multiprocessing` runs those first."""
    script = f"""
import weakref
kept = type("Kept", (), {{}})()
weakref.finalize(kept, int)
import readers
from readers.dali import DaliLoader, PipelineOptions, classification
reader = readers.open({str(packed("hdf5"))!r})
options = PipelineOptions(workers=2, start_method="fork")
loaders = [DaliLoader(reader, 8, augment=classification(32), options=options, output="numpy") for _ in range(2)]
assert len(list(loaders[0])) == 5
loop = iter(loaders[1])
next(loop)
print("the end")
"""
    done = run_python("-c", script)
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr


def test_a_killed_worker_raises_instead_of_hanging(reader: readers.Reader) -> None:
    others = {child.pid for child in multiprocessing.active_children()}
    loader = DaliLoader(reader, 2, augment=CROPS, options=PipelineOptions(workers=2, start_method="fork"))
    batches = iter(loader)
    next(batches)
    child = next(child for child in multiprocessing.active_children() if child.pid not in others)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join(10)
    with pytest.raises(WorkerError, match=r"a process that reads for DALI died \(exit status -9"):
        list(batches)
    state = loader.state_dict()
    assert 0 < state["cursor"] < 42 and len(labels_of(loader)) == 21


# --- errors -------------------------------------------------------------------------------------------------------
def damaged(packed: Callable[[str], Path], folder: Path, numbers: tuple[int, ...]) -> Path:
    """A copy of a set in which some images have lost their second half."""
    shutil.copytree(packed("tar"), folder)
    with readers.open(folder) as reader:
        for number in numbers:
            shard, offset, length = reader.byte_range(number) or (folder, 0, 0)
            with open(shard, "r+b") as file:
                file.seek(offset + length // 2)
                file.write(bytes(length - length // 2))
    return folder


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("verify", "reason"), [(False, "expected a scan and an end marker"), (True, "CRC32C")])
def test_a_bad_sample_is_named(
    packed: Callable[[str], Path], tmp_path: Path, workers: int, verify: bool, reason: str
) -> None:
    with readers.open(damaged(packed, tmp_path / "set", (13,)), verify=verify) as reader:
        options = PipelineOptions(workers=workers, start_method="fork")
        loader = DaliLoader(reader, 4, augment=CROPS, shuffle=False, options=options)
        with pytest.raises((BadSampleError, readers.DamagedSampleError), match=reason) as caught:
            list(loader)
        assert reader.keys[13] in str(caught.value) and "13" in str(caught.value)
        assert loader.state_dict()["cursor"] <= 12 and loader.epoch == 0


@pytest.mark.parametrize(("workers", "output"), [(0, "torch"), (2, "numpy")])
def test_bad_samples_are_skipped(packed: Callable[[str], Path], tmp_path: Path, workers: int, output: Any) -> None:
    """In batches of other sizes, and in the same batches as our own loader."""
    bad = (3, 13, 14, 41)
    with readers.open(damaged(packed, tmp_path / "set", bad)) as reader:
        options = PipelineOptions(workers=workers, start_method="fork")
        given: dict[str, Any] = {"augment": CROPS, "shuffle": False, "on_error": "skip", "seed": 3}
        theirs = DaliLoader(reader, 8, options=options, output=output, **grouped(given))
        ours = ImageLoader(reader, 8, **grouped({"decode": Decode(layout="NCHW"), "threads": 1, **given}))
        for epoch in range(2):
            with pytest.warns(UserWarning, match=rf"epoch {epoch}: 4 bad samples were skipped, the first is sample 3 "):
                same_epochs(ours, theirs, epochs=1)
            assert theirs.bad_samples == ours.bad_samples
        theirs.close()


def test_bad_samples_are_replaced_also_after_a_resume(packed: Callable[[str], Path], tmp_path: Path) -> None:
    bad = Shuffled(42, 7).indices(0, np.array([0, 20, 33])).tolist()
    with readers.open(damaged(packed, tmp_path / "set", tuple(bad))) as reader:

        def loader() -> DaliLoader:
            return DaliLoader(reader, 8, augment=CROPS, seed=7, ranks=Ranks(tail="exact"), on_error="substitute")

        with pytest.warns(UserWarning, match="epoch 0: 3 bad samples were replaced"):
            whole = list(loader())
        assert sum(len(labels) for _, labels in whole) == 42
        first = loader()
        for _, _ in zip(range(2), first, strict=False):
            state = first.state_dict()
        second = loader()
        second.load_state_dict(state)
        with pytest.warns(UserWarning, match="epoch 0: 2 bad samples were replaced"):
            rest = list(second)
        for (images, labels), (others, other_labels) in zip(whole[2:], rest, strict=True):
            assert torch.equal(images, others) and torch.equal(labels, other_labels)
        assert [sample.index for sample in (*first.bad_samples, *second.bad_samples)] == bad


def test_a_sample_that_only_dali_fails_on_is_left_out_of_a_new_pipeline(tmp_path: Path) -> None:
    """Its header and its end are whole, so the damage shows only when it is decoded."""
    for number in range(12):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 48, 3), dtype=np.uint8)
        data = bytearray(encoded(Image.fromarray(pixels), "PNG"))
        if number in (2, 9):
            data[200:900] = bytes(700)
        (tmp_path / f"{number:02d}.png").write_bytes(data)
    reader = readers.open_folder(tmp_path)
    loader = DaliLoader(reader, 4, augment=CROPS, shuffle=False, on_error="skip", output="numpy")
    for epoch in range(2):
        with pytest.warns(UserWarning, match=f"epoch {epoch}: 2 bad samples were skipped"):
            assert [len(labels) for _, labels in loader] == [3, 4, 3]
        assert [sample.key for sample in loader.bad_samples] == ["02", "09"]
    assert loader.epoch == 2 and loader.state_dict()["cursor"] == 0


def test_cached_pixels_are_refused(reader: readers.Reader, place: dict[str, Any]) -> None:
    cached = readers.cached(reader, keep="decoded:32", **place)
    for augment, graph in ((CROPS, None), (None, fn.decoders.image)):
        loader = DaliLoader(cached, 8, augment=augment, graph=graph)
        with pytest.raises(BadSampleError, match="its bytes are pixels, which DALI does not take: have"):
            next(iter(loader))
        del loader
    cached.close()


def test_errors_of_a_graph_are_not_blamed_on_samples(reader: readers.Reader) -> None:
    def crop(encoded: Any) -> Any:
        return fn.crop(fn.decoders.image(encoded), crop=(4000, 4000))

    with pytest.raises(
        WorkerError, match="DALI failed at batch 0 of epoch 0, though our own decoder reads its images: "
    ):
        list(DaliLoader(reader, 4, graph=crop))


def test_a_graph_of_your_own(reader: readers.Reader) -> None:
    def graph(encoded: Any) -> Any:
        images = fn.decoders.image_random_crop(encoded, device="cpu", output_type=dali.types.RGB)
        return fn.resize(images, resize_x=20, resize_y=24)

    loader = DaliLoader(reader, 8, graph=graph, seed=3)
    assert [images.shape for images, _ in loader] == [(8, 24, 20, 3)] * 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": [CenterCrop(8), MixUp()]}, r"DALI pipelines do not execute MixUp\(\): use ImageLoader, "),
        ({"augment": [Resize(32)]}, "the size of the results depends on the image"),
        ({}, "a source without ops needs a graph"),
        ({"augment": CROPS, "graph": lambda encoded: encoded}, "leave augment out where a graph is given"),
        ({"augment": CROPS, "on_error": "ignore"}, "on_error is one of raise, skip, substitute, not 'ignore'"),
        ({"augment": CROPS, "output": "jax"}, "output is one of torch, numpy, not 'jax'"),
        ({"dtype": "uint8"}, "do not fit into uint8"),
        ({"device": "gpu"}, "device is one of cpu, cuda"),
        ({"prefetch": 0}, "prefetch is 0, expected at least 1"),
    ],
)
def test_wrong_options(reader: readers.Reader, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        if options.keys() & {"dtype", "device", "prefetch"}:
            options = {"augment": classification(32), "options": PipelineOptions(**options)}
        DaliLoader(reader, 8, **grouped(options))


def test_an_old_dali_is_refused(reader: readers.Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dali, "__version__", "2.2.9")
    with pytest.raises(
        MissingExtraError, match=r"needs DALI from 2.3 on \(found 2.2.9\): run  pip install 'packer-vision\[dali\]'"
    ):
        DaliLoader(reader, 8, augment=CROPS)


def test_wrong_use_of_nodes(reader: readers.Reader) -> None:
    with pytest.raises(ValueError, match="no pipeline is being defined"):
        external_source(reader, 8)
    with dali.Pipeline(batch_size=4, num_threads=1, device_id=None):
        with pytest.raises(ValueError, match="the pipeline has batches of 4, the source of 8"):
            external_source(reader, 8)
        with pytest.raises(ValueError, match="samples one by one make no short batches"):
            external_source(reader, 4, ranks=Ranks(tail="pad"), per="sample")
        with pytest.raises(ValueError, match="no short batches, as on_error='skip' needs"):
            external_source(reader, 4, on_error="skip", per="sample")
