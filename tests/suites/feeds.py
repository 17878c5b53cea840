"""The promises of each feed of batches.

A loop over a feed is one epoch: the samples in their order, each once (tail "exact"), with image and label of a row
from the same sample. The order depends on seed and epoch alone, so it is the same in every run, on any number of ranks
together, and in every feed. A loop begins with its first batch. Leaving a loop early ends its epoch; the next loop is
the next epoch.

A state is plain data, the same on every rank. A run resumed from it, on the same or another number of ranks, begins
with the first batch that was not handed out: no sample is lost or repeated. `on_error` decides what happens to a bad
sample.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pytest
from rocal_images import folder_of, numbers_of, solid

import readers
from cache.errors import BadSampleError, ResumeError, TrainerError
from readers.order import Shuffled
from readers.order.schedule import Tail

__all__ = ["COUNT", "SIDE", "Feed", "FeedSuite", "Options", "Rows"]

COUNT, BATCH, SEED, SIDE = 22, 4, 3, 16
BAD = (5, 7)


@dataclass(frozen=True)
class Options:
    """Options to open a feed with."""

    reader: Any
    rank: int = 0
    world_size: int = 1
    seed: int = SEED
    shuffle: bool = True
    batch_size: int = BATCH
    tail: Tail = "exact"
    on_error: str = "raise"


class Rows(NamedTuple):
    """A batch: images [n, 3, SIDE, SIDE] of values from 0 to 255, and labels."""

    images: npt.NDArray[Any]
    labels: list[int]


class Feed(Protocol):
    """The interface of a feed that the suite needs; a subclass may wrap the feed under test."""

    def __iter__(self) -> Iterator[Rows]: ...
    def __len__(self) -> int: ...
    def set_epoch(self, epoch: int) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


def expected(epoch: int, seed: int = SEED) -> list[int]:
    """The samples of an epoch in their order."""
    return list(Shuffled(COUNT, seed).indices(epoch, np.arange(COUNT)).tolist())


def labels_of(batch: Rows) -> list[int]:
    """The labels of a batch, whose images must match them."""
    assert batch.images.shape == (len(batch.labels), 3, SIDE, SIDE)
    assert numbers_of(batch.images, 0, 1) == batch.labels, "an image has the label of another"
    return batch.labels


def epoch_of(feed: Feed) -> list[int]:
    """The samples of a complete loop."""
    return [label for batch in feed for label in labels_of(batch)]


def dealt(parts: list[list[int]]) -> list[int]:
    """The samples of all ranks, sorted."""
    return sorted(label for part in parts for label in part)


class FeedSuite:
    """The contract of a feed. Subclasses implement `open`."""

    def open(self, options: Options) -> Feed:
        raise NotImplementedError

    @pytest.fixture
    def options(self, tmp_path: Path) -> Options:
        """Samples of different colours; the label is the sample number."""
        return Options(folder_of(tmp_path / "whole", {number: solid(number) for number in range(COUNT)}))

    @pytest.fixture
    def opened(self) -> Iterator[Any]:
        """Opens feeds and closes them at the end."""
        feeds: list[Feed] = []

        def open(options: Options) -> Feed:
            feeds.append(self.open(options))
            return feeds[-1]

        yield open
        for feed in feeds:
            feed.close()

    # --- whole epochs ---------------------------------------------------------------------------------------------
    def test_every_sample_once_an_epoch_in_the_order_of_the_seed(self, opened: Any, options: Options) -> None:
        feed = opened(options)
        assert len(feed) == 6
        for epoch in range(3):
            batches = [labels_of(batch) for batch in feed]
            assert [label for batch in batches for label in batch] == expected(epoch)
            assert [len(batch) for batch in batches] == [4, 4, 4, 4, 4, 2]
        assert epoch_of(opened(replace(options, seed=9))) == expected(0, 9) != expected(0)
        assert epoch_of(opened(replace(options, shuffle=False))) == list(range(COUNT))

    def test_an_epoch_can_be_chosen_by_number(self, opened: Any, options: Options) -> None:
        feed = opened(options)
        for epoch in (5, 1, 1):
            feed.set_epoch(epoch)
            assert epoch_of(feed) == expected(epoch)
        assert epoch_of(feed) == expected(2), "the next loop is not the next epoch"

    @pytest.mark.parametrize("ranks", [2, 3])
    def test_ranks_share_an_epoch(self, opened: Any, options: Options, ranks: int) -> None:
        feeds = [opened(replace(options, rank=rank, world_size=ranks)) for rank in range(ranks)]
        for epoch in range(2):
            parts = [epoch_of(feed) for feed in feeds]
            assert dealt(parts) == list(range(COUNT)), f"epoch {epoch}"
        assert len({len(feed) for feed in feeds}) == 1, "ranks have different numbers of batches"

    def test_the_remainder_of_an_epoch(self, opened: Any, options: Options) -> None:
        for tail, total in (("drop_last", (COUNT - 2, COUNT)), ("pad", (COUNT, COUNT + 2 * BATCH))):
            parts = [epoch_of(opened(replace(options, rank=rank, world_size=2, tail=tail))) for rank in range(2)]
            assert len(parts[0]) == len(parts[1]) and total[0] - 2 * BATCH <= len(dealt(parts)) <= total[1]
            assert len(set(dealt(parts))) == min(COUNT, len(dealt(parts))), "samples are both dropped and repeated"

    # --- places ---------------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("after", [0, 2, 6])
    def test_resuming_continues_with_the_next_batch(self, opened: Any, options: Options, after: int) -> None:
        feed = opened(options)
        epoch_of(feed)
        loop = iter(feed)
        seen = [label for batch in islice(loop, after) for label in labels_of(batch)]
        state = json.loads(json.dumps(feed.state_dict()))
        again = opened(replace(options, seed=99))  # the seed of the state counts
        again.load_state_dict(state)
        if 0 < after < 6:
            assert seen + epoch_of(again) == expected(1)
        else:
            assert epoch_of(again) == expected(2 if after else 1)
        assert epoch_of(again) == expected(3 if after == 6 else 2)

    @pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (3, 2)])
    def test_resuming_on_another_number_of_ranks(self, opened: Any, options: Options, before: int, after: int) -> None:
        feeds = [opened(replace(options, rank=rank, world_size=before, batch_size=2)) for rank in range(before)]
        seen, states = [], []
        for feed in feeds:
            loop = iter(feed)
            seen.append([label for batch in islice(loop, 2) for label in labels_of(batch)])
            states.append(feed.state_dict())
        assert all(state == states[0] for state in states), "ranks disagree about where they are"
        again = [opened(replace(options, rank=rank, world_size=after)) for rank in range(after)]
        for feed in again:
            feed.load_state_dict(states[0])
        assert dealt([*seen, *map(epoch_of, again)]) == list(range(COUNT))
        assert dealt([epoch_of(feed) for feed in again]) == list(range(COUNT)), "the following epoch is incomplete"

    def test_a_state_of_another_set_is_refused(self, opened: Any, options: Options, tmp_path: Path) -> None:
        state = opened(options).state_dict()
        folder = Path(shutil.copytree(tmp_path / "whole", tmp_path / "other"))
        (folder / "005" / "image5.jpg").rename(folder / "005" / "another.jpg")
        other = opened(replace(options, reader=readers.open_folder(folder)))
        for wrong in (state, {}, {"epoch": 1}):
            with pytest.raises(ResumeError):
                other.load_state_dict(wrong)
        assert epoch_of(other) == expected(0)

    # --- loops ----------------------------------------------------------------------------------------------------
    def test_a_loop_left_early_ends_its_epoch(self, opened: Any, options: Options) -> None:
        feed = opened(options)
        for epoch in range(2):
            assert labels_of(next(iter(feed))) == expected(epoch)[:BATCH]
        assert epoch_of(feed) == expected(2)

    def test_two_loops_at_once_share_no_batch(self, opened: Any, options: Options) -> None:
        """The second loop is the next epoch; the first continues in its own epoch, or ends, or raises a clear error."""
        feed = opened(options)
        first = iter(feed)
        begun = labels_of(next(first))
        second = iter(feed)
        ahead = labels_of(next(second))
        try:
            begun += [label for batch in first for label in labels_of(batch)]
        except TrainerError as error:
            assert "another loop" in str(error)
        ahead += [label for batch in second for label in labels_of(batch)]
        assert begun == expected(0)[: len(begun)] and ahead == expected(1)

    def test_batches_may_be_kept(self, opened: Any, options: Options) -> None:
        batches = list(opened(options))
        assert [label for batch in batches for label in labels_of(batch)] == expected(0)

    # --- bad samples ----------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("on_error", ["raise", "skip", "substitute"])
    def test_bad_samples(self, opened: Any, options: Options, tmp_path: Path, on_error: str) -> None:
        images = {number: solid(number)[: 30 if number in BAD else None] for number in range(COUNT)}
        reader = folder_of(tmp_path / "images", images)
        feed = opened(replace(options, reader=reader, shuffle=False, on_error=on_error))
        if on_error == "raise":
            with pytest.raises(BadSampleError, match=r"sample 5 \(005/image5\)"):
                epoch_of(feed)
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            seen = epoch_of(feed)
        good = [number for number in range(COUNT) if number not in BAD]
        if on_error == "skip":
            assert seen == good
        else:
            assert len(seen) == COUNT and [label for i, label in enumerate(seen) if i not in BAD] == good
            assert not set(seen) & set(BAD), "a bad sample was handed out"
