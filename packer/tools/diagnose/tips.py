"""The table of tips: a row for each thing that could be changed, with the evidence that triggers it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cache.messages import human_bytes, listed, plural, quoted
from packer.tools.diagnose.evidence import Evidence, Member
from packer.tools.diagnose.ladder import Advice

__all__ = ["TIPS", "advise"]


# --- A row of the table of tips.
WORKERS = ("num_workers", "threads")


@dataclass(frozen=True)
class Suggestion:
    """What a row makes of evidence that triggers it. seconds: predicted of a step, None if that cannot be said."""

    why: str
    how: str
    seconds: float | None = None


@dataclass(frozen=True)
class Tip:
    """A row. check: what the evidence calls for, None if nothing. idle: also if the data keep up with the training."""

    id: str
    title: str
    check: Callable[[Evidence], Suggestion | None]
    idle: bool = False


def option(e: Evidence, value: int, names: tuple[str, str]) -> str:
    """An option with a new value. names: of a DataLoader, of an ImageLoader."""
    return f"{names[e.facts.loader == 'ImageLoader']}={value}"


def in_ms(seconds: float) -> str:
    """12.3 ms."""
    return f"{1e3 * seconds:.1f} ms"


# --- Tips on raw data: where they are, in which files, how they are read and cached.
_SMALL_FILE = 1 << 20
_LARGE = 50_000  # bytes of a sample; of smaller ones headers are a part
_LARGE_PIXEL = 1.0  # encoded bytes of a pixel; a JPEG takes 0.2 to 0.6
_MANY_READERS = 16
_ROOM = 0.9  # of the free memory that a cache may take
_SHM_SHARE = 0.25
_CAUTIOUS = 64 << 20
_VARIES = 0.3  # of the time of a step


def _raw(e: Evidence) -> tuple[str, ...]:
    """The stages that fetch raw data: storage, and reading where it mostly waits."""
    stages = ["storage"] if "storage" in e.names else []
    if "read" in e.names and (e.waits("read") or "decode" in e.names):
        stages.append("read")
    return tuple(stages)


def _fetching(e: Evidence) -> bool:
    return e.costs(*_raw(e))


def _cacheable(e: Evidence) -> bool:
    return not e.facts.cached and not e.facts.in_memory and _fetching(e)


def _cost(e: Evidence) -> str:
    stages = _raw(e)
    gain = max(e.freed(stage) for stage in stages)
    return f"{' and '.join(stages)} cost {in_ms(gain)} of a step of {in_ms(e.diagnosis.full.seconds)}"


def _where(e: Evidence) -> str:
    kind = e.facts.filesystem or ("an object store or web server" if e.facts.files == "remote" else "storage")
    return f"the data are on {kind} ({e.facts.place})"


def _bytes_per_second(e: Evidence, step_seconds: float) -> float:
    return e.facts.mean_bytes * (e.facts.batch_size or 0) / step_seconds


def _stage(e: Evidence) -> Suggestion | None:
    f = e.facts
    room = next((place for place, free in f.faster if free > f.set_bytes > 0), None)
    if f.files not in ("shards", "remote") or room is None or not _fetching(e):
        return None
    why = f"{_where(e)}, and {_cost(e)}; {room} is nearer and has room for {human_bytes(f.set_bytes)}"
    waiting = [stage for stage in e.fetches if e.waits(stage)]
    return Suggestion(why, f"packer stage {f.source} --target {quoted(room)}", e.predict(*waiting))


def _node_local(e: Evidence) -> Suggestion | None:
    full = e.diagnosis.full
    if e.facts.local is not False or full.high - full.low < _VARIES * full.seconds or not e.costs("storage"):
        return None
    why = f"{_where(e)}, shared with other nodes, and a step takes from {in_ms(full.low)} to {in_ms(full.high)}"
    return Suggestion(why, f"packer stage {e.facts.source} --target '$TMPDIR' -- python train.py")


def _bandwidth(e: Evidence) -> Suggestion | None:
    f, needed = e.facts, _bytes_per_second(e, e.diagnosis.step.seconds)
    fits = any(room > f.set_bytes for _, room in f.faster)  # then a copy on the node is better
    if not f.is_shared or fits or not needed or not e.costs("storage"):
        return None
    why = (
        f"the training needs {human_bytes(needed)}/s of raw data and gets "
        f"{human_bytes(_bytes_per_second(e, e.diagnosis.full.seconds))}/s; the set of {human_bytes(f.set_bytes)} fits "
        f"nowhere on this node"
    )
    how = "Use a machine with a faster network or a larger local disk; no option of the loader changes this."
    return Suggestion(why, how)


def _concurrency(e: Evidence) -> Suggestion | None:
    f = e.facts
    if not f.is_shared or f.workers >= _MANY_READERS or not e.costs("storage"):
        return None
    more = min(_MANY_READERS, max(4, 2 * f.workers))
    why = f"{_where(e)}: requests wait, and {f.workers} at a time do not use what it can serve"
    if f.files == "remote":
        return Suggestion(why, f"packer stage {f.source} --threads {more}")
    how = option(e, more, WORKERS)
    return Suggestion(why, how)


def _transfer_tool(e: Evidence) -> Suggestion | None:
    if e.facts.files != "remote" or not _fetching(e):
        return None
    why = f"every sample is a request to {e.facts.place}; fetching whole shards once, in parallel, is faster"
    return Suggestion(why, f"packer stage {e.facts.source} --target /local --threads 8")


def _fewer_requests(e: Evidence) -> Suggestion | None:
    f = e.facts
    if not f.shuffled or f.files not in ("remote", "shards") or f.local is True or not e.costs("storage"):
        return None
    why = f"{_where(e)}, and samples are read one by one in a random order; blocks of 8 MiB take far fewer reads"
    return Suggestion(why, "order = readers.order.block_shuffled(reader, block_bytes=8 << 20, window=64)")


def _overloaded(e: Evidence) -> Suggestion | None:
    f = e.facts
    if f.local is not False or f.workers < _MANY_READERS or not e.costs("storage"):
        return None
    why = (
        f"{f.workers} workers of each process read from {f.filesystem} at a time, and still {_cost(e)}: it may be at "
        f"its limit, and more workers then make it worse for everyone"
    )
    how = option(e, f.workers // 2, WORKERS)
    return Suggestion(why, how)


def _compress(e: Evidence) -> Suggestion | None:
    f = e.facts
    pixels = f.short_side * f.long_side
    if not pixels or f.mean_bytes < max(_LARGE, _LARGE_PIXEL * pixels) or not _fetching(e):
        return None
    why = (
        f"a sample takes {human_bytes(f.mean_bytes)}, {f.mean_bytes / pixels:.1f} bytes a pixel, and {_cost(e)}; data "
        f"stored as pixels cost more to read than they save"
    )
    return Suggestion(why, f"packer convert {f.source} --to tar --reencode jpeg --quality 90")


def _pack(e: Evidence) -> Suggestion | None:
    f = e.facts
    if f.files != "loose" or not 0 < f.mean_bytes < _SMALL_FILE or not e.costs(*e.fetches):
        return None
    why = f"{f.samples:,} files of {human_bytes(f.mean_bytes)}: each is looked up, opened and closed for one read"
    return Suggestion(why, f"packer convert {f.source} --to hdf5")


def code_for_cache(keep: str = "") -> str:
    """The line that puts a cache over a reader."""
    return f'reader = readers.cached(reader, keep="{keep}")' if keep else "reader = readers.cached(reader)"


def _cache(e: Evidence) -> Suggestion | None:
    f = e.facts
    if not _cacheable(e) or not 0 < f.set_bytes < _ROOM * f.shm_bytes:
        return None
    decoded = f"; decoded it would be {human_bytes(f.pixel_bytes)}" if f.pixel_bytes else ""
    why = (
        f"{_cost(e)}; the encoded set is {human_bytes(f.set_bytes)} and fits into the {human_bytes(f.shm_bytes)} of "
        f"shared memory, once for all workers of the node{decoded}"
    )
    seconds = e.predict(*_raw(e))
    if not f.ours:
        return Suggestion(why, f"reader = readers.cached(readers.open_folder({f.place!r}))", seconds)
    return Suggestion(why, code_for_cache(), seconds)


def _cache_part(e: Evidence) -> Suggestion | None:
    f = e.facts
    if not _cacheable(e) or not _CAUTIOUS < _ROOM * f.shm_bytes < f.set_bytes:
        return None
    share = _ROOM * f.shm_bytes / f.set_bytes
    why = f"{_cost(e)}; of {human_bytes(f.set_bytes)} shared memory holds {share:.0%}, always the same samples"
    return Suggestion(why, f'reader = readers.cached(reader, "{share:.0%}")', e.predict(*_raw(e), left=1 - share))


def _cache_elsewhere(e: Evidence) -> Suggestion | None:
    f = e.facts
    if not _cacheable(e) or f.shm_bytes > _SHM_SHARE * f.memory_bytes or not f.set_bytes or f.shm_bytes > f.set_bytes:
        return None
    why = f"/dev/shm has {human_bytes(f.shm_bytes)}, the memory {human_bytes(f.memory_bytes)}: a cache needs no tmpfs"
    return Suggestion(why, 'reader = readers.cached(reader, backend="memfd")')


def _clean(e: Evidence) -> Suggestion | None:
    f = e.facts
    if f.unused_cache_bytes < _CAUTIOUS or f.shm_bytes > f.set_bytes > 0:
        return None
    why = f"{human_bytes(f.unused_cache_bytes)} of /dev/shm are caches that no process uses"
    return Suggestion(why, "packer cache clean")


def _nodes(e: Evidence) -> Suggestion | None:
    f = e.facts
    if f.nodes < 2 or f.files not in ("shards", "remote") or not _fetching(e):
        return None
    why = (
        f"each of {f.nodes} nodes reads the whole set in a global shuffle; a part each, mixed again now and then, is "
        f"{human_bytes(f.set_bytes / f.nodes)} a node"
    )
    lines = f"order = readers.order.NodeLocal(len(reader), {f.nodes}, seed=1)  # packer stage --part node"
    return Suggestion(why, lines)


DATA = (
    Tip("network", "a machine with more bandwidth", _bandwidth),
    Tip("stage", "copy the set to faster storage of the node", _stage),
    Tip("node-local", "read where no other job interferes", _node_local),
    Tip("concurrency", "more requests at a time", _concurrency),
    Tip("requests", "fewer, larger reads", _fewer_requests),
    Tip("fewer-readers", "fewer readers at a time", _overloaded),
    Tip("transfer", "fetch whole shards in parallel", _transfer_tool),
    Tip("compress", "store the samples compressed", _compress),
    Tip("pack", "pack small files into shards", _pack),
    Tip("cache", "keep the encoded samples in shared memory", _cache),
    Tip("cache-part", "keep a part of the samples in memory", _cache_part),
    Tip("cache-elsewhere", "a cache without a tmpfs", _cache_elsewhere),
    Tip("clean", "remove caches that are not used", _clean),
    Tip("node-shuffle", "shuffle on the node, and between nodes now and then", _nodes),
)


# --- Tips on decoding, augmenting and generating: who does it, when, and with what.
_TOO_FEW = 1.5  # so many times the CPUs that there are
_BUSY = 0.95
_USEFUL = 0.97  # a step must take less than this share of the time now
_VARIES_WORK = 0.1
_MARGIN = 256 / 224  # a random crop needs more than it gives
_ROOM_WORK = 0.9
_MUCH_LARGER = 1.3
_PHOTO_BYTES = 0.35  # of a pixel, in a JPEG of quality 90
_FIXED_DECODING = 0.05  # of decoding an image of any size
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
_COMPILED = """@numba.njit(nogil=True)
def work(image): ...
op = torch.utils.cpp_extension.load('op', ['op.cpp'])  # where Numba cannot"""
_GPU_DECODERS = """loader = ImageLoader(reader, 256, augment=ops, device='cuda', decode=Decode(decoder='torchcodec'))
loader = DaliLoader(reader, 256, augment=ops)  # or by DALI"""
_LIBRARIES = ("torchvision", "albumentations", "kornia", "torchaudio", "monai", "PIL", "readers", "torch")


