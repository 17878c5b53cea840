"""What to pack for a training: variants of a sample of the images, measured, and recommendations with reasons.

    sampling   a random sample of any source        variants   which ones make sense for it
    measure    bytes, CPU time, what is lost         machine    CPUs, memory, filesystems
    recommend  a function of these figures           text       lines for a terminal; report: a page with a chart

`advise` runs them one after the other. Nothing is written: the sample and its variants are in memory.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cache.messages import Silent, Watcher, plural
from packer.sources import Source, default_output_name, open_source
from packer.tools.advise.measure import (
    Choices,
    Estimate,
    ImageSample,
    Measured,
    choose_coefficients,
    choose_variants,
    draw,
    measure,
    require_loader,
)
from packer.tools.advise.recommend import (
    READERS,
    Facts,
    Job,
    Machine,
    Recommendation,
    choose,
    frontier,
    look,
    recommend,
)
from readers.layout import DATASET_FILE, read_dataset_info

__all__ = ["READERS", "Advice", "AdviseOptions", "Estimate", "Job", "Measured", "Recommendation", "advise"]


@dataclass(frozen=True, slots=True)
class AdviseOptions:
    """What to measure, and for which job; see `Choices` and `Job`.

    split: only this one. samples: images to draw. seed: of the draw. seconds: how long to measure, about, after the
    sample was read. crop_scale: the smallest share of an image's area that a random crop takes. node_memory: bytes of
    the nodes of the job; None: what is free here. flags: options with which `packer convert` opens the source, for the
    commands of the recommendations.
    """

    split: str | None = None
    samples: int = 128
    seed: int = 0
    seconds: float = 45.0
    crop_scale: float = 0.08
    choices: Choices = field(default_factory=Choices)
    job: Job = field(default_factory=Job)
    node_memory: int | None = None
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1, not {self.samples}")
        if not 0 < self.crop_scale <= 1:
            raise ValueError(f"crop_scale must be above 0 and at most 1, not {self.crop_scale}")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"seed must be from 0 to 2^32 - 1, not {self.seed}")


@dataclass(frozen=True, slots=True)
class Advice:
    """The measured variants, and what follows from them.

    title: of the source. total: images in it, by the share of images among those drawn. sampled: images of the sample.
    drawn: samples that were read for it; left_out: those that are not images, or damaged, by reason.
    measured: the images as they are first. chosen: the position of the one to pack. frontier: positions of those with
    which each gain in images/s costs the least error.
    """

    title: str
    splits: dict[str, int]
    total: int
    sampled: int
    drawn: int
    left_out: dict[str, int]
    seed: int
    seconds: float
    image_size: int
    job: Job
    machine: Machine
    measured: tuple[Measured, ...]
    chosen: int
    frontier: tuple[int, ...]
    recommendations: tuple[Recommendation, ...]
    notes: tuple[str, ...] = ()

    def rate(self, one: Measured) -> float:
        """Images/s that the CPUs of this machine decode and augment."""
        return one.per_second(self.machine.cpus)

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers, texts, lists and dictionaries; an interval without an upper end has None there."""
        found = _finite(asdict(self))
        for one, measured in zip(found["measured"], self.measured, strict=True):
            one["images_per_second"] = self.rate(measured)
            one["flags"] = list(measured.variant.flags)
        return dict(found)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def advise(source: str | os.PathLike[str] | Source, *, watcher: Watcher | None = None, **options: Any) -> Advice:
    """Measure variants of a random sample of a source, and recommend what to pack.

    source: a packed set, a folder of images, an archive, or anything else that `packer.convert` takes.
    watcher: is shown the progress.
    options: those of `AdviseOptions`.

    Writes nothing. Raises SourceError without images, ValueError for invalid options, and MissingExtraError
    without torch, which the loader needs.
    """
    how, watcher = AdviseOptions(**options), watcher or Silent()
    require_loader()
    started = time.monotonic()
    opened = open_source(source) if isinstance(source, (str, os.PathLike)) else source
    root = Path(str(getattr(opened, "root", source)))
    sample = draw(opened, how.split, how.samples, how.seed, watcher)
    headers = [image.header for image in sample.images]
    variants, notes = choose_variants(headers, how.choices)
    in_memory, reasons = choose_coefficients(headers)
    variants, notes = variants + in_memory, notes + reasons
    watcher.note(f"measuring {plural(len(variants), 'variant')} of {plural(len(sample.images), 'image')}")
    scale = (how.crop_scale, 1.0)
    measured = measure(sample, variants, how.choices.image_size, scale, how.seconds, watcher)
    facts = _facts(opened, root, sample, tuple(measured), how)
    kept = {one.variant for one in measured}
    if idle := [variant.name for variant in variants if variant not in kept]:
        notes.append(f"{', '.join(idle)}: no image of the sample can be encoded so, or becomes smaller")
    best, steps = choose(facts), frontier(facts)
    return Advice(
        sample.title,
        facts.splits,
        facts.total,
        len(sample.images),
        sample.drawn,
        dict(sample.left_out),
        how.seed,
        time.monotonic() - started,
        how.choices.image_size,
        how.job,
        facts.machine,
        facts.measured,
        measured.index(best),
        tuple(measured.index(one) for one in steps),
        tuple(recommend(facts)),
        (*notes, *_notes(sample, facts)),
    )


def _facts(
    opened: Source, root: Path, sample: ImageSample, measured: tuple[Measured, ...], how: AdviseOptions
) -> Facts:
    share = len(sample.images) / max(1, sample.drawn)
    packed = read_dataset_info(root).format if (root / DATASET_FILE).is_file() else ""
    return Facts(
        source=str(root),
        measured=measured,
        machine=look(root, how.node_memory),
        job=how.job,
        splits={name: max(1, round(count * share)) for name, count in sample.splits.items() if count},
        flags=how.flags,
        packed=packed,
        damaged=sample.damaged,
        drawn=sample.drawn,
        image_seconds=sample.read_seconds / max(1, sample.drawn),
        name=default_output_name(opened, "").removesuffix("-"),
    )


def _notes(sample: ImageSample, facts: Facts) -> list[str]:
    """What limits the figures."""
    notes = [f"{count} of {sample.drawn} drawn left out: {reason} (the first: {sample.examples[reason]})"
             for reason, count in sample.left_out.most_common()]  # fmt: skip
    notes += sample.warnings
    encoded = min(one.images + one.refused for one in facts.measured)
    if encoded < len(sample.images):
        notes.append(f"time was up: {encoded} of {plural(len(sample.images), 'image')} were encoded; measure longer")
    refused = Counter({one.reason: one.refused for one in facts.measured if one.refused})
    notes += [f"{plural(count, 'image')} cannot be encoded again: {reason}" for reason, count in refused.most_common()]
    if facts.job.reader != "packer":
        notes.append(f"images/s are those of ImageLoader; {facts.job.reader} may be slower or quicker")
    if len(sample.fields) > 1:
        others = ", ".join(name for name in sample.fields if name != "image")
        notes.append(f"sizes are those of the images alone, without {others}")
    return notes
