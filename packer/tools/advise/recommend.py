"""What to pack, and how: recommendations as a function of what was measured and of what the job wants.

    images    the variant with the least error that keeps up with the training, or as they are
    format    by what will read the set
    shards    how many, of what size
    threads, cache, staging     see `packer.tools.advise.recommend`

No image is made worse without saying by how much, and that the originals must be kept.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from cache.errors import CacheDirectoryError
from cache.filesystem import Budget, cache_budget, filesystem_type, free_space, is_local
from cache.messages import human_bytes, human_seconds, plural, quoted
from cache.node import available_memory_bytes, usable_cpus
from cache.staging import candidates
from packer.conversion.plan import default_shard_bytes
from packer.tools.advise.measure import Measured

__all__ = [
    "READERS",
    "Directory",
    "Facts",
    "Job",
    "Machine",
    "Recommendation",
    "choose",
    "frontier",
    "look",
    "recommend",
    "staging_directories",
]

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


# --- All that recommendations follow from: plain values, so that they are a function of these and of nothing else.
READERS = ("packer", "dali", "rocal", "webdataset", "tensorflow", "h5py")
SPARE = 1.1  # times the rate that training wants: reading and copying batches take CPU time, too


@dataclass(frozen=True, slots=True)
class Job:
    """What will read the set. images_per_second: what all GPUs of a node want together, None if unknown.

    gpus: of a node. reader: one of READERS. max_error: the largest mean error that is acceptable, of 255.
    Raises ValueError.
    """

    images_per_second: float | None = None
    gpus: int = 1
    reader: str = "packer"
    max_error: float | None = None

    def __post_init__(self) -> None:
        if self.reader not in READERS:
            raise ValueError(f"reader must be one of {', '.join(READERS)}, not {self.reader!r}")
        for name in ("images_per_second", "gpus"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, not {value}")
        if self.max_error is not None and self.max_error < 0:
            raise ValueError(f"max_error must be 0 or more, not {self.max_error}")


@dataclass(frozen=True, slots=True)
class Facts:
    """What was measured, found and asked for.

    source: as the user named it. flags: the options with which `packer convert` opens it.
    packed: the format of a packed set, "" for another source.
    splits: images by split. damaged: images of the sample that do not decode, of `drawn`.
    image_seconds: to read one image from where it is, by one thread.
    measured: the images as they are first.
    """

    source: str
    measured: tuple[Measured, ...]
    machine: Machine
    job: Job
    splits: dict[str, int]
    flags: tuple[str, ...] = ()
    packed: str = ""
    damaged: int = 0
    drawn: int = 0
    image_seconds: float = 0.0
    name: str = field(default="set")

    @property
    def total(self) -> int:
        """Images in all splits."""
        return sum(self.splits.values())

    @property
    def largest_split(self) -> str:
        """The split with the most images: what a training reads."""
        return max(self.splits, key=lambda name: self.splits[name])

    @property
    def original(self) -> Measured:
        """The images as they are."""
        return self.measured[0]

    def rate(self, one: Measured) -> float:
        """Images/s that the CPUs of this machine decode and augment."""
        return one.per_second(self.machine.cpus)

    def keeps_up(self, one: Measured) -> bool:
        """Whether decoding is quick enough for the training; True where its rate is unknown."""
        wanted = self.job.images_per_second
        return wanted is None or self.rate(one) >= SPARE * wanted

    def is_allowed(self, one: Measured) -> bool:
        """Whether the error is acceptable."""
        return self.job.max_error is None or one.error <= self.job.max_error


@dataclass(frozen=True, slots=True)
class Recommendation:
    """One thing to do. choice: what; reason: the figures it follows from; commands: to run; code: for the training."""

    topic: str
    choice: str
    reason: str
    commands: tuple[str, ...] = ()
    code: str = ""


def as_path(path: str) -> str:
    """A path that no command takes for an option."""
    return f"./{path}" if path.startswith("-") else path


# --- What this machine offers: CPUs, memory, the kind of filesystem that a source is on, directories to stage to.
@dataclass(frozen=True, slots=True)
class Directory:
    """A directory that `packer stage` would try. refused: why it cannot be used, "" where it can."""

    path: str
    named_by: str
    filesystem: str
    free_bytes: int
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the processes of this node may use together.

    cpus: that this process may keep busy. memory_bytes: free for it. cache_bytes: the largest cache in shared memory.
    filesystem: type of the one that the source is on, and whether it is this node's own.
    output_filesystem, output_is_local: those of the current directory, where sets are packed to.
    directories: where a set can be staged to, in the order in which they are tried.
    assumed: whether the memory was given, and is not what is free now.
    """

    cpus: int
    memory_bytes: int
    cache_bytes: int
    filesystem: str
    is_local: bool
    output_filesystem: str = ""
    output_is_local: bool = True
    directories: tuple[Directory, ...] = ()
    assumed: bool = False


def look(source: Path, node_memory: int | None = None) -> Machine:
    """Examine this machine. node_memory: bytes of the nodes of the job, where that is not this machine.

    Of a node's memory half is taken as the size of its /dev/shm, which is the usual one.
    """
    memory = available_memory_bytes() if node_memory is None else node_memory
    if node_memory is not None:
        room = Budget(node_memory // 2, node_memory // 2, node_memory).bytes
    else:
        try:
            room = cache_budget().bytes
        except CacheDirectoryError:
            room = 0
    kind, output = filesystem_type(source), filesystem_type(Path())
    return Machine(
        usable_cpus(),
        memory,
        room,
        kind,
        is_local(kind),
        output,
        is_local(output),
        tuple(staging_directories()),
        node_memory is not None,
    )


def staging_directories() -> list[Directory]:
    """Where a set can be staged to, in the order in which they are tried."""
    found: dict[str, Directory] = {}
    for path, named_by in candidates(None):
        if str(path) not in found:
            found[str(path)] = _examined(path, named_by)
    return list(found.values())


def _examined(path: Path, named_by: str) -> Directory:
    kind, free, refused = "", 0, ""
    try:
        if not path.is_dir():
            refused = "no such directory"
        else:
            kind = filesystem_type(path)
            free = free_space(path, kind).bytes
            if not is_local(kind):
                refused = f"a {kind} filesystem, which is not local to this node"
            elif not os.access(path, os.W_OK | os.X_OK):
                refused = "not writable"
    except OSError as error:
        refused = error.strerror or str(error)
    return Directory(str(path), named_by, kind, free, refused)


# --- Recommendations for the nodes of the job: threads, what to keep in memory, where to stage to.
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
