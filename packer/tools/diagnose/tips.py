"""The table of tips: a row for each possible change, with the evidence that it depends on.

A row is data: the condition, the reason, the change to make, and the predicted seconds of a step. Words in braces are
keys of `_WORDS` or names of facts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from cache.messages import human_bytes, listed, plural, quoted
from packer.tools.diagnose.evidence import Evidence, Facts, Member
from packer.tools.diagnose.ladder import Advice, in_ms

__all__ = ["TIPS", "Tip", "advise"]


class Tip(NamedTuple):
    """A row of the table. when: whether the tip applies. why, how: texts with words in braces.

    seconds: predicted seconds of a step; None without a prediction.
    """

    id: str
    title: str
    when: Callable[[Evidence, Facts], object]
    why: str
    how: str
    seconds: Callable[[Evidence], float | None] = lambda e: None


_BUSY = 0.95  # of the CPUs
_USEFUL = 0.97  # of the time of a step: a tip with a longer predicted time is not given
_VARIES, _VARIES_LITTLE = 0.3, 0.1  # of the time of a step
_MANY_READERS = 16
_TOO_FEW = 1.5  # times the usable CPUs
_SMALL_FILE, _LARGE, _CAUTIOUS = 1 << 20, 50_000, 64 << 20  # bytes: of a file, of a sample, of memory
_ROOM = 0.9  # of the free memory, at most, for a cache
_SHM_SHARE = 0.25
_SMALL_BATCH = 32
_LOW_MEMORY = 0.15
_MARGIN = 256 / 224  # a random crop needs an image larger than its output
_MUCH_LARGER = 1.3
_PHOTO_BYTES = 0.35  # per pixel, in a JPEG of quality 90
_BY_CODEC = 0.6  # of the decoding time of libjpeg
_FIXED_DECODING = 0.05  # share of the decoding time that does not depend on the size of the image
_GPU_FRIENDLY = (
    "Normalize", "ColorJitter", "GaussianBlur", "ConvertImageDtype", "ToDtype", "RandomErasing", "RandomHorizontalFlip",
    "RandomVerticalFlip", "RandomGrayscale", "RandomRotation", "RandomSolarize", "RandomInvert", "ConvertColor",
    "Scale",
)  # fmt: skip
_FIXED = (
    "Resize", "CenterCrop", "Pad", "Grayscale", "ToTensor", "PILToTensor", "ToImage", "SmallestMaxSize",
    "LongestMaxSize",
)  # fmt: skip
_CROPS = ("Crop", "Resize", "MaxSize")
_POINTLESS_FIRST = (
    "Blur", "Jitter", "Normalize", "Erasing", "Solarize", "Equalize", "Posterize", "Contrast", "Noise", "Color",
    "Rotation", "Affine", "Perspective", "Augment", "Mask", "Sharpness",
)  # fmt: skip
_LIBRARIES = ("torchvision", "albumentations", "kornia", "torchaudio", "monai", "PIL", "readers", "torch")


# --- Queries of the evidence, for the rows.
def _raw(e: Evidence) -> tuple[str, ...]:
    """The stages that fetch raw data: storage, and "read" if it mostly waits or decoding is a separate stage."""
    reads = "read" in e.names and (e.waits("read") or "decode" in e.names)
    return tuple(name for name in ("storage", "read") if name in e.names and (name == "storage" or reads))


def _fetches(e: Evidence) -> tuple[str, ...]:
    """The stages that read files; "read" may also compute."""
    return tuple(name for name in ("storage", "read") if name in e.names)


def _decoding(e: Evidence) -> tuple[str, ...]:
    """The stages that decode: "decode", or else "read" if it computes and the data are images."""
    if "decode" in e.names:
        return ("decode",)
    return ("read",) if e.facts.media and "read" in e.names and not e.waits("read") else ()


def _augmenting(e: Evidence) -> tuple[str, ...]:
    return tuple(name for name in e.names if name.startswith(("transform", "augment")))


def _fetching(e: Evidence) -> bool:
    return e.costs(*_raw(e))


def _reads(e: Evidence) -> bool:
    """Whether the stage "read" mostly computes, and a step waits for it."""
    return e.costs("read") and not e.waits("read")


def _cacheable(e: Evidence) -> bool:
    return not e.facts.cached and not e.facts.in_memory and _fetching(e)


def _spread(e: Evidence) -> float:
    """The width of the interval of the step time, as a share of the step time."""
    return (e.diagnosis.full.high - e.diagnosis.full.low) / e.diagnosis.full.seconds


def _bytes_per_second(e: Evidence, step_seconds: float) -> float:
    return e.facts.mean_bytes * (e.facts.batch_size or 0) / step_seconds


def _nearest(e: Evidence) -> str:
    """The first place of this node that is faster and has room for the set; "" if there is none."""
    return next((place for place, free in e.facts.faster if free > e.facts.set_bytes > 0), "")


def _cached_share(e: Evidence) -> float:
    return _ROOM * e.facts.shm_bytes / (e.facts.set_bytes or 1.0)


def _more_readers(e: Evidence) -> int:
    return min(_MANY_READERS, max(4, 2 * e.facts.workers))


def _more_ahead(e: Evidence) -> int:
    ahead = 2 * (e.facts.prefetch or 0)
    return max(4, ahead // (e.facts.workers or 1)) if e.facts.loader == "DataLoader" else ahead


def _cpus_short(e: Evidence) -> bool:
    """Whether the loader needs far more CPUs than are usable."""
    return bool(e.diagnosis.culprit) and (e.diagnosis.cpus_needed or 0.0) > _TOO_FEW * e.diagnosis.cpus


def _costly_members(e: Evidence) -> list[Member]:
    """Members of the transform that a step waits for, the costliest first."""
    return sorted((m for m in e.facts.members if e.costs(m.stage)), key=lambda member: -e.freed(member.stage))


def _computing_members(e: Evidence, *, is_own: bool) -> list[Member]:
    """The costly members that compute, in the user's code (`is_own`) or in torchvision."""
    return [m for m in _costly_members(e) if not e.waits(m.stage) and (
        m.module.partition(".")[0] not in _LIBRARIES if is_own else m.module.startswith("torchvision"))]  # fmt: skip


