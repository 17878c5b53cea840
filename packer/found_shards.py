"""The shards that `packer.index` makes a set of, and the sets that exist already: files, splits and format.

`losses` says what a change would lose of an existing set. Names, too, show which shards are missing:

    train-00003-of-00008.tfrecord     says that there are eight
    train-000003.tar                  belongs, by custom, to a run without gaps from the lowest number to the highest

The number of a tar counts where it is padded with zeros to three digits or more, or where numbers start at 0, so that
years and dates do not.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cache.errors import BadNameError, DatasetError, FormatError, NotFlatError, OutputError, SourceError
from cache.messages import listed, plural, quoted
from packer.formats import REGISTRY, format_named, format_of_file
from packer.formats.base import Format, LocateOptions, ShardSpec
from packer.sources.shards import split_of_name
from readers.layout import DATASET_FILE, DatasetInfo, ShardPath, SplitName, read_dataset_info

__all__ = ["FoundShard", "FoundShards", "find_shards", "losses", "missing_shards"]

_log = logging.getLogger(__name__)
_OF = re.compile(r"(?P<head>.*-)(?P<number>\d+)(?P<tail>-of-\d+.*)", re.DOTALL)
_TAR = re.compile(r"(?P<head>.*?)(?P<number>\d+)(?P<tail>\.tar)", re.DOTALL)
_NAMES_IN_MESSAGE = 3
_MOST_DIGITS = 9


@dataclass(frozen=True, eq=False)
class FoundShard:
    """A file, its path in the set (its own inside the set, else the name of its link), and what it says of the set."""

    path: Path
    name: str
    split: str
    spec: ShardSpec | None


@dataclass(frozen=True)
class FoundShards:
    """The shards in the order of the new set, and the directory of that.

    there: the set that is in `out` now.
    origin: the set that the shards belong to, in `out` or in the folder of a shard; it knows what they do not say.
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
        """The description of the set that the shards belong to."""
        return self.origin.info if self.origin else None

    @property
    def new(self) -> list[FoundShard]:
        """Shards that are new to the set they belong to."""
        return [shard for shard in self.shards if self.origin and not self.origin.has(shard.path)]

    def missing(self) -> tuple[int, list[str]]:
        """How many shards are missing according to those that are there, and some of their names.

        None where a set knows its shards: see `losses`.
        """
        if self.known:
            return 0, []
        count, some = missing_shards(shard.path.name for shard in self.shards)
        for split, shards in self.splits.items():
            total = max((shard.spec.shards for shard in shards if shard.spec), default=0)
            if total > len(shards) and not count:
                return total - len(shards), [f"{split} has {total} shards, here: {len(shards)}"]
        return count, some


def find_shards(paths: Sequence[Path], output: Path | None, split: str | None, image_key: str | None) -> FoundShards:
    """Find the shards in files and directories. Raises SourceError, FormatError, OutputError (two of one name)."""
    files = list(dict.fromkeys(Path(os.path.abspath(path)) for path in _files(paths)))
    if not files:
        raise SourceError(
            f"{', '.join(map(str, paths))}: no shards found (files ending in {', '.join(REGISTRY.suffixes())})"
        )
    out = output if output is not None else _common_folder(paths, files)
    there = _find_set(out)
    candidates = [there, *(_find_set(folder) for folder in dict.fromkeys(file.parent for file in files))]
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
        shards.append(FoundShard(file, _path_in_set(file, out), split or _split_of(file, origin, spec, own), spec))
    _check_names(shards)
    found = FoundShards(out, format_name, tuple(shards), there, origin)
    splits = ", ".join(f"{name} {len(part):,}" for name, part in found.splits.items())
    _log.info("%s (%s); the index goes to %s", plural(len(shards), f"{format_name} shard"), splits, out)
    if origin:
        _log.info("they belong to the set in %s, which says what they hold", origin.root)
    return found


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            known = _find_set(path)
            splits = known.info.splits.values() if known and known.info else ()
            yield from (path / s.path for part in splits for s in part.shards if os.path.lexists(path / s.path))
            retired = {path / old.path for old in known.info.retired} if known and known.info else set()
            found = (p for p in path.iterdir() if REGISTRY.of_name(p.name) and not p.is_dir())
            yield from sorted(p for p in found if p not in retired)
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
        raise SourceError("the shards are in several folders; say where the index goes with output=DIR")
    return folders.pop()


def _spec(format_name: str, path: Path, origin: ExistingSet | None) -> ShardSpec | None:
    """What a shard says of its set; None where that is damaged, if the dataset.json of the set knows it too."""
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
        raise FormatError(f"{path}: {error}; or name it with split=NAME") from error


def _own_split(path: Path, container: Format, options: LocateOptions) -> str:
    """The split that a file names for its samples, "" for none."""
    first, *others = container.splits(path, options) or ("",)
    if others:
        raise NotFlatError(
            f"{path}: holds the splits {', '.join((first, *others))}, and an indexed shard is in one; run  "
            f"packer convert {quoted(path)} --to hdf5|tfrecord|tar"
        )
    return first


