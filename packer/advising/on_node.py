"""Recommendations for the nodes of the job: threads, what to keep in memory, where to stage to."""

from __future__ import annotations

import math

from cache.messages import human_bytes, human_seconds, plural, quoted
from packer.advising.facts import SPARE, Facts, Recommendation, as_path
from packer.advising.machine import Directory
from packer.advising.measure import Measured

__all__ = ["advise_cache", "advise_staging", "advise_threads", "quick_form"]

_MANY_EPOCHS = 1000
_CACHING = ("packer",)  # readers that use the caches of this package


def quick_form(facts: Facts) -> tuple[str, Measured] | None:
    """The form of a cache that keeps up with the training, fits into memory and loses no more than is acceptable: if
    there is one, one that loses nothing."""
    for keep, one in _forms(facts) if facts.job.reader in _CACHING else ():
        if facts.keeps_up(one) and facts.is_allowed(one) and one.set_bytes.most <= facts.machine.cache_bytes:
            return keep, one
    return None


def advise_threads(facts: Facts, read: Measured) -> Recommendation:
    """How many threads of the loader decode what the training wants. read: the images that they get."""
    wanted, cpus = facts.job.images_per_second, facts.machine.cpus
    each = f"an image takes {1e3 * read.decode.value:.2g} ms of one CPU"
    if wanted is None:
        why = f"{each}; the loader uses {plural(cpus, 'CPU')} by itself"
        return Recommendation("threads", f"{cpus}, the default", why)
    needed = math.ceil(SPARE * wanted * read.decode.value)
    why = f"{each}, times {wanted:,.0f} images/s and a tenth to spare"
    if needed <= cpus:
        return Recommendation("threads", f"{needed} of {plural(cpus, 'CPU')}", why, code=f"threads={needed}")
    choice = f"{needed} would be needed, this machine has {plural(cpus, 'CPU')}"
    return Recommendation("threads", choice, f'{why}; ask for more CPUs, or decode on the GPU with device="cuda"')


def advise_cache(facts: Facts, chosen: Measured, output: str, converts: bool) -> Recommendation:
    """What of the set to keep in memory: nothing, the encoded bytes, smaller JPEGs, or pixels."""
    room, size = facts.machine.cache_bytes, chosen.set_bytes.most
    memory = f"{human_bytes(room)} of memory {'of such nodes' if facts.machine.assumed else 'here'} can hold a cache"
    form = quick_form(facts)
    if facts.job.reader not in _CACHING:
        why = f"readers.cached is for the readers of this package, and {facts.job.reader} reads the shards itself"
        return Recommendation("cache", "none but the page cache", why)
    if not facts.keeps_up(chosen):
        if form is not None:
            return _cached(facts, form[0], f"decoding is the limit; {_gain(facts, *form)}; {memory}", output)
        others = "; ".join(_gain(facts, *one) for one in _forms(facts))
        why = f"decoding is the limit, and no form of a cache fits and keeps up: {others}; {memory}"
        return Recommendation("cache", "none", why)
    instead = ""
    if form is not None and not facts.keeps_up(facts.original):
        instead = f"; in place of encoding again, a cache over the originals: {_gain(facts, *form)}"
    kind, is_local = _filesystem(facts, converts)
    if is_local and size <= facts.machine.memory_bytes:
        why = (
            f"the set ({human_bytes(size)}) is on a local filesystem ({kind or 'unknown'}) and fits into "
            f"{human_bytes(facts.machine.memory_bytes)} of memory{instead}"
        )
        return Recommendation("cache", "none: the page cache does it", why)
    why = f"the set takes {human_bytes(size)}; {memory}{instead}"
    if room <= 0:
        return Recommendation("cache", "none", why)
    if size > room:
        why += f"; {room / size:.0%} of the reads are hits then, where the page cache may give none"
    return _cached(facts, "encoded", why, output)


def _gain(facts: Facts, keep: str, one: Measured) -> str:
    loss = "the same pixels" if one.psnr is None else f"mean error {one.error:.2g} of 255"
    gain = f"{keep} gives {facts.rate(one):,.0f} images/s from {human_bytes(one.set_bytes.value)} ({loss})"
    saved = facts.original.decode.value - one.decode.value  # in every epoch but the one that fills it
    if saved <= 0:
        return gain
    filling = human_seconds(one.encode * facts.total / facts.machine.cpus)
    return f"{gain}; filling takes {filling}, which has paid after {1 + one.encode / saved:.1f} epochs"


