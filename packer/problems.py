"""What verification finds wrong: a list that stays small however much is wrong, and the result."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["MAX_PROBLEMS", "Problem", "Problems", "VerifyResult"]

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
