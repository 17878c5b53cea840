"""Tips on the copy to the device and on the step."""

from __future__ import annotations

from cache.messages import human_bytes, plural
from readers.diagnosis.evidence import Evidence
from readers.diagnosis.tips.base import Suggestion, Tip, in_ms, option

__all__ = ["COPYING"]

_SMALL_BATCH = 32
_LOW_MEMORY = 0.15


def _pin(e: Evidence) -> Suggestion | None:
    f = e.facts
    if not (f.gpus and f.copies and f.loader == "DataLoader" and e.costs("copy")):
        return None
    pinned = "pinned" if f.pin_memory else "not pinned"
    why = f"the copy to the device adds {in_ms(e.added('copy'))} to a step, and the batches are {pinned}"
    lines = "loader = DataLoader(dataset, pin_memory=True)\nbatches = readers.torch.DevicePrefetcher(loader, device)"
    return Suggestion(why, lines)


def _batch_size(e: Evidence) -> Suggestion | None:
    f, d = e.facts, e.diagnosis
    overhead = sum(e.added(stage) for stage in ("copy", "transfer", "collate"))
    if not f.batch_size or f.batch_size >= _SMALL_BATCH or not f.is_known or overhead < 0.1 * d.full.seconds:
        return None
    why = (
        f"a batch has {plural(f.batch_size, 'sample')}, for which copy, transfer and collate take {in_ms(overhead)} of "
        f"each step; with larger batches a sample costs less of that, but they change what the training learns"
    )
    how = option(e, 2 * f.batch_size, ("batch_size", "batch_size"))
    return Suggestion(why, how)


def _gpu_memory(e: Evidence) -> Suggestion | None:
    f = e.facts
    if not f.gpu_bytes or not f.device.startswith("cuda") or f.gpu_free_bytes > _LOW_MEMORY * f.gpu_bytes:
        return None
    if f.loader not in ("ImageLoader", "DaliLoader"):
        return None
    why = f"batches are made on the GPU, which has {human_bytes(f.gpu_free_bytes)} of {human_bytes(f.gpu_bytes)} left"
    return Suggestion(why, f"batch_size={max(1, (f.batch_size or 2) // 2)}")


def _real_step(e: Evidence) -> Suggestion | None:
    if not e.facts.simulated:
        return None
    why = (
        f"the step only waits {in_ms(e.diagnosis.step.seconds)}: what could be gained is known when the model itself "
        f"runs on batches in the memory of the device"
    )
    return Suggestion(why, "packer diagnose train.py:make_loader --step train.py:train_step --device cuda")


def _watch(e: Evidence) -> Suggestion | None:
    full = e.diagnosis.full
    if full.high - full.low < 0.3 * full.seconds:
        return None
    why = f"a step takes from {in_ms(full.low)} to {in_ms(full.high)}: see what the CPUs, disks and GPU do meanwhile"
    return Suggestion(why, "packer monitor --output run.json -- python train.py")


COPYING = (
    Tip("pin-memory", "copy from pinned memory while the step before runs", _pin),
    Tip("batch-size", "try a larger batch", _batch_size),
    Tip("gpu-memory", "leave memory of the GPU for preprocessing", _gpu_memory),
    Tip("real-step", "measure with the real step", _real_step),
    Tip("watch", "watch the machine over time", _watch),
)
