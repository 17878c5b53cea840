"""Every feed of training keeps the contract of `suites.feeds`: our loader, torch's, DALI and rocAL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from loader_options import grouped
from suites.feeds import SIDE, Feed, FeedSuite, Options, Rows
from torch.utils.data import DataLoader

from readers import Decode
from readers.augment import Crop, Resize
from readers.loader import ImageLoader
from readers.order import Sequential, Shuffled
from readers.torch import EpochSampler, ImageDataset, ImageStream

OPS = [Resize((SIDE, SIDE))]


class OurOwn:
    """A loader without a wrapper; only its batches are converted."""

    def __init__(self, loader: Any, scale: float = 1.0, shift: float = 0.0) -> None:
        self.loader, self.scale, self.shift = loader, scale, shift

    def __iter__(self) -> Iterator[Rows]:
        loop = iter(self.loader)
        return (Rows(np.asarray(images) * self.scale + self.shift, labels.tolist()) for images, labels in loop)

    def __len__(self) -> int:
        return len(self.loader)

    def close(self) -> None:
        getattr(self.loader, "close", lambda: None)()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class OfTorch(OurOwn):
    """A DataLoader over a sampler or a stream, with a count of the batches that training has received."""

    def __init__(self, loader: Any, place: Any, batches: Any) -> None:
        super().__init__(loader)
        self.place, self.batches, self.seen = place, batches, None

    def __iter__(self) -> Iterator[Rows]:
        self.seen = 0
        for batch in super().__iter__():
            self.seen += len(batch.labels)
            yield batch

    def __len__(self) -> int:
        return len(self.batches)

    def set_epoch(self, epoch: int) -> None:
        self.place.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.place.state_dict() if self.seen is None else self.place.state_after(self.seen))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.place.load_state_dict(state)


class TestImageLoader(FeedSuite):
    def open(self, options: Options) -> Feed:
        loader = ImageLoader(
            options.reader,
            options.batch_size,
            **grouped(
                {
                    "augment": OPS,
                    "threads": 2,
                    "decode": Decode(layout="NCHW"),
                    **{
                        name: getattr(options, name)
                        for name in ("rank", "world_size", "seed", "shuffle", "tail", "on_error")
                    },
                }
            ),
        )
        return OurOwn(loader)


def order_of(options: Options) -> Any:
    return (Shuffled if options.shuffle else Sequential)(len(options.reader), options.seed)


class TestDataLoader(FeedSuite):
    def open(self, options: Options) -> Feed:
        dataset = ImageDataset(options.reader, OPS, on_error=options.on_error)
        ranks = {"rank": options.rank, "world_size": options.world_size, "tail": options.tail}
        sampler = EpochSampler(order_of(options), dataset, **ranks)
        loader = DataLoader(dataset, options.batch_size, sampler=sampler)
        return OfTorch(loader, sampler, loader)


class TestImageStream(FeedSuite):
    def open(self, options: Options) -> Feed:
        dataset = ImageDataset(options.reader, OPS, on_error=options.on_error)
        ranks = {"rank": options.rank, "world_size": options.world_size, "tail": options.tail}
        sampler = EpochSampler(order_of(options), dataset, **ranks)
        stream = ImageStream(dataset, sampler, options.batch_size, drop_last=options.tail == "drop_last")
        return OfTorch(DataLoader(stream, batch_size=None), stream, stream)


# DALI leaves a socket to the garbage collector when it spawns a worker.
@pytest.mark.filterwarnings("ignore:unclosed <socket.socket:ResourceWarning")
class TestDali(FeedSuite):
    @pytest.fixture(autouse=True)
    def dali(self) -> None:
        pytest.importorskip("nvidia.dali", exc_type=ImportError)

    def open(self, options: Options) -> Feed:
        from readers.dali import DaliLoader

        ranks = {name: getattr(options, name) for name in ("rank", "world_size", "seed", "shuffle", "tail", "on_error")}
        return OurOwn(
            DaliLoader(options.reader, options.batch_size, output="numpy", **grouped({"augment": OPS, **ranks}))
        )


@pytest.mark.rocal
class TestRocal(FeedSuite):
    """On rocAL where it is importable, otherwise on a double of it."""

    @pytest.fixture(autouse=True)
    def library(self, rocal: Any) -> None:
        pass

    def open(self, options: Options) -> Feed:
        from readers.rocal import RocalLoader, celeba, external_source

        names = ("rank", "world_size", "seed", "shuffle", "tail", "on_error")
        source = external_source(
            options.reader, options.batch_size, **grouped({name: getattr(options, name) for name in names})
        )
        loader = RocalLoader(celeba(source, size=SIDE, crop=Crop(4, 8, 32, 32), threads=1), source)
        return OurOwn(loader, 127.5, 127.5)
