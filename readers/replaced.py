"""A set that is replaced while a reader has it open, or opens it: told from a set that is damaged.

Replacing takes dataset.json away first and writes it last. So what does not fit together is no damage where
dataset.json has gone or is another one than the reader has read, and rebuilding an index then would do harm.
"""

from __future__ import annotations

import errno
from pathlib import Path

from readers.errors import DatasetError, StaleIndexError, UnknownNameError
from readers.layout import DATASET_FILE, DatasetInfo, read_dataset_info

__all__ = ["as_replaced", "failed_read"]


def failed_read(path: Path, error: OSError) -> StaleIndexError:
    """What to raise for a system call on a shard that failed."""
    if error.errno == errno.ESTALE:
        return StaleIndexError(
            f"{path}: was replaced or removed on the file server while it was open (ESTALE): the set has changed; open "
            f"it again when whatever replaces it is done"
        )
    return StaleIndexError(f"{path}: cannot be read: {error.strerror}")


def as_replaced(directory: Path, opened: DatasetInfo, error: Exception) -> Exception:
    """`error`, or what to raise in its place where the set in `directory` is not the one that was opened any more."""
    stale = _errno(error) == errno.ESTALE
    if isinstance(error, UnknownNameError) or (stale and isinstance(error, StaleIndexError)):
        return error
    if stale:
        return StaleIndexError(
            f"{directory}: files of the set were replaced on the file server while it was opened (ESTALE); open it "
            f"again when whatever replaces it is done"
        )
    try:
        if read_dataset_info(directory) == opened:
            return error
        state = "has been replaced by another"
    except DatasetError:
        if (directory / DATASET_FILE).exists():
            return error
        state = f"is being replaced or was removed (its {DATASET_FILE} has gone)"
    return StaleIndexError(
        f"{directory}: the set {state} since it was opened; open it again when that is done ({error})"
    )


def _errno(error: BaseException | None) -> int | None:
    """Of the system call that an error came from."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        error = error.__cause__
    return None
