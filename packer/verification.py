"""`packer.verify`: check every byte of a set and its index.

For each file of an index: its size and CRC32C. For each shard: its size; that its format finds exactly the samples,
keys, labels, file names and byte ranges of the index; the CRC32C of every sample; and that the header of its image
matches the index. SHA256SUMS and classes.txt, if they exist: that they agree with dataset.json. deep=True adds CRC32C
and SHA-256 of the whole file, the format's own checksums of the payload and a full decode of every image. sums=True
writes SHA256SUMS of an intact set. against=SOURCE compares with the original source, sample by sample.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c

import readers
from cache.errors import (
    BadSampleError,
    ChangedError,
    DatasetError,
    FormatError,
    MissingError,
    OutputError,
    PackerError,
    RemoteError,
    StagingSourceError,
    StaleIndexError,
    TruncatedError,
)
from cache.files import read_regular
from cache.messages import Counter, Silent, Watcher, human_bytes, plural, quoted
from cache.remote import Remote, is_remote
from cache.staging.session import work_off
from cache.staging.sources import RemoteSource, StagedFile
from packer.adoption import key_prefix
from packer.columns import HEADER_COLUMNS, column_files, damaged_columns, header_values
from packer.conversion.images import decode_fully
from packer.documents import differences, read_document, write_dataset_info
from packer.formats import format_named
from packer.formats.base import Arena, Located, LocateOptions, Window, locate_options
from packer.sets.change import Change
from packer.sources import open_source
from packer.sources.base import Slice, Source, SourceListing, SourceReader, SplitListing
from packer.sources.shards import located_samples
from packer.workers import Workers, run_shards
from readers.fields import check_field
from readers.headers import read_header, sniff
from readers.headers.base import stored_bytes
from readers.layout import (
    DATASET_FILE,
    MAX_JSON_BYTES,
    PIXELS,
    REPORT_FILE,
    SUMS_FILE,
    DatasetInfo,
    ShardInfo,
    read_dataset_info,
)
from readers.opening.packed import open_packed
from readers.opening.remote import RemoteHome
from readers.table import ABSENT, Buffer, ImageInfo, Index, decode_name, encode_name

__all__ = [
    "MAX_PROBLEMS",
    "LocatedRows",
    "Problem",
    "Problems",
    "VerifyResult",
    "check_index",
    "compare",
    "header_difference",
    "sample_difference",
    "verify",
]


# --- differences between an index, its shards and the source --------------------------------------------------------
# dataset.json has size and CRC32C of every file of an index, so damage of any column is found without the shards. Sets
# of earlier versions lack them; for those, and in addition, each sample's key, label, byte ranges, file names and image
# header are compared with the shard. With a source, every byte of every field is compared, too.


MAX_PROBLEMS = 10_000


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault: its shard, a description, and the index and key of the sample if it concerns one."""

    split: str
    shard: str
    what: str
    index: int | None = None
    key: str | None = None

    def __str__(self) -> str:
        sample = "" if self.index is None else f" sample {self.index} ({self.key})"
        return f"{self.split}: {self.shard}:{sample} {self.what}"


@dataclass(slots=True)
class Problems:
    """A capped list of problems, and their uncapped count."""

    problems: list[Problem] = field(default_factory=list)
    count: int = 0

    def add(self, problem: Problem) -> None:
        self.count += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)


