"""Tips on decoding, augmenting and generating: who does it, when, and with what."""

from __future__ import annotations

import itertools

from cache.messages import human_bytes, listed, plural
from readers.diagnosis.evidence import Evidence
from readers.diagnosis.facts import Member
from readers.diagnosis.tips.base import WORKERS, Suggestion, Tip, in_ms, option
from readers.diagnosis.tips.data import code_for_cache

__all__ = ["WORK"]

_TOO_FEW = 1.5  # so many times the CPUs that there are
_BUSY = 0.95
_USEFUL = 0.97  # a step must take less than this share of the time now
_VARIES = 0.1
_MARGIN = 256 / 224  # a random crop needs more than it gives
_ROOM = 0.9
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
_GPU_DECODERS = """loader = ImageLoader(reader, 256, augment=ops, device='cuda', decoder='torchcodec')
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
    if full.high - full.low < _VARIES * full.seconds or steady > 0.9 * full.seconds:
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
    if not 0 < size < _ROOM * f.shm_bytes:
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
