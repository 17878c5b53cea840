"""Tips on the copy to the device and on the step."""

from __future__ import annotations

from cache.messages import human_bytes
from readers.diagnosis.evidence import Evidence
from readers.diagnosis.findings import Change, PayloadFact, PayloadField
from readers.diagnosis.tips.base import DALI, HPC, PART_8, Suggestion, Tip, in_ms

__all__ = ["COPYING"]

_WORTH_SAYING = 0.02  # of the bytes of a step
_SMALL_BATCH = 32
_LOW_MEMORY = 0.15


def _field(evidence: Evidence, *kinds: str) -> tuple[PayloadField, PayloadFact] | None:
    """The field of the payload with the most to save by facts of these kinds, if that is a part of the whole."""
    payload = evidence.diagnosis.payload
    if payload is None:
        return None
    found = [(field, fact) for field in payload.fields for fact in field.facts if fact.kind in kinds]
    # Of a field only its best fact is advice: what is never used need not be smaller.
    found = [pair for pair in found if pair[1].saves == pair[0].facts[0].saves]
    best = max(found, key=lambda pair: pair[1].saves, default=None)
    return best if best is not None and best[1].saves >= _WORTH_SAYING * payload.bytes else None


def _less_copy(evidence: Evidence, saved: int) -> float:
    """Seconds that the copy takes less if it has so many bytes less to copy."""
    payload = evidence.diagnosis.payload
    return 0.0 if payload is None or not payload.bytes else evidence.added("copy") * saved / payload.bytes


def _with_copy_less(evidence: Evidence, less: float) -> float | None:
    """Seconds of a step if the copy takes so much less; None if no copy was measured."""
    full, step = evidence.diagnosis.full.seconds, evidence.diagnosis.step.seconds
    if not less:
        return None
    return evidence.model.seconds(saved=less) if evidence.model is not None else max(step, full - less)


def _payload(evidence: Evidence, kinds: tuple[str, ...], how: str, change: str = "") -> Suggestion | None:
    """The answer of a row on the payload. how: may name {path}."""
    best = _field(evidence, *kinds)
    payload = evidence.diagnosis.payload
    if best is None or payload is None:
        return None
    field, fact = best
    name = field.path or "the batch"
    size = human_bytes(field.bytes)
    why = f"{name} ({field.dtype}, {size} of {human_bytes(payload.bytes)} a step): {fact.text}; saves "
    less = _less_copy(evidence, fact.saves)
    change_to = Change(change, field.path, f"{change} for {name}", field, saved=less) if change else None
    seconds = _with_copy_less(evidence, less)
    return Suggestion(f"{why}{human_bytes(fact.saves)} a step", how.format(path=name), seconds, change_to)


def _uint8(e: Evidence) -> Suggestion | None:
    if e.facts.loader == "ImageLoader":
        how = "loader = ImageLoader(reader, batch_size, augment=ops_without_normalize); x = (x.float() - mean) / std"
    else:
        how = "images = (images.to(device, non_blocking=True).float() / 255 - mean) / std  # {path} as uint8 till here"
    return _payload(e, ("uint8",), how, "uint8")


def _cast(e: Evidence) -> Suggestion | None:
    how = "batch = batch.to(torch.bfloat16).to(device, non_blocking=True)  # {path}, in the collate function"
    if e.facts.loader == "ImageLoader":
        how = "loader = ImageLoader(reader, batch_size, augment=ops, dtype=torch.bfloat16)"
    return _payload(e, ("cast",), how)


def _narrow(e: Evidence) -> Suggestion | None:
    return _payload(e, ("narrow",), "values = values.to(torch.int32)  # {path}, before the copy; .long() on the device")


def _one_hot(e: Evidence) -> Suggestion | None:
    how = "labels = torch.nn.functional.one_hot(labels.to(device), classes)  # {path} as class numbers till here"
    return _payload(e, ("one-hot",), how)


def _bits(e: Evidence) -> Suggestion | None:
    how = "packed = np.packbits(mask, axis=-1)  # {path}; on the device (packed[..., None] >> shifts) & 1"
    return _payload(e, ("bits",), how)


def _sparse(e: Evidence) -> Suggestion | None:
    return _payload(e, ("sparse",), "x = x.to_sparse().to(device, non_blocking=True).to_dense()  # {path}")


def _padded(e: Evidence) -> Suggestion | None:
    how = "x = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)  # {path}: to the longest of each batch"
    return _payload(e, ("padded",), how)


