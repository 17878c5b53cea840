"""The package for training code: open a packed set, or a plain folder, and read samples from it.

    import readers
    with readers.open("imagenette2-hdf5", split="train") as reader:
        sample = reader[0]                      # Sample(key, label, fields)
        jpeg = reader.read(0)                   # bytes
        batch = reader.read_many([5, 3, 900])   # sorted and coalesced reads, results in this order

Importing it imports none of click, h5py and torch.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cache

if Path(cache.__file__ or "").resolve().parent.parent != Path(__file__).resolve().parent.parent:
    raise ImportError(
        f"readers needs its own package `cache`, but {cache.__file__} hides it; rename that file or folder, or run "
        f"from another directory"
    )

from cache.errors import (
    BadSampleError,
    DamagedSampleError,
    DatasetError,
    FormatError,
    MissingExtraError,
    NotFlatError,
    OutputError,
    PackerError,
    PipelineError,
    RemoteError,
    ResumeError,
    ServingError,
    SourceError,
    StagingError,
    StaleIndexError,
    UnknownNameError,
    WorkerError,
)
from readers import moved as moved
from readers.opening.packed import Backend, open_copied, open_packed
from readers.reader import Reader
from readers.table import NO_LABEL, Buffer, ImageInfo, Sample, Table

if TYPE_CHECKING:
    from readers import order as order
    from readers.caching import CachedReader, CachedStats, Capacity, Coefficients, Decoded, Recoded, cached
    from readers.opening.packed import concat
    from readers.opening.tree import open_folder
    from readers.options import Decode, FieldOptions, Ranks, Threads, Views
    from readers.replaying import replay
    from readers.staging import Shared, ShareOptions, Staged, StageOptions, share, stage

__all__ = [
    "NO_LABEL",
    "BadSampleError",
    "Buffer",
    "CachedReader",
    "CachedStats",
    "Capacity",
    "Coefficients",
    "DamagedSampleError",
    "DatasetError",
    "Decode",
    "Decoded",
    "FieldOptions",
    "FormatError",
    "ImageInfo",
    "MissingExtraError",
    "NotFlatError",
    "OutputError",
    "PackerError",
    "PipelineError",
    "Ranks",
    "Reader",
    "Recoded",
    "RemoteError",
    "ResumeError",
    "Sample",
    "ServingError",
    "ShareOptions",
    "Shared",
    "SourceError",
    "StageOptions",
    "Staged",
    "StagingError",
    "StaleIndexError",
    "Table",
    "Threads",
    "UnknownNameError",
    "Views",
    "WorkerError",
    "cached",
    "concat",
    "open",
    "open_folder",
    "replay",
    "share",
    "stage",
]

# Imported on first use (PEP 562): every worker imports `readers`, and reading a local set needs none of these. Type
# checkers see the imports above. `order` is a subpackage; `readers.order` works after `import readers` alone.
_LAZY = {
    "Views": "readers.options",
    "Threads": "readers.options",
    "Ranks": "readers.options",
    "FieldOptions": "readers.options",
    "Decode": "readers.options",
    "CachedReader": "readers.caching",
    "CachedStats": "readers.caching",
    "Capacity": "readers.caching",
    "Coefficients": "readers.caching",
    "Decoded": "readers.caching",
    "Recoded": "readers.caching",
    "ShareOptions": "readers.staging",
    "Shared": "readers.staging",
    "StageOptions": "readers.staging",
    "Staged": "readers.staging",
    "cached": "readers.caching",
    "concat": "readers.opening.packed",
    "open_folder": "readers.opening.tree",
    "replay": "readers.replaying",
    "order": "readers.order",
    "share": "readers.staging",
    "stage": "readers.staging",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        moved = f"; it is packer.{name}" if name in ("diagnose", "monitor", "simulate") else ""
        raise AttributeError(f"module 'readers' has no attribute {name!r}{moved}")
    module = importlib.import_module(_LAZY[name])
    if name not in globals():
        globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def open(
    path: str | os.PathLike[str],
    split: str | None = None,
    *,
    backend: Backend = "pread",
    verify: bool = False,
    fallback: str | os.PathLike[str] | None = None,
    patience_seconds: float = 0.0,
) -> Reader:
    """Open one split of a packed set.

    path: the directory with dataset.json, or its address: s3://, gs://, az://, https://; see `readers.opening.remote`.
    split: None takes the only split, or "train".
    backend: "pread" copies bytes out; "mmap" returns views of the page cache.
    verify: check the CRC32C of all bytes read; bytes from an address are always checked.
    fallback: path or address of the set that `path` is a copy of; shards missing from the copy are read from it.
    patience_seconds: how long to wait for a shard that is being staged before reading it from the fallback.

    Raises DatasetError, UnknownNameError, StaleIndexError, ValueError; for addresses RemoteError and MissingExtraError.
    """
    address, local = (path, None) if _is_address(path) else (fallback, path)
    if isinstance(address, str) and _is_address(address):
        if backend != "pread":
            raise ValueError(
                f"backend {backend!r} is for local sets; leave it out for {address.partition('://')[0]}://"
            )
        from readers.opening.remote import open_remote

        if local is None and fallback is not None:
            raise ValueError("fallback is for local copies, but the path is an address; leave fallback out")
        return open_remote(address, split, local=local, patience_seconds=patience_seconds)
    if fallback is not None:
        return open_copied(
            path, split, fallback=fallback, backend=backend, verify=verify, patience_seconds=patience_seconds
        )
    if patience_seconds:
        raise ValueError("patience_seconds needs a fallback: only a copy with a fallback waits for staging")
    return open_packed(path, split, backend=backend, verify=verify)


def _is_address(path: object) -> bool:
    return isinstance(path, str) and "://" in path