def check_index(root: Path, info: DatasetInfo, split: str, problems: Problems, remedy: str = "") -> bool:
    """Check every column of a split's index: its checksum, its length, and that samples are in the order of shards.

    remedy: what to do about damage; by default: rebuild the index.

    Returns whether the index is sound enough to check the shards with it.
    """
    remedy = remedy or f"rebuild it with  packer index {quoted(root)}"
    files = info.splits[split]
    damaged = list(damaged_columns(root, files))
    for name, problem in damaged:
        problems.add(Problem(split, f"{files.index}/{name}", f"{problem}; {remedy}"))
    try:
        with readers.open(root, split) as reader:
            Index(root / files.index, files.samples, reader.fields, info.separate).check()
            counts = [shard.samples for shard in files.shards]
            expected = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)
            wrong = [] if np.array_equal(reader.table.column("shard"), expected) else ["shard"]
            for name in info.separate:
                if int(reader.table.shard_column(name).max(initial=0)) >= max(1, len(counts)):
                    wrong.append(f"{name}.shard")
            if not wrong:
                return True
            if not damaged:
                problems.add(Problem(split, files.index, f"the column {wrong[0]} does not fit dataset.json; {remedy}"))
    except PackerError as error:
        if not damaged:
            problems.add(Problem(split, files.index, str(error)))
    return False


def sample_difference(reader: readers.Reader, index: int, sample: Located, shard: str) -> str:
    """The difference between the index and the shard in one sample; "" if they agree."""
    if not _is_key(reader.keys[index], sample.key, shard):
        return f"the shard has the key {sample.key!r}"
    if sample.label != int(reader.labels[index]):
        return f"the shard has the label {sample.label}, the index {int(reader.labels[index])}"
    for name in reader.fields:
        indexed = reader.byte_range(index, name)
        expected = None if indexed is None else indexed[1:]
        if sample.ranges.get(name) != expected:
            return f"field {name}: the shard has it at {sample.ranges.get(name)}, the index says {expected}"
        stored = reader.table.columns.names(name)[index]
        named = encode_name(sample.names.get(name, ""), sample.key)
        if stored != named:
            return f"field {name}: the shard has the file name {named!r:.200}, the index {stored!r:.200}"
    return ""


def _is_key(key: str, of_shard: str, shard: str) -> bool:
    """Whether a key belongs to a sample of a shard: keys that occur in several adopted shards are prefixed with the
    shard's name, or, in a set made of others that has it in a folder, with the last parts of its name."""
    prefix = key.removesuffix(f"/{of_shard}")
    return key == of_shard or (
        prefix != key and f"/{key_prefix(shard)}".endswith((f"/{prefix}", f"/{Path(prefix).stem}"))
    )


class LocatedRows:
    """The samples of an edited index with payloads in one shard, to compare with what its format locates there.

    first, stop: the samples of the split for which `dataset.json` lists the shard. number: of the shard in that list.
    """

    def __init__(self, reader: readers.Reader, first: int, stop: int, number: int) -> None:
        info, table = reader.dataset, reader.table
        self._reader, self._edited, self._shard = reader, info.edited, reader.split_info.shards[number].path
        self._rows: dict[tuple[str, int, int], list[int]] = {}
        for name in reader.fields:
            rows = np.arange(first, stop)
            if name in info.separate:
                rows = np.flatnonzero(table.shard_column(name) == number)
            offset = table.field_column(name, "offset")[rows]
            length = table.field_column(name, "length")[rows]
            there = offset != np.uint64(ABSENT)
            for row, *place in zip(rows[there].tolist(), offset[there].tolist(), length[there].tolist(), strict=True):
                self._rows.setdefault((name, place[0], place[1]), []).append(row)

    def differences(self, sample: Located) -> Iterator[tuple[int, str]]:
        """(sample, difference between index and shard); payloads without a sample are ignored."""
        for name, place in sample.ranges.items():
            for row in self._rows.pop((name, *place), ()):
                yield from ((row, problem) for problem in self._compared(row, name, sample))

    def _compared(self, row: int, of: str, sample: Located) -> Iterator[str]:
        reader, key = self._reader, self._reader.keys[row]
        if "keys" not in self._edited and not _is_key(key, sample.key, self._shard):
            yield f"the shard has the key {sample.key!r}"
        if "labels" not in self._edited and of not in reader.dataset.separate and sample.label != reader.labels[row]:
            yield f"the shard has the label {sample.label}, the index {int(reader.labels[row])}"
        name, stored = sample.names.get(of, ""), reader.table.columns.names(of)[row]
        if stored != encode_name(name, sample.key) and decode_name(stored, key) != name:
            yield f"field {of}: the shard has the file name {name!r:.200}, the index {stored!r:.200}"

    def missing(self) -> Iterator[tuple[int, str]]:
        """(sample, problem) for payloads that are not at the place in the index."""
        for (name, offset, length), rows in self._rows.items():
            for row in rows:
                yield row, f"field {name}: the shard has none at {offset} of {length} bytes, the place in the index"