def _fixed(e: Evidence) -> list[Member]:
    """The deterministic members before the first random one: their result is the same in each epoch."""
    return list(itertools.takewhile(lambda member: member.name in _FIXED, e.facts.members))


def _misplaced(e: Evidence) -> list[Member]:
    """A costly member that works on the whole image, and a later crop or resize; [] if there is none."""
    members = e.facts.members
    for number, member in enumerate(members):
        later = [m for m in members[number + 1 :] if any(word in m.name for word in _CROPS)]
        if later and any(word in member.name for word in _POINTLESS_FIRST) and e.costs(member.stage):
            return [member, later[0]]
    return []


def _for_gpu(e: Evidence) -> list[str]:
    names = [member.name for member in _costly_members(e)]
    if e.costs("augment") and not e.facts.device.startswith("cuda"):
        names += e.facts.ops
    return [name for name in names if name in _GPU_FRIENDLY]


def _wanted_side(e: Evidence) -> int:
    return round(e.facts.crop * _MARGIN)


def _smaller(e: Evidence) -> float:
    """The share of the decoding time that remains with images of the wanted side."""
    f, side = e.facts, _wanted_side(e)
    left = (side / f.short_side) ** 2
    if f.mean_bytes and f.long_side:  # the smaller image may also have fewer bytes per pixel
        left = min(left, side * side * f.long_side / f.short_side * _PHOTO_BYTES / f.mean_bytes)
    return _FIXED_DECODING + (1 - _FIXED_DECODING) * left


def _shrinks(e: Evidence) -> bool:
    return 0 < _wanted_side(e) < e.facts.short_side


def _decoded_bytes(e: Evidence) -> float:
    return e.facts.pixel_bytes * ((_wanted_side(e) / e.facts.short_side) ** 2 if _shrinks(e) else 1.0)


def _overhead(e: Evidence) -> float:
    return sum(e.added(stage) for stage in ("copy", "transfer", "collate"))


def _workers_needed(e: Evidence) -> int:
    return e.model.enough_workers() if e.model is not None else 0


def _seconds_of_workers(e: Evidence) -> float:
    return e.model.seconds(workers=_workers_needed(e)) if e.model is not None else 0.0


def _who(e: Evidence) -> str:
    count = e.facts.workers if e.model is None else e.model.workers
    return f"{plural(count, 'worker')} make{'s' * (count == 1)}" if count else "the training process makes"


