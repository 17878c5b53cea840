"""The training loop with batches of other sizes: from which size on the step is not starved any more.

For each size the loader is rebuilt, the loop runs with it, and then the step alone with two of its batches in the
memory of the device. A size that fails, as one that the memory of the device is too small for, is a row with its error.
The time of a simulated step is in proportion to the batch; real steps often gain from larger ones.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cache.errors import PipelineError
from cache.messages import Silent, Watcher
from readers.diagnosis.pipeline import ending, endless, in_a_line, module_for, tree_bytes
from readers.diagnosis.timing import StepTime, time_steps
from readers.diagnosis.training import Training, cuda_of

__all__ = ["BatchSize", "BatchSizes", "measure_batch_sizes", "resized"]

_KEPT = 2  # batches with which the step alone is measured
_STEP_WARMUP = 3
_SAME = 0.1
_MESSAGE_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The loop at one size.

    step, full: the step alone, and with the loader. step_images, images: a second, of these. waiting: share of the time
    in which the step waits for its batch, 0 to 1. bytes: of a batch, as the step gets it. device_bytes: the most that
    torch had allocated on a CUDA device, None elsewhere. error: why there are no figures, "" otherwise.
    """

    batch_size: int
    step: StepTime | None = None
    full: StepTime | None = None
    step_images: float = 0.0
    images: float = 0.0
    waiting: float = 0.0
    bytes: int = 0
    device_bytes: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The loop at several sizes, the smallest first.

    enough: the smallest size at which the step waits less than a tenth of the time; None where there is none.
    flat: the smallest size from which on no larger one gives a tenth more images/s.
    advice: the same as a sentence. scaled_from: the size that a simulated step was for; None of a real one.
    """

    rows: tuple[BatchSize, ...]
    enough: int | None
    flat: int
    advice: str
    scaled_from: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers, texts, lists and dictionaries."""
        return asdict(self)


def measure_batch_sizes(
    loader: Any,
    sizes: Sequence[int],
    step: Callable[[Any], object] | None = None,
    *,
    device: Any = None,
    simulate_step: float | None = None,
    seconds: float = 20.0,
    watcher: Watcher | None = None,
) -> BatchSizes:
    """Measure a loop at several batch sizes.

    loader: an `ImageLoader`, or a torch DataLoader without a batch sampler of its own.
    step, device: as in `readers.diagnose`. The step must take batches of any of the sizes.
    simulate_step: seconds of a step with a batch of the loader's own size.
    seconds: about how long to measure, all sizes together.
    watcher: shows which size is being measured.

    Raises PipelineError for a loader that cannot be rebuilt, ValueError for sizes below 1, and if all sizes fail what
    the first one raised.
    """
    ordered = sorted(set(sizes))
    if not ordered or ordered[0] < 1:
        raise ValueError(f"sizes must be at least 1, not {list(sizes)}")
    training, own = Training.of(step, simulate_step, device), _own_size(loader)
    rows, errors, note = list[BatchSize](), list[Exception](), (watcher or Silent()).note
    for size in ordered:
        note(f"measuring batches of {size}")
        if simulate_step is not None:
            training = Training.of(None, simulate_step * size / own, device)
        try:
            rows.append(_measure(resized(loader, size), size, training, device, seconds / 2 / len(ordered)))
        except Exception as error:
            rows.append(BatchSize(size, error=_message(error)))
            errors.append(error)
        _free(device)
    if len(errors) == len(rows):
        raise errors[0]
    return _judge(tuple(rows), None if step is not None else own)


def resized(loader: Any, batch_size: int) -> Iterable[Any]:
    """The same loader with batches of another size. Raises PipelineError where it cannot be rebuilt."""
    known = module_for(loader)
    if known is None:
        kind = type(loader).__name__
        raise PipelineError(
            f"{kind} cannot be rebuilt with another batch size; an ImageLoader and a torch DataLoader can"
        )
    return known.resized(loader, batch_size)  # type: ignore[no-any-return]


def _own_size(loader: Any) -> int:
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if not isinstance(size, int):
        resized(loader, 1)  # says what is wrong with it
        raise PipelineError(f"{type(loader).__name__} does not say its batch size")
    return size


def _measure(loader: Iterable[Any], size: int, training: Training, device: Any, seconds: float) -> BatchSize:
    cuda, synchronize = cuda_of(device), training.synchronize
    workers = max(1, getattr(loader, "num_workers", 0) or getattr(loader, "threads", 0))
    ahead = (getattr(loader, "prefetch_factor", None) or 1) * workers + 1
    if cuda is not None:
        cuda.reset_peak_memory_stats(device)
    with ending(endless(loader)) as batches:
        few = list(itertools.islice(batches, _KEPT))
        full = time_steps(
            batches, training.run, warmup=ahead, seconds=seconds, workers=workers, synchronize=synchronize
        )
    on_device = itertools.cycle([training.on_device(batch) for batch in few])
    alone = time_steps(on_device, training.step, warmup=_STEP_WARMUP, seconds=seconds, synchronize=synchronize)
    return BatchSize(
        size,
        alone,
        full,
        step_images=size / alone.seconds,
        images=size / full.seconds,
        waiting=max(0.0, 1 - alone.seconds / full.seconds),
        bytes=tree_bytes(few[0]),
        device_bytes=None if cuda is None else int(cuda.max_memory_allocated(device)),
    )


def _message(error: Exception) -> str:
    """One line of what was raised: of a worker's error the last one, as its message is a traceback."""
    if isinstance(error, PipelineError):
        return str(error)
    if "Original Traceback" in str(error):
        return str(error).rstrip().splitlines()[-1][:_MESSAGE_CHARACTERS]
    return in_a_line(error)


def _free(device: Any) -> None:
    """Give back what a size has taken, before the next one is measured."""
    gc.collect()
    if (cuda := cuda_of(device)) is not None:
        cuda.empty_cache()


def _judge(rows: tuple[BatchSize, ...], scaled_from: int | None) -> BatchSizes:
    good = [row for row in rows if not row.error]
    enough = next((row.batch_size for row in good if row.waiting < _SAME), None)
    flat = next(
        row.batch_size
        for i, row in enumerate(good)
        if all(other.images < (1 + _SAME) * row.images for other in good[i + 1 :])
    )
    if enough is None:
        advice = "the step waits for the loader at every size"
    else:
        advice = f"from batches of {enough} on, the step waits less than {_SAME:.0%} of the time"
    if flat < good[-1].batch_size:
        advice += f"; batches larger than {flat} give no more images/s"
    elif len(good) > 1:
        advice += f"; images/s still rise at {flat}, the largest size"
    failed = [row.batch_size for row in rows if row.error]
    if failed:
        advice += f"; failed: {', '.join(map(str, failed))}"
    return BatchSizes(rows, enough, flat, advice, scaled_from)
