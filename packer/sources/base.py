"""The interface of sources: a fast listing of the samples, and readers that workers read their bytes with.

`list` examines names and sizes only, and runs once. `open` gives each worker a reader of the samples of a slice of that
listing, which reads into the worker's arena. A source object is small and picklable.
"""

from __future__ import annotations

import faulthandler
import itertools
import lzma
import multiprocessing
import os
import pickle
import posixpath
import stat
import struct
import sys
import threading
import zlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from cache.checksums import crc32c
from cache.errors import BadNameError, BadSampleError, MissingExtraError, PackerError, SourceError
from cache.files import read_regular
from cache.messages import listed
from cache.system import resource
from packer.formats.base import Arena, key_by_number
from readers.layout import same_split
from readers.opening.tree import Keys, TreeNames
from readers.table import NO_LABEL, Buffer, NamesBuilder, Strings

__all__ = [
    "AheadReader",
    "FieldNames",
    "FileSource",
    "LabellingReader",
    "ListingBuilder",
    "NumberPlaces",
    "ObjectPlaces",
    "Places",
    "Samples",
    "Slice",
    "SomeSamples",
    "Source",
    "SourceListing",
    "SourceReader",
    "SplitListing",
    "StrayReader",
    "check_names",
    "checked_name",
    "choose_split",
    "file_stamp",
    "in_child",
    "numbered",
    "of_sample",
    "place_name",
    "plain_yaml",
    "read_text",
    "refusing",
    "safe_name",
    "size_and_time",
    "stored_title",
    "wanted_split",
]


# ------------------------------------------------------------------------------
# Places: the location of each sample of a listing, for the reader of its source: numbers, or small objects.


_BLOCK_SAMPLES = 1024


class Places(Protocol):
    """The location of each sample, for the reader of its source; slices are lists."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...
    def take(self, indices: npt.NDArray[np.int64]) -> Places:
        """The places at `indices`."""


class NumberPlaces(Sequence["tuple[int, ...]"]):
    """Places of k whole numbers each, int64 [n, k]."""

    def __init__(self, numbers: npt.NDArray[np.int64]) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        picked = self._numbers[index].tolist()
        return list(map(tuple, picked)) if isinstance(index, slice) else tuple(picked)

    def take(self, indices: npt.NDArray[np.int64]) -> NumberPlaces:
        return NumberPlaces(self._numbers[indices])


class ObjectPlaces(Sequence[Any]):
    """Places that are small objects, each pickled: about 20 bytes, compared with 100 for a Python tuple."""

    def __init__(self, pickles: Strings) -> None:
        self._pickles = pickles

    def __len__(self) -> int:
        return len(self._pickles)

    def __getitem__(self, index: Any) -> Any:
        n = len(self)
        first, stop, step = index.indices(n) if isinstance(index, slice) else (i := range(n)[index], i + 1, 1)
        bounds = self._pickles.offsets[first : max(first, stop) + 1].tolist()
        data = self._pickles.blob[bounds[0] : bounds[-1]].tobytes()
        picked = [pickle.loads(data[a - bounds[0] : b - bounds[0]]) for a, b in itertools.pairwise(bounds)]
        return picked[::step] if isinstance(index, slice) else picked[0]

    def __iter__(self) -> Iterator[Any]:
        for first in range(0, len(self), _BLOCK_SAMPLES):
            yield from self[first : first + _BLOCK_SAMPLES]

    @classmethod
    def of(cls, places: Iterable[Any]) -> ObjectPlaces:
        pickles = [pickle.dumps(place, _PLAIN) for place in places]
        ends = np.cumsum([0, *map(len, pickles)], dtype=np.uint64)
        return cls(Strings(np.frombuffer(b"".join(pickles), np.uint8), ends))

    def take(self, indices: npt.NDArray[np.int64]) -> ObjectPlaces:
        return ObjectPlaces(self._pickles.take(indices))


# ------------------------------------------------------------------------------
# Helpers of many sources: the size of a file, and the meaning of a split name.


_MAX_DEPTH = 100


def size_and_time(path: str | os.PathLike[str]) -> tuple[int, int]:
    """(bytes, modification time in ns) of a file; -1 bytes if it cannot be examined, or is not a file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return -1, 0
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else (-1, 0)


