"""`ImageDataset`, `EpochSampler` and `ImageStream`: items, transforms and bad samples; `test_loops` tests epochs."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from conftest import make_jpeg, tree_of
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, Subset, default_collate, random_split
from torchdata import nodes

import packer
import readers
from cache.errors import BadSampleError, ResumeError
from packer.testing.samples import overwrite
from readers.augment import Normalize, Op, RandomHorizontalFlip, RandomResizedCrop, Resize, Stage
from readers.decode import decode_image
from readers.feed import Start
from readers.loader import ImageLoader
from readers.order import Sequential, Shuffled, Weighted
from readers.torch import EpochSampler, ImageDataset, ImageStream

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
        overwrite(reader, number, b"")
    return reader


def whole(reader: readers.Reader, index: int) -> torch.Tensor:
    return torch.from_numpy(decode_image(reader.read(index)).copy()).permute(2, 0, 1)


# --- the data set -------------------------------------------------------------------------------------------------
def test_the_pickle_for_a_worker_does_not_grow_with_the_set(
    reader: readers.Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of paths and labels, as ImageFolder has, takes 60 bytes a sample."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    build_index = importlib.import_module("index_set").build_index
    sizes = []
    for samples in (2_000, 40_000):
        (tmp_path / f"{samples}").mkdir()
        build_index(tmp_path / f"{samples}", samples)
        with readers.open(tmp_path / f"{samples}") as many:
            dataset = ImageDataset(many, CROP)
            sizes.append(len(ForkingPickler.dumps(dataset)))
            assert len(pickle.dumps(many.select(indices=range(0, samples, 2)))) < 25_000 + 4 * samples
    assert max(sizes) < 25_000 and abs(sizes[1] - sizes[0]) < 1_000, "names of 1,000 classes and 100 shards"
    assert len(ForkingPickler.dumps(ImageDataset(reader))) < 5_000
    listed = [(f"/data/imagenet/train/n0{i % 1000}/n0{i % 1000}_{i}.JPEG", i % 1000) for i in range(40_000)]
    assert len(pickle.dumps(listed)) > 50 * max(sizes)


def test_the_content_of_a_sample(reader: readers.Reader) -> None:
    dataset = ImageDataset(reader)
    image, label = dataset[7]
    assert torch.equal(image, whole(reader, 7)) and label == int(reader.labels[7])
    assert len(dataset) == COUNT and dataset.classes == reader.classes and dataset.targets == reader.labels.tolist()
    batch = dataset.__getitems__([3, 1, 2])  # the images do not share memory
    assert all(torch.equal(x, whole(reader, i)) for (x, _), i in zip(batch, [3, 1, 2], strict=True))
    assert isinstance(ImageDataset(reader, output="numpy")[0][0], np.ndarray)
    picture = ImageDataset(reader, output="pil")[0][0]
    assert isinstance(picture, Image.Image) and np.array_equal(np.asarray(picture).transpose(2, 0, 1), whole(reader, 0))
    assert ImageDataset(reader, decode=None)[0][0] == bytes(reader.read(0))
    with pytest.raises(IndexError):
        dataset[COUNT]
    with pytest.raises(TypeError, match=r"found list; for batches use  DataLoader\(dataset, batch_sampler=…\)"):
        next(iter(DataLoader(dataset, sampler=[[0, 1]], batch_size=None)))
    dataset.load_state_dict(dataset.state_dict())
    with pytest.raises(ResumeError, match="another set"):
        dataset.load_state_dict({"fingerprint": "other"})


# --- batches --------------------------------------------------------------------------------------------------------
def of_codec(folder: Path, pack: Callable[..., Path]) -> readers.Reader:
    """Images that the codec decodes, others, and two damaged ones."""
    images = {f"c/{i:02d}.{'png' if i % 5 == 4 else 'jpg'}": (90 + i, 120 - i) for i in range(24)}
    root = tree_of(folder / "of_codec", {name: make_jpeg(i, size) for i, (name, size) in enumerate(images.items())})
    for name in images:
        if name.endswith("png"):
            Image.open(root / name).save(root / name, "PNG")
    reader = readers.open(pack(root, "hdf5"))
    for number in (5, 14):
        overwrite(reader, number, b"")
    return reader


def plain(samples: list[Any]) -> Any:
    """`default_collate` of unchanged samples."""
    assert all(len(sample) == 2 and "Made" not in str(type(sample)) for sample in samples)
    return default_collate(samples)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_images_decoded_into_their_batch_equal_those_of_samples(
    tmp_path: Path, pack: Callable[..., Path], workers: int, floats: bool, on_error: Any
) -> None:
    """By torch's function and by `collate`, in tuples and dictionaries, and as a stream."""
    reader, ops = of_codec(tmp_path, pack), [RandomResizedCrop(48), RandomHorizontalFlip()]
    ops += [Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))] if floats else []
    for fields in (("image", "key"), {"pixels": "image", "labels": "label"}):
        dataset = ImageDataset(reader, ops, fields=fields, on_error=on_error)
        loaders = []
        for collate in (plain, None, dataset.collate, "stream"):
            sampler = EpochSampler(Shuffled(24, 3), dataset)
            data, args = dataset, {"sampler": sampler, "collate_fn": collate, "batch_size": 5}
            if collate == "stream":
                data, args = ImageStream(dataset, sampler, 5, drop_last=False), {"batch_size": None}  # type: ignore[assignment]
            loaders.append(list(DataLoader(data, num_workers=workers, **args)))  # type: ignore[arg-type]
        for batches in zip(*loaders, strict=True):
            values = [[*(batch.values() if isinstance(batch, dict) else batch)] for batch in batches]
            assert [type(batch) for batch in batches] == [dict if isinstance(fields, dict) else list] * 4
            for images, others in values:
                assert torch.equal(images, values[0][0]) and images.is_contiguous()
                assert images.is_shared() == bool(workers) and list(others) == list(values[0][1])


