"""Staging: a packed set, or part of it, copied to this node's own disk once, for all processes of the node.

    with readers.stage("/lustre/sets/imagenet-hdf5", "$SLURM_TMPDIR") as local:
        reader = readers.open(local, split="train")

Every process of the node calls it. One copies, the others wait; see `cache.staging` for how. The copy lies in
`TARGET/packer-staged-<uid>/<name>-<fingerprint>/` and stays there unless cleanup="atexit"; a later job on the node, or
the same one after a requeue, finds it. While the context is open the copy is locked against removal.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from cache import staging as node
from cache.errors import StagingError
from cache.messages import Watcher
from cache.node import detect_ranks, usable_cpus
from readers.order import ResumeToken, StagedFirst
from readers.staged_files import Portion, SetFiles, set_files

__all__ = ["StageOptions", "Staged", "stage"]


@dataclass(frozen=True)
class StageOptions:
    """How a set is staged.

    splits: only these. part: (i, n), or "node": this node's share of the samples, as `readers.order.NodeLocal` deals
    them. fraction: of the bytes. background: return when the index is here, and bring the shards from a thread.
    order: with background, bring the shards of its split (that with the shards it was made for) in the order in which
    its epoch wants them, and two at a time unless `threads` says otherwise. resume: the token with which training goes
    on in that order, so that what it still wants comes first.
    verify: also read what is here already and compare checksums (sizes always are). cleanup: "atexit" removes the copy
    when the last process that uses it leaves, "never" keeps it. quota_bytes: remove least recently used copies that
    nobody holds until all copies fit. threads: files copied at a time. bytes_per_second: a cap for this node.
    any_filesystem: stage to a filesystem that other nodes share, too.
    """

    splits: tuple[str, ...] | None = None
    part: tuple[int, int] | str | None = None
    fraction: float = 1.0
    background: bool = False
    order: StagedFirst | None = None
    resume: Mapping[str, Any] | None = None
    verify: bool = False
    cleanup: str = "never"
    quota_bytes: int | None = None
    threads: int | None = None
    bytes_per_second: float | None = None
    any_filesystem: bool = False

    def __post_init__(self) -> None:
        if self.cleanup not in node.CLEANUPS:
            raise ValueError(f"cleanup must be one of {', '.join(node.CLEANUPS)}, not {self.cleanup!r}")
        for name in ("quota_bytes", "threads", "bytes_per_second"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, not {value}")
        if self.order is not None and not self.background:
            raise ValueError("an order is for staging in the background: training begins when all is here otherwise")
        if self.resume is not None and self.order is None:
            raise ValueError("a token to resume from says nothing without the order that it is of")
        self.portion()

    def turns(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """(first samples of the shards of the order's split, shards as they are wanted); None without an order.

        Raises ResumeError for a token of another order.
        """
        if self.order is None:
            return None
        if self.resume is None:
            return self.order.starts, self.order.shards()
        token = ResumeToken.from_dict(self.resume)
        order = token.resumed(self.order.with_seed(token.seed))
        return order.starts, order.shards(token.epoch, token.cursor)

    def portion(self) -> Portion:
        """What of the set is meant, with "node" replaced by what the launcher says."""
        part, splits = self.part, self.splits
        if part == "node":
            ranks = detect_ranks()
            part = (ranks.node, ranks.nodes)
        elif isinstance(part, str):
            raise ValueError(f"part must be (i, n) or 'node', not {part!r}")
        return Portion((splits,) if isinstance(splits, str) else splits, part, self.fraction)

    def how(self) -> node.How:
        # In an order the first shards should be here soon, not all of them a little.
        threads = self.threads or (2 if self.order is not None else min(8, max(2, usable_cpus())))
        return node.How(threads=threads, bytes_per_second=self.bytes_per_second, verify=self.verify)


class Staged:
    """A context manager; entering it stages and gives the local directory. It may be entered again."""

    def __init__(
        self,
        dataset: str | os.PathLike[str],
        target: str | os.PathLike[str] | None,
        options: StageOptions,
        watcher: Watcher | None,
    ) -> None:
        self.dataset, self.target, self.options, self.watcher = dataset, target, options, watcher
        self._session: node.Session | None = None

    @property
    def path(self) -> Path:
        """The local directory. Raises StagingError before it was entered."""
        return self._entered().path

    @property
    def counts(self) -> node.CopyCounts:
        """Bytes and files that this process copied, files it found, files it found damaged."""
        return self._entered().counts

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all is here; False where it is not by then. Raises StagingError if staging failed."""
        return self._entered().wait(seconds)

    @property
    def begun(self) -> bool:
        """Whether it has been entered so far that there is something to stop."""
        return self._session is not None

    def stop(self) -> None:
        """Ask to stop copying, from any thread: entering raises StagingError then, if files are still missing."""
        if self._session is not None:
            self._session.stop()

    def close(self) -> None:
        """Let go of the copy; stops what is still being copied."""
        if self._session is not None:
            self._session.close()

    def __enter__(self) -> Path:
        self.close()
        self._session = None
        try:
            self._session = node.Session(self._request(self._files()), self.options.how(), self.watcher)
            return self._session.open()
        except BaseException:
            self._session = None
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _entered(self) -> node.Session:
        if self._session is None:
            raise StagingError("nothing is staged: use  with readers.stage(…) as local")
        return self._session

    def _files(self) -> SetFiles:
        if isinstance(self.dataset, str) and "://" in self.dataset:
            from readers.remote import remote_set_files

            return remote_set_files(self.dataset)
        return set_files(self.dataset)

    def _request(self, files: SetFiles) -> node.Request:
        options, portion = self.options, self.options.portion()
        shards, index = files.shards(portion), files.index(portion)
        turns = options.turns()
        if turns is not None:
            shards = files.in_turn(shards, *turns)
        first = [*index, files.head] if options.background else [*shards, *index, files.head]
        return node.Request(
            files.manifest,
            first,
            later=shards if options.background else (),
            target=self.target,
            quota_bytes=options.quota_bytes,
            any_filesystem=options.any_filesystem,
            cleanup=options.cleanup,
        )


def stage(
    dataset: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    watcher: Watcher | None = None,
    **options: Any,
) -> Staged:
    """Stage a packed set to this node; a context manager that gives the local directory.

    dataset: a directory, or an address: s3://, gs://, az://, https://.
    target: a directory of this node, which may name environment variables. None looks at what the batch system names
        ($SLURM_TMPDIR, …), $TMPDIR, /mnt/bb/$USER, /local, /scratch/local and /dev/shm, and takes the first that is
        writable, local and large enough.
    watcher: sees the work go by.
    options: those of `StageOptions`.

    Raises ValueError and RemoteError, and on entering DatasetError, UnknownNameError, ResumeError or StagingError.
    """
    return Staged(dataset, target, StageOptions(**options), watcher)
