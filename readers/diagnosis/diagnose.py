"""`diagnose`: a loader and a training step in, a `Diagnosis` out."""

from __future__ import annotations

import importlib
import itertools
import sys
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from cache.errors import PipelineError
from cache.messages import Watcher
from readers.diagnosis.advice import advise
from readers.diagnosis.apply import apply_advice
from readers.diagnosis.climb import Training, climb
from readers.diagnosis.evidence import Evidence, gather
from readers.diagnosis.ladder import Diagnosis
from readers.diagnosis.payload import inspect_payload
from readers.diagnosis.pipeline import IterablePipeline, Pipeline, leaves, map_tree, to_device
from readers.diagnosis.sampling import sampling, with_rates
from readers.diagnosis.tracing import trace_calls
from readers.trace import Trace

__all__ = ["diagnose"]

_OTHERS_BUSY = 0.3
# Loaders that can be cut: the module that defines the class, the class, and the module here with its pipeline.
_CUT = (
    ("readers.loader", "ImageLoader", "imageloader"),
    ("torch.utils.data", "DataLoader", "dataloader"),
)


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
    if (step is None) == (simulate_step is None):
        raise ValueError("give either step, a function of a batch, or simulate_step, in seconds")
    if seconds <= 0 or (simulate_step is not None and simulate_step < 0):
        raise ValueError(f"seconds={seconds} and simulate_step={simulate_step}: times are positive")
    if step is None:
        pause = simulate_step or 0.0

        def step(batch: Any) -> None:
            time.sleep(pause)

    if copy is None and device is not None and str(device) != "cpu":

        def copy(batch: Any) -> Any:
            return to_device(batch, device)

    if watcher is not None:
        watcher.note("reading the first samples")
    pipeline, batches = _open(loader)
    training = Training(
        trace_calls(trace, "step", step), None if copy is None else trace_calls(trace, "copy", copy),
        _pinning(device, batches[0]), _synchronize(device), simulate_step is not None, trace=trace,
    )  # fmt: skip
    with sampling(seconds) as sampler, nullcontext() if trace is None else pipeline.record(trace):
        result = climb(pipeline, replace(training, begins=sampler.begin), seconds=seconds, watcher=watcher)
    payload = inspect_payload(batches, None if simulate_step is not None else step, copy)
    result = replace(result, batch_size=_batch_size(batches[0]), payload=payload)
    result = replace(result, usage=with_rates(sampler.usage, result))
    idle = result.step.cpu_busy if simulate_step is not None else None  # of a step that only waits
    if idle is not None and idle > _OTHERS_BUSY:
        note = f"other processes kept the CPUs {idle:.0%} busy; repeat it on a quiet machine"
        result = replace(result, notes=(*result.notes, note))
    copies = copy is not None or (device is not None and str(device) != "cpu")
    facts = gather(loader, result, device=device, copies=copies, simulated=simulate_step is not None)
    evidence = Evidence.of(result, facts)
    result = replace(result, advice=advise(evidence))
    if apply:
        chosen = [each for each in result.advice if apply is True or each.id in apply]
        applied = apply_advice(pipeline, evidence, chosen, training, seconds=seconds, watcher=watcher)
        result = replace(result, applied=applied)
    return result


def _open(loader: Iterable[Any] | Pipeline) -> tuple[Pipeline, list[Any]]:
    """The pipeline of a loader, and the batches that it replays. What cannot be cut is a pipeline of one stage."""
    make = None if isinstance(loader, Pipeline) else _pipeline_of(loader)
    if make is not None:
        try:
            pipeline: Pipeline = make(loader)
            return pipeline, _replayed(pipeline)
        except PipelineError:
            raise
        except Exception as error:  # of the user's classes; a data set that is broken fails below, too
            pipeline = IterablePipeline(loader)  # type: ignore[arg-type]
            pipeline.notes = (f"the loader could not be cut into stages ({type(error).__name__}: {error})",)
    else:
        pipeline = loader if isinstance(loader, Pipeline) else IterablePipeline(loader)
    return pipeline, _replayed(pipeline)


def _replayed(pipeline: Pipeline) -> list[Any]:
    return list(itertools.islice(pipeline.cached(len(pipeline.stages)), pipeline.distinct))


def _pipeline_of(loader: Any) -> Callable[[Any], Pipeline] | None:
    """What cuts loaders of this kind."""
    for module, kind, cut in _CUT:
        defined = sys.modules.get(module)  # where it was never imported, no loader is of this kind
        if defined is not None and isinstance(loader, getattr(defined, kind)):
            make: Callable[[Any], Pipeline] = getattr(
                importlib.import_module(f"readers.diagnosis.{cut}"), f"{kind}Pipeline"
            )
            return make
    return None


def _batch_size(batch: Any) -> int | None:
    sizes = [leaf.shape[0] for leaf in leaves(batch) if len(getattr(leaf, "shape", ())) > 0]
    return int(sizes[0]) if sizes else None


def _pinning(device: Any, batch: Any) -> Callable[[Any], Any] | None:
    """What brings a batch into page-locked memory, for a CUDA device whose batches are not there."""
    torch = sys.modules.get("torch")
    if torch is None or device is None or not str(device).startswith("cuda"):
        return None

    def is_pageable(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and not leaf.is_pinned()

    if not any(is_pageable(leaf) for leaf in leaves(batch)):
        return None
    return lambda batch: map_tree(batch, lambda leaf: leaf.pin_memory() if is_pageable(leaf) else leaf)


def _synchronize(device: Any) -> Callable[[], object]:
    torch = sys.modules.get("torch")
    if torch is not None and device is not None and str(device).startswith("cuda"):
        return lambda: torch.cuda.synchronize(device)
    return lambda: None
