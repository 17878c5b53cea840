"""Caches in shared memory and staged copies on this node: list, fill, remove.

Only directories with packer's marker count as staged copies; see `cache.staging`. `readers.stage` makes copies.
"""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import cache
import readers
from cache.errors import OutputError, StagingError, UnknownNameError, UnsupportedCpuError
from cache.messages import Silent, Watcher, listed
from cache.remote import is_remote
from cache.staging.copies import Copy, Store, find_store, remove_copies, sweep
from cache.staging.session import candidates
from packer.output import Result, set_title
from readers.staging import AS_FILES, TREE

DIRECTORY = "/dev/shm"


@dataclass(frozen=True, slots=True)
class CacheReport(Result):
    """One cache.

    set: fingerprint of the data set and, after a slash, its split.
    title: its directory or address and split, as its first user named it.
    kept: the form in which samples are cached.
    job: "0" outside a batch system.
    filled: share of the capacity in use.
    hit_rate: hits per read.
    users: process id and command of each living user.
    """

    name: str
    set: str
    title: str
    kept: str
    job: str
    capacity_bytes: int
    used_bytes: int
    filled: float
    hits: int
    misses: int
    passed: int
    dropped: int
    hit_bytes: int
    puts: int
    put_bytes: int
    hit_rate: float
    users: tuple[tuple[int, str], ...]
    in_use: bool
    persist: bool
    age_s: float


@dataclass(frozen=True, slots=True)
class WarmResult(Result):
    """The result of filling a cache. samples: of the split; kept: those that fit; present: those in the cache now."""

    path: Path | str
    split: str
    kept_as: str
    samples: int
    kept: int
    present: int
    capacity_bytes: int
    used_bytes: int
    seconds: float


def list_caches(directory: str | os.PathLike[str] = DIRECTORY, names: tuple[str, ...] = ()) -> list[CacheReport]:
    """The caches of this user in a directory. names: only those whose name, set, title or form contains one of these.

    Raises OSError if the directory does not exist, UnknownNameError for a name without a match.
    """
    reports = [_report(info) for info in cache.list_caches(Path(directory))]
    for name in names:
        if not any(_matches(report, name) for report in reports):
            raise UnknownNameError(
                f"{directory}: no cache {name!r}; it has {listed([report.name for report in reports], 20) or 'none'}"
            )
    return [report for report in reports if not names or any(_matches(report, name) for name in names)]


def clean_caches(
    directory: str | os.PathLike[str] = DIRECTORY,
    names: tuple[str, ...] = (),
    *,
    everything: bool = False,
    dry_run: bool = False,
) -> list[CacheReport]:
    """Remove unused caches that do not persist. Returns the removed ones.

    names: only caches of these sets, or whose name or form contains one of these; see `list_caches`.
    everything: also persistent caches.
    dry_run: remove nothing.

    Raises UnknownNameError for a name without a match.
    """
    chosen = list_caches(directory, names)
    if dry_run:
        return [report for report in chosen if not report.in_use and (everything or not report.persist)]
    of_names = [report.name for report in chosen] if names else None
    return [_report(info) for info in cache.clean_caches(Path(directory), all=everything, names=of_names)]


def warm_cache(
    path: str | os.PathLike[str],
    split: str | None = None,
    *,
    capacity: readers.Capacity = "auto",
    keep: str = "encoded",
    threads: int | None = None,
    directory: str | os.PathLike[str] = DIRECTORY,
    job: str | None = None,
    watcher: Watcher | None = None,
) -> WarmResult:
    """Fill a persistent cache, for readers that open the set with the same keep and persist=True.

    Raises DatasetError and UnknownNameError for the set, ValueError for capacity and keep, OutputError without room,
    and for coefficients UnsupportedCpuError.
    """
    if keep == "coefficients":
        from readers.coefficients import unsupported_reason  # imports crc32c

        if reason := unsupported_reason():  # a warning in training, an error here
            raise UnsupportedCpuError(f"this machine cannot decode DCT coefficients: {reason}; --keep encoded works")
    watcher, title = watcher or Silent(), set_title(path)
    started = time.monotonic()
    with readers.open(path, split) as base:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", UserWarning)
            reader = readers.cached(base, capacity, keep, persist=True, directory=directory, job=job)
        with reader:
            before = reader.stats()
            reasons = "; ".join(str(warning.message) for warning in warned)
            if not before.capacity_bytes:  # a warning in training, an error here
                raise OutputError(
                    f"{directory}: no cache of {title} was made{': ' if reasons else ''}{reasons}; give another "
                    f"capacity=SIZE, or see  packer cache ls"
                )
            if reasons:
                watcher.note(reasons)
            done = [0, 0]

            def progress(samples: int, size: int) -> None:
                done[:] = samples, size

            watcher.begin(before.kept, 0, lambda: (done[0], done[1]))
            try:
                reader.prefill(threads, progress=progress)
            finally:
                watcher.end()
            after = reader.stats()
            same = ("samples", "kept", "present", "capacity_bytes", "used_bytes")
            seconds = time.monotonic() - started
            counts = {name: getattr(after, name) for name in same}
            return WarmResult(path=title, split=base.split, kept_as=after.kind, seconds=seconds, **counts)


