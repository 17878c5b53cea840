"""A row of the table of tips."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from readers.diagnosis.evidence import Evidence

__all__ = ["WORKERS", "Suggestion", "Tip", "in_ms", "option"]

WORKERS = ("num_workers", "threads")


@dataclass(frozen=True)
class Suggestion:
    """What a row makes of evidence that triggers it. seconds: predicted of a step, None if that cannot be said."""

    why: str
    how: str
    seconds: float | None = None


@dataclass(frozen=True)
class Tip:
    """A row. check: what the evidence calls for, None if nothing. idle: also if the data keep up with the training."""

    id: str
    title: str
    check: Callable[[Evidence], Suggestion | None]
    idle: bool = False


def option(e: Evidence, value: int, names: tuple[str, str]) -> str:
    """An option with a new value. names: of a DataLoader, of an ImageLoader."""
    return f"{names[e.facts.loader == 'ImageLoader']}={value}"


def in_ms(seconds: float) -> str:
    """12.3 ms."""
    return f"{1e3 * seconds:.1f} ms"
