"""The test suite of sources.

`list` lists the splits, and for each split the samples' keys (unique), labels (a position in `classes`, or -1),
original names, and the places that a reader needs to find the bytes. It avoids reading the samples if possible, and
always gives the same result. Workers receive the source by pickling, open it, and read slices of the listing, in any
order if the listing `shuffles`. `paths` names every file that is read, so that none of them is overwritten.

Missing, damaged or malicious input raises SourceError (for a packed set also DatasetError), or BadSampleError for a
single sample; it never gives wrong bytes, and never raises any other error.
"""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packer
import readers
from cache.errors import BadSampleError, DatasetError, SourceError
from packer.formats.base import Arena
from packer.sources.base import SomeSamples, SourceListing

__all__ = ["Content", "SourceSuite", "content_of", "payloads", "places"]

REFUSED = (SourceError, DatasetError)


@dataclass
class Content:
    """The content of a source: by split, (key, label, fields) of each sample; an absent field is None."""

    splits: dict[str, list[tuple[str, int, tuple[bytes | None, ...]]]]
    classes: tuple[str, ...] = ()
    fields: tuple[str, ...] = field(default=("image",))


def places(listing: SourceListing, split: str) -> list[tuple[Any, int]]:
    """(place, size in bytes) of each sample of a split, as a worker receives them."""
    part = listing.splits[split]
    sent = pickle.loads(pickle.dumps(SomeSamples(part, range(len(part)))))
    return [pair for block in sent.slices() for pair in zip(block.places, block.bytes, strict=True)]


def payloads(source: Any, places: Sequence[tuple[Any, int]], room: int = 1 << 16) -> list[tuple[bytes | None, ...]]:
    """The fields of samples, read as a worker does: into memory that is reused. room: its initial size in bytes."""
    arena = Arena(lambda: None, room)
    read = []
    with source.open() as reader:
        for place, size in places:
            arena.begin(size + 1)
            read.append(tuple(None if data is None else bytes(data) for data in reader.read(place, arena)))
    return read


def content_of(source: Any, split: str | None = None) -> Content:
    """List and read everything in a source."""
    listing = source.list(split)
    splits = {
        name: list(zip(part.keys, part.labels, payloads(source, places(listing, name)), strict=True))
        for name, part in listing.splits.items()
    }
    return Content(splits, tuple(listing.classes), tuple(listing.fields))


