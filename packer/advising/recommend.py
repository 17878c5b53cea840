"""What to pack, and how: recommendations as a function of what was measured and of what the job wants.

    images    the variant with the least error that keeps up with the training, or as they are
    format    by what will read the set
    shards    how many, of what size
    threads, cache, staging     see `packer.advising.on_node`

No image is made worse without saying by how much, and that the originals must be kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cache.messages import human_bytes, human_seconds, plural, quoted
from packer.advising.facts import SPARE, Facts, Recommendation, as_path
from packer.advising.measure import Measured
from packer.advising.on_node import advise_cache, advise_staging, advise_threads, quick_form
from packer.conversion.plan import default_shard_bytes

__all__ = ["choose", "frontier", "recommend"]

_BETTER = 1.05  # times the rate of a variant with less error, or it is not worth its error
_STEP = 1.3  # times the rate of the one before, in a text
_WORTHWHILE = 0.8  # of the bytes, which an encoding without loss may leave to be recommended for them alone
_STRIPED = ("lustre", "gpfs", "beegfs")
# Bytes that a sample takes besides its image, about: docs/performance.md.
_OVERHEAD = {"hdf5": 60, "tfrecord": 300, "tar": 1800}
# By what reads the set: its format and why; what it needs besides.
_FORMATS = {
    "packer": ("hdf5", "the readers of this package read any format at the same speed"),
    "dali": ("tfrecord", "DALI's own readers.tfrecord reads it; with readers.dali of this package any format does"),
    "rocal": ("tfrecord", "rocAL's own reader reads it; with readers.rocal of this package any format does"),
    "webdataset": ("tar", "WebDataset reads tar shards"),
    "tensorflow": ("tfrecord", "tf.data reads it"),
    "h5py": ("hdf5", "h5py reads it"),
}
_INDEXES = {"dali": "dali", "rocal": "rocal"}


def recommend(facts: Facts) -> list[Recommendation]:
    """All recommendations, the most important first."""
    chosen = choose(facts)
    form = None if facts.keeps_up(chosen) else quick_form(facts)
    container, why = _format(facts, chosen)
    converts = not chosen.variant.is_original or container != facts.packed
    output = _output_name(facts, chosen, container) if converts else facts.source
    shards = _shards(facts, chosen)
    found = [_images(facts, chosen, _convert(facts, chosen, container, shards.flags, output) if converts else ())]
    if facts.damaged:
        found.append(_damage(facts, converts))
    index = _INDEXES.get(facts.job.reader)
    commands = (f"packer export-index {quoted(as_path(output))} --for {index}",) if index else ()
    found.append(Recommendation("format", container, why, commands))
    if converts:
        found.append(Recommendation("shards", shards.choice, shards.reason))
    cache = advise_cache(facts, chosen, output, converts)
    staging = advise_staging(facts, chosen, output, converts, bool(cache.commands))
    return [*found, advise_threads(facts, form[1] if form else chosen), cache, staging]


# --- which images -----------------------------------------------------------------------------------------------
def choose(facts: Facts) -> Measured:
    """The variant to pack: as they are where that keeps up, alone or in a cache that loses nothing; else the one with
    the least error that does, else about the quickest."""
    packed = [one for one in facts.measured if not one.variant.keep]
    allowed = [one for one in packed if facts.is_allowed(one)]
    enough = [one for one in allowed if facts.keeps_up(one)]
    if facts.original in enough:
        exact = [one for one in enough if one.psnr is None and not one.refused]
        smallest = min(exact, key=lambda one: one.image_bytes)
        worthwhile = smallest.image_bytes <= _WORTHWHILE * facts.original.image_bytes
        return smallest if worthwhile else facts.original
    form = quick_form(facts)
    if form is not None and form[1].psnr is None:
        return facts.original  # nothing need be lost
    if enough:
        return min(enough, key=lambda one: (one.error, one.image_bytes))
    quickest = max(map(facts.rate, allowed))
    if form is not None or quickest < _BETTER * facts.rate(facts.original):
        return facts.original
    return min((one for one in allowed if facts.rate(one) * _BETTER >= quickest), key=lambda one: one.error)


def frontier(facts: Facts, gain: float = _BETTER) -> list[Measured]:
    """The variants with which each gain in images/s, of this factor or more, costs the least error, by rising error."""
    found: list[Measured] = []
    for one in sorted(facts.measured, key=lambda one: (one.error, -facts.rate(one))):
        if not one.variant.keep and (not found or facts.rate(one) >= gain * facts.rate(found[-1])):
            found.append(one)
    return found


def _images(facts: Facts, chosen: Measured, commands: tuple[str, ...]) -> Recommendation:
    if not chosen.variant.is_original:
        return Recommendation("images", f"pack them as: {chosen.variant.name}", _why(facts, chosen), commands)
    choice = "pack them as they are" if commands else "nothing to convert: the set is as it should be"
    return Recommendation("images", choice, _why_original(facts), commands)


def _why_original(facts: Facts) -> str:
    wanted, cpus = facts.job.images_per_second, plural(facts.machine.cpus, "CPU")
    decoded = f"{cpus} decode {facts.rate(facts.original):,.0f} images/s"
    if wanted is None:
        steps = "; ".join(
            f"{facts.rate(one) / SPARE:,.0f} images/s {one.variant.name}"
            + (f" (mean error {one.error:.1f} of 255)" if one.psnr is not None else "")
            for one in frontier(facts, _STEP)
        )
        flags = "--images-per-second or --simulate-step"
        return f"{decoded}; what the training wants is not known ({flags}). With a tenth to spare, up to {steps}"
    if facts.keeps_up(facts.original):
        return f"decoding keeps up: {decoded}, the training wants {wanted:,.0f}; nothing is lost"
    form = quick_form(facts)
    if form is not None:
        how = "only what is kept in memory gives" if form[1].psnr is not None else "a cache without any loss gives"
        return f"{decoded}, the training wants {wanted:,.0f}, and {how} that: see cache"
    limit = "" if facts.job.max_error is None else f" with a mean error up to {facts.job.max_error:g}"
    return f"{decoded} and the training wants {wanted:,.0f}, but no variant{limit} is quicker by {_BETTER - 1:.0%}"


def _why(facts: Facts, chosen: Measured) -> str:
    wanted, original = facts.job.images_per_second, facts.original
    cpus, rate = plural(facts.machine.cpus, "CPU"), facts.rate(chosen)
    size = (
        f"{human_bytes(chosen.image_bytes)} an image instead of {human_bytes(original.image_bytes)}, "
        f"{human_bytes(chosen.set_bytes.value)} in all instead of {human_bytes(original.set_bytes.value)}"
    )
    cost = f"encoding takes {human_seconds(chosen.encode * facts.total / facts.machine.cpus)} on {cpus}"
    if chosen.psnr is None:
        return f"{size}, without any loss, and {rate:,.0f} images/s; {cost}"
    why = f"as they are {cpus} decode {facts.rate(original):,.0f} images/s, and the training wants {wanted or 0:,.0f}; "
    if facts.keeps_up(chosen):
        why += f"this variant gives {rate:,.0f} with the least error"
    else:
        why += f"no variant gives that and a tenth to spare, this one gives {rate:,.0f}"
    return f"{why}{_error(chosen)}; {size}; {cost}. The loss cannot be undone: keep the originals"


def _error(one: Measured) -> str:
    if one.psnr is None:
        return ""
    return f" (mean {one.error:.2g} of 255, worst crop {one.worst:.2g}, PSNR {one.psnr:.0f} dB)"


def _damage(facts: Facts, converts: bool) -> Recommendation:
    share = facts.damaged / max(1, facts.drawn)
    return Recommendation(
        "damage",
        "leave damaged images out" if converts else "look for damaged images",
        f"{plural(facts.damaged, 'image')} of {facts.drawn:,} drawn ({share:.1%}) cannot be decoded; packing "
        f"stops at the first one, and --on-error quarantine copies them aside",
        () if converts else (f"packer verify {quoted(as_path(facts.source))} --deep",),
    )


# --- which format, and shards -----------------------------------------------------------------------------------
def _format(facts: Facts, chosen: Measured) -> tuple[str, str]:
    """The container to pack, and why."""
    container, why = _FORMATS[facts.job.reader]
    if facts.job.reader == "packer" and facts.packed:
        return facts.packed, f"{why}, and this set is {facts.packed} already"
    share = {name: size / max(1.0, chosen.image_bytes) for name, size in _OVERHEAD.items()}
    others = ", ".join(f"{name} {share[name]:.1%}" for name in _OVERHEAD if name != container)
    size = human_bytes(chosen.image_bytes)
    return container, f"{why}; it adds about {share[container]:.1%} to images of {size} ({others})"


@dataclass(frozen=True, slots=True)
class _Shards:
    choice: str
    reason: str
    flags: tuple[str, ...] = ()


def _shards(facts: Facts, chosen: Measured) -> _Shards:
    """Shards of the largest split. Those of re-encoded images are given in samples: sizes are cut by the originals."""
    split = facts.largest_split
    samples = facts.splits[split]
    size, before = (one.image_bytes * samples for one in (chosen, facts.original))
    usual = _usual_shards(size, samples)
    gpus, cpus = facts.job.gpus, facts.machine.cpus
    needed = max(gpus, gpus * (cpus // gpus)) if facts.job.reader not in ("packer", "h5py") else 1
    count = min(samples, max(usual, needed))
    flags: tuple[str, ...] = ()
    if count != _usual_shards(before, samples):
        flags = ("--samples-per-shard", str(max(1, samples // count) if count > usual else math.ceil(samples / count)))
        count = math.ceil(samples / int(flags[1]))
    why = f"{human_bytes(size)} in {split}: 8 shards a split, but none under 64 MiB or over 1 GiB"
    if count > usual:
        why = f"each of {plural(gpus, 'rank')} times {plural(max(1, cpus // gpus), 'worker')} needs a shard of its own"
    if (kind := facts.machine.output_filesystem) in _STRIPED:
        why += f"; on {kind} one stripe a shard is enough, since the shards are spread over the servers"
    return _Shards(f"{plural(count, 'shard')} of about {human_bytes(size / count)}", why, flags)


def _usual_shards(size: float, samples: int) -> int:
    return max(1, min(samples, math.ceil(size / default_shard_bytes(round(size)))))


# --- commands ---------------------------------------------------------------------------------------------------
def _convert(facts: Facts, chosen: Measured, container: str, shards: tuple[str, ...], output: str) -> tuple[str, ...]:
    leaves_out = ("--on-error", "quarantine") if facts.damaged or chosen.refused else ()
    words = ("packer", "convert", as_path(facts.source), *facts.flags, *chosen.variant.flags, "--to", container)
    named = ("-o", as_path(output)) if chosen.variant.flags else ()
    return (" ".join(map(quoted, (*words, *shards, *leaves_out, *named))),)


def _output_name(facts: Facts, chosen: Measured, container: str) -> str:
    """The directory that the command makes: its default, or one that says how the images were encoded."""
    return "-".join(part for part in (facts.name, chosen.variant.suffix, container) if part)
