"""`DevicePrefetcher`: the loader's batches on the device, complete and in order; exact resume; a clean end. Tested on
the CPU, and on a double of CUDA whose copies happen as late as allowed; it was never run on a GPU."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_jpeg, tree_of
from gpu_doubles import FakeCuda
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import readers
from cache.errors import TrainerError
from packer.testing.children import in_child
from readers.augment import Resize
from readers.loader import ImageLoader
from readers.order import Shuffled
from readers.torch import DevicePrefetcher, EpochSampler, ImageDataset

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]
COUNT, BATCH = 40, 4


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "packer-prefetcher"]


def numbers(count: int = COUNT, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(count)), BATCH, **options)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


# --- the same batches ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("workers", "prefetch"), [(0, 1), (0, 100), (2, 5)])
def test_batches_equal_those_of_the_loader(workers: int, prefetch: int) -> None:
    loader = numbers(num_workers=workers)
    prefetcher = DevicePrefetcher(loader, "cpu", prefetch=prefetch)
    assert len(prefetcher) == len(loader) == 10
    assert prefetcher.batch_size == BATCH and prefetcher.dataset is loader.dataset
    for _ in range(2):
        assert [batch[0].tolist() for batch in prefetcher] == [batch[0].tolist() for batch in loader]
    assert not threads() and list(DevicePrefetcher([], "cpu")) == []
    for device, ahead, words in (("cpu", 0, "at least 1"), ("cuda", 1, "finds no GPU")):
        with pytest.raises(ValueError, match=words):
            DevicePrefetcher([], device, prefetch=ahead)
    assert not hasattr(prefetcher, "state_dict") and not hasattr(prefetcher, "no_such_attribute")


def test_at_most_prefetch_batches_are_made_ahead() -> None:
    made = threading.Semaphore(0)
    requested = []

    def batches() -> Iterator[int]:
        for number in range(20):
            requested.append(number)
            made.release()
            yield number

    loop = iter(DevicePrefetcher(batches(), "cpu", prefetch=3))
    assert not requested, "batches were made before the loop began"
    assert next(loop) == 0
    for _ in range(4):
        assert made.acquire(timeout=300)
    assert next(loop) == 1 and made.acquire(timeout=300) and requested == [0, 1, 2, 3, 4]
    assert list(loop) == list(range(2, 20))


# --- on a device --------------------------------------------------------------------------------------------------
Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Record:
    image: Any
    name: str


def test_every_kind_of_batch_is_copied(cuda: FakeCuda) -> None:
    batch = {
        "pair": Pair(cuda.tensor(1.0), [cuda.tensor(2.0, pinned=True), "text", None]),
        "record": Record(cuda.tensor(3.0), "name"),
        "ordered": OrderedDict(a=cuda.tensor(4.0)),
        "user": UserDict(a=(cuda.tensor(5.0), 6)),
    }
    (moved,) = DevicePrefetcher([batch], "cuda")
    pair, record, user = moved["pair"], moved["record"], moved["user"]["a"]
    tensors = [pair.first, pair.second[0], record.image, moved["ordered"]["a"], user[0]]
    assert [float(tensor[0]) for tensor in tensors] == [1, 2, 3, 4, 5]
    assert all(tensor.device == torch.device("cuda", 0) for tensor in tensors)
    assert [type(moved[name]) for name in moved] == [type(batch[name]) for name in batch]
    assert pair.second[1:] == ["text", None] and record.name == "name" and user[1] == 6
    assert batch["record"].image.device.type == "cpu" and batch["user"]["a"][0].device.type == "cpu"
    assert {("consumer", id(tensor)) for tensor in tensors} == set(cuda.recorded)


def test_packed_sequences_keep_their_sizes_on_the_host() -> None:
    packed = pack_sequence([torch.arange(2.0), torch.arange(3.0)], enforce_sorted=False)
    (moved,) = DevicePrefetcher([packed], "cpu")
    assert type(moved) is type(packed) and torch.equal(moved.data, packed.data)
    assert moved.batch_sizes is packed.batch_sizes


@pytest.mark.parametrize("pinned", [True, False])
def test_copies_finish_before_training_reads_them_and_their_source_is_kept(cuda: FakeCuda, pinned: bool) -> None:
    """The double copies only in a wait, and copies no data from a tensor that was freed by then."""
    freed = []

    def batches() -> Iterator[Any]:
        for number in range(8):
            tensor = cuda.tensor(number, pinned=pinned)
            freed.append(weakref.ref(tensor))
            yield tensor, number

    for tensor, number in DevicePrefetcher(batches(), "cuda", prefetch=2):
        assert tensor.tolist() == [number]
        assert ("consumer", id(tensor)) in cuda.recorded, "otherwise its memory is reused too early"
    gc.collect()
    assert [reference() for reference in freed] == [None] * 8


def test_a_loop_left_early_waits_for_its_copies(cuda: FakeCuda) -> None:
    loop = iter(DevicePrefetcher([cuda.tensor(1.0), cuda.tensor(2.0), cuda.tensor(3.0)], "cuda", prefetch=1))
    next(loop)
    for _ in range(2):  # the copy of the next batch is queued
        assert cuda.side.copies.acquire(timeout=300)
    del loop
    gc.collect()
    assert not threads() and cuda.side.idle


# --- state --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, pack: Callable[..., Path]) -> Path:
    root = tmp_path_factory.mktemp("photos") / "images"
    return pack(tree_of(root, {f"class/photo{i:03d}.jpg": make_jpeg(i, (16, 16)) for i in range(COUNT)}))


def image_loader(reader: readers.Reader) -> Any:
    return ImageLoader(reader, BATCH, augment=[Resize((8, 8))], seed=3, threads=2, fields=("index",))


def stateful(workers: int) -> Callable[[readers.Reader], Any]:
    def make(reader: readers.Reader) -> Any:
        dataset = ImageDataset(reader, fields=("index",))
        sampler = EpochSampler(Shuffled(len(reader), seed=3), dataset)
        return StatefulDataLoader(dataset, BATCH, sampler=sampler, num_workers=workers)

    return make


LOADERS = {"ImageLoader": image_loader, "StatefulDataLoader": stateful(0), "with workers": stateful(2)}


@pytest.mark.parametrize(
    ("kind", "taken"), [("ImageLoader", 1), ("ImageLoader", 10), ("StatefulDataLoader", 10), ("with workers", 4)]
)
def test_resume_repeats_and_loses_nothing(packed: Path, kind: str, taken: int) -> None:
    make = LOADERS[kind]
    with readers.open(packed) as reader:
        plain = make(reader)
        expected = [batch[0].tolist() for _ in range(2) for batch in plain]
        first = DevicePrefetcher(make(reader), "cpu", prefetch=5)
        loop = iter(first)
        seen = [next(loop)[0].tolist() for _ in range(taken)]
        state = first.state_dict()
        again = DevicePrefetcher(make(reader), "cpu", prefetch=2)
        again.load_state_dict(state)
        del loop
        assert first.state_dict() == state, "a loop left early lost its position"
        while len(seen) < len(expected):
            seen += [batch[0].tolist() for batch in again]
        assert seen == expected
        again.load_state_dict(state)
        again.set_epoch(7)
        assert kind != "ImageLoader" or again.epoch == 7 == again.state_dict()["epoch"]


def test_a_sampler_behind_a_prefetcher_does_not_know_the_position_of_training(packed: Path) -> None:
    with readers.open(packed) as reader:
        dataset = ImageDataset(reader, fields=("index",))
        sampler = EpochSampler(Shuffled(len(reader), seed=3), dataset)
        prefetcher = DevicePrefetcher(DataLoader(dataset, BATCH, sampler=sampler), "cpu")
        prefetcher.set_epoch(2)
        loop = iter(prefetcher)
        seen = next(loop)[0].tolist()
        assert prefetcher.sampler is sampler and sampler.epoch == 2
        with pytest.raises(TrainerError, match="state_after"):
            sampler.state_dict()
        state = sampler.state_after(BATCH)
        loop.close()
        sampler.load_state_dict(state)
        seen += [i for batch in prefetcher for i in batch[0].tolist()]
        assert sorted(seen) == list(range(COUNT))


# --- the end ------------------------------------------------------------------------------------------------------
def test_errors_come_after_the_batches_before_them() -> None:
    def batches() -> Iterator[int]:
        yield from (0, 1, 2)
        raise OSError("the disk is gone")

    seen = []
    with pytest.raises(OSError, match="the disk is gone"):
        for batch in (loop := iter(DevicePrefetcher(batches(), "cpu", prefetch=10))):
            seen.append(batch)
    assert seen == [0, 1, 2] and list(loop) == [] and not threads()
    with pytest.raises(ZeroDivisionError):
        next(iter(DevicePrefetcher((1 // 0 for _ in range(1)), "cpu")))


@pytest.mark.parametrize("workers", [0, 2])
def test_leaving_a_loop_ends_its_thread_and_the_workers(workers: int) -> None:
    prefetcher = DevicePrefetcher(numbers(num_workers=workers), "cpu")
    for _ in prefetcher:
        break
    gc.collect()
    assert not threads()
    assert [batch[0][0].item() for batch in prefetcher] == list(range(0, COUNT, BATCH)), "the next loop is not complete"


def test_a_finished_loop_keeps_no_reference_to_its_caller() -> None:
    """The garbage collector ends leftovers in any order, so workers of a DataLoader may wait 5 s each."""

    class Held:
        pass

    def train() -> weakref.ref[Held]:
        local = Held()
        assert len(list(DevicePrefetcher(numbers(), "cpu"))) == 10
        return weakref.ref(local)

    gc.disable()
    try:
        assert train()() is None
    finally:
        gc.enable()


def test_a_new_loop_ends_the_previous_one() -> None:
    prefetcher = DevicePrefetcher(numbers(), "cpu")
    first, second = iter(prefetcher), iter(prefetcher)
    next(first)
    assert next(second)[0].tolist() == [0, 1, 2, 3] and len(threads()) == 1
    with pytest.raises(RuntimeError, match="another loop"):
        next(first)
    assert len(list(second)) == 9


def test_a_forked_child_cannot_continue_the_loop_of_its_parent() -> None:
    prefetcher = DevicePrefetcher(numbers(), "cpu")
    loop = iter(prefetcher)
    next(loop)

    def child() -> None:
        with pytest.raises(TrainerError, match="forked"):
            while True:
                next(loop)
        assert len(list(prefetcher)) == 10

    in_child(child)
    assert len(list(loop)) == 9