def test_a_batch_is_decoded_in_one_call_where_its_samples_are_not_used_otherwise(
    tmp_path: Path, pack: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    native, calls = pytest.importorskip("readers.coefficients.native"), []
    resize = native.resize
    monkeypatch.setattr(native, "resize", lambda some, *args: calls.append(len(some)) or resize(some, *args))
    reader = of_codec(tmp_path, pack).select(indices=range(4))

    class Own(ImageDataset):
        def collate(self, items: Any) -> Any:
            return plain(items)

    def blank(label: int, sample: dict[str, Any]) -> int:
        sample["image"] = torch.zeros(1)
        return label

    ops, blanked = [Resize((48, 48))], {"target_transform": blank}
    for kind, options, collate, expected in (
        (ImageDataset, {}, None, [4]),
        (ImageDataset, {}, "subset", [4]),
        (ImageDataset, {}, "stack", [1] * 4),
        (ImageDataset, {}, plain, [1] * 4),
        (Own, {}, "own", [1] * 4),
        (ImageDataset, blanked, None, [1] * 4),
    ):
        dataset = kind(reader, ops, **options)  # type: ignore[arg-type]
        wrapped = {"subset": Subset(dataset, range(4)), "stack": Subset(StackDataset(dataset, list("abcd")), range(4))}
        collate_fn = dataset.collate if collate == "own" else None if collate in wrapped else collate
        args = wrapped.get(collate, dataset)  # type: ignore[call-overload]
        (batch,) = DataLoader(args, 4, collate_fn=collate_fn)  # type: ignore[arg-type]
        batch = batch[0] if collate == "stack" else batch
        assert calls == expected and batch[0].shape[1:] == ((3, 48, 48) if options is not blanked else (1,))
        calls.clear()
    samples = ImageDataset(reader, ops).__getitems__(range(4))
    assert len({sample[0].untyped_storage().data_ptr() for sample in samples}) == 4


def test_plain_functions(reader: readers.Reader) -> None:
    dataset = ImageDataset(reader, lambda image: image.float().mean(), target_transform=lambda label: label + 100)
    mean, label = dataset[3]
    assert mean == whole(reader, 3).float().mean() and label == int(reader.labels[3]) + 100


def test_albumentations_are_called_with_image(reader: readers.Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    class Transpose:
        def __call__(self, *, image: Any) -> dict[str, Any]:
            assert isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.shape[2] == 3
            return {"image": image.transpose(1, 0, 2)}

    monkeypatch.setattr(Transpose, "__module__", "albumentations.core.transforms_interface")
    image, _ = ImageDataset(reader, Transpose())[0]
    assert np.array_equal(image.transpose(2, 1, 0), whole(reader, 0))


def test_without_our_sampler_ops_use_torchs_generator(reader: readers.Reader) -> None:
    dataset = ImageDataset(reader, CROP)
    torch.manual_seed(0)
    first = [dataset[1][0] for _ in range(4)]
    torch.manual_seed(0)
    assert all(torch.equal(dataset[1][0], image) for image in first)
    assert not all(torch.equal(image, first[0]) for image in first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode": "BGR"}, "decode is 'RGB', 'unchanged' or None, not 'BGR'"),
        ({"output": "list"}, "output is one of"),
        ({"on_error": "ignore"}, "on_error is one of raise, skip, substitute"),
        ({"transform": CROP, "decode": None}, "ops need decoded images"),
        ({"transform": [Normalize((0.5,) * 3, (0.5,) * 3), Resize(3)]}, "Resize comes after Normalize"),
    ],
)
def test_wrong_options(reader: readers.Reader, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageDataset(reader, **options)


# --- bad samples --------------------------------------------------------------------------------------------------
def test_a_single_bad_sample_raises(damaged: readers.Reader) -> None:
    with pytest.raises(BadSampleError, match=r"sample 5 \(class0/photo020\): .* `packer verify --deep`"):
        ImageDataset(damaged)[5]
    with pytest.raises(BadSampleError, match="request batches"):
        ImageDataset(damaged, on_error="skip")[5]


@pytest.mark.parametrize(
    ("on_error", "done", "workers"), [("skip", "skipped", 0), ("substitute", "replaced by others", 2)]
)
def test_bad_samples_are_skipped_or_replaced_and_reported(
    damaged: readers.Reader, on_error: Any, done: str, workers: int
) -> None:
    dataset = ImageDataset(damaged, on_error=on_error)
    sampler = EpochSampler(Sequential(COUNT), dataset)
    images, labels = zip(*DataLoader(dataset, 10, sampler=sampler, num_workers=workers), strict=True)
    assert dataset.bad_samples == 2
    if on_error == "skip":
        assert list(map(len, images)) == [9, 10, 9, 10]
    else:
        all_images, all_labels = torch.cat(images), torch.cat(labels)
        assert len(all_images) == COUNT
        for bad in BAD:
            twins = [i for i in range(COUNT) if i not in BAD and torch.equal(all_images[i], all_images[bad])]
            assert len(twins) == 1 and all_labels[bad] == all_labels[twins[0]]
    with pytest.warns(UserWarning, match=f"epoch 0: 2 bad samples were {done}, the first is sample (5|21) "):
        next(iter(sampler))
    assert dataset.report() == "" and dataset.bad_samples == 0


# --- unchanged ---------------------------------------------------------------------------------------------------
def test_unchanged_images_keep_their_depth(tmp_path: Path) -> None:
    values = np.random.default_rng(1).integers(0, 65536, (2, 6, 8), np.uint16)
    for number, image in enumerate(values):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    reader = readers.open_folder(tmp_path)
    loader = DataLoader(ImageDataset(reader, decode="unchanged"), batch_size=2)
    (images, _labels) = next(iter(loader))
    assert images.shape == (2, 1, 6, 8) and np.array_equal(images.numpy()[:, 0], values)
    array, _ = ImageDataset(reader, lambda image: image.astype(np.float32) / 65535, "unchanged", output="numpy")[1]
    assert array.dtype == np.float32 and np.allclose(array * 65535, values[1], atol=0.01)
    with pytest.warns(UserWarning, match="more than 8 bits a channel"):
        assert ImageDataset(reader)[0][0].dtype == torch.uint8


def test_options_that_exclude_unchanged(tmp_path: Path, place: dict[str, Any]) -> None:
    (tmp_path / "1.jpg").write_bytes(make_jpeg(1))
    reader = readers.open_folder(tmp_path)
    with pytest.raises(ValueError, match="output='tensor' or 'numpy'"):
        ImageDataset(reader, decode="unchanged", output="pil")
    with (
        readers.cached(reader, capacity="1MiB", keep="decoded", **place) as kept,
        pytest.raises(ValueError, match="a cache that keeps images decoded: open it with keep='encoded'"),
    ):
        ImageDataset(kept, decode="unchanged")


# --- data sets of torch over a data set ---------------------------------------------------------------------------
class Wrapped(torch.utils.data.Dataset[Any]):
    """A wrapper as users write it. numbers: the samples to return."""

    def __init__(self, dataset: ImageDataset, numbers: list[int]) -> None:
        self.dataset, self.numbers = dataset, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.numbers[index]]


WRAPPERS: dict[str, Callable[[ImageDataset], Any]] = {
    "random_split": lambda dataset: random_split(dataset, [20, COUNT - 20])[0],
    "a subset of a subset in ConcatDataset": lambda dataset: ConcatDataset(
        [Subset(Subset(dataset, list(range(30))), list(range(20)))]
    ),
    "Wrapped": lambda dataset: Wrapped(dataset, list(range(20))),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_that_loses_the_place_in_the_epoch_is_named(reader: readers.Reader, name: str) -> None:
    dataset = ImageDataset(reader, CROP)
    wrapped = WRAPPERS[name](dataset)
    loader = DataLoader(wrapped, 5, sampler=EpochSampler(Shuffled(20, 1)))
    lost = "Wrapped" if name == "Wrapped" else "Subset"
    with pytest.warns(
        UserWarning, match=rf"^{lost} passes plain numbers.*reader\.select\(indices=…\).*{lost}$"
    ) as caught:
        for _ in range(2):
            assert len(list(loader)) == 4
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for transform, sampler in ((CROP, None), ([Resize(16)], EpochSampler(Shuffled(20, 1)))):  # no sample is lost
            list(DataLoader(WRAPPERS[name](ImageDataset(reader, transform)), 5, sampler=sampler))


@pytest.mark.parametrize("kind", ["selected", "concatenated"])
def test_wrappers_that_keep_the_place_in_the_epoch(reader: readers.Reader, kind: str) -> None:
    """A selection in place of a subset, and data sets in ConcatDataset: the images equal those of the loader, with any
    workers."""
    first, second = reader.select(indices=range(15)), reader.select(indices=range(15, COUNT))
    chosen = first if kind == "selected" else readers.concat([first, second])
    both: Any = ConcatDataset([ImageDataset(first, CROP), ImageDataset(second, CROP)])
    dataset = ImageDataset(first, CROP) if kind == "selected" else both
    order = Shuffled(len(chosen), 7)
    expected = torch.cat([images for images, _ in ImageLoader(chosen, 5, order=order, augment=CROP)])
    for workers in (0, 2):
        loader = DataLoader(dataset, 5, sampler=EpochSampler(order), num_workers=workers)
        assert torch.equal(torch.cat([images for images, _ in loader]), expected)


def test_concatenated_data_sets_replace_bad_samples_within_each_set_and_order(damaged: readers.Reader) -> None:
    """Sample 5 belongs to the first, sample 21 to the second; samples outside the order are never substitutes."""
    parts = [damaged.select(indices=range(20)), damaged.select(indices=range(20, COUNT))]
    sets = [ImageDataset(part, fields=("image", "key"), on_error="substitute") for part in parts]
    order = Weighted((np.arange(COUNT) % 20) < 10, samples=200, seed=3)
    keys = [key for _, some in DataLoader(ConcatDataset(sets), 10, sampler=EpochSampler(order)) for key in some]
    allowed = {damaged.keys[i] for i in range(COUNT) if i % 20 < 10 and i not in BAD}
    assert len(keys) == 200 and {*keys} <= allowed and all(dataset.bad_samples for dataset in sets)


# --- in threads ---------------------------------------------------------------------------------------------------
# torchdata's nodes, executors, and the future thread workers of torch: the items equal those of processes, on any
# thread.
BATCH, ORDER = 4, Shuffled(COUNT, 1)


def dataset_of(reader: readers.Reader) -> ImageDataset:
    return ImageDataset(reader, CROP, fields=("index", "image"))


def threaded(reader: readers.Reader, threads: int = 3, batch_size: int = BATCH) -> nodes.Loader[Any]:
    """A torchdata pipeline of nodes: batches of indices, each made by one of several workers."""
    dataset = dataset_of(reader)
    indices = nodes.Batcher(nodes.SamplerWrapper(EpochSampler(ORDER, dataset)), batch_size, drop_last=True)

    def load(batch: list[int]) -> Any:
        return default_collate(dataset.__getitems__(batch))

    return nodes.Loader(nodes.ParallelMapper(indices, load, num_workers=threads, method="thread"))


def by_processes(reader: readers.Reader, workers: int = 2) -> DataLoader[Any]:
    dataset = dataset_of(reader)
    sampler = EpochSampler(ORDER, dataset)
    return DataLoader(dataset, BATCH, sampler=sampler, num_workers=workers, drop_last=True)


def same(made: Any, expected: Any) -> bool:
    return all(
        torch.equal(a, b) for row, other in zip(made, expected, strict=True) for a, b in zip(row, other, strict=True)
    )


def test_threads_give_the_batches_of_processes(reader: readers.Reader) -> None:
    """Also in the second epoch: random numbers depend neither on the worker nor on the number of workers."""
    processes, threads = by_processes(reader), threaded(reader)
    for _ in range(2):
        expected = list(processes)
        assert len(expected) == COUNT // BATCH and same(list(threads), expected)


@pytest.mark.parametrize(("stop", "batch_size"), [(3, 4), (10, 4), (13, 3), (23, 4)])
def test_nodes_resume_exactly(reader: readers.Reader, stop: int, batch_size: int) -> None:
    """In mid-epoch, and at the end of an epoch, with and without a remainder; with another number of threads."""
    loader, epochs = threaded(reader, 3, batch_size), 4
    whole = [copy.copy(batch) for _ in range(epochs) for batch in loader]
    loader = threaded(reader, 3, batch_size)
    seen: list[Any] = []
    while len(seen) < stop:
        seen += islice(loader, stop - len(seen))
    resumed = threaded(reader, 1, batch_size)
    resumed.load_state_dict(loader.state_dict())
    while len(seen) < len(whole):
        seen += list(resumed)
    assert same(seen, whole)


def test_many_threads_share_a_data_set(reader: readers.Reader) -> None:
    """Threads of an executor request single items and batches, while a copy is pickled."""
    dataset = dataset_of(reader)
    places = [list(batch) for batch in torch.utils.data.BatchSampler(EpochSampler(ORDER, dataset), BATCH, True)]
    expected = [[item[1] for item in dataset.__getitems__(batch)] for batch in places]

    def one(number: int) -> bool:
        batch = places[number % len(places)]
        items = [dataset[place] for place in batch] if number % 2 else dataset.__getitems__(batch)
        return all(
            torch.equal(item[1], image) for item, image in zip(items, expected[number % len(places)], strict=True)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(60)))


def test_a_worker_of_a_stream_computes_only_the_order_of_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, computed = EpochSampler(Shuffled(2503, 3), tail="exact"), [0]
    every, indices = list(sampler.samples_from(Start())), Shuffled.indices

    def counted(self: Shuffled, epoch: int, positions: Any) -> Any:
        computed[0] += len(positions)
        return indices(self, epoch, positions)

    monkeypatch.setattr(Shuffled, "indices", counted)
    for worker in range(3):
        batches, computed[0] = list(sampler.batches_from(Start(), 10, worker, 3)), 0
        assert [size for size, _ in batches] == [10] * 250 + [3]
        expected = [every[at : at + 10] if at // 10 % 3 == worker else [] for at in range(0, 2503, 10)]
        assert [places for _, places in batches] == expected
        assert len(list(sampler.batches_from(Start(), 10, worker, 3))) == 251
        assert computed[0] == 17 * sum(map(len, expected)), "each sample has 16 substitutes"


def test_a_stream_in_a_thread_equals_that_of_the_loader(reader: readers.Reader) -> None:
    dataset = dataset_of(reader)
    stream = ImageStream(dataset, EpochSampler(ORDER, dataset), BATCH)
    expected = list(DataLoader(ImageStream(dataset, EpochSampler(ORDER, dataset), BATCH), batch_size=None))
    loader = nodes.Loader(nodes.Prefetcher(nodes.IterableWrapper(stream), 2))
    assert same(list(loader), expected)


def test_the_first_reads_may_come_from_several_threads(reader: readers.Reader, request: pytest.FixtureRequest) -> None:
    expected = [bytes(data) for data in reader.read_many(range(8))]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    request.addfinalizer(lambda: sys.setswitchinterval(before))
    with ThreadPoolExecutor(8) as pool:
        for _ in range(30):
            fresh, together = pickle.loads(pickle.dumps(reader)), threading.Barrier(8)

            def read(index: int, reader: readers.Reader = fresh, together: threading.Barrier = together) -> bytes:
                together.wait(300)
                return bytes(reader.read(index))

            assert list(pool.map(read, range(8))) == expected


@dataclass(frozen=True)
class Threads(Op):
    """Records how many cores torch's operations may use."""

    noted: list[int]
    stage: ClassVar[Stage] = Stage.PIXELS

    def plan(self, planner: Any, u: Any) -> None:
        planner.step(self, np.zeros((len(u), 1)))

    def apply(self, images: torch.Tensor, rows: Any) -> torch.Tensor:
        self.noted.append(torch.get_num_threads())
        return images


def test_an_item_is_made_on_one_core_and_the_thread_count_of_torch_is_unchanged(reader: readers.Reader) -> None:
    """Waiting torch threads made an item take eight times as long."""
    noted: list[int] = []
    dataset, before = ImageDataset(reader, [RandomResizedCrop(16), Threads(noted)]), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        dataset[0], dataset.__getitems__([1, 2])
        assert noted == [1] * 3 and torch.get_num_threads() == 3
        in_thread: list[int] = []
        thread = threading.Thread(target=lambda: (dataset[0], in_thread.append(torch.get_num_threads())))
        thread.start()
        thread.join()
        assert noted == [1] * 4 and in_thread == [3]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("decoder", ["auto", "cpu", "compiled"])
def test_the_decoder_of_a_data_set(
    tmp_path: Path, pack: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, decoder: Any
) -> None:
    """With "cpu" libjpeg decodes, to the same pixels, with ops and without."""
    native = pytest.importorskip("readers.coefficients.native")
    calls: list[str] = []
    for name in ("decode_jpeg", "resize"):
        kept = getattr(native, name)
        monkeypatch.setattr(native, name, lambda *args, kept=kept, name=name: calls.append(name) or kept(*args))
    with readers.open(pack(tree_of(tmp_path / "images", {"c/0.jpg": make_jpeg(1, (90, 70))}))) as reader:
        for transform in (None, [Resize((24, 24))]):
            expected = ImageDataset(reader, transform)[0][0]
            calls.clear()
            dataset = ImageDataset(reader, transform, readers.Decode(decoder=decoder))
            assert torch.equal(pickle.loads(pickle.dumps(dataset))[0][0], expected) and bool(calls) == (
                decoder != "cpu"
            )
        with pytest.raises(ValueError, match="for the other options use ImageLoader"):
            ImageDataset(reader, None, readers.Decode(layout="NHWC"))