def _seconds_of_order(e: Evidence) -> float | None:
    f, (member, _) = e.facts, _misplaced(e)
    return e.predict(member.stage, left=min(1.0, (f.crop / f.short_side) ** 2)) if f.crop and f.short_side else None


def _per_sample(e: Evidence, *stages: str) -> str:
    work = sum(e.model.work.get(stage, 0.0) for stage in stages) if e.model is not None else 0.0
    return f"{in_ms(work / (e.facts.batch_size or 1))} a sample" if work else "much"


def _option(e: Evidence, of_torch: str, of_packer: str) -> str:
    return of_packer if e.facts.loader == "ImageLoader" else of_torch


# --- The words for the texts of the rows.
_WORDS: dict[str, Callable[[Evidence], Any]] = {
    "where": lambda e: f"the data are on {e.facts.filesystem or 'an object store or web server'} ({e.facts.place})",
    "cost": lambda e: f"{' and '.join(_raw(e))} cost {in_ms(max(map(e.freed, _raw(e))))} of a step of "
                      f"{in_ms(e.diagnosis.full.seconds)}",
    "range": lambda e: f"a step takes from {in_ms(e.diagnosis.full.low)} to {in_ms(e.diagnosis.full.high)}",
    "step": lambda e: in_ms(e.diagnosis.step.seconds),
    "steady": lambda e: in_ms(e.predict("storage") or 0.0),
    "rate_needed": lambda e: human_bytes(_bytes_per_second(e, e.diagnosis.step.seconds)),
    "rate": lambda e: human_bytes(_bytes_per_second(e, e.diagnosis.full.seconds)),
    "rate_of_batches": lambda e: human_bytes(e.diagnosis.batch_bytes / e.diagnosis.step.seconds),
    "set": lambda e: human_bytes(e.facts.set_bytes),
    "part": lambda e: human_bytes(e.facts.set_bytes / e.facts.nodes),
    "sample": lambda e: human_bytes(e.facts.mean_bytes),
    "bytes_a_pixel": lambda e: e.facts.mean_bytes / (e.facts.short_side * e.facts.long_side),
    "or_decoded": lambda e: f"; decoded it would be {human_bytes(e.facts.pixel_bytes)}" * bool(e.facts.pixel_bytes),
    "decoded": lambda e: human_bytes(_decoded_bytes(e)),
    "keep": lambda e: f"decoded:{_wanted_side(e)}" if _shrinks(e) else "decoded",
    "reader": lambda e: "reader" if e.facts.ours else f"readers.open_folder({e.facts.place!r})",
    "share": _cached_share,
    "shm": lambda e: human_bytes(e.facts.shm_bytes),
    "memory": lambda e: human_bytes(e.facts.memory_bytes),
    "unused": lambda e: human_bytes(e.facts.unused_cache_bytes),
    "gpu_free": lambda e: human_bytes(e.facts.gpu_free_bytes),
    "gpu_memory": lambda e: human_bytes(e.facts.gpu_bytes),
    "nearest": lambda e: quoted(_nearest(e)),
    "readers": _more_readers,
    "more_readers": lambda e: f"packer stage {e.facts.source} --threads {_more_readers(e)}"
                    if e.facts.files == "remote" else f"{_option(e, 'num_workers', 'threads')}={_more_readers(e)}",
    "threads": lambda e: _option(e, "num_workers", "threads"),
    "half": lambda e: e.facts.workers // 2,
    "workers_needed": _workers_needed,
    "who": _who,
    "by_workers": lambda e: in_ms(e.model.slowdown * sum(e.model.work.values()) / max(1, e.model.workers)),  # type: ignore[union-attr]
    "floor": lambda e: in_ms(e.model.floor),  # type: ignore[union-attr]
    "work": lambda e: in_ms(sum(e.model.work.values())),  # type: ignore[union-attr]
    "cpu": lambda e: in_ms(sum(e.model.cpu.values())),  # type: ignore[union-attr]
    "count_of_cpus": lambda e: plural(e.diagnosis.cpus, "CPU"),
    "cpus": lambda e: e.diagnosis.cpus,
    "cpus_needed": lambda e: e.diagnosis.cpus_needed,
    "cpus_asked": lambda e: round((e.diagnosis.cpus_needed or 0.0) + 0.5),
    "cpu_busy": lambda e: e.diagnosis.full.cpu_busy,
    "batches_ahead": lambda e: plural(e.facts.prefetch or 0, "batch"),
    "prefetch": lambda e: f"{_option(e, 'prefetch_factor', 'prefetch')}={_more_ahead(e)}",
    "side": _wanted_side,
    "resized": lambda e: e.facts.crop or 256,
    "left": _smaller,
    "decoding": lambda e: _per_sample(e, *_decoding(e)),
    "reading": lambda e: _per_sample(e, "read"),
    "fixed": lambda e: listed([member.name for member in _fixed(e)]),
    "of_fixed": lambda e: _per_sample(e, *(member.stage for member in _fixed(e))),
    "first": lambda e: _misplaced(e)[0],
    "of_first": lambda e: _per_sample(e, _misplaced(e)[0].stage),
    "crop_of": lambda e: _misplaced(e)[1].name,
    "mine": lambda e: _computing_members(e, is_own=True)[0],
    "of_mine": lambda e: _per_sample(e, _computing_members(e, is_own=True)[0].stage),
    "theirs": lambda e: _computing_members(e, is_own=False)[0],
    "of_theirs": lambda e: _per_sample(e, _computing_members(e, is_own=False)[0].stage),
    "for_gpu": lambda e: listed(_for_gpu(e)),
    "augmenting": lambda e: in_ms(sum(map(e.freed, _augmenting(e)))),
    "copy": lambda e: in_ms(e.added("copy")),
    "pinned": lambda e: "pinned" if e.facts.pin_memory else "not pinned",
    "overhead": lambda e: in_ms(_overhead(e)),
    "samples_a_batch": lambda e: plural(e.facts.batch_size or 0, "sample"),
    "double_batch": lambda e: 2 * (e.facts.batch_size or 0),
    "half_batch": lambda e: max(1, (e.facts.batch_size or 2) // 2),
    "batch": lambda e: e.facts.batch_size or 64,
}  # fmt: skip


class _Words(dict[str, Any]):
    """The words for some evidence, each computed when a row uses it."""

    def __init__(self, evidence: Evidence) -> None:
        super().__init__()
        self._evidence = evidence

    def __missing__(self, name: str) -> Any:
        return _WORDS[name](self._evidence) if name in _WORDS else getattr(self._evidence.facts, name)


TIPS: tuple[Tip, ...] = (
    # Raw data: place, file layout, reading and caching.
    Tip("network", "a machine with more bandwidth",
        lambda e, f: f.is_shared and not any(room > f.set_bytes for _, room in f.faster)  # otherwise stage a copy
        and f.mean_bytes and f.batch_size and e.costs("storage"),
        "training needs {rate_needed}/s of raw data and gets {rate}/s; the set of {set} does not fit on this node",
        "Use a machine with a faster network or a larger local disk; no option of the loader changes this."),
    Tip("stage", "copy the set to faster storage of the node",
        lambda e, f: f.files in ("shards", "remote") and _nearest(e) and _fetching(e),
        "{where}, and {cost}; {nearest} is nearer and has room for {set}",
        "packer stage {source} --target {nearest}",
        lambda e: e.predict(*filter(e.waits, _fetches(e)))),
    Tip("node-local", "read where no other job interferes",
        lambda e, f: f.local is False and _spread(e) >= _VARIES and e.costs("storage"),
        "{where}, shared with other nodes, and {range}",
        "packer stage {source} --target '$TMPDIR' -- python train.py"),
    Tip("concurrency", "more requests at a time",
        lambda e, f: f.is_shared and f.workers < _MANY_READERS and e.costs("storage"),
        "{where}: requests wait, and {workers} at a time do not use its capacity", "{more_readers}"),
    Tip("requests", "fewer, larger reads",
        lambda e, f: f.shuffled and f.files in ("remote", "shards") and f.local is not True and e.costs("storage"),
        "{where}, and samples are read one by one in a random order; blocks of 8 MiB take far fewer reads",
        "order = readers.order.block_shuffled(reader, block_bytes=8 << 20, window=64)"),
    Tip("fewer-readers", "fewer readers at a time",
        lambda e, f: f.local is False and f.workers >= _MANY_READERS and e.costs("storage"),
        "{workers} workers of each process read from {filesystem} at a time, and still {cost}: it may be at its "
        "limit, and more workers then slow down every job", "{threads}={half}"),
    Tip("transfer", "fetch whole shards in parallel",
        lambda e, f: f.files == "remote" and _fetching(e),
        "every sample is a request to {place}; fetching whole shards once, in parallel, is faster",
        "packer stage {source} --target /local --threads 8"),
    Tip("compress", "store the samples compressed",  # a JPEG has 0.2 to 0.6 bytes per pixel
        lambda e, f: f.pixel_bytes and f.mean_bytes >= max(_LARGE, f.short_side * f.long_side) and _fetching(e),
        "a sample takes {sample}, {bytes_a_pixel:.1f} bytes a pixel, and {cost}; data stored as pixels cost more to "
        "read than they save", "packer convert {source} --to tar --reencode jpeg --quality 90"),
    Tip("pack", "pack small files into shards",
        lambda e, f: f.files == "loose" and 0 < f.mean_bytes < _SMALL_FILE and e.costs(*_fetches(e)),
        "{samples:,} files of {sample}: each is looked up, opened and closed for one read",
        "packer convert {source} --to hdf5"),
    Tip("cache", "keep the encoded samples in shared memory",
        lambda e, f: _cacheable(e) and 0 < f.set_bytes < _ROOM * f.shm_bytes,
        "{cost}; the encoded set is {set} and fits into the {shm} of shared memory, once for all workers of the "
        "node{or_decoded}", "reader = readers.cached({reader})",
        lambda e: e.predict(*_raw(e))),
    Tip("cache-part", "keep a part of the samples in memory",
        lambda e, f: _cacheable(e) and _CAUTIOUS < _ROOM * f.shm_bytes < f.set_bytes,
        "{cost}; of {set} shared memory holds {share:.0%}, always the same samples",
        'reader = readers.cached(reader, "{share:.0%}")',
        lambda e: e.predict(*_raw(e), left=1 - _cached_share(e))),
    Tip("cache-elsewhere", "a cache without a tmpfs",
        lambda e, f: _cacheable(e) and f.shm_bytes <= min(_SHM_SHARE * f.memory_bytes, f.set_bytes) and f.set_bytes,
        "/dev/shm has {shm}, the memory {memory}: a cache needs no tmpfs",
        'reader = readers.cached(reader, backend="memfd")'),
    Tip("clean", "remove caches that are not used",
        lambda e, f: f.unused_cache_bytes >= _CAUTIOUS and not f.shm_bytes > f.set_bytes > 0,
        "{unused} of /dev/shm are caches that no process uses", "packer cache clean"),
    Tip("node-shuffle", "shuffle on the node, and exchange parts after some epochs",
        lambda e, f: f.nodes > 1 and f.files in ("shards", "remote") and _fetching(e),
        "each of {nodes} nodes reads the whole set in a global shuffle; a part each, exchanged after some epochs, is "
        "{part} a node",
        "order = readers.order.NodeLocal(len(reader), {nodes}, seed=1)  # packer stage --part node"),
    # Work: workers and CPUs.
    Tip("workers", "more workers",
        lambda e, f: e.model is not None and f.is_known and _workers_needed(e) > e.model.workers,
        "{who} a batch in {by_workers}, training takes one in {floor}; a batch is {work} of work, {cpu} of it on the "
        "CPU, and there are {count_of_cpus}", "{threads}={workers_needed}",
        _seconds_of_workers),
    Tip("prefetch", "more batches ahead",
        lambda e, f: e.model is not None and f.prefetch and f.is_known and e.costs("storage")
        and _spread(e) >= _VARIES_LITTLE and (e.predict("storage") or 0.0) <= 0.9 * e.diagnosis.full.seconds,
        "{range}, and {steady} if it never waits for storage: more than {batches_ahead} ahead can bridge occasional "
        "waits", "{prefetch}"),
    Tip("shrink", "shrink the images before training",
        lambda e, f: f.crop and f.short_side > _MUCH_LARGER * _wanted_side(e) and not f.cached
        and e.costs(*_decoding(e)),
        "images have a short side of {short_side} pixels, training uses {crop}, and decoding takes {decoding}; with "
        "{side} pixels that is about {left:.0%}",
        "packer convert {source} --to hdf5 --resize-short {side}\npacker advise {source}  # other sizes",
        lambda e: e.predict(*_decoding(e), left=_smaller(e))),
    Tip("decoded", "keep pixels in shared memory",
        lambda e, f: f.ours and not f.cached and e.costs("decode") and 0 < _decoded_bytes(e) < _ROOM * f.shm_bytes,
        "decoding takes {decoding}, and the pixels of the set, {decoded}, fit into shared memory ({shm})",
        'reader = readers.cached(reader, keep="{keep}")',
        lambda e: e.predict(*_fetches(e), "decode")),
    Tip("prepare", "do constant work before training",
        lambda e, f: e.costs(*(member.stage for member in _fixed(e))),
        "{fixed} give the same result in each epoch and take {of_fixed}",
        "packer convert {source} --to hdf5 --resize-short {resized}",
        lambda e: e.predict(*(member.stage for member in _fixed(e)))),
    Tip("cpus", "a machine with more CPUs for each GPU", lambda e, f: _cpus_short(e),
        "to keep up, the loader needs {cpus_needed:.1f} CPUs, and this process may use {cpus}; use a machine with "
        "more, or reduce the work", "sbatch --cpus-per-task={cpus_asked} job.sh"),
    Tip("servers", "prepare batches on other machines", lambda e, f: _cpus_short(e) and e.diagnosis.batch_bytes,
        "{cpus_needed:.1f} CPUs are needed, and {cpus} are available; other machines could prepare batches, if the "
        "network brings {rate_of_batches}/s from them",
        "Another service must do that (as tf.data service or Ray Data); packer has none."),
    Tip("order", "crop before the work on pixels", lambda e, f: _misplaced(e),
        "{first.name} works on the whole image, {of_first}, of which {crop_of} then keeps a part: crop and resize "
        "first", "transform = Compose([{crop_of}(size), {first.name}(), *others])",
        _seconds_of_order),
    # Work: libraries and code.
    Tip("compile", "compile your own transforms", lambda e, f: _computing_members(e, is_own=True),
        "{mine.name}, of {mine.module}, computes {of_mine} on the CPU; loops in Python are 10 to 100 times as fast "
        "when they are compiled",
        "@numba.njit(nogil=True)\ndef work(image): ...\n"
        "op = torch.utils.cpp_extension.load('op', ['op.cpp'])  # where Numba cannot"),
    Tip("library", "a faster library for augmentation", lambda e, f: _computing_members(e, is_own=False),
        "{theirs.name} of torchvision takes {of_theirs} on the CPU; a recipe of readers.augment decodes, crops and "
        "resizes in one pass, and albumentations is often faster, too",
        "dataset = ImageDataset(reader, [RandomResizedCrop(224), RandomHorizontalFlip()])"),
    Tip("decoder", "a faster decoder",
        lambda e, f: f.decoder == "pillow" and f.media == "jpeg" and _reads(e),
        "the data set reads and decodes {reading}; libjpeg-turbo without Pillow, at the scale and for the part that a "
        "crop needs, takes about half",
        "reader = readers.open_folder({place!r})\nloader = ImageLoader(reader, {batch})"),
    Tip("codec", "install the compiled JPEG decoder",
        lambda e, f: f.ours and f.no_codec and f.media == "jpeg" and f.device == "cpu" and e.costs(*_decoding(e)),
        "decoding an image takes {decoding}, and about half of that with it; {no_codec}", "packer doctor",
        lambda e: e.predict(*_decoding(e), left=_BY_CODEC)),
    Tip("balance", "a format that decodes faster",
        lambda e, f: f.media in ("png", "webp", "tiff", "gif") and e.costs(*_decoding(e)),
        "the images are {media}, and decoding one takes {decoding}; a JPEG of quality 95 takes a fraction of it, and "
        "loses little", "packer convert {source} --to hdf5 --reencode jpeg --quality 95"),
    # On the GPU.
    Tip("gpu-decode", "decode on the GPU",
        lambda e, f: f.gpus and f.media in ("jpeg", "") and e.costs(*_decoding(e))
        and not (f.device.startswith("cuda") and f.decoder.startswith(("torchcodec", "torchvision"))),
        "decoding takes {decoding} of the CPUs, and the GPU can decode JPEG",
        "loader = ImageLoader(reader, 256, augment=ops, device='cuda', decoder='torchcodec')\n"
        "loader = DaliLoader(reader, 256, augment=ops)  # or by DALI"),
    Tip("gpu-transforms", "transforms on the GPU", lambda e, f: f.gpus and _for_gpu(e),
        "{for_gpu} cost {augmenting} of a step on the CPUs; on whole batches on the GPU they cost little",
        "loader = ImageLoader(reader, 256, augment=ops, device='cuda')"),
    Tip("gpu-decompress", "decompress on the GPU",
        lambda e, f: f.gpus and f.media not in ("jpeg", "") and e.costs(*_decoding(e)),
        "the CPUs decompress {media}, {decoding}; GPUs decompress JPEG, by torchcodec and DALI, and your own formats "
        "with nvCOMP", "packer convert {source} --to hdf5 --reencode jpeg"),
    Tip("generate", "generate the data on the GPU", lambda e, f: f.files == "none" and _reads(e),
        "{dataset} reads no file and computes {reading}: if samples are generated, the GPU can generate them without "
        "a copy; approximate samples may suffice at first, with the data set at the end",
        "images = torch.rand(256, 3, 224, 224, device='cuda')  # the generator, on whole batches"),
    Tip("threads", "one thread in each worker",
        lambda e, f: f.loader == "DataLoader" and f.workers > 1 and f.omp_threads != "1"
        and (e.diagnosis.full.cpu_busy or 0.0) >= _BUSY
        and e.costs(*(stage for stage in ("read", *_decoding(e), *_augmenting(e)) if not e.waits(stage))),
        "the CPUs are {cpu_busy:.0%} busy, and libraries in each of the {workers} workers may start a thread for each "
        "of the {cpus} CPUs; one thread each is enough, with libraries built for this CPU (AVX2, libjpeg-turbo)",
        "OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENCV_FOR_THREADS_NUM=1 python train.py"),
    # The copy to the device, and the step.
    Tip("pin-memory", "copy from pinned memory while the step before runs",
        lambda e, f: f.gpus and f.copies and f.loader == "DataLoader" and e.costs("copy"),
        "the copy to the device adds {copy} to a step, and the batches are {pinned}",
        "loader = DataLoader(dataset, pin_memory=True)\nbatches = readers.torch.DevicePrefetcher(loader, device)"),
    Tip("batch-size", "try a larger batch",
        lambda e, f: 0 < (f.batch_size or 0) < _SMALL_BATCH and f.is_known
        and _overhead(e) >= 0.1 * e.diagnosis.full.seconds,
        "a batch has {samples_a_batch}, for which copy, transfer and collate take {overhead} of each step; with larger "
        "batches a sample costs less of that, but they change training", "batch_size={double_batch}"),
    Tip("gpu-memory", "leave memory of the GPU for preprocessing",
        lambda e, f: f.gpu_bytes and f.device.startswith("cuda") and f.gpu_free_bytes <= _LOW_MEMORY * f.gpu_bytes
        and f.loader in ("ImageLoader", "DaliLoader"),
        "batches are made on the GPU, which has {gpu_free} of {gpu_memory} left", "batch_size={half_batch}"),
    Tip("real-step", "measure with the real step", lambda e, f: f.simulated,
        "the step only waits {step}: to know the gain, measure the model itself on batches in the memory of the "
        "device", "packer diagnose train.py:make_loader --step train.py:train_step --device cuda"),
    Tip("watch", "watch the machine over time", lambda e, f: _spread(e) >= _VARIES,
        "{range}: look at the CPUs, disks and GPU during that time",
        "packer monitor --output run.json -- python train.py"),
)  # fmt: skip


def advise(evidence: Evidence, tips: Iterable[Tip] = TIPS) -> tuple[Advice, ...]:
    """The advice of a diagnosis, the largest predicted gain first; none if the data keep up with training."""
    full, advice, words = evidence.diagnosis.full.seconds, list[Advice](), _Words(evidence)
    for tip in tips if evidence.diagnosis.culprit else ():
        if not tip.when(evidence, evidence.facts):
            continue
        seconds = tip.seconds(evidence)
        if seconds is None or seconds <= _USEFUL * full:
            gain = 0.0 if seconds is None else max(0.0, full - seconds)
            why, how = tip.why.format_map(words), tip.how.format_map(words)
            advice.append(Advice(tip.id, tip.title, why, how, seconds, gain))
    return tuple(sorted(advice, key=lambda each: -each.gain))