def _path_in_set(path: Path, out: Path) -> str:
    folder, inside = Path(os.path.realpath(path.parent)), Path(os.path.realpath(out))
    try:
        return ShardPath((folder / path.name).relative_to(inside).as_posix())
    except BadNameError as error:
        raise SourceError(f"{path}: {error}; move or rename it") from error
    except ValueError:
        return ShardPath(path.name)


def _check_names(shards: Sequence[FoundShard]) -> None:
    """Raise OutputError where two links would have one name."""
    by_name: dict[str, Path] = {}
    for shard in shards:
        other = by_name.setdefault(shard.name, shard.path)
        if other != shard.path:
            raise OutputError(
                f"{other} and {shard.path} have one name, and one folder cannot hold links to both; rename one, "
                f"or index each folder by itself"
            )


@dataclass(frozen=True)
class ExistingSet:
    """A directory with a dataset.json. info: None where that cannot be read, for the reason in `fault`."""

    root: Path
    info: DatasetInfo | None
    fault: str = ""

    @cached_property
    def split_of(self) -> dict[str, str]:
        """The split of each shard, by the shard's real path."""
        splits = self.info.splits.items() if self.info else ()
        return {os.path.realpath(self.root / shard.path): name for name, split in splits for shard in split.shards}

    def has(self, path: Path) -> bool:
        """Whether a file is one of the set's shards."""
        return os.path.realpath(path) in self.split_of


def _find_set(root: Path) -> ExistingSet | None:
    """The set in a directory; None where there is no dataset.json."""
    if not os.path.lexists(root / DATASET_FILE):
        return None
    try:
        return ExistingSet(root, read_dataset_info(root))
    except DatasetError as error:
        return ExistingSet(root, None, str(error))


def losses(old: DatasetInfo, new: DatasetInfo) -> list[str]:
    """What `old` has and `new`, in the same directory, does not have, in words.

    Shards are compared by path. One whose bytes differ is a loss too: without its old checksums damage could not be
    distinguished from a change.
    """
    now = {shard.path: shard for split in new.splits.values() for shard in split.shards}
    before = [shard for split in old.splits.values() for shard in split.shards]
    gone = [shard for shard in before if shard.path not in now]
    pairs = [(shard, now[shard.path]) for shard in before if shard.path in now]
    lost: list[str] = []
    if gone:
        samples = plural(sum(shard.samples for shard in gone), "sample")
        lost.append(f"{samples} in {plural(len(gone), 'shard')} ({listed([shard.path for shard in gone])})")
    for was, shard in pairs:
        if shard.samples < was.samples:
            samples = plural(was.samples - shard.samples, "sample")
            lost.append(f"{samples} of {was.path}, which had {was.samples} and has {shard.samples}")
    changed = [was.path for was, shard in pairs if (was.bytes, was.crc32c) != (shard.bytes, shard.crc32c)]
    if changed:
        lost.append(
            f"the checksums of {plural(len(changed), 'shard')} ({listed(changed)}), whose bytes are not those that "
            f"were indexed: damaged, or rewritten"
        )
    classes = [name for name in old.classes if name not in new.classes]
    for what, names in (
        ("split", old.splits.keys() - {name for name, split in new.splits.items() if split.shards}),
        ("class", classes),
        ("field", old.fields.keys() - new.fields.keys()),
    ):
        if names:
            lost.append(f"{plural(len(names), what)} ({listed(sorted(names))})")
    if not classes and old.classes != new.classes[: len(old.classes)]:
        lost.append("the order of the classes")
    return lost


def missing_shards(names: Iterable[str]) -> tuple[int, list[str]]:
    """How many further shards the names of these imply, and some of their names."""
    runs: dict[tuple[str, str], dict[int, str]] = {}  # (before the number, behind it) -> number -> its digits
    for name in names:
        match = _OF.fullmatch(name) or _TAR.fullmatch(name)
        if match is not None and len(match["number"]) <= _MOST_DIGITS:
            runs.setdefault((match["head"], match["tail"]), {})[int(match["number"])] = match["number"]
    count, some = 0, list[str]()
    for (head, tail), run in runs.items():
        expected = _expected_numbers(run, tail)
        missing = len(expected) - sum(number in expected for number in run)
        if missing > 0:
            count += missing
            width = max(map(len, run.values())) if len({*map(len, run.values())}) == 1 else 0
            gone = (f"{head}{number:0{width}d}{tail}" for number in expected if number not in run)
            some += itertools.islice(gone, _NAMES_IN_MESSAGE - len(some))
    return count, some


def _expected_numbers(run: Mapping[int, str], tail: str) -> range:
    """All numbers of the run that shards with these numbers belong to."""
    total = re.match(r"-of-(\d+)", tail)
    if total is not None:
        count = int(total[1]) if len(total[1]) <= _MOST_DIGITS else 0
        return range(1, count + 1) if count in run and 0 not in run else range(count)
    lowest = min(run)
    padded = run[lowest].startswith("0") and len(run[lowest]) >= 3
    return range(lowest, max(run) + 1) if padded or run.get(0) == "0" else range(0)