def _unneeded(e: Evidence) -> Suggestion | None:
    if e.facts.loader == "ImageLoader":
        how = "loader = ImageLoader(reader, batch_size, augment=ops, fields=fields_that_the_step_uses)"
    else:
        how = "samples = [sample[:2] for sample in samples]  # in the collate function, without {path}"
    return _payload(e, ("unused", "duplicate", "constant"), how)


def _pin(e: Evidence) -> Suggestion | None:
    f = e.facts
    if not (f.gpus and f.copies and f.loader == "DataLoader" and e.costs("copy")):
        return None
    pinned = "pinned" if f.pin_memory else "not pinned"
    why = f"the copy to the device adds {in_ms(e.added('copy'))} to a step, and the batches are {pinned}"
    change = None if f.pin_memory else Change("pin_memory", 1, "pin_memory=True")
    lines = "loader = DataLoader(dataset, pin_memory=True)\nbatches = readers.torch.DevicePrefetcher(loader, device)"
    return Suggestion(why, lines, None, change)


def _batch_size(e: Evidence) -> Suggestion | None:
    f, d = e.facts, e.diagnosis
    size = f.batch_size
    overhead = sum(e.added(stage) for stage in ("copy", "transfer", "collate"))
    if not size or size >= _SMALL_BATCH or f.loader not in ("DataLoader", "ImageLoader"):
        return None
    if not d.culprit or overhead < 0.1 * d.full.seconds:
        return None
    why = f"{size} samples a batch, for which copy, transfer and collate take {in_ms(overhead)} of each step; larger "
    why += "batches cost less of that for a sample, but change what the training learns"
    return Suggestion(why, f"batch_size={2 * size}", None, Change("batch_size", 2 * size, f"batch_size={2 * size}"))


def _gpu_memory(e: Evidence) -> Suggestion | None:
    f = e.facts
    if not f.gpu_bytes or not f.device.startswith("cuda") or f.gpu_free_bytes > _LOW_MEMORY * f.gpu_bytes:
        return None
    if f.loader not in ("ImageLoader", "DaliLoader"):
        return None
    why = f"batches are made on the GPU, which has {human_bytes(f.gpu_free_bytes)} of {human_bytes(f.gpu_bytes)} left"
    return Suggestion(why, f"batch_size={max(1, (f.batch_size or 2) // 2)}")


def _real_step(e: Evidence) -> Suggestion | None:
    d = e.diagnosis
    if not e.facts.simulated:
        return None
    why = f"the step only waits {in_ms(d.step.seconds)}: what could be gained is known when the model itself runs on "
    why += "batches in the memory of the device"
    return Suggestion(why, "packer diagnose train.py:make_loader --step train.py:train_step --device cuda")


def _watch(e: Evidence) -> Suggestion | None:
    full = e.diagnosis.full
    if full.high - full.low < 0.3 * full.seconds:
        return None
    why = f"a step takes from {in_ms(full.low)} to {in_ms(full.high)}: see what the CPUs, disks and GPU do meanwhile"
    return Suggestion(why, "packer monitor --output run.json -- python train.py")


COPYING = (
    Tip("unneeded", "copy only what the step uses", ((PART_8, 24),), _unneeded, idle=True),
    Tip("uint8", "copy 8-bit integers, and convert on the device", ((PART_8, 18), (DALI, 8)), _uint8, idle=True),
    Tip("half", "cast to half precision before the copy", ((PART_8, 19), (DALI, 8)), _cast, idle=True),
    Tip("narrow", "copy the smallest type that holds the values", ((DALI, 8),), _narrow, idle=True),
    Tip("one-hot", "copy class numbers, and unpack them on the device", ((PART_8, 20),), _one_hot, idle=True),
    Tip("bit-masks", "copy binary values as bits", ((PART_8, 21),), _bits, idle=True),
    Tip("sparse", "copy sparse values as such", ((PART_8, 22),), _sparse, idle=True),
    Tip("padding", "pad no further than needed", ((PART_8, 23),), _padded, idle=True),
    Tip("pin-memory", "copy from pinned memory while the step before runs", ((PART_8, 17),), _pin),
    Tip("batch-size", "try a larger batch", ((DALI, 7), (HPC, 2)), _batch_size),
    Tip("gpu-memory", "leave memory of the GPU for preprocessing", ((DALI, 2),), _gpu_memory),
    Tip("real-step", "measure with the real step", ((HPC, 1),), _real_step),
    Tip("watch", "watch the machine over time", ((DALI, 3),), _watch),
)