def _report(info: cache.CacheInfo) -> CacheReport:
    counts = asdict(info.stats)
    del counts["users"]
    same = ("name", "title", "job", "capacity_bytes", "used_bytes", "in_use", "persist", "age_s")
    return CacheReport(
        set=info.fingerprint,
        kept=info.kind,
        filled=info.used_bytes / max(1, info.capacity_bytes),
        hit_rate=info.stats.hits / max(1, info.stats.hits + info.stats.misses + info.stats.passed),
        users=tuple((pid, _command(pid)) for pid in info.users),
        **{name: getattr(info, name) for name in same},
        **counts,
    )


def _matches(report: CacheReport, name: str) -> bool:
    if os.path.isdir(name):
        name = f"{os.path.abspath(name)} ("  # the form of titles, in which the split follows
    return any(name in text for text in (report.name, report.set, report.title, report.kept))


def _command(pid: int) -> str:
    """The name of a process, "" if it is not visible."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class StagedCopy(Result):
    """One copy. bytes: on the disk now, of wanted_bytes. last_use: seconds since the epoch.

    leaving: its removal is in progress or was interrupted; `clean_staged` and the next staging finish it.
    """

    path: str
    source: str
    bytes: int
    wanted_bytes: int
    last_use: float
    in_use: bool
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class CleanResult(Result):
    """Removed copies, and copies that were kept because they are in use."""

    removed: tuple[StagedCopy, ...]
    kept: tuple[StagedCopy, ...]
    foreign: tuple[str, ...]  # files in removed copies that packer did not write; they are kept


def staged_copies(target: str | os.PathLike[str] | None = None) -> list[StagedCopy]:
    """The copies in a target directory (None: in all candidates of staging), least recently used first."""
    stores = _stores(target)
    leaving = [_described(copy, leaving=True) for store in stores for copy in store.leaving()]
    return leaving + [_described(copy) for store in stores for copy in store.copies()]


def clean_staged(
    dataset: str | os.PathLike[str] | None = None,
    target: str | os.PathLike[str] | None = None,
    *,
    dry_run: bool = False,
) -> CleanResult:
    """Remove unused copies of a set (None: all copies), and the remains of interrupted removals.

    Raises StagingError.
    """
    source = None if dataset is None else _source_text(dataset)

    def is_chosen(copy: Copy) -> bool:
        places = (copy.path, copy.path / TREE)
        return source is None or source in (copy.source.removesuffix(AS_FILES), *map(os.path.realpath, places))

    removed, kept, foreign = list[StagedCopy](), list[StagedCopy](), list[str]()
    for store in _stores(target):
        with store.lock():
            described = {copy.path: _described(copy) for copy in store.copies()}
            described |= {copy.path: _described(copy, leaving=True) for copy in store.leaving()}
            for gone in [*sweep(store, dry_run), *remove_copies(store, is_chosen, dry_run)]:
                if gone.bytes or not gone.foreign:  # else only foreign files are left in it
                    (kept if gone.kept else removed).append(described[gone.path])
                foreign += map(str, gone.foreign)
    return CleanResult(tuple(removed), tuple(kept), tuple(foreign))


def _source_text(dataset: str | os.PathLike[str]) -> str:
    """The name of a set in the records of copies."""
    return str(set_title(dataset)) if is_remote(dataset) else os.path.realpath(dataset)


def _stores(target: str | os.PathLike[str] | None) -> list[Store]:
    """The stores in the candidates; a foreign directory is an error only if the user named it."""
    stores: dict[Path, Store] = {}
    for candidate in candidates(target):
        try:
            store = find_store(candidate.path)
        except (StagingError, OSError):
            if target is not None:
                raise
            continue
        if store is not None:
            stores.setdefault(store.path.resolve(), store)
    return list(stores.values())


def _described(copy: Copy, leaving: bool = False) -> StagedCopy:
    size, planned = copy.stored_bytes(), copy.planned_bytes
    return StagedCopy(str(copy.path), copy.source, size, planned, copy.last_use(), copy.in_use(), leaving)
