"""What a diagnosis finds besides the ladder, as plain values: the payload of a step, advice, and what came of it.

payload   what `readers.diagnosis.payload` sees in the batches that reach the step
advice    what `readers.diagnosis.advice` makes of the evidence
applied   what `readers.diagnosis.apply` changed and measured
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Advice", "Applied", "Change", "Payload", "PayloadFact", "PayloadField"]


@dataclass(frozen=True, slots=True)
class PayloadFact:
    """Something about a field that costs bytes. kind: which, one of `readers.diagnosis.payload.KINDS`.

    text: the same in words. saves: bytes of a step that would not be copied. grid: of "uint8", (offset, step) of each
    channel, or one of all: a value is offset + step × k with k from 0 to 255.
    """

    kind: str
    text: str
    saves: int
    grid: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PayloadField:
    """An array in a batch. path: where it is, as `[0]`, `image` or `[1].mask`; "" if the batch is the array itself.

    dtype: its name, as float32. shape: None for a dimension that differs from batch to batch. bytes: of a step, the
    mean. used: whether the step does anything with it; None if that is unknown. facts: the largest saving first.
    """

    path: str
    dtype: str
    shape: tuple[int | None, ...]
    bytes: int
    used: bool | None
    facts: tuple[PayloadFact, ...] = ()


@dataclass(frozen=True, slots=True)
class Payload:
    """What the batches carry to the step. batches: that were looked at. bytes: of a step, the mean.

    saves: bytes of a step that are saved if the best fact of each field is acted on. notes: what could not be seen.
    """

    batches: int
    bytes: int
    saves: int
    fields: tuple[PayloadField, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """A change that `apply` can make. kind: which, one of `readers.diagnosis.pipeline.CHANGES`.

    value: its new value: a number of workers, of batches or of samples, a form of the cache, a directory, the path of
    a field. what: the change in words. field: what is known of that field.

    What it is to bring, for predictions: share: (stage, share of its work that is left); saved: seconds of a step that
    the copy takes less.
    """

    kind: str
    value: int | str
    what: str
    field: PayloadField | None = None
    share: tuple[tuple[str, float], ...] = ()
    saved: float = 0.0


@dataclass(frozen=True, slots=True)
class Advice:
    """A tip that the evidence calls for. id: of the row in the table. sources: where the tip is from, by title.

    why: what was found, with its figures. how: a command, an option or a line of code. seconds: what a step would
    take, predicted; None if that cannot be said. gain: seconds of a step that are gained, 0.0 where seconds is None.
    change: how `apply` can try it, None if that is the user's to do.
    """

    id: str
    title: str
    sources: tuple[str, ...]
    why: str
    how: str
    seconds: float | None = None
    gain: float = 0.0
    change: Change | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """A change that was made. advice: the id of the tip. kept: whether it helped, so that the next one adds to it.

    before, predicted, measured: seconds of a step; where the change is one of the batch size, of as many samples as a
    batch had before. predicted is None where nothing was predicted, measured None where the change could not be made;
    problem then says why.
    """

    change: Change
    advice: str
    before: float
    predicted: float | None
    measured: float | None
    kept: bool
    problem: str = ""

    @property
    def error(self) -> float | None:
        """How far the prediction is off, as a share of what was measured; None where one of them is missing."""
        if self.predicted is None or self.measured is None:
            return None
        return self.predicted / self.measured - 1