def _decoding(e: Evidence) -> tuple[str, ...]:
    """The stages that decode: "decode", or "read" of a data set that decodes there."""
    if "decode" in e.names:
        return ("decode",)
    return ("read",) if e.facts.media and "read" in e.names and not e.waits("read") else ()


def _augmenting(e: Evidence) -> tuple[str, ...]:
    return e.stages_of("transform", "augment")


def _computing(e: Evidence) -> tuple[str, ...]:
    return tuple(stage for stage in (*_decoding(e), *_augmenting(e)) if not e.waits(stage))


def _costly_members(e: Evidence) -> list[Member]:
    """Members of the transform that a step waits for, the costliest first."""
    found = [member for member in e.facts.members if e.costs(member.stage)]
    return sorted(found, key=lambda member: -e.freed(member.stage))


def _per_sample(e: Evidence, *stages: str) -> str:
    work = sum(e.model.work.get(stage, 0.0) for stage in stages) if e.model is not None else 0.0
    return f"{in_ms(work / (e.facts.batch_size or 1))} a sample" if work else "much"


# --- workers ----------------------------------------------------------------------------------------------------------
def _workers(e: Evidence) -> Suggestion | None:
    model = e.model
    if model is None or not e.facts.is_known:
        return None
    wanted = model.enough_workers()
    seconds = model.seconds(workers=wanted)
    if wanted <= model.workers or seconds > _USEFUL * e.diagnosis.full.seconds:
        return None
    work, cpu = sum(model.work.values()), sum(model.cpu.values())
    who = plural(model.workers, "worker") + (" makes" if model.workers == 1 else " make")
    why = (
        f"{who if model.workers else 'the training process makes'} a batch in "
        f"{in_ms(model.slowdown * work / max(1, model.workers))}, the training takes one in {in_ms(model.floor)}; a "
        f"batch is {in_ms(work)} of work, {in_ms(cpu)} of it on the CPU, and there are {plural(model.cpus, 'CPU')}"
    )
    how = option(e, wanted, WORKERS)
    return Suggestion(why, how, seconds)


