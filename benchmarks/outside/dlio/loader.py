"""packer for DLIO: PackerDataLoader for reader.data_loader_classname, PackerReader for reader.reader_classname.

PACKER_SET: the packed set of DLIO's files. PACKER_DECODE=1: images are decoded, otherwise their bytes are read.
"""

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from dlio_benchmark.common.enumerations import DataLoaderType
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader
from dlio_benchmark.reader.image_reader import ImageReader

import readers
from readers.augment import RandomHorizontalFlip, RandomResizedCrop
from readers.loader import ImageLoader, Ranks
from readers.order import Shuffled
from readers.torch import EpochBatchSampler, ImageDataset

CROP = int(os.environ.get("PACKER_CROP", "0"))  # side of the crop in pixels; 0: whole images, all of one size
OPS = [RandomResizedCrop(CROP), RandomHorizontalFlip()] if CROP else []


def open_items(dataset_type):
    reader = readers.open(os.environ["PACKER_SET"], str(dataset_type))
    return ImageDataset(reader, decode="RGB" if os.environ.get("PACKER_DECODE") == "1" else None)


class PackerDataLoader(BaseDataLoader):
    def __init__(self, format_type, dataset_type, epoch):
        super().__init__(format_type, dataset_type, epoch, DataLoaderType.PYTORCH)

    def read(self):
        self.items, self.threads = open_items(self.dataset_type), max(1, self._args.read_threads)
        order, rank, ranks = Shuffled(len(self.items), self._args.seed), self._args.my_rank, self._args.comm_size
        made = {"order": order, "ranks": Ranks(rank, ranks), "threads": self.threads, "augment": OPS}
        self.sampler = EpochBatchSampler(order, self.items, self.batch_size, rank=rank, world_size=ranks)
        self.decoded = ImageLoader(self.items.reader, self.batch_size, **made) if self.items.decode else None

    def next(self):
        yield from self.decoded or self.read_ahead()

    def read_ahead(self):
        with ThreadPoolExecutor(self.threads) as crew:
            ahead = deque()
            for rows in self.sampler:
                ahead.append(crew.submit(self.items.__getitems__, rows))
                if len(ahead) > self.threads + 1:
                    yield ahead.popleft().result()
            yield from (batch.result() for batch in ahead)

    def finalize(self):
        pass


class PackerReader(ImageReader):  # for DLIO's own loader
    def read_index(self, image_idx, step):
        self.items = getattr(self, "items", None) or open_items(self.dataset_type)
        self.items[int(image_idx)]
        return self._args.resized_image  # as DLIO's readers, which never return the data they read
