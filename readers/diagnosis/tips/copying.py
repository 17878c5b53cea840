"""Tips on the copy to the device and on the step."""

from __future__ import annotations

from cache.messages import human_bytes, plural
from readers.diagnosis.evidence import Evidence
from readers.diagnosis.findings import Change, Payload, PayloadFact, PayloadField
from readers.diagnosis.tips.base import DALI, HPC, PART_8, Sources, Suggestion, Tip, in_ms, option

__all__ = ["COPYING"]

_WORTH_SAYING = 0.02  # of the bytes of a step
_SMALL_BATCH = 32
_LOW_MEMORY = 0.15


def _field(payload: Payload, *kinds: str) -> tuple[PayloadField, PayloadFact] | None:
    """The field with the most to save by facts of these kinds, if that is a part of the whole."""
    # Of a field only its best fact is advice: what is never used need not be smaller.
    found = [
        (field, fact)
        for field in payload.fields
        for fact in field.facts
        if fact.kind in kinds and fact.saves == field.facts[0].saves >= _WORTH_SAYING * payload.bytes
    ]
    return max(found, key=lambda pair: pair[1].saves, default=None)


def _payload(e: Evidence, kinds: tuple[str, ...], how: str, ours: str, change: str) -> Suggestion | None:
    """What to do about a fact of the payload. how: may name {path}; ours: the same for an ImageLoader."""
    payload, d = e.diagnosis.payload, e.diagnosis
    best = None if payload is None else _field(payload, *kinds)
    if best is None or payload is None:
        return None
    field, fact = best
    name = field.path or "the batch"
    why = (
        f"{name} ({field.dtype}, {human_bytes(field.bytes)} of {human_bytes(payload.bytes)} a step): {fact.text}; "
        f"saves {human_bytes(fact.saves)} a step"
    )
    less = e.added("copy") * fact.saves / payload.bytes if payload.bytes else 0.0
    seconds = None
    if less:
        seconds = max(d.step.seconds, d.full.seconds - less) if e.model is None else e.model.seconds(saved=less)
    made = Change(change, field.path, f"{change} for {name}", field, saved=less) if change else None
    lines = ours if ours and e.facts.loader == "ImageLoader" else how.format(path=name)
    return Suggestion(why, lines, seconds, made)


def _on_payload(
    id: str, title: str, sources: Sources, kinds: tuple[str, ...], how: str, *, ours: str = "", change: str = ""
) -> Tip:
    return Tip(id, title, sources, lambda e: _payload(e, kinds, how, ours, change), idle=True)


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
    overhead = sum(e.added(stage) for stage in ("copy", "transfer", "collate"))
    if not f.batch_size or f.batch_size >= _SMALL_BATCH or not f.is_known or overhead < 0.1 * d.full.seconds:
        return None
    why = (
        f"a batch has {plural(f.batch_size, 'sample')}, for which copy, transfer and collate take {in_ms(overhead)} of "
        f"each step; with larger batches a sample costs less of that, but they change what the training learns"
    )
    how, change = option(e, "batch_size", 2 * f.batch_size, ("batch_size", "batch_size"))
    return Suggestion(why, how, None, change)


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
    _on_payload(
        "unneeded", "copy only what the step uses", ((PART_8, 24),), ("unused", "duplicate", "constant"),
        "samples = [sample[:2] for sample in samples]  # in the collate function, without {path}",
        ours="loader = ImageLoader(reader, batch_size, augment=ops, fields=fields_that_the_step_uses)",
    ),
    _on_payload(
        "uint8", "copy 8-bit integers, and convert on the device", ((PART_8, 18), (DALI, 8)), ("uint8",),
        "images = (images.to(device, non_blocking=True).float() / 255 - mean) / std  # {path} as uint8 till here",
        ours="loader = ImageLoader(reader, batch_size, augment=ops_without_normalize); x = (x.float() - mean) / std",
        change="uint8",
    ),
    _on_payload(
        "half", "cast to half precision before the copy", ((PART_8, 19), (DALI, 8)), ("cast",),
        "batch = batch.to(torch.bfloat16).to(device, non_blocking=True)  # {path}, in the collate function",
        ours="loader = ImageLoader(reader, batch_size, augment=ops, dtype=torch.bfloat16)",
    ),
    _on_payload(
        "narrow", "copy the smallest type that holds the values", ((DALI, 8),), ("narrow",),
        "values = values.to(torch.int32)  # {path}, before the copy; .long() on the device",
    ),
    _on_payload(
        "one-hot", "copy class numbers, and unpack them on the device", ((PART_8, 20),), ("one-hot",),
        "labels = torch.nn.functional.one_hot(labels.to(device), classes)  # {path} as class numbers till here",
    ),
    _on_payload(
        "bit-masks", "copy binary values as bits", ((PART_8, 21),), ("bits",),
        "packed = np.packbits(mask, axis=-1)  # {path}; on the device (packed[..., None] >> shifts) & 1",
    ),
    _on_payload(
        "sparse", "copy sparse values as such", ((PART_8, 22),), ("sparse",),
        "x = x.to_sparse().to(device, non_blocking=True).to_dense()  # {path}",
    ),
    _on_payload(
        "padding", "pad no further than needed", ((PART_8, 23),), ("padded",),
        "x = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)  # {path}: to the longest of each batch",
    ),
    Tip("pin-memory", "copy from pinned memory while the step before runs", ((PART_8, 17),), _pin),
    Tip("batch-size", "try a larger batch", ((DALI, 7), (HPC, 2)), _batch_size),
    Tip("gpu-memory", "leave memory of the GPU for preprocessing", ((DALI, 2),), _gpu_memory),
    Tip("real-step", "measure with the real step", ((HPC, 1),), _real_step),
    Tip("watch", "watch the machine over time", ((DALI, 3),), _watch),
)  # fmt: skip
