"""All that recommendations follow from: plain values, so that they are a function of these and of nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

from packer.advising.machine import Machine
from packer.advising.measure import Measured

__all__ = ["READERS", "SPARE", "Facts", "Job", "Recommendation", "as_path"]

READERS = ("packer", "dali", "rocal", "webdataset", "tensorflow", "h5py")
SPARE = 1.1  # times the rate that training wants: reading and copying batches take CPU time, too


@dataclass(frozen=True, slots=True)
class Job:
    """What will read the set. images_per_second: what all GPUs of a node want together, None if unknown.

    gpus: of a node. reader: one of READERS. max_error: the largest mean error that is acceptable, of 255.
    Raises ValueError.
    """

    images_per_second: float | None = None
    gpus: int = 1
    reader: str = "packer"
    max_error: float | None = None

    def __post_init__(self) -> None:
        if self.reader not in READERS:
            raise ValueError(f"reader must be one of {', '.join(READERS)}, not {self.reader!r}")
        for name in ("images_per_second", "gpus"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, not {value}")
        if self.max_error is not None and self.max_error < 0:
            raise ValueError(f"max_error must be 0 or more, not {self.max_error}")


@dataclass(frozen=True, slots=True)
class Facts:
    """What was measured, found and asked for.

    source: as the user named it. flags: the options with which `packer convert` opens it.
    packed: the format of a packed set, "" for another source.
    splits: images by split. damaged: images of the sample that do not decode, of `drawn`.
    image_seconds: to read one image from where it is, by one thread.
    measured: the images as they are first.
    """

    source: str
    measured: tuple[Measured, ...]
    machine: Machine
    job: Job
    splits: dict[str, int]
    flags: tuple[str, ...] = ()
    packed: str = ""
    damaged: int = 0
    drawn: int = 0
    image_seconds: float = 0.0
    name: str = field(default="set")

    @property
    def total(self) -> int:
        """Images in all splits."""
        return sum(self.splits.values())

    @property
    def largest_split(self) -> str:
        """The split with the most images: what a training reads."""
        return max(self.splits, key=lambda name: self.splits[name])

    @property
    def original(self) -> Measured:
        """The images as they are."""
        return self.measured[0]

    def rate(self, one: Measured) -> float:
        """Images/s that the CPUs of this machine decode and augment."""
        return one.per_second(self.machine.cpus)

    def keeps_up(self, one: Measured) -> bool:
        """Whether decoding is quick enough for the training; True where its rate is unknown."""
        wanted = self.job.images_per_second
        return wanted is None or self.rate(one) >= SPARE * wanted

    def is_allowed(self, one: Measured) -> bool:
        """Whether the error is acceptable."""
        return self.job.max_error is None or one.error <= self.job.max_error


@dataclass(frozen=True, slots=True)
class Recommendation:
    """One thing to do. choice: what; reason: the figures it follows from; commands: to run; code: for the training."""

    topic: str
    choice: str
    reason: str
    commands: tuple[str, ...] = ()
    code: str = ""


def as_path(path: str) -> str:
    """A path that no command takes for an option."""
    return f"./{path}" if path.startswith("-") else path