T = TypeVar("T")
N = TypeVar("N", bound=str)


def wanted_split(split: str | None, names: Collection[str], where: str) -> str | None:
    """The requested one of `names`, None for all; val, valid and validation are synonyms.

    Raises SourceError for any other name.
    """
    if split is None or split in names:
        return split
    other = next((name for name in same_split(split) if name in names), None)
    if other is None:
        raise SourceError(f"{where}: no split {split!r}; it has {', '.join(names) or 'none'}")
    return other


def file_stamp(path: Path) -> tuple[int, int]:
    """(bytes, modification time in ns) of a file; if they differ, the file has changed since it was listed."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise SourceError(f"{path}: cannot be examined: {error.strerror}") from error
    return status.st_size, status.st_mtime_ns


def plain_yaml(text: str, where: object, extra: str, purpose: str) -> Any:
    """Parse YAML. Raises SourceError, also for aliases, by which a few bytes can stand for any amount of data.

    extra: packer's extra that installs PyYAML, for this purpose.
    """
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError("PyYAML", extra, purpose) from error
    loader, depth = getattr(yaml, "CSafeLoader", yaml.SafeLoader), 0
    try:
        for event in yaml.parse(text, loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > _MAX_DEPTH:
                problem = f"nests deeper than {_MAX_DEPTH}" if depth > _MAX_DEPTH else "has aliases (*name)"
                raise ValueError(f"{problem}; write the values out")
        return yaml.load(text, loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SourceError(f"{where}: cannot be read as YAML: {str(error)[:200]}") from error


_NAMES_BLOCK = 1024
_MORE_BYTES = 1 << 30
_PLAIN = 3  # the last protocol of pickle without frames, which are longer than a place


class Slice(NamedTuple):
    """Some samples of a split, in the form for workers: parallel lists.

    names[i]: original file name of each field, "" for none. bytes[i]: of all fields together, 0 if unknown.
    places[i]: the argument for the source's reader.
    """

    keys: Sequence[str]
    labels: Sequence[int]
    names: Sequence[tuple[str, ...]]
    bytes: Sequence[int]
    places: Sequence[Any]


class FieldNames(Sequence["tuple[str, ...]"]):
    """The file names of every sample, one per field."""

    __slots__ = ("columns",)

    def __init__(self, *columns: Strings | TreeNames) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: Any) -> Any:
        picked = [column[index] for column in self.columns]
        return list(zip(*picked, strict=True)) if isinstance(index, slice) else tuple(picked)

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return zip(*self.columns, strict=True)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def take(self, indices: npt.NDArray[np.int64]) -> FieldNames:
        return FieldNames(*(column.take(indices) for column in self.columns))


@dataclass(slots=True, eq=False)
class SplitListing:
    """All samples of one split, in packing order, as columns; `ListingBuilder` fills them.

    root: the folder that the split came from. keys, names, bytes, places: as in `Slice`.
    labels: -1 for none; may be reassigned.
    stamps: modification times, or other marks of a change; listings with different ones are not equal.
    """

    root: str
    keys: Strings | Keys
    labels: npt.NDArray[np.integer[Any]]
    names: FieldNames
    bytes: npt.NDArray[np.int64]
    places: Places
    stamps: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.keys)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SplitListing):
            return NotImplemented
        same = (self.root, len(self)) == (other.root, len(other)) and np.array_equal(self.stamps, other.stamps)
        return same and all(left == right for left, right in zip(self.slices(), other.slices(), strict=True))

    __hash__ = None  # type: ignore[assignment]

    def take(self, indices: npt.NDArray[np.int64]) -> SplitListing:
        """A subset of the samples, in the order of `indices`."""
        return SplitListing(
            self.root,
            self.keys.take(indices),
            self.labels[indices],
            self.names.take(indices),
            self.bytes[indices],
            self.places.take(indices),
            self.stamps[indices],
        )

    def slices(self) -> Iterator[Slice]:
        """All samples as Python objects, a thousand at a time, so that millions take little memory."""
        for first in range(0, len(self), _NAMES_BLOCK):
            part = slice(first, first + _NAMES_BLOCK)
            labels, sizes = self.labels[part].tolist(), self.bytes[part].tolist()
            yield Slice(self.keys[part], labels, self.names[part], sizes, self.places[part])


class Samples(Protocol):
    """The samples of a shard, in the form for its worker."""

    def slices(self) -> Iterator[Slice]:
        """All samples, in order. Raises SourceError."""


class SomeSamples:
    """Samples of a listing for a worker. They are selected when they are sent to it, or used."""

    def __init__(self, listing: SplitListing, indices: npt.NDArray[np.int64] | range | None = None) -> None:
        self._listing, self._indices = listing, indices

    def slices(self) -> Iterator[Slice]:
        """All samples, a thousand at a time."""
        return self._picked().slices()

    def _picked(self) -> SplitListing:
        indices = self._indices
        if indices is None:
            return self._listing
        if isinstance(indices, range):
            indices = np.arange(indices.start, indices.stop, indices.step)
        return self._listing.take(indices)

    def __reduce__(self) -> tuple[Any, ...]:
        return SomeSamples, (self._picked(),)


class ListingBuilder:
    """Fills the columns of a split by appending, without additional memory."""

    def __init__(self, fields: int = 1) -> None:
        """fields: number of file names per sample."""
        self._keys = NamesBuilder()
        self._names = [NamesBuilder() for _ in range(fields)]
        self._pickles, self._ends = bytearray(), array("Q", (0,))
        self._labels, self._bytes, self._stamps = array("q"), array("q"), array("q")

    def __len__(self) -> int:
        return len(self._labels)

    def add(self, names: Sequence[str], place: Any, size: int, *marks: int, key: str = "", label: int = -1) -> None:
        """Add one sample. place: a small picklable object; size: its bytes, 0 if unknown.

        marks: modification times of its files, or other marks of a change, which become one stamp.
        """
        stamp = 0
        for mark in marks:
            stamp = (stamp * 1_000_003 + mark) % (1 << 63)
        for column, name in zip(self._names, names, strict=True):
            column.append(name)
        self._keys.append(key)
        self._pickles += pickle.dumps(place, _PLAIN)
        self._ends.append(len(self._pickles))
        self._bytes.append(size)
        self._labels.append(label)
        self._stamps.append(stamp)

    def build(self, root: str = "") -> SplitListing:
        """The listing, over the memory of this builder, which cannot be filled any further."""
        return SplitListing(
            root,
            self._keys.build(),
            np.frombuffer(self._labels, np.int64),
            FieldNames(*(names.build() for names in self._names)),
            np.frombuffer(self._bytes, np.int64),
            ObjectPlaces(Strings(np.frombuffer(self._pickles, np.uint8), np.frombuffer(self._ends, np.uint64))),
            np.frombuffer(self._stamps, np.int64),
        )


@dataclass(slots=True)
class SourceListing:
    """The content of a source.

    left_out: (path, reason) of files that are not samples.
    skip_strays: whether a file that is not an image, and not named like one, is left out instead of being an error; the
    source's reader is then a `StrayReader`.
    shuffles: whether samples can be read in any order at low cost.
    estimated: whether bytes are averages, and a sample may have more.
    max_workers: how many processes may read at the same time, None for any number.
    watched: (paths, modification times in ns) of the folders below the source's `root`; if they are unchanged, a later
    process may reuse the listing. None if it has to list again. See `SavedSource`.
    json_listed: whether the last member of each place is the field json of the sample, or None.
    late_labels: whether labels are known only when samples are read, by a `LabellingReader`.
    where: an expression of `readers.where` to evaluate when a sample has been read; "" selects all.
    not_chosen: number of unlisted samples for which such an expression is false.
    sampled: whether only some samples have been examined, so that another source may have the same listing.
    """

    splits: dict[str, SplitListing]
    fields: Mapping[str, str]
    classes: tuple[str, ...] = ()
    left_out: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    skip_strays: bool = False
    shuffles: bool = True
    estimated: bool = False
    max_workers: int | None = None
    watched: tuple[Sequence[str], npt.NDArray[np.int64]] | None = None
    late_labels: bool = False
    where: str = ""
    not_chosen: int = 0
    sampled: bool = False
    json_listed: bool = False


class SourceReader(Protocol):
    """Reads samples in a worker."""

    def read(self, place: Any, arena: Arena) -> Sequence[Buffer | None]:
        """The payload of every field, None if absent; in the arena or in separate memory.

        Raises BadSampleError (this sample cannot be read) or SourceError (none can).
        """


@runtime_checkable
class LabellingReader(SourceReader, Protocol):
    """A reader that learns the label of a sample only when it reads it; the label in the listing is ignored."""

    def label(self, place: Any) -> int:
        """The label of the sample that was read last; NO_LABEL for none."""


@runtime_checkable
class AheadReader(SourceReader, Protocol):
    """A reader that fetches samples ahead."""

    def expect(self, places: Sequence[Any]) -> None:
        """Announce the places that `read` will be called with next, after those announced before."""


class StrayReader(SourceReader, Protocol):
    """A reader of files that may not be images; with `skip_strays`, large ones are checked by `head` first."""

    def head(self, place: Any) -> bytes:
        """The first bytes of a file, up to HEAD_BYTES of `packer.registry`. Raises like `read`."""


class Source(Protocol):
    """A source of samples."""

    @property
    def title(self) -> str:
        """A description for users and for dataset.json."""

    def list(self, split: str | None) -> SourceListing:
        """Every sample of every split, or of one split. Raises SourceError."""

    def open(self) -> AbstractContextManager[SourceReader]:
        """A reader of the listed samples. Raises SourceError."""

    def paths(self, listing: SourceListing) -> Iterator[str | os.PathLike[str]]:
        """Every file that the samples are read from; no conversion of them may overwrite it."""


def stored_title(source: Source) -> str:
    """The title of a source for dataset.json, with its `place_name` instead of the path."""
    parts, root, title = getattr(source, "sources", None), str(getattr(source, "root", "")), source.title
    if parts is not None:
        return listed([stored_title(part) for part in parts])
    return f"{title.removesuffix(root)}{place_name(root)}" if root and title.endswith(root) else title


def place_name(path: str | os.PathLike[str]) -> str:
    """A path in the form that sets store: an absolute path, or one that leads up, is reduced to its last component.

    The rest would reveal details of the machine, and perhaps the name of a user.
    """
    text = os.fspath(path)
    if not os.path.isabs(text) and ".." not in Path(text).parts:
        return text
    return os.path.basename(os.path.abspath(text)) or text


class SavedSource(Source, Protocol):
    """A source whose listing may be saved, and used by processes that have not called `list`.

    root: its folder. identity: describes the source and its options; a listing is reused only if it is the same.
    """

    root: Path

    @property
    def identity(self) -> str: ...


class FileSource(ABC):
    """A source of files, which must not change between `list` and `open`.

    kind: noun for the title.
    isolated: its library trusts the bytes of a file, so that damage may crash the process that reads them; it is listed
    and read in separate processes.
    seconds: time limit for listing in a separate process, with at most 1 GiB of additional memory; None: no limits.
    """

    kind: str = ""
    isolated: bool = False
    seconds: float | None = None

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._stamps: dict[Path, tuple[int, int]] = {}

    @property
    def title(self) -> str:
        return f"{self.kind} {self.root}"

    def list(self, split: str | None) -> SourceListing:
        self._stamps = {}
        if self.root.is_file():
            self.note(self.root)
        if self.isolated or self.seconds is not None:
            state, listing = in_child(self.root, _listed, self, split, seconds=self.seconds)
            self.__dict__.update(state)
        else:
            listing = self.list_files(split)
        choose_split(listing, split, self.root)
        mark = np.int64(self.mark())
        for name, part in listing.splits.items():
            if not len(part):
                raise SourceError(f"{self.root}: no samples in {name}")
            part.stamps = part.stamps ^ mark
        return listing

    def mark(self) -> int:
        """A value that is added to the stamps of all samples, and changes with the files."""
        return crc32c(repr([(path.name, *stamp) for path, stamp in self._stamps.items()]).encode(errors="replace"))

    def note(self, path: Path) -> Path:
        """Record `path` as one of the files that must not change. Raises SourceError if it is not a regular file."""
        self._stamps[path] = file_stamp(path)
        if not path.is_file():
            raise SourceError(f"{path}: not a regular file")
        return path

    def paths(self, listing: SourceListing) -> Iterator[str | os.PathLike[str]]:
        yield from self._stamps

    @contextmanager
    def open(self) -> Iterator[SourceReader]:
        for path, stamp in self._stamps.items():
            if file_stamp(path) != stamp:
                raise SourceError(f"{path}: has changed since it was listed; run the same command again")
        with self.open_files() as reader:
            yield reader

    @abstractmethod
    def list_files(self, split: str | None) -> SourceListing:
        """The listing of all splits; `list` selects the requested one, and adds the stamps recorded by `note`.

        split: the name for samples without a split.
        """

    @abstractmethod
    def open_files(self) -> AbstractContextManager[SourceReader]:
        """A reader of the files."""


def _listed(source: FileSource, split: str | None) -> tuple[dict[str, Any], SourceListing]:
    listing = source.list_files(split)
    return source.__dict__, listing


def choose_split(listing: SourceListing, split: str | None, where: object) -> None:
    """Keep the requested split, None for all. Raises SourceError if there is none of this name."""
    if split is not None:
        name = wanted_split(split, listing.splits, str(where))
        listing.splits = {name: listing.splits[name]} if name else {}


def in_child(where: object, work: Callable[..., T], *arguments: object, seconds: float | None = None) -> T:
    """Call `work` in a separate process. Raises its errors, and SourceError if the process dies.

    seconds: time limit, which also limits it to 1 GiB more memory than this process; None: no limits.
    """
    is_safe = sys.platform == "linux" and threading.active_count() == 1
    context: Any = multiprocessing.get_context("fork" if is_safe else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, seconds is not None, work, arguments), daemon=True)
    try:
        process.start()
        sender.close()
        if not receiver.poll(seconds):
            raise SourceError(f"{where}: takes more than {seconds:g} s to read: damaged, or made to harm")
        error, value = receiver.recv()
    except EOFError as error:
        raise SourceError(f"{where}: ended the process that read it: truncated or damaged") from error
    finally:
        receiver.close()
        process.kill()
        process.join()
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def _answer(sender: Connection, is_limited: bool, work: Callable[..., object], arguments: Sequence[object]) -> None:
    faulthandler.disable()  # the parent reports the crash
    try:
        if is_limited and sys.platform == "linux":
            has = int(read_regular("/proc/self/statm", 1 << 10).split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (has + _MORE_BYTES, has + _MORE_BYTES))
        sender.send((None, work(*arguments)))
    except MemoryError:
        sender.send((SourceError("it takes more memory than a source of its kind: damaged, or made to harm"), None))
    except Exception as error:
        sender.send((error, None))


_DAMAGE = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, EOFError, RecursionError),
    *(NotImplementedError, struct.error, zlib.error, lzma.LZMAError, BadZipFile),
)


@contextmanager
def refusing(
    where: object, problem: str = "cannot be read", error: type[SourceError | BadSampleError] = SourceError
) -> Iterator[None]:
    """Turn errors of reading damaged bytes into a packer error, "where: problem: reason". Other packer errors pass."""
    try:
        yield
    except PackerError:
        raise
    except _DAMAGE as raised:
        reason = raised.strerror if isinstance(raised, OSError) and raised.strerror else f"{raised!s:.200}"
        if isinstance(raised, LookupError | TypeError | AttributeError):
            reason = f"{raised!r:.200}"
        raise error(f"{where}: {problem}: {reason}") from raised


@contextmanager
def of_sample(where: object) -> Iterator[None]:
    """Name the part of a sample in its BadSampleError; other reading errors become a BadSampleError."""
    try:
        with refusing(where, error=BadSampleError):
            yield
    except BadSampleError as error:
        raise error if str(error).startswith(f"{where}: ") else BadSampleError(f"{where}: {error}") from error


def read_text(path: Path, max_bytes: int, problem: str = "cannot be read as UTF-8 text") -> str:
    """The content of a small text file. Raises SourceError."""
    with refusing(path, problem):
        return read_regular(path, max_bytes).decode()


def numbered(
    split: str, places: npt.NDArray[np.int64], sizes: npt.NDArray[Any] | int, fields: int, labels: Any = NO_LABEL
) -> SplitListing:
    """A split of samples without names, whose keys are their numbers. places: int64 [n, k]; sizes: bytes of each."""
    count = len(places)
    nothing = Strings(np.empty(0, np.uint8), np.zeros(count + 1, np.uint64))
    return SplitListing(
        "",
        Strings.of(key_by_number(Path(split), number) for number in range(count)),
        np.broadcast_to(np.asarray(labels, np.int64), count).copy(),
        FieldNames(*[nothing] * fields),
        np.broadcast_to(np.asarray(sizes, np.int64), count).copy(),
        NumberPlaces(places),
        np.zeros(count, np.int64),
    )


def checked_name(kind: Callable[[str], N], name: str, where: object) -> N:
    """A name of this kind, such as `readers.layout.RelativePath`. Raises SourceError if it is invalid."""
    try:
        return kind(name)
    except BadNameError as error:
        raise SourceError(f"{where}: {error}") from error


def check_names(names: Iterable[str], where: str) -> None:
    """Refuse names that containers cannot store: not UTF-8, NUL, absolute, or with a `..` in them."""
    waiting = iter(names)
    while block := list(itertools.islice(waiting, _NAMES_BLOCK)):
        text = "\0".join(["", *block, ""])
        doubtful = not text.isascii() or ".." in text or "\0/" in text or "\0\0" in text
        if doubtful or text.count("\0") != len(block) + 1:
            for name in block:
                _check_name(name, where)


def _check_name(name: str, where: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise SourceError(f"{where}: the name {name!r} is not UTF-8; rename it (see convmv)") from error
    if not name or "\0" in name or name[0] == "/" or (".." in name and ".." in PurePosixPath(name).parts):
        raise SourceError(
            f"{where}: {name!r} cannot be the name of a sample: empty, absolute, or leads out of its folder"
        )


def safe_name(path: str) -> str:
    """`path` without `.`, `//` and inner `..`, a leading "/" and leading `..`; "" if nothing is left.

    "./a//b.jpg" -> "a/b.jpg", "/data/b.jpg" -> "data/b.jpg", "../../b.jpg" -> "b.jpg", "a/../b.jpg" ->
    "b.jpg".
    """
    parts = posixpath.normpath(path).split("/")
    return "/".join(part for part in parts if part not in ("", ".", ".."))