def header_difference(info: ImageInfo, index: int, image: Buffer | None) -> str:
    """The difference between the header columns of a sample and its image (None: no image); "" if they agree."""
    try:
        header = None if image is None else read_header(image)
    except BadSampleError:
        header = None  # adopted shards may contain data without a readable header
    for name, value in zip(HEADER_COLUMNS, header_values(header), strict=True):
        stored = int(getattr(info, name)[index])
        if stored != value:
            return f"the image's header says {name} {value}, the index {stored}"
    return ""


def compare(root: Path, source: Source, problems: Problems, watcher: Watcher) -> int:
    """Report every difference. Returns how many files the conversion reported as left out."""
    info = read_dataset_info(root)
    options = info.made.get("options", {})
    if options.get("reencode"):
        problems.add(
            Problem("", str(root), "was re-encoded when it was packed, so its bytes cannot equal the source's")
        )
        return 0
    listing = source.list(options.get("split"))
    comparison = _Comparison(root, info, listing, problems)
    total = sum(int(part.bytes.sum()) for part in listing.splits.values())
    watcher.begin(sum(map(len, listing.splits.values())), total, lambda: (comparison.samples, comparison.bytes))
    try:
        for split in sorted(info.splits.keys() | listing.splits.keys()):
            if split not in listing.splits or split not in info.splits:
                side = "source" if split in listing.splits else "set"
                problems.add(Problem(split, str(root), f"the split is only in the {side}"))
                continue
            with source.open() as source_reader:
                comparison.run(split, listing.splits[split], source_reader)
    finally:
        watcher.end()
    return comparison.left_out


class _Comparison:
    def __init__(self, root: Path, info: DatasetInfo, listing: SourceListing, problems: Problems) -> None:
        self._root, self._listing, self._found = root, listing, problems
        # If one side has no class names, the numbers are compared.
        both_named = bool(info.classes) and bool(listing.classes)
        self._set_classes = info.classes if both_named else ()
        self._source_classes = listing.classes if both_named else ()
        self._reported = set(_read_report(root))
        self.samples = self.bytes = self.left_out = 0

    def run(self, split: str, part: SplitListing, source: SourceReader) -> None:
        arena = Arena(lambda: None)
        with readers.open(self._root, split) as reader:
            packed = {_file_name(reader, i): i for i in range(len(reader))}
            for block in part.slices():
                for i, names in enumerate(block.names):
                    name = names[0] or block.keys[i]
                    index = packed.pop(name, None)
                    self.samples, self.bytes = self.samples + 1, self.bytes + block.bytes[i]
                    if index is not None:
                        arena.begin(block.bytes[i] + 1)
                        self._compare_sample(reader, index, block, i, source, arena)
                    elif (split, name) in self._reported:
                        self.left_out += 1
                    else:
                        self._add(split, f"{name} is in the source, but not in the set")
            for name, index in packed.items():
                self._add(split, "is not in the source", index, name)

    def _compare_sample(
        self, reader: readers.Reader, index: int, part: Slice, i: int, source: SourceReader, arena: Arena
    ) -> None:
        key, split = reader.keys[index], reader.split
        try:
            payloads = source.read(part.places[i], arena)
        except BadSampleError as error:
            self._add(split, f"cannot be read from the source: {error}", index, key)
            return
        for name, payload in zip(self._listing.fields, payloads, strict=True):
            packed = reader.read(index, name) if name in reader.fields and reader.has(index, name) else None
            if payload != packed:
                problem = "differs from the source" if name == "image" else f"field {name} differs from the source"
                self._add(split, problem, index, key)
        label = int(reader.labels[index])
        if _class(self._set_classes, label) != _class(self._source_classes, part.labels[i]):
            expected = _class(self._source_classes, part.labels[i])
            self._add(split, f"has the label {label}, the source says {expected}", index, key)

    def _add(self, split: str, problem: str, index: int | None = None, key: str | None = None) -> None:
        self._found.add(Problem(split, str(self._root), problem, index, key))


