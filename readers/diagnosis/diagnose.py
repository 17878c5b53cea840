"""`diagnose`: a loader and a training step in, a `Diagnosis` out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from cache.errors import PipelineError
from cache.messages import Watcher
from readers.diagnosis.advice import advise
from readers.diagnosis.apply import apply_advice
from readers.diagnosis.climb import climb
from readers.diagnosis.evidence import Evidence
from readers.diagnosis.facts import gather
from readers.diagnosis.ladder import Diagnosis
from readers.diagnosis.payload import inspect_payload
from readers.diagnosis.pipeline import IterablePipeline, Pipeline, ending, leaves, module_for
from readers.diagnosis.sampling import mark_line, start_sampler, with_rates
from readers.diagnosis.training import Training, pinning
from readers.trace import Trace

__all__ = ["diagnose"]

_OTHERS_BUSY = 0.3
_STEPS = 4  # that the shortest measurement takes, about


def diagnose(
    loader: Iterable[Any] | Pipeline,
    step: Callable[[Any], object] | None = None,
    *,
    device: Any = None,
    copy: Callable[[Any], Any] | None = None,
    simulate_step: float | None = None,
    seconds: float = 30.0,
    watcher: Watcher | None = None,
    apply: bool | Collection[str] = False,
    trace: Trace | None = None,
) -> Diagnosis:
    """Measure which stage of a loader starves a training step.

    The step is called a few hundred times with real batches, so a model is trained by it; the sampler of the loader is
    used, too. Do this in a run of its own, not in the middle of one.

    loader: any iterable of batches; a torch DataLoader is rebuilt with its data set, samplers, workers and collate
        function, and cut into stages. For a loader of another kind, a `Pipeline` that says how to cut it.
    step: what the training does with a batch on its device.
    device: where batches go before the step, as "cuda"; None leaves them where they are.
    copy: how they get there, if not by `.to(device, non_blocking=True)` of all tensors in them.
    simulate_step: seconds that a step takes, in place of `step`: no model and no GPU is needed.
    seconds: about how long to measure; some seconds more are spent on starting workers.
    apply: also make those changes of the advice that are the loader's own, one at a time on a copy of the loader, and
        measure them, which takes about as long again. Ids of advice: only of these.
    watcher: shows the time of each line as soon as it is known.
    trace: gets each line and its waits, copies and steps, and of an `ImageLoader` what its threads do.

    Raises PipelineError if the loader gives no batch, ValueError for arguments that contradict each other. What the
    loader or the step raises is passed on.
    """
    if seconds <= 0:
        raise ValueError(f"seconds={seconds}: expected more than 0")
    if simulate_step is not None and _STEPS * simulate_step > seconds:
        raise ValueError(
            f"seconds={seconds:g}: steps of {simulate_step:g} s cannot be measured in so short a time, which takes at "
            f"least {_STEPS} of them; give seconds={_STEPS * simulate_step:g} or more, or a shorter step"
        )
    training = Training.of(step, simulate_step, device, copy, trace)
    if watcher is not None:
        watcher.note("reading the first samples")
    pipeline, batches = _open(loader)
    training = replace(training, pin=pinning(device, batches[0]))
    sampler = start_sampler(seconds)
    with sampler or nullcontext(), nullcontext() if trace is None else pipeline.record(trace):
        lines = replace(training, begins=lambda name: mark_line(sampler, name))
        result = climb(pipeline, lines, seconds=seconds, watcher=watcher)
    payload = inspect_payload(batches, step, None if training.copy is None else training.on_device)
    result = replace(result, batch_size=_batch_size(batches[0]), payload=payload)
    result = replace(result, usage=with_rates(None if sampler is None else sampler.usage(), result))
    idle = result.step.cpu_busy if training.simulated else None  # of a step that only waits
    if idle is not None and idle > _OTHERS_BUSY:
        note = f"other processes kept the CPUs {idle:.0%} busy; repeat it on a quiet machine"
        result = replace(result, notes=(*result.notes, note))
    copies = training.copy is not None
    facts = gather(loader, result, device=device, copies=copies, simulated=training.simulated)
    evidence = Evidence.of(result, facts)
    result = replace(result, advice=advise(evidence))
    if apply:
        chosen = [each for each in result.advice if apply is True or each.id in apply]
        applied = apply_advice(pipeline, evidence, chosen, training, seconds=seconds, watcher=watcher)
        result = replace(result, applied=applied)
    return result


def _open(loader: Iterable[Any] | Pipeline) -> tuple[Pipeline, list[Any]]:
    """The pipeline of a loader, and the batches that it replays. What cannot be cut is a pipeline of one stage."""
    if isinstance(loader, Pipeline):
        return loader, _replayed(loader)
    known, whole = module_for(loader), IterablePipeline(loader)
    if known is not None:
        try:
            pipeline: Pipeline = known.make_pipeline(loader)
            return pipeline, _replayed(pipeline)
        except PipelineError:
            raise
        except Exception as error:  # of the user's classes; a data set that is broken fails below, too
            whole.notes = (f"the loader could not be cut into stages ({type(error).__name__}: {error})",)
    return whole, _replayed(whole)


def _replayed(pipeline: Pipeline) -> list[Any]:
    with ending(pipeline.cached(len(pipeline.stages))) as batches:
        return list(itertools.islice(batches, pipeline.distinct))


def _batch_size(batch: Any) -> int | None:
    sizes = [leaf.shape[0] for leaf in leaves(batch) if len(getattr(leaf, "shape", ())) > 0]
    return int(sizes[0]) if sizes else None
