"""The rows of `s004.py` in torch's DataLoader: `workers` processes, batches of float32 tensors.

Each row's function gets a `Job` and returns a function that makes the batches of one epoch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from harness import contender
from s004_sets import EXTENSIVE, JITTER, Job

__all__ = ["DATASET", "FILES", "HDF5", "PIXELS", "TAR", "TFRECORD", "MakeEpoch", "operations"]

MakeEpoch: TypeAlias = Callable[[], Iterable[Any]]

FILES, HDF5, PIXELS = "PyTorch from files", "PyTorch from HDF5 of JPEGs", "PyTorch from HDF5 of pixels"
TFRECORD, TAR, DATASET = "PyTorch from TFRecord", "PyTorch from tar", "ours: ImageDataset from HDF5"
_IMPORTS = "torch.utils.data pillow_transforms"
_SHUFFLED = 1000


def transforms(job: Job, *, resized: bool = False) -> Any:
    """torchvision's transforms on Pillow images. resized: they are as small as the resize makes them already."""
    import pillow_transforms as T

    task = job.task
    crop = [T.RandomCrop(task.crop), T.RandomHorizontalFlip()] if job.is_random else [T.CenterCrop(task.crop)]
    jitter = [T.ColorJitter(JITTER, JITTER, JITTER)] if job.load == EXTENSIVE else []
    resize = [] if resized else [T.Resize(task.resize)]
    return T.Compose([*resize, *crop, *jitter, T.ToTensor(), T.Normalize(task.mean, task.std)])


def operations(job: Job) -> list[Any]:
    """The same as a list of this project's ops."""
    from readers.augment import CenterCrop, ColorJitter, Normalize, RandomCrop, RandomHorizontalFlip, Resize

    task = job.task
    crop = [RandomCrop(task.crop), RandomHorizontalFlip()] if job.is_random else [CenterCrop(task.crop)]
    jitter = [ColorJitter(JITTER, JITTER, JITTER)] if job.load == EXTENSIVE else []
    return [Resize(task.resize), *crop, *jitter, Normalize(task.mean, task.std)]


def _loader(job: Job, dataset: Any, **options: Any) -> MakeEpoch:
    from torch.utils.data import DataLoader

    loader = DataLoader(dataset, job.batch, num_workers=job.workers, persistent_workers=True, drop_last=True, **options)
    return lambda: loader


@contender(FILES, imports=_IMPORTS, exact=True, note="a file opened for each image; Pillow; torchvision's transforms")
def files(job: Job) -> MakeEpoch:
    import pillow_transforms as T

    return _loader(job, T.Folder(job.tree, transforms(job)), shuffle=True)


class _Hdf5:
    """A data set over one HDF5 file by h5py. read: from an item of its first data set to an image."""

    def __init__(self, path: str, name: str, read: Callable[[Any], Any], transform: Any) -> None:
        import h5py

        self._path, self._name, self._read, self._transform = path, name, read, transform
        self._file: Any = None
        with h5py.File(path) as file:
            self._labels = file["labels"][:].tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if self._file is None:  # in each worker process, as handles of HDF5 do not survive a fork
            import h5py

            self._file = h5py.File(self._path)
        return self._transform(self._read(self._file[self._name][index])), self._labels[index]


@contender(
    HDF5,
    imports=f"{_IMPORTS} h5py",
    exact=True,
    note="the dedicated reader, if it kept JPEGs: one file of variable-length bytes, h5py; Pillow as above",
)
def hdf5(job: Job) -> MakeEpoch:
    import pillow_transforms as T

    def read(data: Any) -> Any:
        return T.read_image(data.tobytes())

    return _loader(job, _Hdf5(str(job.require("images.h5")), "images", read, transforms(job)), shuffle=True)


@contender(
    PIXELS,
    imports=f"{_IMPORTS} h5py",
    exact=True,
    note="the dedicated reader, if it kept pixels: decoded, resized and cut to a square beforehand, a chunk an image",
)
def pixels(job: Job) -> MakeEpoch:
    from PIL import Image

    dataset = _Hdf5(str(job.require("pixels.h5")), "pixels", Image.fromarray, transforms(job, resized=True))
    return _loader(job, dataset, shuffle=True)


@contender(
    TFRECORD,
    imports=f"{_IMPORTS} tfrecord",
    exact=True,
    note=f"our shards, the tfrecord package, shards divided among the workers, a buffer of {_SHUFFLED}; Pillow",
)
def tfrecord(job: Job) -> MakeEpoch:
    import pillow_transforms as T
    from tfrecord.iterator_utils import shuffle_iterator
    from tfrecord.reader import tfrecord_loader
    from torch.utils.data import IterableDataset, get_worker_info

    transform, shards = transforms(job), job.shards("tfrecord", ".tfrecord")
    features = {"image/encoded": "byte", "image/class/label": "int"}

    def finish(record: Any) -> Any:
        return transform(T.read_image(bytes(record["image/encoded"]))), int(record["image/class/label"][0])

    class Records(IterableDataset):
        def __iter__(self) -> Any:
            worker = get_worker_info()
            mine = shards[worker.id :: worker.num_workers]
            records = itertools.chain.from_iterable(tfrecord_loader(shard, None, features) for shard in mine)
            return map(finish, shuffle_iterator(records, _SHUFFLED) if job.is_random else records)

    return _loader(job, Records())


@contender(
    TAR,
    imports=f"{_IMPORTS} webdataset",
    exact=True,
    note=f"our shards, the webdataset package, a buffer of {_SHUFFLED}; Pillow",
)
def tar(job: Job) -> MakeEpoch:
    import pillow_transforms as T
    import webdataset

    transform = transforms(job)

    def finish(sample: tuple[bytes, bytes]) -> Any:
        return transform(T.read_image(sample[0])), int(sample[1])

    shards = job.shards("tar", ".tar")
    dataset = webdataset.WebDataset(shards, shardshuffle=len(shards) if job.is_random else False, empty_check=False)
    dataset = dataset.shuffle(_SHUFFLED if job.is_random else 0).to_tuple("jpg", "cls").map(finish)
    dataset = dataset.batched(job.batch, partial=False)
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=job.workers, persistent_workers=True)
    return lambda: loader


@contender(
    DATASET,
    imports="torch.utils.data readers.torch readers.augment",
    exact=True,
    note="in a DataLoader: our reader, decoder and ops in worker processes",
)
def image_dataset(job: Job) -> MakeEpoch:
    import readers
    from readers.torch import ImageDataset

    return _loader(job, ImageDataset(readers.open(job.require("hdf5")), operations(job)), shuffle=True)
