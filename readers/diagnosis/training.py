"""What a training does with the batches of a loader: copy them to its device, and step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from readers.diagnosis.pipeline import leaves, map_tree, to_device
from readers.trace import Trace

__all__ = ["Training", "cuda_of", "pinning", "trace_calls"]


@dataclass(frozen=True)
class Training:
    """What happens to a batch after the loader.

    step: a function of a batch on the device. copy: brings one there; None where there is nothing to copy. pin: a copy
    of a batch in page-locked memory, None where the loader's are there already or copying does not gain by it.
    synchronize: waits for the device. simulated: whether the step ignores its batch.
    begins: called with the name of each line before it is measured. trace: gets the lines, and the waits in them.
    """

    step: Callable[[Any], object]
    copy: Callable[[Any], Any] | None = None
    pin: Callable[[Any], Any] | None = None
    synchronize: Callable[[], object] = lambda: None
    simulated: bool = False
    begins: Callable[[str], object] = lambda name: None
    trace: Trace | None = None

    @classmethod
    def of(
        cls,
        step: Callable[[Any], object] | None,
        simulate_step: float | None = None,
        device: Any = None,
        copy: Callable[[Any], Any] | None = None,
        trace: Trace | None = None,
    ) -> Training:
        """From the arguments of `readers.diagnose`. Raises ValueError for those that contradict each other."""
        if (step is None) == (simulate_step is None):
            raise ValueError("give either step, a function of a batch, or simulate_step, in seconds")
        if simulate_step is not None and simulate_step < 0:
            raise ValueError(f"simulate_step={simulate_step}: a time is positive")
        if copy is None and device is not None and str(device) != "cpu":

            def copy(batch: Any) -> Any:
                return to_device(batch, device)

        cuda = cuda_of(device)
        return cls(
            trace_calls(trace, "step", step or (lambda batch: time.sleep(simulate_step or 0.0))),
            None if copy is None else trace_calls(trace, "copy", copy),
            synchronize=(lambda: None) if cuda is None else (lambda: cuda.synchronize(device)),
            simulated=step is None,
            trace=trace,
        )

    def on_device(self, batch: Any) -> Any:
        return batch if self.copy is None else self.copy(batch)

    def run(self, batch: Any) -> None:
        self.step(self.on_device(batch))


def cuda_of(device: Any) -> Any:
    """The module `torch.cuda`, if the device is one of CUDA."""
    torch: Any = sys.modules.get("torch")
    return torch.cuda if torch is not None and str(device or "").startswith("cuda") else None


def pinning(device: Any, batch: Any) -> Callable[[Any], Any] | None:
    """What brings a batch into page-locked memory, for a CUDA device whose batches are not there."""
    torch: Any = sys.modules.get("torch")
    if cuda_of(device) is None:
        return None

    def is_pageable(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and not leaf.is_pinned()

    if not any(is_pageable(leaf) for leaf in leaves(batch)):
        return None
    return lambda batch: map_tree(batch, lambda leaf: leaf.pin_memory() if is_pageable(leaf) else leaf)


def trace_calls(trace: Trace | None, name: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function itself, or one that adds each call to the track of this name."""
    if trace is None:
        return function

    def traced(argument: Any) -> Any:
        with trace.span(f"diagnosis: {name}", name):
            return function(argument)

    return traced
