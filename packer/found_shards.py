"""What `packer.index` is asked to make a set of, and what is there already: files, their set, splits and format.

Of a set that is there, `losses` says what a change would lose. Which shards are missing is told by names, too:

    train-00003-of-00008.tfrecord     says that there are eight
    train-000003.tar                  has all from the lowest number to the highest before and behind it, by custom

Numbers of a tar count as such where they are padded with zeros to three digits or more, or where they start at 0, so
that years and dates are none.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cache.errors import BadNameError, DatasetError, FormatError, NotFlatError, OutputError, SourceError
from cache.messages import plural
from packer.formats import REGISTRY, format_named, format_of_file
from packer.formats.base import Format, LocateOptions, ShardSpec
from packer.sources.shards import split_of_name
from readers.layout import DATASET_FILE, DatasetInfo, ShardInfo, read_dataset_info
from readers.names import ShardPath, SplitName

__all__ = ["ExistingSet", "FoundShard", "FoundShards", "find_set", "find_shards", "listed", "losses", "missing_shards"]


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

        A set that knows its shards is asked instead: see `losses`.
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


_NAMED = 3


@dataclass(frozen=True)
class ExistingSet:
    """A directory with a dataset.json. info: None where that cannot be read; fault then says why."""

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


def find_set(root: Path) -> ExistingSet | None:
    """The set in a directory; None where there is no dataset.json."""
    if not os.path.lexists(root / DATASET_FILE):
        return None
    try:
        return ExistingSet(root, read_dataset_info(root))
    except DatasetError as error:
        return ExistingSet(root, None, str(error))


def losses(old: DatasetInfo, new: DatasetInfo) -> list[str]:
    """What `old` has and `new`, in the same directory, has not; in words, empty where nothing is lost.

    A shard is known by its path. One whose bytes differ counts as a loss too: its old checksums are the only thing by
    which damage can be told from a change.
    """
    there = {shard.path: shard for split in new.splits.values() for shard in split.shards}
    known = [shard for split in old.splits.values() for shard in split.shards]
    found: list[str] = []
    gone = [shard for shard in known if shard.path not in there]
    if gone:
        samples = sum(shard.samples for shard in gone)
        found.append(f"{plural(samples, 'sample')} in {plural(len(gone), 'shard')} ({_paths(gone)})")
    for shard in known:
        now = there.get(shard.path)
        if now is not None and now.samples < shard.samples:
            lost = plural(shard.samples - now.samples, "sample")
            found.append(f"{lost} of {shard.path}, which had {shard.samples} and has {now.samples}")
    changed = [
        s for s in known if s.path in there and (s.bytes, s.crc32c) != (there[s.path].bytes, there[s.path].crc32c)
    ]
    if changed:
        found.append(
            f"the checksums of {plural(len(changed), 'shard')} ({_paths(changed)}), whose bytes are not those that "
            f"were indexed: damaged, or rewritten"
        )
    found += _names("split", old.splits.keys() - {name for name, split in new.splits.items() if split.shards})
    if old.classes != new.classes[: len(old.classes)]:
        missing = [name for name in old.classes if name not in new.classes]
        found += _names("class", missing) if missing else ["the order of the classes"]
    return found + _names("field", [name for name in old.fields if name not in new.fields])


def listed(names: Sequence[str]) -> str:
    """The first few of some names."""
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")


def _names(what: str, names: Collection[str]) -> list[str]:
    return [f"{plural(len(names), what)} ({listed(sorted(names))})"] if names else []


def _paths(shards: Sequence[ShardInfo]) -> str:
    return listed([shard.path for shard in shards])


_OF = re.compile(r"(?P<head>.*-)(?P<number>\d+)(?P<of>-of-(?P<count>\d+).*)", re.DOTALL)
_TAR = re.compile(r"(?P<head>.*?)(?P<number>\d+)\.tar", re.DOTALL)
_NAMED = 3
_MOST_DIGITS = 9


def missing_shards(names: Iterable[str]) -> tuple[int, list[str]]:
    """How many shards the names of those that are there call for beside them, and some of their names."""
    count, some = 0, list[str]()
    told: dict[tuple[str, str], dict[int, str]] = {}
    for name in names:
        match = _OF.fullmatch(name) or _TAR.fullmatch(name)
        if match is not None and len(match["number"]) <= _MOST_DIGITS:
            told.setdefault((match["head"], match.groupdict().get("of") or ".tar"), {})[int(match["number"])] = match[
                "number"
            ]
    for (head, tail), found in told.items():
        wanted = _numbers_of_count(found, tail) if tail != ".tar" else _numbers_of_tars(found)
        missing = len(wanted) - sum(number in wanted for number in found)
        if missing > 0:
            count += missing
            width = max(map(len, found.values())) if len({*map(len, found.values())}) == 1 else 0
            gone = (f"{head}{number:0{width}d}{tail}" for number in wanted if number not in found)
            some += itertools.islice(gone, _NAMED - len(some))
    return count, some


def _numbers_of_count(found: dict[int, str], tail: str) -> range:
    match = re.match(r"-of-(\d+)", tail)
    assert match is not None
    count = int(match[1]) if len(match[1]) <= _MOST_DIGITS else 0
    return range(1, count + 1) if count in found and 0 not in found else range(count)


def _numbers_of_tars(found: dict[int, str]) -> range:
    lowest = min(found)
    padded = found[lowest].startswith("0") and len(found[lowest]) >= 3
    return range(lowest, max(found) + 1) if padded or (lowest == 0 and found[0] == "0") else range(0)