def _prefetch(e: Evidence) -> Suggestion | None:
    f, full, model = e.facts, e.diagnosis.full, e.model
    if model is None or not f.prefetch or not f.is_known or not e.costs("storage"):
        return None
    steady = e.predict("storage") or 0.0
    if full.high - full.low < _VARIES_WORK * full.seconds or steady > 0.9 * full.seconds:
        return None
    why = (
        f"a step takes from {in_ms(full.low)} to {in_ms(full.high)}, and {in_ms(steady)} if it never waits for "
        f"storage: more than {plural(f.prefetch, 'batch')} ahead can bridge waits that come now and then"
    )
    many = max(4, 2 * f.prefetch // (f.workers or 1)) if f.loader == "DataLoader" else 2 * f.prefetch
    how = option(e, many, ("prefetch_factor", "prefetch"))
    return Suggestion(why, how)


def _cpus_short(e: Evidence) -> float:
    """The CPUs that would keep up, where those are far more than there are; else 0."""
    needed = e.diagnosis.cpus_needed or 0.0
    return needed if e.diagnosis.culprit and needed > _TOO_FEW * e.diagnosis.cpus else 0.0


def _more_cpus(e: Evidence) -> Suggestion | None:
    if not (needed := _cpus_short(e)):
        return None
    why = (
        f"to keep up, the loader needs {needed:.1f} CPUs, and this process may use {e.diagnosis.cpus}; a "
        f"machine that has more, or less work for them"
    )
    return Suggestion(why, f"sbatch --cpus-per-task={round(needed + 0.5)} job.sh")


def _data_servers(e: Evidence) -> Suggestion | None:
    d = e.diagnosis
    if not (needed := _cpus_short(e)) or not d.batch_bytes:
        return None
    why = (
        f"{needed:.1f} CPUs are needed and {d.cpus} are there; other machines could prepare batches, if the network "
        f"brings {human_bytes(d.batch_bytes / d.step.seconds)}/s from them"
    )
    return Suggestion(why, "Another service must do that (as tf.data service or Ray Data); packer has none.")


def _threads(e: Evidence) -> Suggestion | None:
    f, busy = e.facts, e.diagnosis.full.cpu_busy
    if f.loader != "DataLoader" or f.workers < 2 or f.omp_threads == "1" or busy is None or busy < _BUSY:
        return None
    if not e.costs(*_computing(e), *(stage for stage in e.stages_of("read") if not e.waits(stage))):
        return None
    why = (
        f"the CPUs are {busy:.0%} busy, and libraries in each of the {f.workers} workers may start a thread for each "
        f"of the {e.diagnosis.cpus} CPUs; one each is enough, with libraries built for this CPU (AVX2, libjpeg-turbo)"
    )
    return Suggestion(why, "OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENCV_FOR_THREADS_NUM=1 python train.py")


# --- before training --------------------------------------------------------------------------------------------------
def _shrink(e: Evidence) -> Suggestion | None:
    f, decoding = e.facts, _decoding(e)
    wanted = round(f.crop * _MARGIN)
    larger = f.crop and f.short_side > _MUCH_LARGER * wanted
    if not larger or f.cached or not decoding or not e.costs(*decoding):
        return None
    left = (wanted / f.short_side) ** 2
    if f.mean_bytes and f.long_side:  # of many bytes for a pixel, the smaller image has fewer, too
        left = min(left, wanted * wanted * f.long_side / f.short_side * _PHOTO_BYTES / f.mean_bytes)
    left = _FIXED_DECODING + (1 - _FIXED_DECODING) * left
    why = (
        f"images have a short side of {f.short_side} pixels, training sees {f.crop}, and decoding takes "
        f"{_per_sample(e, *decoding)}; with {wanted} pixels that is about {left:.0%}"
    )
    how = f"packer convert {f.source} --to hdf5 --resize-short {wanted}\npacker advise {f.source}  # other sizes"
    return Suggestion(why, how, e.predict(*decoding, left=left))


def _decoded(e: Evidence) -> Suggestion | None:
    f, decoding = e.facts, _decoding(e)
    if not f.ours or f.cached or "decode" not in decoding or not e.costs("decode"):
        return None
    side = round(f.crop * _MARGIN) if f.crop else 0
    shrinks = 0 < side < f.short_side
    size = f.pixel_bytes * ((side / f.short_side) ** 2 if shrinks else 1.0)
    if not 0 < size < _ROOM_WORK * f.shm_bytes:
        return None
    keep = f"decoded:{side}" if shrinks else "decoded"
    why = (
        f"decoding takes {_per_sample(e, 'decode')}, and the pixels of the set, {human_bytes(size)}, fit into shared "
        f"memory ({human_bytes(f.shm_bytes)})"
    )
    stages = [stage for stage in ("storage", "read", "decode") if stage in e.names]
    return Suggestion(why, code_for_cache(keep), e.predict(*stages))


def _prepare(e: Evidence) -> Suggestion | None:
    """Members that draw nothing, before the first that does: their result is the same in each epoch."""
    fixed = list(itertools.takewhile(lambda member: member.name in _FIXED, e.facts.members))
    stages = [member.stage for member in fixed]
    if not fixed or not e.costs(*stages):
        return None
    why = f"{listed([member.name for member in fixed])} give the same in each epoch and take {_per_sample(e, *stages)}"
    how = f"packer convert {e.facts.source} --to hdf5 --resize-short {e.facts.crop or 256}"
    return Suggestion(why, how, e.predict(*stages))


def _order(e: Evidence) -> Suggestion | None:
    members, f = e.facts.members, e.facts
    for number, member in enumerate(members):
        later = next((m for m in members[number + 1 :] if any(word in m.name for word in _CROPS)), None)
        if later and any(word in member.name for word in _POINTLESS_FIRST) and e.costs(member.stage):
            why = (
                f"{member.name} works on the whole image, {_per_sample(e, member.stage)}, of which {later.name} then "
                f"leaves a part: crop and resize first"
            )
            left = min(1.0, (f.crop / f.short_side) ** 2) if f.crop and f.short_side else None
            seconds = None if left is None else e.predict(member.stage, left=left)
            return Suggestion(why, f"transform = Compose([{later.name}(size), {member.name}(), *others])", seconds)
    return None


# --- with what --------------------------------------------------------------------------------------------------------
def _compile(e: Evidence) -> Suggestion | None:
    for member in _costly_members(e):
        if member.module.partition(".")[0] not in _LIBRARIES and not e.waits(member.stage):
            why = (
                f"{member.name}, of {member.module}, computes {_per_sample(e, member.stage)} on the CPU; loops in "
                f"Python are 10 to 100 times as fast when they are compiled"
            )
            return Suggestion(why, _COMPILED)
    return None


def _library(e: Evidence) -> Suggestion | None:
    for member in _costly_members(e):
        if member.module.startswith("torchvision") and not e.waits(member.stage):
            why = (
                f"{member.name} of torchvision takes {_per_sample(e, member.stage)} on the CPU; a recipe of "
                f"readers.augment decodes, crops and resizes in one pass, and albumentations is often faster, too"
            )
            return Suggestion(why, "dataset = ImageDataset(reader, [RandomResizedCrop(224), RandomHorizontalFlip()])")
    return None


def _decoder(e: Evidence) -> Suggestion | None:
    f = e.facts
    if f.decoder != "pillow" or f.media != "jpeg" or not e.costs("read") or e.waits("read"):
        return None
    why = (
        f"the data set reads and decodes {_per_sample(e, 'read')}; libjpeg-turbo without Pillow, at the scale and for "
        f"the part that a crop needs, takes about half"
    )
    how = f"reader = readers.open_folder({f.place!r})\nloader = ImageLoader(reader, {f.batch_size or 64})"
    return Suggestion(why, how)


def _balance(e: Evidence) -> Suggestion | None:
    f, decoding = e.facts, _decoding(e)
    if f.media not in ("png", "webp", "tiff", "gif") or not decoding or not e.costs(*decoding):
        return None
    why = (
        f"the images are {f.media}, and decoding one takes {_per_sample(e, *decoding)}; a JPEG of quality 95 takes a "
        f"fraction of it, and loses little"
    )
    return Suggestion(why, f"packer convert {f.source} --to hdf5 --reencode jpeg --quality 95")


# --- on the GPU -------------------------------------------------------------------------------------------------------
def _gpu_decode(e: Evidence) -> Suggestion | None:
    f, decoding = e.facts, _decoding(e)
    on_gpu = f.device.startswith("cuda") and f.decoder.startswith(("torchcodec", "torchvision"))
    if not f.gpus or on_gpu or f.media not in ("jpeg", ""):
        return None
    if not decoding or not e.costs(*decoding):
        return None
    why = f"decoding takes {_per_sample(e, *decoding)} of the CPUs, and the GPU can decode JPEG"
    return Suggestion(why, _GPU_DECODERS)


def _gpu_transforms(e: Evidence) -> Suggestion | None:
    f = e.facts
    names = [member.name for member in _costly_members(e) if member.name in _GPU_FRIENDLY]
    if e.costs("augment") and not f.device.startswith("cuda"):
        names += [name for name in f.ops if name in _GPU_FRIENDLY]
    if not f.gpus or not names:
        return None
    seconds = sum(e.freed(stage) for stage in _augmenting(e))
    why = f"{listed(names)} cost {in_ms(seconds)} of a step on the CPUs; on whole batches on the GPU they cost little"
    return Suggestion(why, "loader = ImageLoader(reader, 256, augment=ops, device='cuda')")


def _gpu_decompress(e: Evidence) -> Suggestion | None:
    f, decoding = e.facts, _decoding(e)
    if not f.gpus or f.media in ("jpeg", "") or not decoding or not e.costs(*decoding):
        return None
    why = (
        f"the CPUs decompress {f.media}, {_per_sample(e, *decoding)}; GPUs decompress JPEG, by torchcodec and DALI, "
        f"and with nvCOMP formats of your own"
    )
    return Suggestion(why, f"packer convert {f.source} --to hdf5 --reencode jpeg")


def _generate(e: Evidence) -> Suggestion | None:
    if e.facts.files != "none" or not e.costs("read") or e.waits("read"):
        return None
    why = (
        f"{e.facts.dataset} reads no file and computes {_per_sample(e, 'read')}: if samples are generated, the GPU can "
        f"do that without a copy; approximate ones may do at first, and the data set at the end"
    )
    return Suggestion(why, "images = torch.rand(256, 3, 224, 224, device='cuda')  # the generator, on whole batches")


WORK = (
    Tip("workers", "more workers", _workers),
    Tip("prefetch", "more batches ahead", _prefetch),
    Tip("shrink", "shrink the images before training", _shrink),
    Tip("decoded", "keep pixels in shared memory", _decoded),
    Tip("prepare", "do before training what is the same in each epoch", _prepare),
    Tip("cpus", "a machine with more CPUs for each GPU", _more_cpus),
    Tip("servers", "prepare batches on other machines", _data_servers),
    Tip("order", "crop before the work on pixels", _order),
    Tip("compile", "compile transforms of your own", _compile),
    Tip("library", "a faster library for augmentation", _library),
    Tip("decoder", "a faster decoder", _decoder),
    Tip("balance", "a format that is quicker to decode", _balance),
    Tip("gpu-decode", "decode on the GPU", _gpu_decode),
    Tip("gpu-transforms", "transforms on the GPU", _gpu_transforms),
    Tip("gpu-decompress", "decompress on the GPU", _gpu_decompress),
    Tip("generate", "generate the data on the GPU", _generate),
    Tip("threads", "one thread in each worker", _threads),
)


# --- Tips on the copy to the device and on the step.
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

TIPS: tuple[Tip, ...] = (*DATA, *WORK, *COPYING)


# --- Advice: the tips that the evidence of a diagnosis calls for, the largest predicted gain first.
_WORTH_SAYING = 0.03  # of a step


def advise(evidence: Evidence, tips: Iterable[Tip] = TIPS) -> tuple[Advice, ...]:
    """The advice of a diagnosis. If the data keep up with the training, only that of tips marked `idle`."""
    full = evidence.diagnosis.full.seconds
    found = list[Advice]()
    for tip in tips:
        if not evidence.diagnosis.culprit and not tip.idle:
            continue
        answer = tip.check(evidence)
        if answer is None or (answer.seconds is not None and _is_useless(answer, full) and not tip.idle):
            continue
        gain = max(0.0, full - answer.seconds) if answer.seconds is not None else 0.0
        found.append(Advice(tip.id, tip.title, answer.why, answer.how, answer.seconds, gain))
    return tuple(sorted(found, key=lambda advice: -advice.gain))


def _is_useless(answer: Suggestion, full: float) -> bool:
    return answer.seconds is not None and answer.seconds > (1 - _WORTH_SAYING) * full