def _file_name(reader: readers.Reader, index: int) -> str:
    key = reader.keys[index]
    return decode_name(reader.table.columns.names(reader.fields[0])[index], key) or key


def _class(classes: tuple[str, ...], label: int) -> str | int:
    return classes[label] if 0 <= label < len(classes) else label


def _read_report(root: Path) -> Iterator[tuple[str, str]]:
    """(split, name) of every file that the conversion reported as left out."""
    path = root / REPORT_FILE
    try:
        text = read_regular(path, MAX_JSON_BYTES).decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return
    except OSError as error:
        raise DatasetError(f"the report of left-out files cannot be read: {error}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            item = json.loads(line)
            yield str(item.get("split", "")), str(item["name"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DatasetError(f"{path}: line {number} was not written by packer: {error!r:.200}") from error


_REPORT_SAMPLES, _BLOCK_BYTES = 256, 1 << 20
_FILES_AT_ONCE = 4
_OF_THE_SHARD = (ChangedError, MissingError, TruncatedError)


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The result of a check. problems: the first 10,000 faults; problem_count: the number of all.

    sums: whether SHA256SUMS was written.
    """

    path: Path | str
    shards: int
    samples: int
    shard_bytes: int
    deep: bool
    against: str | None
    problems: tuple[Problem, ...]
    problem_count: int
    left_out: int = 0
    sums: bool = False

    @property
    def ok(self) -> bool:
        return self.problem_count == 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "path": str(self.path), "ok": self.ok}


@dataclass(frozen=True, slots=True)
class _Task:
    root: Path
    split: str
    number: int
    shard: ShardInfo
    first: int  # first sample of the shard in the split
    format: str
    options: LocateOptions
    deep: bool
    sums: bool
    decode: str

    @property
    def title(self) -> str:
        """The name of the task in the log."""
        return f"{self.shard.path} ({plural(self.shard.samples, 'sample')}, {human_bytes(self.shard.bytes)})"


def verify(
    path: str | Path,
    *,
    deep: bool = False,
    against: str | Path | Source | None = None,
    sums: bool = False,
    workers: int | None = None,
    engine: Executor | None = None,
    watcher: Watcher | None = None,
) -> VerifyResult:
    """Check a packed set; the result reports damage. Raises DatasetError if there is no set.

    deep, against, sums: see the module.
    workers: number of processes; default the CPUs that this process may use.
    engine: an executor to check shards with, by default local processes; see `packer.open_engine`.

    For a set at an address, the index and the checksum of every shard are checked. Raises RemoteError.
    """
    watcher, crew = watcher or Silent(), Workers(workers, engine)
    if is_remote(path):
        needs_files = deep or sums or against is not None
        return _verify_remote(str(path), needs_files, workers or _FILES_AT_ONCE, watcher)
    root = Path(path)
    info = read_dataset_info(root)
    options = replace(locate_options(info), check_payload=deep)
    problems, sound = Problems(), True
    tasks: list[_Task] = []
    made = info.made.get("options")
    decode = str(made.get("decode", "RGB")) if isinstance(made, dict) else "RGB"
    for name, split in info.splits.items():
        first = 0
        for number, shard in enumerate(split.shards):
            tasks.append(_Task(root, name, number, shard, first, info.format, options, deep, sums, decode))
            first += shard.samples
        sound &= check_index(root, info, name, problems)
    text = read_regular(root / DATASET_FILE, MAX_JSON_BYTES)
    for file, problem in differences(partial(read_document, root), text, info, root):
        problems.add(Problem("all", file, problem))
    if not any(split.samples for split in info.splits.values()):
        problems.add(Problem("all", DATASET_FILE, "the set has no samples, so there is nothing to read or train on"))
    digests: dict[str, str] = {}
    if sound:
        samples, size = sum(task.shard.samples for task in tasks), sum(task.shard.bytes for task in tasks)
        for task, (part, digest) in zip(
            tasks, run_shards(verify_shard, tasks, len(tasks), crew, watcher, (samples, size)), strict=True
        ):
            problems.count += part.count
            problems.problems += part.problems[: MAX_PROBLEMS - len(problems.problems)]
            digests[task.shard.path] = digest
    left_out = 0
    if against is not None:
        source = open_source(against, layout="tree") if isinstance(against, (str, Path)) else against
        left_out = compare(root, source, problems, watcher)
        against = source.title
    if sums and not problems.count:
        _write_sums(root, info, digests, watcher)
    return VerifyResult(
        path=root,
        shards=len(tasks),
        samples=sum(split.samples for split in info.splits.values()),
        shard_bytes=sum(task.shard.bytes for task in tasks),
        deep=deep,
        against=against,
        problems=tuple(problems.problems),
        problem_count=problems.count,
        left_out=left_out,
        sums=sums and not problems.count,
    )


def _write_sums(root: Path, info: DatasetInfo, digests: Mapping[str, str], watcher: Watcher) -> None:
    """Write the SHA-256 of all files of a set into its dataset.json, and SHA256SUMS. digests: of shards, by path."""
    splits = {}
    for name, split in info.splits.items():
        shards = tuple(replace(shard, sha256=digests[shard.path]) for shard in split.shards)
        known = split.columns or [path.name for path in (root / split.index).glob("*.npy")]
        splits[name] = replace(split, shards=shards, columns=column_files(root / split.index, known))
    with Change(root, watcher) as change:
        if change.info is None or replace(change.info, retired=()) != replace(info, retired=()):
            raise OutputError(f"{root}: has been changed since it was verified; run the same command again")
        new = write_dataset_info(change.place, replace(change.info, splits=splits), scratch=change.work)
        if SUMS_FILE not in new.documents:
            raise OutputError(f"{root / SUMS_FILE}: is in the way, and packer did not write it; move it elsewhere")


def verify_shard(task: _Task, counter: Counter) -> tuple[Problems, str]:
    """All problems of one shard, and its SHA-256 if requested."""
    problems = Problems()

    reader = open_packed(task.root, task.split, recognise=False)

    def wrong(problem: str, index: int | None = None) -> None:
        key = None if index is None else _key_of(reader, index)
        problems.add(Problem(task.split, task.shard.path, problem, index, key))

    try:
        reader.store.check(task.number)
    except StaleIndexError as error:
        wrong(str(error))
        return problems, ""
    path = task.root / task.shard.path
    digest = ""
    if task.deep or task.sums:
        crc, digest = _digests(path, bool(task.sums or task.shard.sha256))
        if crc != task.shard.crc32c:
            wrong(f"the CRC32C of the whole file is {crc:08x}, dataset.json says {task.shard.crc32c:08x}")
        elif task.shard.sha256 and digest != task.shard.sha256:
            wrong(f"the SHA-256 of the whole file is {digest}, dataset.json says {task.shard.sha256}")
    _check_located(task, reader, path, wrong)
    _check_samples(task, reader, wrong, counter)
    return problems, digest


def _digests(path: Path, sha256: bool) -> tuple[int, str]:
    """CRC32C and, if requested, SHA-256 of a whole file, in one pass."""
    crc, digest = 0, hashlib.sha256()
    with Window(path) as window:
        for offset in range(0, window.size, _BLOCK_BYTES):
            block = window.read(offset, min(_BLOCK_BYTES, window.size - offset))
            crc = crc32c(block, crc)
            if sha256:
                digest.update(block)
    return crc, digest.hexdigest() if sha256 else ""


def _check_located(task: _Task, reader: readers.Reader, path: Path, wrong: Any) -> None:
    """Compare the samples that the format locates in the file with the index."""
    if reader.dataset.edited or reader.dataset.separate:
        _check_rows(task, reader, path, wrong)
        return
    count = 0
    try:
        for count, sample in enumerate(located_samples(format_named(task.format), path, task.options), start=1):
            index = task.first + count - 1
            if count > task.shard.samples:
                continue
            try:
                problem = sample_difference(reader, index, sample, task.shard.path)
            except DatasetError as error:
                problem = str(error)
            if problem:
                wrong(problem, index)
    except FormatError as error:
        wrong(f"{task.format} structure: {error}")
        return
    if count != task.shard.samples:
        wrong(f"holds {plural(count, 'sample')}, dataset.json says {task.shard.samples}")


def _check_rows(task: _Task, reader: readers.Reader, path: Path, wrong: Any) -> None:
    """Like `_check_located`, for an index that was edited: other samples, labels or keys, or fields in other shards."""
    rows = LocatedRows(reader, task.first, task.first + task.shard.samples, task.number)
    count, all_listed = 0, bool(task.shard.samples) and "samples" not in reader.dataset.edited
    try:
        for sample in located_samples(format_named(task.format), path, task.options):
            count += 1
            for index, problem in rows.differences(sample):
                wrong(problem, index)
    except FormatError as error:
        wrong(f"{task.format} structure: {error}")
        return
    for index, problem in rows.missing():
        wrong(problem, index)
    if all_listed and count != task.shard.samples:
        wrong(f"holds {plural(count, 'sample')}, dataset.json says {task.shard.samples}")


def _key_of(reader: readers.Reader, index: int) -> str | None:
    try:
        return reader.keys[index]
    except DatasetError:
        return None


def _check_samples(task: _Task, reader: readers.Reader, wrong: Any, counter: Counter) -> None:
    """Check the checksum of every field of every sample, the header of its image and, if deep, its pixels."""
    info = reader.info
    for done, index in enumerate(range(task.first, task.first + task.shard.samples), start=1):
        for name in reader.fields:
            try:
                payload = reader.read(index, name) if reader.has(index, name) else None
            except PackerError as error:
                wrong(str(error), index)
                continue
            problem = _payload_fault(reader, index, name, payload, task.decode if task.deep else "none")
            if not problem and name == "image":
                problem = header_difference(info, index, payload)
            if problem:
                wrong(problem, index)
            counter.report(0, len(payload or b""))
        if done % _REPORT_SAMPLES == 0:
            counter.report(_REPORT_SAMPLES, 0)
            if counter.stopped():
                return


def _payload_fault(reader: readers.Reader, index: int, name: str, payload: Buffer | None, decode: str) -> str:
    """What is wrong with the bytes of a field; "" if nothing. decode: the form to decode images to, or "none"."""
    if payload is None:
        return ""
    kind = reader.kinds[name]
    crc = crc32c(stored_bytes(payload) if kind == PIXELS else payload)
    expected = int(reader.table.field_column(name, "crc32c")[index])
    if crc != expected:
        return f"field {name} is damaged: CRC32C {crc:08x}, expected {expected:08x}"
    try:
        if name == "image" and sniff(payload):
            decode_fully(payload, decode)
        elif kind not in ("image", "file", "json", PIXELS) and decode != "none":
            check_field(kind, payload, deep=True)
    except BadSampleError as error:
        return f"the image {error}" if name == "image" else f"field {name}: {error}"
    return ""


def _verify_remote(address: str, deep: bool, workers: int, watcher: Watcher) -> VerifyResult:
    """Check shards and index of a set at an address, `workers` files at a time; each is fetched once, none is stored.

    A shard with the size and CRC32C of dataset.json is the shard that was packed, so samples are not checked one by
    one. Checks of its content (the format's structure, the pixels, the original source) need local files.
    """
    remote = Remote(address)
    if deep:
        raise RemoteError(
            f"{remote.url}: deep=True, sums=True and against=SOURCE need local files; run  packer stage "
            f"{quoted(remote.url)} --target DIR  and verify the copy"
        )
    home = RemoteHome(remote)
    problems = Problems()
    sound = []
    for name, split in home.info.splits.items():
        try:
            folder = home.fetch_index(name)
            check_index(home.path, home.info, name, problems, f"remove {folder}, and it is fetched again")
            sound.append(name)
        except DatasetError as error:
            problems.add(Problem(name, split.index, str(error)))
    text = remote.whole(DATASET_FILE, MAX_JSON_BYTES)[0]
    for file, problem in differences(partial(_read_object, remote), text, home.info, remote.url):
        problems.add(Problem("all", file, problem))
    shards = [(name, shard) for name, split in home.info.splits.items() for shard in split.shards]
    files = [(name, _File(shard.path, shard.bytes, shard.crc32c)) for name, shard in shards]
    for name in sound:
        split = home.info.splits[name]
        files += [(name, _File(f"{split.index}/{file}", c.bytes, c.crc32c)) for file, c in split.columns.items()]
    total = sum(file.bytes for _, file in files)
    checks = _RemoteCheck(RemoteSource(remote, home.path, frozenset()), problems)
    watcher.begin(0, total, lambda: (0, checks.done_bytes))
    try:
        work_off(files, checks.check, workers, checks.stop, lambda: None)
    finally:
        watcher.end()
    return VerifyResult(
        path=str(remote.url),
        shards=len(shards),
        samples=sum(split.samples for split in home.info.splits.values()),
        shard_bytes=sum(shard.bytes for _, shard in shards),
        deep=False,
        against=None,
        problems=tuple(problems.problems),
        problem_count=problems.count,
    )


def _read_object(remote: Remote, name: str) -> bytes | None:
    try:
        return remote.whole(name, MAX_JSON_BYTES)[0]
    except MissingError:
        return None


class _File(NamedTuple):
    """A shard, or a file of an index."""

    path: str
    bytes: int
    crc32c: int


class _RemoteCheck:
    """The threads of one remote check, and the state that they share."""

    def __init__(self, source: RemoteSource, problems: Problems) -> None:
        self._source, self._found = source, problems
        self._lock = threading.Lock()
        self.stop = threading.Event()
        self.done_bytes = 0

    def check(self, item: tuple[str, _File]) -> None:
        """Fetch one file and compare its checksum. Raises RemoteError if the transfer failed, not the file."""
        split, file = item
        crc = 0
        try:
            for chunk in self._source.chunks(StagedFile(file.path, file.bytes), lambda: None):
                if self.stop.is_set():
                    return
                crc = crc32c(chunk, crc)
                with self._lock:
                    self.done_bytes += len(chunk)
        except StagingSourceError as error:
            if error.__cause__ is not None and not isinstance(error.__cause__, _OF_THE_SHARD):
                raise RemoteError(str(error)) from error
            self._wrong(split, file, str(error))
            return
        if crc != file.crc32c:
            self._wrong(split, file, f"the CRC32C of the whole file is {crc:08x}, dataset.json says {file.crc32c:08x}")

    def _wrong(self, split: str, file: _File, problem: str) -> None:
        with self._lock:
            self._found.add(Problem(split, file.path, problem))
