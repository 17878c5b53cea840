"""What a conversion returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from packer.output import Result

__all__ = ["ConvertResult"]


@dataclass(frozen=True, slots=True)
class ConvertResult(Result):
    """What a conversion did. Times are seconds, sizes bytes; splits maps names to samples.

    left_out counts files by what was done with them, left_out_reasons by why.
    undecided: of a dry run, the part of `where` that is known only of samples that have been read.
    """

    output: Path | str
    format: str
    splits: dict[str, int]
    classes: int
    shards: int
    samples: int
    payload_bytes: int
    shard_bytes: int
    seconds: float
    shards_resumed: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    left_out_reasons: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    dry_run: bool = False
    already_done: bool = False
    uploaded_bytes: int = 0
    undecided: str = ""
