"""`packer.verify`: is every byte of a set what it was when it was packed, and is the index true?

For each file of an index: its size and CRC32C. For each shard: its size; that its format finds exactly the samples,
keys, labels, file names and byte ranges of the index; the CRC32C of every sample; and that the header of its image
equals that of the index. SHA256SUMS and classes.txt, where they are there: that they say what dataset.json does.
deep=True adds CRC32C and SHA-256 of the whole file, the format's own checksums of the payload and a full decode of
every image. against=SOURCE compares with the original source, sample by sample.
"""

from __future__ import annotations

import threading
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from crc32c import crc32c

import readers
from cache.checksums import file_sha256
from cache.errors import (
    BadSampleError,
    ChangedError,
    DatasetError,
    FormatError,
    MissingError,
    PackerError,
    RemoteError,
    StagingSourceError,
    StaleIndexError,
    TruncatedError,
)
from cache.files import read_regular
from cache.messages import Counter, Silent, Watcher, human_bytes, plural, quoted
from cache.remote import Remote, is_remote
from cache.staging import StagedFile, work_off
from cache.staging.remote import RemoteSource
from packer.comparison import (
    MAX_PROBLEMS,
    LocatedRows,
    Problem,
    Problems,
    check_index,
    compare,
    header_difference,
    sample_difference,
)
from packer.conversion.images import decode_fully
from packer.documents import differences, read_document
from packer.formats import format_named
from packer.formats.base import LocateOptions, Window, locate_options
from packer.sources import Source, open_source
from packer.sources.shards import located_samples
from packer.workers import Workers, run_shards
from readers.fields import check_field
from readers.headers import sniff
from readers.layout import DATASET_FILE, MAX_JSON_BYTES, ShardInfo, read_dataset_info
from readers.packed import open_packed
from readers.pixels import PIXELS, stored_bytes
from readers.remote import RemoteHome
from readers.sample import Buffer

__all__ = ["Problem", "VerifyResult", "verify"]

