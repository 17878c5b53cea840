"""Staging: a packed set, or part of it, copied to this node's own disk once, for all processes of the node.

    with readers.stage("/lustre/sets/imagenet-hdf5", "$SLURM_TMPDIR") as local:
        reader = readers.open(local, split="train")

Every process of the node calls it. One copies, the others wait; see `cache.staging`. The copy is in
`TARGET/packer-staged-<uid>/<name>-<fingerprint>/` and stays there unless cleanup="atexit"; a later job on the node, or
the same one after a requeue, finds it. While the context is open the copy is locked against removal.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
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
from readers.originals import TREE, Originals
from readers.packed import open_packed
from readers.reader import Reader
from readers.staged_files import Portion, SetFiles, set_files

__all__ = ["FORMS", "StageOptions", "Staged", "stage"]

FORMS = ("shards", "files")


@dataclass(frozen=True)
class StageOptions:
    """How a set is staged.

    splits: only these; default: all.
    form: "shards", or "files": the original files of whole splits, for programs that read a folder of images.
    part: (i, n), or "node": this node's share of the samples, as `readers.order.NodeLocal` assigns them.
    overlap: with part, whether a shard in which two parts meet is staged on both nodes; False: on the first, for nodes
        that share what they hold (`readers.share`).
    fraction: of the bytes, above 0 and up to 1.
    background: return when the index is copied, and copy the shards in a thread.
    order: with background, copy the shards of its split (the one with the shards it was made for) in the order in which
        its epoch reads them, two at a time unless `threads` is given.
    resume: the token with which training resumes in that order: shards that it still reads are copied first.
    verify: also read files that are there already and compare checksums (sizes always are).
    cleanup: "atexit" removes the copy when the last process that uses it leaves, "never" keeps it.
    quota_bytes: remove least recently used copies that are not in use until all copies fit.
    threads: files copied at a time.
    bytes_per_second: a limit for this node.
    any_filesystem: stage even to a filesystem that other nodes share.
    """

    splits: tuple[str, ...] | None = None
    form: str = "shards"
    part: tuple[int, int] | str | None = None
    overlap: bool = True
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
            raise ValueError("an order is for staging in the background: otherwise training starts when all is copied")
        if self.resume is not None and self.order is None:
            raise ValueError("resume is a token of an order, and means nothing without the order")
        if self.form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, not {self.form!r}")
        if self.form == "files" and (self.part is not None or self.fraction != 1 or self.background):
            raise ValueError("form='files' stages whole splits: leave part, fraction and background out")
        if not self.overlap and self.part is None:
            raise ValueError(
                "whether shards overlap is about the parts of nodes: give a part as well, such as part='node'"
            )
        self.portion()

    def turns(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """(first samples of the shards of the order's split, shards in the order to copy); None without an order.

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
        """The portion to stage, with "node" resolved by the launcher's variables."""
        part, splits = self.part, self.splits
        if part == "node":
            ranks = detect_ranks()
            part = (ranks.node, ranks.nodes)
        elif isinstance(part, str):
            raise ValueError(f"part must be (i, n) or 'node', not {part!r}")
        return Portion((splits,) if isinstance(splits, str) else splits, part, self.fraction, self.overlap)

    def copying_threads(self) -> int:
        """With an order few: the first shards should be complete soon, rather than all of them in part."""
        return self.threads or (2 if self.order is not None else min(8, max(2, usable_cpus())))


class Staged:
    """A context manager that stages on entering and returns the local directory. It may be entered again."""

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
        """The local directory. Raises StagingError before the context is entered."""
        path = self._entered().path
        return path if self.options.form == "shards" else path / TREE

    @property
    def counts(self) -> node.CopyCounts:
        """Bytes and files that this process copied, files that were there, files that were damaged."""
        return self._entered().counts

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all files are copied; False after `seconds`. Raises StagingError if staging failed."""
        return self._entered().wait(seconds)

    @property
    def begun(self) -> bool:
        """Whether there is a session that `stop` can stop."""
        return self._session is not None

    def stop(self) -> None:
        """Stop copying, from any thread: entering then raises StagingError if files are still missing."""
        if self._session is not None:
            self._session.stop()

    def close(self) -> None:
        """Release the copy; stops copying."""
        if self._session is not None:
            self._session.close()

    def __enter__(self) -> Path:
        self.close()
        self._session = None
        try:
            files = self._files()
            if self.options.form == "shards":
                return self._open(self._request(files))
            with closing(Originals(files, files.splits(self.options.portion()), self._open_split)) as originals:
                return self._open(self._requested(originals.manifest, originals.manifest.files)) / TREE
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

    def _open(self, request: node.Request) -> Path:
        self._session = node.Session(request, self.watcher)
        return self._session.open()

    def _open_split(self, name: str) -> Reader:
        if isinstance(self.dataset, str) and "://" in self.dataset:
            from readers.remote import open_remote

            return open_remote(self.dataset, name)
        return open_packed(self.dataset, name)

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
        return self._requested(files.manifest, first, shards if options.background else ())

    def _requested(
        self, manifest: node.Manifest, files: Sequence[node.StagedFile], later: Sequence[node.StagedFile] = ()
    ) -> node.Request:
        options = self.options
        return node.Request(
            manifest,
            files,
            later=later,
            target=self.target,
            quota_bytes=options.quota_bytes,
            any_filesystem=options.any_filesystem,
            cleanup=options.cleanup,
            threads=options.copying_threads(),
            bytes_per_second=options.bytes_per_second,
            verify=options.verify,
        )


def stage(
    dataset: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    watcher: Watcher | None = None,
    **options: Any,
) -> Staged:
    """Stage a packed set to this node; a context manager that returns the local directory.

    dataset: a directory, or an address: s3://, gs://, az://, https://.
    target: a directory of this node, which may name environment variables. None takes the first writable, local and
        large enough one of those that the batch system names ($SLURM_TMPDIR, …), $TMPDIR, /mnt/bb/$USER, /local,
        /scratch/local and /dev/shm.
    watcher: is shown the progress.
    options: those of `StageOptions`.

    Raises ValueError and RemoteError, and on entering DatasetError, UnknownNameError, ResumeError or StagingError.
    """
    return Staged(dataset, target, StageOptions(**options), watcher)