def _cached(facts: Facts, keep: str, why: str, output: str) -> Recommendation:
    split = () if len(facts.splits) == 1 else ("--split", facts.largest_split)
    command = " ".join(map(quoted, ("packer", "cache", "warm", as_path(output), *split, "--keep", keep)))
    code = f'readers.cached(reader, keep="{keep}", persist=True)'
    return Recommendation("cache", f"keep {keep}", why, (command,), code)


def _forms(facts: Facts) -> list[tuple[str, Measured]]:
    """Forms of a cache that decode quicker, by what stands for them among the variants; first what loses nothing, then
    the smaller ones."""
    found = []
    for one in facts.measured:
        how = one.variant.reencode
        if how is not None and how.resize_short and how.quality == 90 and how.codec != "webp":
            found.append((f"recoded:{how.resize_short}@90", one))
        elif one.variant.keep:
            found.append((one.variant.keep, one))
    return sorted(found, key=lambda form: (form[1].psnr is not None, form[1].image_bytes))


def _filesystem(facts: Facts, converts: bool) -> tuple[str, bool]:
    """(type, whether it is local) of where the set will be."""
    machine = facts.machine
    return (machine.output_filesystem, machine.output_is_local) if converts else (machine.filesystem, machine.is_local)


def advise_staging(facts: Facts, chosen: Measured, output: str, converts: bool, is_cached: bool) -> Recommendation:
    """Whether and where to stage, with the epochs after which it has paid."""
    kind, is_local = _filesystem(facts, converts)
    if is_local:
        return Recommendation("staging", "none", f"the set is on a local filesystem of this node ({kind or 'unknown'})")
    size, lost = chosen.set_bytes.most, _lost_seconds(facts, chosen)
    copying = chosen.image_bytes * facts.total / max(1e-9, _read_rate(facts) * facts.original.image_bytes)
    rate = (
        f"{plural(facts.machine.cpus, 'thread')} read {_read_rate(facts):,.0f} images/s from {kind}, as measured here"
    )
    if lost <= 0:
        return Recommendation("staging", "none", f"{rate}, which is more than is decoded or wanted")
    epochs = copying / lost
    after = f"after {epochs:.1f} epochs" if epochs < _MANY_EPOCHS else "hardly ever"
    why = (
        f"{rate}, so an epoch waits {human_seconds(lost)}; copying {human_bytes(size)} takes about "
        f"{human_seconds(copying)} and has paid {after}"
    )
    fit = [one for one in facts.machine.directories if not one.refused]
    usable = [one for one in fit if one.free_bytes > 0 and not (is_cached and one.filesystem == "tmpfs")]
    fits = [one for one in usable if one.free_bytes >= size]
    if fits:
        return Recommendation(
            "staging", f"to {fits[0].path}", f"{why}; {_described(fits[0])}", (_stage(output, fits[0]),)
        )
    if not usable:
        refused = "; ".join(f"{one.path} ({one.refused or 'kept for the cache'})" for one in facts.machine.directories)
        return Recommendation("staging", "nowhere", f"{why}; no directory of this node will do: {refused or 'none'}")
    largest = max(usable, key=lambda one: one.free_bytes)
    fraction = math.floor(90 * largest.free_bytes / size) / 100
    if fraction <= 0:
        return Recommendation("staging", "nowhere", f"{why}; {_described(largest)}, less than a hundredth of it")
    command = f"{_stage(output, largest)} --fraction {fraction:g}"
    return Recommendation(
        "staging", f"{fraction:.0%} of it to {largest.path}", f"{why}; {_described(largest)}", (command,)
    )


def _read_rate(facts: Facts) -> float:
    """Images/s that as many threads as there are CPUs read from where the source is."""
    return facts.machine.cpus / max(facts.image_seconds, 1e-9)


def _lost_seconds(facts: Facts, chosen: Measured) -> float:
    """Seconds of an epoch that reading takes longer than decoding and training do."""
    demand = min(facts.rate(chosen), facts.job.images_per_second or math.inf)
    return facts.total / _read_rate(facts) - facts.total / demand


def _described(place: Directory) -> str:
    return f"{place.path} ({place.filesystem}, by {place.named_by}) has {human_bytes(place.free_bytes)}"


def _stage(output: str, place: Directory) -> str:
    return f"packer stage {quoted(as_path(output))} --target {quoted(place.path)}"
