"""`ImageDataset`, `EpochSampler` and `ImageStream` inside DataLoader and StatefulDataLoader, forked and spawned."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_jpeg, tree_of
from PIL import Image
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import packer
import readers
from cache.errors import BadSampleError, ResumeError
from readers.augment import Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize
from readers.decode import decode_image
from readers.loader import ImageLoader
from readers.order import Sequential, Shuffled
from readers.torch import EpochSampler, ImageDataset, ImageStream, Place

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]
CROP = [RandomResizedCrop(16), RandomHorizontalFlip()]
COUNT = 40
BAD = (5, 21)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos") / "images"
    return tree_of(root, {f"class{i % 4}/photo{i:03d}.jpg": make_jpeg(2000 + i, (40, 32)) for i in range(COUNT)})


@pytest.fixture(scope="module")
def reader(photos: Path, pack: Callable[..., Path]) -> Iterator[readers.Reader]:
    with readers.open(pack(photos, "hdf5", samples_per_shard=16)) as opened:
        yield opened


@pytest.fixture
def damaged(photos: Path, tmp_path: Path) -> readers.Reader:
    out = tmp_path / "damaged"
    packer.convert(photos, to="hdf5", output=out)
    reader = readers.open(out)
    for number in BAD:
        place = reader.byte_range(number)
        assert place is not None
        shard, offset, length = place
        with open(shard, "r+b") as file:
            file.seek(offset)
            file.write(bytes(length))
    return reader


def whole(reader: readers.Reader, index: int) -> torch.Tensor:
    return torch.from_numpy(decode_image(reader.read(index)).copy()).permute(2, 0, 1)


def numbered(batch: Any) -> list[int]:
    """Which samples a batch holds, by their labels and pixels having been replaced with their number."""
    return [int(number) for number in batch[1]]


class Numbers(ImageDataset):
    """Says which sample it is instead of what class: (image, number)."""

    def __getitems__(self, indices: Any) -> list[tuple[Any, Any]]:
        items = super().__getitems__(indices)
        return [(image, int(index)) for (image, _), index in zip(items, indices, strict=True)]


# --- the data set -------------------------------------------------------------------------------------------------
def test_what_a_sample_is(reader: readers.Reader) -> None:
    dataset = ImageDataset(reader)
    image, label = dataset[7]
    assert torch.equal(image, whole(reader, 7)) and label == int(reader.labels[7])
    assert len(dataset) == COUNT and dataset.classes == reader.classes and dataset.targets == reader.labels.tolist()
    batch = dataset.__getitems__([3, 1, 2])
    assert all(torch.equal(x, whole(reader, i)) for (x, _), i in zip(batch, [3, 1, 2], strict=True))
    assert isinstance(ImageDataset(reader, output="numpy")[0][0], np.ndarray)
    picture = ImageDataset(reader, output="pil")[0][0]
    assert isinstance(picture, Image.Image) and np.array_equal(np.asarray(picture).transpose(2, 0, 1), whole(reader, 0))
    assert ImageDataset(reader, decode=None)[0][0] == bytes(reader.read(0))
    with pytest.raises(IndexError):
        dataset[COUNT]


def test_samples_stay_as_they_are(reader: readers.Reader) -> None:
    dataset = ImageDataset(reader)
    images = [dataset[i][0] for i in range(5)]
    assert all(torch.equal(image, whole(reader, i)) for i, image in enumerate(images))


def test_plain_functions(reader: readers.Reader) -> None:
    dataset = ImageDataset(reader, lambda image: image.float().mean(), target_transform=lambda label: label + 100)
    mean, label = dataset[3]
    assert mean == whole(reader, 3).float().mean() and label == int(reader.labels[3]) + 100


def test_albumentations_are_called_their_way(reader: readers.Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    class Transpose:
        def __call__(self, *, image: Any) -> dict[str, Any]:
            assert isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.shape[2] == 3
            return {"image": image.transpose(1, 0, 2)}

    monkeypatch.setattr(Transpose, "__module__", "albumentations.core.transforms_interface")
    image, _ = ImageDataset(reader, Transpose())[0]
    assert np.array_equal(image.transpose(2, 1, 0), whole(reader, 0))


def test_our_ops_are_those_of_the_loader(reader: readers.Reader) -> None:
    order = Shuffled(COUNT, 11)
    ops = [*CROP, Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))]
    loader = ImageLoader(reader, 8, augment=ops, order=order, seed=11)
    ours = torch.cat([images for images, _ in loader])
    for workers in (0, 2):
        sampler = EpochSampler(order, reader)
        batches = DataLoader(ImageDataset(reader, ops), 8, sampler=sampler, num_workers=workers)
        assert torch.allclose(torch.cat([images for images, _ in batches]), ours, atol=1e-6)


def test_without_our_sampler_ops_follow_torchs_generator(reader: readers.Reader) -> None:
    dataset = ImageDataset(reader, CROP)
    torch.manual_seed(0)
    first = [dataset[1][0] for _ in range(4)]
    torch.manual_seed(0)
    assert all(torch.equal(dataset[1][0], image) for image in first)
    assert not all(torch.equal(image, first[0]) for image in first)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers(reader: readers.Reader, context: str) -> None:
    dataset = ImageDataset(reader, [Resize((20, 20))])
    loader = DataLoader(dataset, 8, num_workers=2, multiprocessing_context=context, persistent_workers=True)
    for _ in range(2):
        images, labels = (torch.cat(part) for part in zip(*loader, strict=True))
        assert torch.equal(labels, torch.from_numpy(np.array(reader.labels)))
        assert torch.equal(images[9], ImageDataset(reader, [Resize((20, 20))])[9][0])


def test_pickle_is_small(reader: readers.Reader) -> None:
    dataset = ImageDataset(reader, CROP)
    dataset[0]
    assert torch.equal(
        pickle.loads(pickle.dumps(dataset)).__getitems__([Place(3, 1, 2, 3)])[0][0], dataset[Place(3, 1, 2, 3)][0]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode": "BGR"}, "decode is 'RGB', 'unchanged' or None, not 'BGR'"),
        ({"output": "list"}, "output is one of"),
        ({"on_error": "ignore"}, "on_error is one of raise, skip, substitute"),
        ({"transform": CROP, "decode": None}, "ops need 8-bit RGB"),
        ({"transform": [RandomHorizontalFlip(), Resize(3)]}, "put crops and the resize first"),
    ],
)
def test_wrong_options(reader: readers.Reader, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageDataset(reader, **options)


# --- bad samples --------------------------------------------------------------------------------------------------
def test_a_bad_sample_raises(damaged: readers.Reader) -> None:
    with pytest.raises(BadSampleError, match=r"sample 5 \(class0/photo020\): .* `packer verify --deep`"):
        ImageDataset(damaged)[5]


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_skipped_and_reported(damaged: readers.Reader, workers: int) -> None:
    dataset = ImageDataset(damaged, on_error="skip")
    sizes = [len(images) for images, _ in DataLoader(dataset, 10, num_workers=workers)]
    assert sizes == [9, 10, 9, 10] and dataset.bad_samples == 2
    assert dataset.report().startswith("2 bad samples were skipped, the first is sample ")
    assert dataset.report() == "" and dataset.bad_samples == 0
    with pytest.raises(BadSampleError, match="ask for batches"):
        dataset[5]


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_replaced(damaged: readers.Reader, workers: int) -> None:
    dataset = ImageDataset(damaged, on_error="substitute")
    sampler = EpochSampler(Sequential(COUNT), damaged)
    images, labels = (
        torch.cat(part) for part in zip(*DataLoader(dataset, 10, sampler=sampler, num_workers=workers), strict=True)
    )
    assert len(images) == COUNT and dataset.bad_samples == 2
    for bad in BAD:
        twins = [i for i in range(COUNT) if i not in BAD and torch.equal(images[i], images[bad])]
        assert len(twins) == 1 and labels[bad] == labels[twins[0]]
    assert "2 bad samples were replaced by others" in dataset.report()


def test_the_sampler_reports_bad_samples(damaged: readers.Reader) -> None:
    dataset = ImageDataset(damaged, on_error="skip")
    sampler = EpochSampler(Sequential(COUNT), dataset)
    loader = DataLoader(dataset, 10, sampler=sampler, num_workers=2)
    assert sum(len(images) for images, _ in loader) == COUNT - len(BAD)
    with pytest.warns(UserWarning, match="epoch 0: 2 bad samples were skipped, the first is sample"):
        next(iter(sampler))


# --- the sampler --------------------------------------------------------------------------------------------------
def test_the_sampler_walks_through_epochs() -> None:
    order = Shuffled(COUNT, 3)
    sampler = EpochSampler(order)
    for epoch in range(3):
        assert sampler.epoch == epoch
        assert list(sampler) == order.indices(epoch, np.arange(COUNT)).tolist()
    sampler.set_epoch(1)
    places = list(sampler)
    assert all(isinstance(place, Place) for place in places)
    assert [(place.epoch, place.position) for place in places] == [(1, position) for position in range(COUNT)]
    assert pickle.loads(pickle.dumps(places[3])).position == 3


@pytest.mark.parametrize(
    ("tail", "lengths"), [("drop_last", [13, 13, 13]), ("pad", [14, 14, 14]), ("exact", [13, 13, 14])]
)
def test_ranks_take_turns(tail: Any, lengths: list[int]) -> None:
    order = Shuffled(COUNT, 3)
    expected = order.indices(0, np.arange(COUNT)).tolist()
    parts = []
    for rank in range(3):
        sampler = EpochSampler(order, rank=rank, world_size=3, tail=tail)
        parts.append(list(sampler))
        assert len(parts[-1]) == lengths[rank]
        sampler.set_epoch(0)
        assert len(sampler) == lengths[rank]
    dealt = [part[i] for i in range(13) for part in parts]
    assert dealt == expected[:39]


def test_long_epochs_come_in_blocks() -> None:
    order = Shuffled(10_001, 1)
    parts = [list(EpochSampler(order, rank=rank, world_size=2, tail="exact")) for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == list(range(10_001))
    assert parts[0] == order.indices(0, np.arange(0, 10_000, 2)).tolist() + parts[0][5000:]


def test_a_plain_loader_resumes_by_what_training_has_seen(reader: readers.Reader) -> None:
    order = Shuffled(COUNT, 6)
    expected = order.indices(0, np.arange(COUNT)).tolist()
    seen, states = [], []
    for rank in range(2):
        sampler = EpochSampler(order, reader, rank=rank, world_size=2)
        loader = DataLoader(Numbers(reader, CROP), 4, sampler=sampler, num_workers=2)
        for step, batch in enumerate(loader, 1):
            seen += numbered(batch)
            if step == 3:
                break
        states.append(json.loads(json.dumps(sampler.state_after(step * 4))))
    assert states[0] == states[1] and sorted(seen) == sorted(expected[:24])
    sampler = EpochSampler(order, reader)
    sampler.load_state_dict(states[0])
    assert sampler.left == 16 and len(sampler) == COUNT
    rest = [number for batch in DataLoader(Numbers(reader, CROP), 5, sampler=sampler) for number in numbered(batch)]
    assert rest == expected[24:] and sampler.epoch == 1


def test_states_go_from_the_sampler_to_the_loader_and_back(reader: readers.Reader) -> None:
    order = Shuffled(COUNT, 6)
    sampler = EpochSampler(order, reader)
    loader = ImageLoader(reader, 8, augment=CROP, order=order, fields=("index", "image"))
    loader.load_state_dict(sampler.state_after(16))
    first = next(iter(loader))[0].tolist()
    assert first == order.indices(0, np.arange(16, 24)).tolist()
    sampler.load_state_dict(loader.state_dict())
    assert list(sampler) == order.indices(0, np.arange(24, COUNT)).tolist()


def test_a_state_of_another_set(reader: readers.Reader) -> None:
    state = EpochSampler(Shuffled(COUNT, 1), reader).state_dict()
    with pytest.raises(ResumeError, match="data set"):
        EpochSampler(Shuffled(COUNT, 1)).load_state_dict(state)
    with pytest.raises(ResumeError, match="another set"):
        ImageDataset(reader).load_state_dict({"fingerprint": "other"})
    ImageDataset(reader).load_state_dict(ImageDataset(reader).state_dict())


# --- torchdata ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_stateful_data_loader(reader: readers.Reader, workers: int, stop: int) -> None:
    def make() -> StatefulDataLoader[Any]:
        sampler = EpochSampler(Shuffled(COUNT, 6), reader)
        return StatefulDataLoader(Numbers(reader, CROP), 8, sampler=sampler, num_workers=workers)

    expected = [numbered(batch) for batch in make()]
    loader = make()
    stream = iter(loader)
    start = [next(stream) for _ in range(stop)]
    state = loader.state_dict()
    del stream
    resumed = make()
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert [numbered(batch) for batch in start + rest] == expected
    order = Shuffled(COUNT, 6)
    again = [number for batch in resumed for number in numbered(batch)]
    assert again == order.indices(1, np.arange(COUNT)).tolist()
    later = make()
    later.load_state_dict(resumed.state_dict())
    again = [number for batch in later for number in numbered(batch)]
    assert again == order.indices(2, np.arange(COUNT)).tolist()


# --- streams ------------------------------------------------------------------------------------------------------
def stream_loader(reader: readers.Reader, workers: int, make: Callable[..., Any] = DataLoader, **options: Any) -> Any:
    stream = ImageStream(Numbers(reader, CROP), EpochSampler(Shuffled(COUNT, 6), reader), 8)
    return make(stream, batch_size=None, num_workers=workers, **options)


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1}, {"num_workers": 3}, {"num_workers": 3, "persistent_workers": True}]
)
def test_a_stream_has_the_order_whatever_the_workers(reader: readers.Reader, options: dict[str, Any]) -> None:
    order = Shuffled(COUNT, 6)
    loader = stream_loader(reader, options.pop("num_workers", 0), **options)
    assert len(loader) == 5
    for epoch in (0, 1):
        numbers = [number for batch in loader for number in numbered(batch)]
        assert numbers == order.indices(epoch, np.arange(COUNT)).tolist()
    for _ in loader:
        break
    numbers = [number for batch in loader for number in numbered(batch)]
    assert numbers == order.indices(3, np.arange(COUNT)).tolist()
    loader.dataset.set_epoch(9)
    numbers = [number for batch in loader for number in numbered(batch)]
    assert numbers == order.indices(9, np.arange(COUNT)).tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_in_a_stateful_data_loader(reader: readers.Reader, workers: int) -> None:
    expected = [numbered(batch) for batch in stream_loader(reader, workers, StatefulDataLoader)]
    loader = stream_loader(reader, workers, StatefulDataLoader)
    stream = iter(loader)
    start = [numbered(next(stream)) for _ in range(3)]
    state = loader.state_dict()
    resumed = stream_loader(reader, workers, StatefulDataLoader)
    resumed.load_state_dict(state)
    assert start + [numbered(batch) for batch in resumed] == expected


def test_the_last_batch_of_a_stream(reader: readers.Reader) -> None:
    for drop_last, sizes in ((True, [12, 12, 12]), (False, [12, 12, 12, 4])):
        stream = ImageStream(ImageDataset(reader, CROP), EpochSampler(Shuffled(COUNT), reader), 12, drop_last=drop_last)
        loader = DataLoader(stream, batch_size=None, num_workers=2)
        assert len(stream) == len(sizes) and [len(images) for images, _ in loader] == sizes


# --- unchanged ---------------------------------------------------------------------------------------------------
def test_unchanged_images_come_in_their_own_depth(tmp_path: Path) -> None:
    values = np.random.default_rng(1).integers(0, 65536, (2, 6, 8), np.uint16)
    for number, image in enumerate(values):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    reader = readers.open_folder(tmp_path)
    loader = DataLoader(ImageDataset(reader, decode="unchanged"), batch_size=2)
    (images, _labels) = next(iter(loader))
    assert images.shape == (2, 1, 6, 8) and np.array_equal(images.numpy()[:, 0], values)
    array, _ = ImageDataset(reader, lambda image: image.astype(np.float32) / 65535, "unchanged", output="numpy")[1]
    assert array.dtype == np.float32 and np.allclose(array * 65535, values[1], atol=0.01)
    assert ImageDataset(reader)[0][0].dtype == torch.uint8


def test_what_unchanged_cannot_be_combined_with(tmp_path: Path, place: dict[str, Any]) -> None:
    (tmp_path / "1.jpg").write_bytes(make_jpeg(1))
    reader = readers.open_folder(tmp_path)
    with pytest.raises(ValueError, match="ops need 8-bit RGB"):
        ImageDataset(reader, [Resize(8)], "unchanged")
    with pytest.raises(ValueError, match="output='tensor' or 'numpy'"):
        ImageDataset(reader, decode="unchanged", output="pil")
    with (
        readers.cached(reader, capacity="1MiB", keep="decoded", **place) as kept,
        pytest.raises(ValueError, match="a cache that keeps images decoded: open it with keep='encoded'"),
    ):
        ImageDataset(kept, decode="unchanged")