_REPORT_SAMPLES = 256
_FILES_AT_ONCE = 4
_OF_THE_SHARD = (ChangedError, MissingError, TruncatedError)


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What was checked and what is wrong. problems holds the first 10,000; problem_count counts all."""

    path: Path | str
    shards: int
    samples: int
    shard_bytes: int
    deep: bool
    against: str | None
    problems: tuple[Problem, ...]
    problem_count: int
    left_out: int = 0

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
    first: int  # sample of the split
    format: str
    options: LocateOptions
    deep: bool
    decode: str

    @property
    def title(self) -> str:
        """Its name in the log."""
        return f"{self.shard.path} ({plural(self.shard.samples, 'sample')}, {human_bytes(self.shard.bytes)})"


def verify(
    path: str | Path,
    *,
    deep: bool = False,
    against: str | Path | Source | None = None,
    workers: int | None = None,
    engine: Executor | None = None,
    watcher: Watcher | None = None,
) -> VerifyResult:
    """Check a packed set, whose damage is reported in the result. Raises DatasetError where there is none.

    deep, against: see the module.
    workers: processes; default the CPUs this process may use.
    engine: where shards are checked, if not in processes of this machine; see `packer.open_engine`.

    Of a set at an address the checksum of every shard is compared, and the index. Raises RemoteError.
    """
    watcher, crew = watcher or Silent(), Workers(workers, engine)
    if is_remote(path):
        return _verify_remote(str(path), deep or against is not None, workers or _FILES_AT_ONCE, watcher)
    root = Path(path)
    info = read_dataset_info(root)
    options = replace(locate_options(info), check_payload=deep)
    found, sound = Problems(), True
    tasks: list[_Task] = []
    made = info.made.get("options")
    decode = str(made.get("decode", "RGB")) if isinstance(made, dict) else "RGB"
    for name, split in info.splits.items():
        first = 0
        for number, shard in enumerate(split.shards):
            tasks.append(_Task(root, name, number, shard, first, info.format, options, deep, decode))
            first += shard.samples
        sound &= check_index(root, info, name, found)
    text = read_regular(root / DATASET_FILE, MAX_JSON_BYTES)
    for file, what in differences(partial(read_document, root), text, info, root):
        found.add(Problem("all", file, what))
    if not any(split.samples for split in info.splits.values()):
        found.add(Problem("all", DATASET_FILE, "the set has no samples: there is nothing to read or train on"))
    if sound:
        samples, size = sum(task.shard.samples for task in tasks), sum(task.shard.bytes for task in tasks)
        for part in run_shards(verify_shard, tasks, len(tasks), crew, watcher, (samples, size)):
            found.count += part.count
            found.problems += part.problems[: MAX_PROBLEMS - len(found.problems)]
    left_out = 0
    if against is not None:
        source = open_source(against, layout="tree") if isinstance(against, (str, Path)) else against
        left_out = compare(root, source, found, watcher)
        against = source.title
    return VerifyResult(
        path=root,
        shards=len(tasks),
        samples=sum(split.samples for split in info.splits.values()),
        shard_bytes=sum(task.shard.bytes for task in tasks),
        deep=deep,
        against=against,
        problems=tuple(found.problems),
        problem_count=found.count,
        left_out=left_out,
    )


def verify_shard(task: _Task, counter: Counter) -> Problems:
    """All problems of one shard."""
    found = Problems()

    reader = open_packed(task.root, task.split, recognise=False)

    def wrong(what: str, index: int | None = None) -> None:
        key = None if index is None else _key_of(reader, index)
        found.add(Problem(task.split, task.shard.path, what, index, key))

    try:
        reader.store.check(task.number)
    except StaleIndexError as error:
        wrong(str(error))
        return found
    path = task.root / task.shard.path
    if task.deep:
        with Window(path) as window:
            crc = window.checksum()
        if crc != task.shard.crc32c:
            wrong(f"the CRC32C of the whole file is {crc:08x}, dataset.json says {task.shard.crc32c:08x}")
        elif task.shard.sha256 and (digest := file_sha256(path)) != task.shard.sha256:
            wrong(f"the SHA-256 of the whole file is {digest}, dataset.json says {task.shard.sha256}")
    _check_located(task, reader, path, wrong)
    _check_samples(task, reader, wrong, counter)
    return found


def _check_located(task: _Task, reader: readers.Reader, path: Path, wrong: Any) -> None:
    """Compare what the format locates in the file with the index."""
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
                what = sample_difference(reader, index, sample, task.shard.path)
            except DatasetError as error:
                what = str(error)
            if what:
                wrong(what, index)
    except FormatError as error:
        wrong(f"{task.format} structure: {error}")
        return
    if count != task.shard.samples:
        wrong(f"holds {plural(count, 'sample')}, dataset.json says {task.shard.samples}")


def _check_rows(task: _Task, reader: readers.Reader, path: Path, wrong: Any) -> None:
    """The same where the index has other samples than the shards, other labels or keys, or fields in other shards."""
    rows = LocatedRows(reader, task.first, task.first + task.shard.samples, task.number)
    count, all_listed = 0, bool(task.shard.samples) and "samples" not in reader.dataset.edited
    try:
        for sample in located_samples(format_named(task.format), path, task.options):
            count += 1
            for index, what in rows.differences(sample):
                wrong(what, index)
    except FormatError as error:
        wrong(f"{task.format} structure: {error}")
        return
    for index, what in rows.missing():
        wrong(what, index)
    if all_listed and count != task.shard.samples:
        wrong(f"holds {plural(count, 'sample')}, dataset.json says {task.shard.samples}")


def _key_of(reader: readers.Reader, index: int) -> str | None:
    try:
        return reader.keys[index]
    except DatasetError:
        return None


def _check_samples(task: _Task, reader: readers.Reader, wrong: Any, counter: Counter) -> None:
    """Check the checksum of every field of every sample, the header of its image and, if deep, the pixels."""
    info = reader.info
    for done, index in enumerate(range(task.first, task.first + task.shard.samples), start=1):
        for name in reader.fields:
            try:
                payload = reader.read(index, name) if reader.has(index, name) else None
            except PackerError as error:
                wrong(str(error), index)
                continue
            what = _payload_fault(reader, index, name, payload, task.decode if task.deep else "none")
            if not what and name == "image":
                what = header_difference(info, index, payload)
            if what:
                wrong(what, index)
            counter.report(0, len(payload or b""))
        if done % _REPORT_SAMPLES == 0:
            counter.report(_REPORT_SAMPLES, 0)
            if counter.stopped():
                return


def _payload_fault(reader: readers.Reader, index: int, name: str, payload: Buffer | None, decode: str) -> str:
    """What is wrong with the bytes of a field; "" for nothing. decode: what to decode an image to; "none": do not."""
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

    A shard with the size and the CRC32C of dataset.json is the shard that was packed, so samples are not checked one
    by one. Checks of its content (the format's structure, the pixels, the original source) need the files here.
    """
    remote = Remote(address)
    if deep:
        raise RemoteError(
            f"{remote.url}: deep=True and against=SOURCE need the files here; run  packer stage {quoted(remote.url)} "
            f"--target DIR  and verify the copy"
        )
    home = RemoteHome(remote)
    found = Problems()
    sound = []
    for name, split in home.info.splits.items():
        try:
            here = home.fetch_index(name)
            check_index(home.path, home.info, name, found, f"remove {here}, and it is fetched again")
            sound.append(name)
        except DatasetError as error:
            found.add(Problem(name, split.index, str(error)))
    text = remote.whole(DATASET_FILE, MAX_JSON_BYTES)[0]
    for file, what in differences(partial(_read_object, remote), text, home.info, remote.url):
        found.add(Problem("all", file, what))
    shards = [(name, shard) for name, split in home.info.splits.items() for shard in split.shards]
    files = [(name, _File(shard.path, shard.bytes, shard.crc32c)) for name, shard in shards]
    for name in sound:
        split = home.info.splits[name]
        files += [(name, _File(f"{split.index}/{file}", c.bytes, c.crc32c)) for file, c in split.columns.items()]
    total = sum(file.bytes for _, file in files)
    checks = _RemoteCheck(RemoteSource(remote, home.path, frozenset()), found)
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
        problems=tuple(found.problems),
        problem_count=found.count,
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
    """The threads of one remote check, and what they share."""

    def __init__(self, source: RemoteSource, found: Problems) -> None:
        self._source, self._found = source, found
        self._lock = threading.Lock()
        self.stop = threading.Event()
        self.done_bytes = 0

    def check(self, item: tuple[str, _File]) -> None:
        """Fetch one file and compare its checksum. Raises RemoteError where the transport failed, not the file."""
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

    def _wrong(self, split: str, file: _File, what: str) -> None:
        with self._lock:
            self._found.add(Problem(split, file.path, what))
