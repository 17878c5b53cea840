"""The errors that readers and packer raise, under the name that users import; the tree is in `cache.errors`."""

from __future__ import annotations

from cache.errors import (
    BadNameError,
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
    SourceError,
    StagingError,
    StaleIndexError,
    TrainerError,
    UnknownNameError,
    WorkerError,
)

__all__ = [
    "BadNameError",
    "BadSampleError",
    "DamagedSampleError",
    "DatasetError",
    "FormatError",
    "MissingExtraError",
    "NotFlatError",
    "OutputError",
    "PackerError",
    "PipelineError",
    "RemoteError",
    "ResumeError",
    "SourceError",
    "StagingError",
    "StaleIndexError",
    "TrainerError",
    "UnknownNameError",
    "WorkerError",
]