class SourceSuite:
    """The tests of a source. Subclasses define two fixtures: `root`, its path, which tests may damage, and `truth`.

    damages: how many times the test marked `faults` damages files. changed_bytes: limits the damage to the beginning
    of a file; None for all of it.
    """

    damages = 0
    changed_bytes: int | None = None

    @pytest.fixture
    def root(self) -> Path:
        raise NotImplementedError

    @pytest.fixture
    def truth(self) -> Content:
        raise NotImplementedError

    def open(self, root: Path) -> Any:
        return packer.open_source(root)

    def files(self, root: Path) -> set[Path]:
        """The files that a conversion must not overwrite."""
        return {root} if root.is_file() else {path for path in root.rglob("*") if path.is_file()}

    def data_files(self, root: Path) -> set[Path]:
        """The files that contain samples."""
        return self.files(root)

    # --- listing and reading --------------------------------------------------------------------------------------
    def test_listing_and_reading(self, root: Path, truth: Content) -> None:
        source = self.open(root)
        assert content_of(source) == truth
        assert str(root) in source.title
        for samples in truth.splits.values():
            keys = [key for key, _, _ in samples]
            assert len(set(keys)) == len(keys) and all(label >= -1 for _, label, _ in samples)
            assert not truth.classes or all(label < len(truth.classes) for _, label, _ in samples)

    def test_listings_are_the_same_each_time(self, root: Path) -> None:
        first, second = (self.open(root).list(None) for _ in range(2))
        assert first.splits == second.splits and (first.classes, first.fields) == (second.classes, second.fields)
        assert first.left_out == second.left_out and first.warnings == second.warnings

    def test_files_that_change_make_another_listing(self, root: Path) -> None:
        """So that samples packed before the change are not reused."""
        before = self.open(root).list(None)
        for path in self.files(root):
            os.utime(path, ns=(1, 1))
        assert self.open(root).list(None).splits != before.splits

    def test_one_split(self, root: Path, truth: Content) -> None:
        name = list(truth.splits)[-1]
        only = content_of(self.open(root), name)
        assert only.splits == {name: truth.splits[name]} and only.fields == truth.fields
        if len(truth.splits) > 1:
            with pytest.raises(REFUSED, match="no split 'elsewhere'"):
                self.open(root).list("elsewhere")

    def test_listed_sizes_suffice_for_reading(self, root: Path, truth: Content) -> None:
        """A sample can be read into memory of the size in the listing plus one byte; a size of 0 is unknown."""
        source = self.open(root)
        listing = source.list(None)
        if listing.estimated:
            assert min(size for name in truth.splits for _, size in places(listing, name)) > 0
            return
        for name, samples in truth.splits.items():
            for where, (_, _, fields) in zip(places(listing, name), samples, strict=True):
                assert payloads(source, [where], 0) == [fields]
                assert where[1] == 0 or where[1] >= len(fields[0] or b"")

    # --- in workers -----------------------------------------------------------------------------------------------
    def test_slices_in_any_order(self, root: Path, truth: Content) -> None:
        source = self.open(root)
        listing = source.list(None)
        for name, samples in truth.splits.items():
            order = list(range(len(samples)))
            orders = [order[1::2], order[-1:]]
            if listing.shuffles:
                orders += [order[::-1], random.Random(1).choices(order, k=2 * len(order))]
            where = places(listing, name)
            for some in orders:
                assert payloads(source, [where[i] for i in some]) == [samples[i][2] for i in some]

    def test_workers_get_the_assigned_labels(self, root: Path) -> None:
        for part in self.open(root).list(None).splits.values():
            part.labels = np.arange(len(part)) + 7
            for indices in (None, range(len(part)), np.arange(len(part))[::-1]):
                some = pickle.loads(pickle.dumps(SomeSamples(part, indices)))
                got = [label for block in some.slices() for label in block.labels]
                assert got == [7 + i for i in (range(len(part)) if indices is None else indices)]

    def test_in_a_separate_worker(self, root: Path, truth: Content, elsewhere: Callable[..., Any]) -> None:
        source = self.open(root)
        assert elsewhere(content_of, source) == truth
        listing = source.list(None)
        for name, samples in truth.splits.items():
            assert elsewhere(payloads, source, places(listing, name)) == [fields for _, _, fields in samples]

    def test_paths_name_every_file(self, root: Path) -> None:
        source = self.open(root)
        named = {Path(path) for path in source.paths(source.list(None))}
        assert named == self.files(root)
        assert {Path(path) for path in pickle.loads(pickle.dumps(source)).paths(source.list(None))} == named

    def test_packing(self, root: Path, truth: Content, tmp_path: Path) -> None:
        packer.convert(
            self.open(root), "tar", tmp_path / "out", run=packer.Run(workers=1), shards=packer.Shards(samples=4)
        )
        for name, samples in truth.splits.items():
            with readers.open(tmp_path / "out", name, verify=True) as reader:
                assert (tuple(reader.classes), tuple(reader.fields)) == (truth.classes, truth.fields)
                assert [(sample.key, -1 if sample.label is None else sample.label) for sample in reader] == [
                    (key, label) for key, label, _ in samples
                ]
                for sample, (key, _, fields) in zip(reader, samples, strict=True):
                    present = {f: data for f, data in zip(truth.fields, fields, strict=True) if data is not None}
                    assert {f: bytes(data) for f, data in sample.fields.items()} == present, key

    # --- errors ---------------------------------------------------------------------------------------------------
    def test_a_missing_source(self, root: Path, tmp_path: Path) -> None:
        with pytest.raises(SourceError, match="no such file or directory"):
            self.open(tmp_path / "nowhere" / root.name).list(None)

    def test_files_removed_after_listing(self, root: Path) -> None:
        """Removes files after they have been listed."""
        source = self.open(root)
        listing = source.list(None)
        for path in self.files(root):
            path.unlink()
        for name in listing.splits:
            with pytest.raises((*REFUSED, BadSampleError)):
                payloads(source, places(listing, name))

    def test_files_cut_short(self, root: Path, truth: Content) -> None:
        """Truncated files cause an error, or give correct samples."""
        whole = {path: path.read_bytes() for path in self.data_files(root)}
        for keep in (0.0, 0.3, 0.6, 0.99):
            for path, data in whole.items():
                path.write_bytes(data[: int(len(data) * keep)])
            self._check_cut(root, truth)

    def _check_cut(self, root: Path, truth: Content) -> None:
        try:
            source = self.open(root)
            listing = source.list(None)
        except REFUSED:
            return
        for name, samples in truth.splits.items():
            true = {(key, fields[0]) for key, _, fields in samples}
            listed = listing.splits[name].keys if name in listing.splits else []
            for key, where in zip(listed, places(listing, name) if listed else [], strict=True):
                try:
                    (fields,) = payloads(source, [where])
                except (*REFUSED, BadSampleError):
                    continue
                assert (key, fields[0]) in true or self.whole_files(root), f"{key}: other bytes"

    def whole_files(self, root: Path) -> bool:
        """Whether samples are whole files, so that truncation cannot be detected."""
        return False

    @pytest.mark.faults
    def test_changed_bytes(self, root: Path) -> None:
        """Damaged bytes and truncated files must raise one of packer's errors, or leave the source readable."""
        draw, refused = random.Random(1), 0
        for _ in range(self.damages):
            path = draw.choice(sorted(self.files(root)))
            good = path.read_bytes()
            data = bytearray(good[: draw.randrange(len(good))] if draw.random() < 0.1 else good)
            for _ in range(draw.randint(1, 4) if data else 0):
                place = draw.randrange(min(len(data), self.changed_bytes or len(data)))
                data[place] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
            path.write_bytes(data)
            try:
                content_of(self.open(root))
            except (*REFUSED, BadSampleError):
                refused += 1
            path.write_bytes(good)
        assert refused or not self.damages, "nothing was damaged"
