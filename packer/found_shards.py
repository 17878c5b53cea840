"""What `packer.index` is asked to make a set of: which files, of which format and set, in which splits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packer.existing_set import ExistingSet, find_set
from packer.formats import REGISTRY, format_named, format_of_file
from packer.formats.base import Format, LocateOptions, ShardSpec
from packer.shard_numbers import missing_shards
from packer.sources.shards import split_of_name
from readers.errors import BadNameError, FormatError, NotFlatError, OutputError, SourceError
from readers.layout import DatasetInfo
from readers.names import ShardPath, SplitName

__all__ = ["FoundShard", "FoundShards", "find_shards"]


@dataclass(frozen=True, eq=False)
class FoundShard:
    """A file, its path in the set (inside it as it is, otherwise the name of its link), and what it says of the set."""

    path: Path
    name: str
    split: str
    spec: ShardSpec | None


@dataclass(frozen=True)
class FoundShards:
    """The shards in the order of the set to be, and the directory where that goes.

    there: the set that is in `out` now. origin: the set that the shards belong to, which knows what they do not say:
    the one in `out`, or one beside the shards.
    """

    out: Path
    format: str
    shards: tuple[FoundShard, ...]
    there: ExistingSet | None
    origin: ExistingSet | None

    @cached_property
    def splits(self) -> dict[str, list[FoundShard]]:
        """The shards by split, the splits in the order of the set they come from."""
        names = [shard.split for shard in self.shards]
        info = self.known
        order = dict.fromkeys([*(name for name in (info.splits if info else ()) if name in names), *names])
        return {name: [shard for shard in self.shards if shard.split == name] for name in order}

    @property
    def known(self) -> DatasetInfo | None:
        """What the set says that the shards belong to."""
        return self.origin.info if self.origin else None

    @property
    def new(self) -> list[FoundShard]:
        """Shards that the set they belong to did not have."""
        return [shard for shard in self.shards if self.origin and not self.origin.has(shard.path)]

    def missing(self) -> tuple[int, list[str]]:
        """How many shards are missing by what those that are there say, and some of their names.

        A set that knows its shards is asked instead: see `packer.existing_set.losses`.
        """
        if self.known:
            return 0, []
        count, some = missing_shards(shard.path.name for shard in self.shards)
        for split, shards in self.splits.items():
            told = max((shard.spec.shards for shard in shards if shard.spec), default=0)
            if told > len(shards) and not count:
                return told - len(shards), [f"{split} has {told} shards, here: {len(shards)}"]
        return count, some


def find_shards(paths: Sequence[Path], output: Path | None, split: str | None, image_key: str | None) -> FoundShards:
    """Look at what there is. Raises SourceError, FormatError, OutputError (links that cannot be made)."""
    files = list(dict.fromkeys(Path(os.path.abspath(path)) for path in _files(paths)))
    if not files:
        raise SourceError(
            f"{', '.join(map(str, paths))}: no shards found (files ending in {', '.join(REGISTRY.suffixes())})"
        )
    out = output if output is not None else _common_folder(paths, files)
    there = find_set(out)
    candidates = [there, *(find_set(folder) for folder in dict.fromkeys(file.parent for file in files))]
    origin = next((found for found in candidates if found and any(map(found.has, files))), None)
    if origin:
        place = {path: number for number, path in enumerate(origin.split_of)}
        files.sort(key=lambda file: place.get(os.path.realpath(file), len(place)))
    format_name = _one_format(files)
    if origin and origin.info:
        image_key = image_key or origin.info.adopted.image_key
    container, options = format_named(format_name), LocateOptions(image_key)
    shards = []
    for file in files:
        spec = None if image_key else _spec(format_name, file, origin)
        own = "" if spec else _own_split(file, container, options)
        shards.append(FoundShard(file, _place_in(file, out), split or _split_of(file, origin, spec, own), spec))
    _check_names(shards)
    return FoundShards(out, format_name, tuple(shards), there, origin)


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            known = find_set(path)
            splits = known.info.splits.values() if known and known.info else ()
            yield from (path / s.path for part in splits for s in part.shards if os.path.lexists(path / s.path))
            yield from sorted(p for p in path.iterdir() if REGISTRY.of_name(p.name) and not p.is_dir())
        elif path.is_file():
            yield path
        else:
            raise SourceError(f"{path}: no such file or directory")


def _one_format(paths: Sequence[Path]) -> str:
    names = {path: format_of_file(path).name for path in paths}
    first = names[paths[0]]
    for path, name in names.items():
        if name != first:
            raise SourceError(f"{path} is {name}, {paths[0]} is {first}; index one format at a time")
    return first


def _common_folder(asked: Sequence[Path], files: Sequence[Path]) -> Path:
    if len(asked) == 1 and asked[0].is_dir():
        return asked[0]
    folders = {path.parent for path in files}
    if len(folders) > 1:
        raise SourceError("the shards lie in several folders; say with -o where the index goes")
    return folders.pop()


def _spec(format_name: str, path: Path, origin: ExistingSet | None) -> ShardSpec | None:
    """What a shard says of its set. Where that is damaged, the set's dataset.json knows it too."""
    try:
        return format_named(format_name).describe(path)
    except FormatError:
        if origin and origin.has(path):
            return None
        raise


def _split_of(path: Path, origin: ExistingSet | None, spec: ShardSpec | None, own: str) -> str:
    if origin and origin.has(path):
        return origin.split_of[os.path.realpath(path)]
    try:
        return SplitName(spec.split if spec else own or split_of_name(path.name))
    except BadNameError as error:
        raise FormatError(f"{path}: {error}; or name it with --split") from error


def _own_split(path: Path, container: Format, options: LocateOptions) -> str:
    """The split that a file names for its samples, "" for none; in an index a shard is in one split."""
    first, *others = container.splits(path, options) or ("",)
    if others:
        raise NotFlatError(
            f"{path}: holds the splits {', '.join((first, *others))}, and an indexed shard is in one; run  "
            f"packer convert {path} --to hdf5|tfrecord|tar"
        )
    return first


def _place_in(path: Path, out: Path) -> str:
    folder, inside = Path(os.path.realpath(path.parent)), Path(os.path.realpath(out))
    try:
        return ShardPath((folder / path.name).relative_to(inside).as_posix())
    except BadNameError as error:
        raise SourceError(f"{path}: {error}; move or rename it") from error
    except ValueError:
        return ShardPath(path.name)


def _check_names(shards: Sequence[FoundShard]) -> None:
    """Links lie side by side, so that no two may have one name."""
    by_name: dict[str, Path] = {}
    for shard in shards:
        other = by_name.setdefault(shard.name, shard.path)
        if other != shard.path:
            raise OutputError(
                f"{other} and {shard.path} have one name, and links to both cannot lie in one folder; rename one, or "
                f"index each folder by itself"
            )
