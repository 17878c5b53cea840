"""Orders of training: the sample at each position of an epoch, the share of each rank, and exact resume.

    order = Shuffled(len(reader), seed=7)
    schedule = Schedule(order, batch_size=256, rank=0, world_size=8)
    for step in range(schedule.steps()):
        samples = order.indices(epoch, schedule.positions(step))      # int64, for reader.read_many
        token = ResumeToken(7, epoch, schedule.cursor_after(step), reader.fingerprint, "", order.spec(), len(reader))

Orders have no state and hold no list of the samples: an order is a function of (seed, epoch, position).
"""

from readers.order.base import Order, Permutation, Sequential, Shuffled
from readers.order.local import BlockShuffled, NodeLocal, StagedFirst, block_shuffled, staged_first
from readers.order.quality import (
    ShuffleReport,
    describe,
    mixing,
    read_amplification,
    requests_per_sample,
    shuffle_quality,
)
from readers.order.sampling import Bucketed, ClassBalanced, Mixed, Weighted
from readers.order.schedule import ResumeToken, Schedule
from readers.order.woven import Woven, woven

__all__ = [
    "BlockShuffled",
    "Bucketed",
    "ClassBalanced",
    "Mixed",
    "NodeLocal",
    "Order",
    "Permutation",
    "ResumeToken",
    "Schedule",
    "Sequential",
    "ShuffleReport",
    "Shuffled",
    "StagedFirst",
    "Weighted",
    "Woven",
    "block_shuffled",
    "describe",
    "mixing",
    "read_amplification",
    "requests_per_sample",
    "shuffle_quality",
    "staged_first",
    "woven",
]
