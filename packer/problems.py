"""What verification finds wrong, and a list of it that stays small however much is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["MAX_PROBLEMS", "Problem", "Problems"]

MAX_PROBLEMS = 10_000


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: where (a shard, and a sample's index and key where it is one), and what."""

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
    """A list of problems: capped, while the count is not."""

    problems: list[Problem] = field(default_factory=list)
    count: int = 0

    def add(self, problem: Problem) -> None:
        self.count += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)
