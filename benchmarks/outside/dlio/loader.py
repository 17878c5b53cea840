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


def open_items(dataset_type):
    reader = readers.open(os.environ["PACKER_SET"], str(dataset_type))
    return ImageDataset(reader, decode="RGB" if os.environ.get("PACKER_DECODE") == "1" else None)


class PackerDataLoader(BaseDataLoader):
    def __init__(self, format_type, dataset_type, epoch):
        super().__init__(format_type, dataset_type, epoch, DataLoaderType.PYTORCH)

    def read(self):
        self.items, args = open_items(self.dataset_type), self._args
        order, ranks = Shuffled(len(self.items), seed=args.seed), {"rank": args.my_rank, "world_size": args.comm_size}
        self.batches = EpochBatchSampler(order, self.items, self.batch_size, **ranks)
        self.threads = max(1, args.read_threads)
        if self.items.decode:
            crop = int(os.environ.get("PACKER_CROP", "0"))  # pixels of a side; 0: whole images, all of one size
            ops = [RandomResizedCrop(crop), RandomHorizontalFlip()] if crop else []
            made = {"augment": ops, "order": order, "ranks": Ranks(**ranks), "threads": self.threads}
            self.batches = ImageLoader(self.items.reader, self.batch_size, **made)

    def next(self):
        if self.items.decode:
            yield from self.batches
            return
        with ThreadPoolExecutor(self.threads) as crew:
            ahead = deque()
            for rows in self.batches:
                ahead.append(crew.submit(self.items.__getitems__, rows))
                if len(ahead) > self.threads + 1:
                    yield ahead.popleft().result()
            yield from (one.result() for one in ahead)

    def finalize(self):
        pass


class PackerReader(ImageReader):
    def __init__(self, dataset_type, thread_index, epoch):
        super().__init__(dataset_type, thread_index, epoch)
        self.items = open_items(dataset_type)

    def read_index(self, image_idx, step):
        self.items[int(image_idx)]
        return self._args.resized_image  # what DLIO's readers return, whatever they have read
