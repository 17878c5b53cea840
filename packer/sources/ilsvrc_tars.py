"""The archives of ILSVRC as they are published, read without unpacking them.

    ILSVRC2012_img_train.tar               an archive a class, n01440764.tar, in which its images are
    ILSVRC2012_img_val.tar                 images without labels, which follow from
        LOC_val_solution.csv               as on Kaggle, or
        ILSVRC2012_devkit_t12.tar.gz       the development kit: data/ILSVRC2012_validation_ground_truth.txt has a number
                                           for each image, and data/meta.mat the synset of each number
    ILSVRC2012_img_test_v10102019.tar      images without labels

Place: (number of the archive, place in it).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

from packer.formats.base import Arena
from packer.sources.base import SourceListing
from packer.sources.ilsvrc_labels import give_labels, read_kit, read_solution
from packer.sources.known_folders import SOLUTION, ilsvrc_tars
from packer.sources.lookups import wanted_split
from packer.sources.places import Places
from packer.sources.tar_archive import TarSource
from readers.sample import Buffer

__all__ = ["IlsvrcTarSource"]

_KIT = re.compile(r"ILSVRC\d{4}_devkit_t12\.(?:tar\.gz|tgz)")


class IlsvrcTarSource:
    """See the module."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._tars = [(split, TarSource(path, "tree")) for split, path in ilsvrc_tars(self.root).items()]

    @property
    def title(self) -> str:
        return f"archives of ILSVRC {self.root}"

    def list(self, split: str | None) -> SourceListing:
        split = wanted_split(split, [name for name, _ in self._tars], str(self.root))
        whole = SourceListing({}, {"image": "image"}, skip_strays=True)
        for number, (name, tar) in enumerate(self._tars):
            listing = tar.list(name)
            part = listing.splits[name]
            part.places = _NumberedPlaces(number, part.places)
            whole.splits[name] = part
            whole.classes = whole.classes or listing.classes
            whole.left_out += listing.left_out
        give_labels(whole, self._solution(), str(self.root))
        whole.splits = {name: part for name, part in whole.splits.items() if split in (None, name)}
        return whole

    def _solution(self) -> Mapping[str, str]:
        """The class of each image of val."""
        if (self.root / SOLUTION).is_file():
            return read_solution(self.root / SOLUTION)
        kit = self._kit()
        return {} if kit is None else read_kit(kit)

    def _kit(self) -> Path | None:
        return next((self.root / name for name in sorted(os.listdir(self.root)) if _KIT.fullmatch(name)), None)

    @contextmanager
    def open(self) -> Iterator[_NumberedReader]:
        with ExitStack() as opened:
            yield _NumberedReader(cache(lambda number: opened.enter_context(self._tars[number][1].open())))

    def paths(self, listing: SourceListing) -> Iterator[Path]:
        table = self.root / SOLUTION
        kit = table if table.is_file() else self._kit()
        if kit is not None:
            yield kit
        for _, tar in self._tars:
            yield from tar.paths(listing)


class _NumberedPlaces(Sequence[Any]):
    """Places with the number of what they are in."""

    def __init__(self, number: int, places: Places) -> None:
        self._number, self._places = number, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        found = self._places[index]
        return [(self._number, place) for place in found] if isinstance(index, slice) else (self._number, found)

    def take(self, indices: Any) -> _NumberedPlaces:
        """The places at `indices`."""
        return _NumberedPlaces(self._number, self._places.take(indices))


class _NumberedReader:
    """Reads from several archives, each opened when it is needed."""

    def __init__(self, readers: Callable[[int], Any]) -> None:
        self._readers = readers

    def read(self, place: tuple[int, Any], arena: Arena) -> Sequence[Buffer]:
        return cast(Sequence[Buffer], self._readers(place[0]).read(place[1], arena))

    def head(self, place: tuple[int, Any]) -> bytes:
        return cast(bytes, self._readers(place[0]).head(place[1]))
