"""The evidence for advice: a model of the step time with other loader settings, and the facts of the loader.

    step = max(floor, slowdown × max(work of a batch / workers, CPU time of a batch / CPUs, serial work of a batch))
    step = floor + slowdown × work of a batch                                                 without workers

The model has few parameters and is fitted to one diagnosis. The floor is the measured step with its copy and transfer.
The work of a batch is the sum of its stages, each timed alone in one worker. The slowdown is the measured time of the
workers over the modelled one; it is 1 unless the workers are the limit. The time that storage adds to the warm pipeline
is work that waits.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from cache import list_caches
from cache.filesystem import cache_budget, filesystem_type, free_space, is_in_memory, is_local
from cache.messages import quoted
from cache.node import available_memory_bytes, detect_ranks
from cache.staging.session import candidates
from cache.stores import LooseFiles
from packer.tools.diagnose.ladder import Diagnosis, StageCost
from packer.tools.diagnose.pipeline import leaves
from readers.coefficients import unsupported_reason
from readers.headers import MEDIA
from readers.reader import Reader
from readers.table import ImageInfo, headers_of

__all__ = ["Evidence", "Facts", "Member", "Model", "fit", "gather"]

_LIMITED = 1.05  # times the floor: a step that takes longer waits for the workers
_SAME = 1.03
_SLOWEST = 3.0  # times the work alone: a step that takes longer is not limited by the workers
_COMPUTES, _COMPUTES_ON_BUSY = 0.5, 0.1  # share of a stage's time on the CPU
_BUSY = 0.95  # of the CPUs
_COMPUTING = ("decode", "augment")  # stages of our own loaders that never wait
_MOST_WORKERS = 4  # per CPU, for work that waits


@dataclass(frozen=True)
class Model:
    """A model of the time of a training step.

    work, cpu: seconds and CPU seconds of a batch in one worker, by stage. workers: 0 for none.
    serial: the stages that only one worker can run at a time.
    """

    floor: float
    work: Mapping[str, float]
    cpu: Mapping[str, float]
    workers: int
    cpus: int
    slowdown: float = 1.0
    serial: tuple[str, ...] = ()

    def seconds(self, *, workers: int | None = None, share: Mapping[str, float] | None = None) -> float:
        """Seconds of a step with this number of workers. share: the share of its work that each stage still has."""
        left, count = share or {}, self.workers if workers is None else workers
        work = {stage: seconds * left.get(stage, 1.0) for stage, seconds in self.work.items()}
        if count < 1:
            return self.floor + self.slowdown * sum(work.values())
        cpu = sum(seconds * left.get(stage, 1.0) for stage, seconds in self.cpu.items())
        serial = sum(work.get(stage, 0.0) for stage in self.serial)
        return max(self.floor, self.slowdown * max(sum(work.values()) / count, cpu / self.cpus, serial))

    def enough_workers(self) -> int:
        """The fewest workers for which more workers would not make a step noticeably faster."""
        most = max(self.workers, _MOST_WORKERS * self.cpus)
        best = self.seconds(workers=most)
        return next((n for n in range(1, most) if self.seconds(workers=n) <= _SAME * best), most)


def is_computing(cost: StageCost, cpu_busy: float | None) -> bool:
    """Whether a stage computes rather than waits. On busy CPUs, a stage that computes also waits for a CPU."""
    if cost.busy is None or cost.cpu is None:
        return False
    least = _COMPUTES_ON_BUSY if cpu_busy is not None and cpu_busy >= _BUSY else _COMPUTES
    return cost.stage in _COMPUTING or cost.cpu >= least * cost.busy


def fit(result: Diagnosis, workers: int | None = None, serial: tuple[str, ...] = ()) -> Model | None:
    """Fit the model to a diagnosis; None if the times of the stages are unknown. workers: 0 if there are none."""
    timed = [cost for cost in result.costs if cost.busy]
    alone = {cost.stage: cost.busy or 0.0 for cost in timed}
    cpu = {cost.stage: min(cost.cpu, alone[cost.stage]) for cost in timed if cost.cpu is not None}
    # The work of a computing stage is its CPU time; other processes took the rest of its time.
    work = {**alone, **{cost.stage: cpu[cost.stage] for cost in timed if is_computing(cost, result.full.cpu_busy)}}
    total = sum(work.values())
    if not total:
        return None
    count = result.workers if workers is None else workers
    # The rungs, from the step on: stages in the training process, stages in workers, and waits.
    stages = [rung.stage for rung in result.rungs]
    of_workers = [number for number, stage in enumerate(stages) if stage in work]
    lines = (of_workers[0] - 1, of_workers[-1], -1)
    floor, warm, full = (result.rungs[number].time.seconds for number in lines)
    model = Model(floor, work, cpu, count, result.cpus, 1.0, serial)
    if count < 1:
        slowdown = max(0.0, warm - floor) / total
        waited = max(0.0, full - max(warm, floor)) / (slowdown or 1.0)
    else:
        least = replace(model, floor=0.0).seconds()
        limited = _LIMITED * floor < warm < _SLOWEST * replace(model, floor=0.0, work=alone).seconds()
        slowdown = warm / least if limited and least else 1.0
        waited = 0.0
        if full > _LIMITED * max(floor, warm):  # the wait that explains the time of the whole loader
            waits = [full * count / slowdown - total]
            waits += [full / slowdown - sum(work.get(stage, 0.0) for stage in serial)] if serial else []
            waited = max(0.0, min(waits))
    storage = "storage" if "storage" in stages else stages[-1]
    return replace(model, work={storage: waited, **work}, slowdown=slowdown)


# --- Facts of a loader, its data and the machine, other than times.
# Nothing here raises. Only a few files of the data set are opened, for their sizes and headers. Unknown facts stay
# None, 0 or "".
_PEEKED = 32
_PEEK_SECONDS = 2.0
_PEEK_BYTES = 16 << 20
_NO_BYTES = 4096  # fewer bytes than this are those of reading /proc/self/io
_LISTS = ("samples", "imgs", "images", "files", "paths", "image_paths", "filenames", "image_files", "data")


@dataclass(frozen=True)
class Member:
    """A member of the transform. stage: its stage in the diagnosis. module: the module that defines its class."""

    stage: str
    name: str
    module: str = ""


@dataclass(frozen=True)
class Facts:
    """Facts of the loader, its data and the node.

    loader, dataset: names of their classes. ours: whether a reader of this package reads the samples.
    place: directory or address of the data. files: "loose", "shards", "remote", "none" if no files are read, "" if
    unknown. filesystem: its type. local: whether it belongs to the node. in_memory: whether it is a tmpfs.
    samples: number of samples. mean_bytes: mean encoded size. short_side, long_side: medians, in pixels. media: the
    most frequent encoding. crop: short side of the images in a batch. members: members of the transform. ops: ops of a
    recipe of this package, by class name. cached: the form of an existing cache.
    workers: 0 if the loader works in the training process. prefetch: total number of batches ahead. pin_memory, device,
    batch_size: options of the loader. shuffled: whether the order is random over the whole set. decoder: "cpu",
    "pillow", "torchcodec/cuda", …. no_codec: the reason why the compiled codec is missing, else "".
    gpus: number of GPUs. gpu_bytes, gpu_free_bytes: memory of the current GPU. copies: whether batches are copied to a
    device. memory_bytes, shm_bytes: free bytes. faster: (directory, free bytes) of places to stage the data. nodes:
    nodes of the job. unused_cache_bytes: caches in /dev/shm that no process uses. simulated: whether the step only
    waits. omp_threads: OMP_NUM_THREADS.
    """

    loader: str = ""
    dataset: str = ""
    ours: bool = False
    place: str = ""
    files: str = ""
    filesystem: str = ""
    local: bool | None = None
    in_memory: bool = False
    samples: int = 0
    mean_bytes: float = 0.0
    short_side: int = 0
    long_side: int = 0
    media: str = ""
    crop: int = 0
    members: tuple[Member, ...] = ()
    ops: tuple[str, ...] = ()
    cached: str = ""
    workers: int = 0
    prefetch: int | None = None
    pin_memory: bool | None = None
    device: str = "cpu"
    batch_size: int | None = None
    shuffled: bool | None = None
    decoder: str = ""
    no_codec: str = ""
    gpus: int = 0
    gpu_bytes: int = 0
    gpu_free_bytes: int = 0
    copies: bool = False
    memory_bytes: int = 0
    shm_bytes: int = 0
    faster: tuple[tuple[str, int], ...] = ()
    nodes: int = 1
    unused_cache_bytes: int = 0
    simulated: bool = False
    omp_threads: str = ""

    @property
    def set_bytes(self) -> float:
        """Encoded bytes of the whole set; 0 if unknown."""
        return self.samples * self.mean_bytes

    @property
    def pixel_bytes(self) -> float:
        """Bytes of the whole set when decoded; 0 if unknown."""
        return 3.0 * self.samples * self.short_side * self.long_side

    @property
    def is_shared(self) -> bool:
        """Whether the data come from a server."""
        return self.files == "remote" or self.local is False

    @property
    def is_known(self) -> bool:
        """Whether the options of the loader are known."""
        return self.loader in ("DataLoader", "ImageLoader")

    @property
    def source(self) -> str:
        """The set as an argument of a command."""
        return quoted(self.place or "SET")


def gather(
    loader: Any, result: Diagnosis, batch: Any, *, device: Any = None, copies: bool = False, simulated: bool = False
) -> Facts:
    """Gather the facts of any loader. batch: one of its batches. device: device of the batches. copies: see `Facts`."""
    facts: dict[str, Any] = {
        "loader": type(loader).__name__, "simulated": simulated, "copies": copies, "workers": result.workers,
        "batch_size": result.batch_size, "omp_threads": os.environ.get("OMP_NUM_THREADS", ""),
        "no_codec": unsupported_reason(),
    }  # fmt: skip
    for find in (_of_node, lambda: _of_loader(loader), lambda: _of_data(loader), lambda: _of_batch(batch)):
        with suppress(Exception):  # an object may only look like a known class
            facts |= find()
    if device is not None and facts.get("device", "cpu") == "cpu":
        facts["device"] = str(device)
    if facts.get("place") and facts.get("files") != "remote":
        with suppress(OSError):
            kind, memory = filesystem_type(Path(facts["place"])), is_in_memory(Path(facts["place"]))
            facts |= {"filesystem": kind, "local": is_local(kind), "in_memory": memory}
    known = Facts(**facts)
    return replace(known, faster=_places_nearby(known))


def _owners(loader: Any) -> Iterator[Any]:
    """The loader, its data set, and the data sets that it wraps."""
    for _ in range(8):
        if loader is not None:
            yield loader
            loader = getattr(loader, "dataset", None)


# --- the node ---------------------------------------------------------------------------------------------------------
def _of_node() -> dict[str, Any]:
    facts: dict[str, Any] = {"memory_bytes": available_memory_bytes()}
    with suppress(Exception):
        facts["shm_bytes"] = cache_budget("/dev/shm").bytes
    with suppress(Exception):
        facts["unused_cache_bytes"] = sum(
            each.capacity_bytes for each in list_caches() if not each.in_use and not each.persist
        )
    with suppress(Exception):
        facts["nodes"] = detect_ranks().nodes
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        facts |= {"gpus": torch.cuda.device_count(), "gpu_free_bytes": free, "gpu_bytes": total}
    return facts


def _places_nearby(facts: Facts) -> tuple[tuple[str, int], ...]:
    """Directories of this node that are faster than the directory of the data, with their free bytes, memory last.

    For data on a local disk only memory is faster; for data in memory nothing is.
    """
    if facts.in_memory or not facts.place:
        return ()
    places = list[tuple[str, int]]()
    for target in candidates(None):
        with suppress(OSError):
            kind = filesystem_type(target.path)
            memory = is_in_memory(target.path)
            if target.path.is_dir() and is_local(kind) and (memory or facts.local is False):
                places.append((str(target.path), free_space(target.path, kind).bytes))
    return tuple(places)


# --- the loader -------------------------------------------------------------------------------------------------------
def _of_loader(loader: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if (workers := getattr(loader, "num_workers", None)) is not None:  # a torch DataLoader
        ahead = (getattr(loader, "prefetch_factor", None) or 2) * workers
        facts |= {"workers": int(workers), "prefetch": ahead, "pin_memory": bool(loader.pin_memory)}
        sampler = type(getattr(loader, "sampler", None)).__name__
        facts["shuffled"] = "Random" in sampler or "Distributed" in sampler or "Epoch" in sampler
    elif (threads := getattr(loader, "threads", None)) is not None:
        facts |= {"workers": int(threads), "prefetch": getattr(loader, "prefetch", None)}
        facts |= {"device": str(getattr(loader, "device", "cpu")), "decoder": str(getattr(loader, "decoder", ""))}
        facts["shuffled"] = type(getattr(loader, "order", None)).__name__ == "Shuffled"
    return facts


def _of_batch(batch: Any) -> dict[str, Any]:
    """The short side of the images in a batch."""
    for leaf in leaves(batch):
        shape = tuple(getattr(leaf, "shape", ()))
        channels = [d for d in (1, 3) if len(shape) == 4 and shape[d] in (1, 3, 4)]
        if channels:
            return {"crop": min(side for d, side in enumerate(shape) if d not in (0, channels[0]))}
    return {}


# --- the data ---------------------------------------------------------------------------------------------------------
def _of_data(loader: Any) -> dict[str, Any]:
    owners = list(_owners(loader))
    data = owners[-1]
    facts: dict[str, Any] = {"dataset": "" if data is loader else type(data).__name__}
    for owner in owners:
        transform = getattr(owner, "transform", None)
        members = getattr(transform, "transforms", None)
        if callable(transform):
            each_of = list(members) if members is not None else [transform]
            facts["members"] = tuple(
                Member(f"transform {n}", type(each).__name__, type(each).__module__)
                for n, each in enumerate(each_of, 1)
            )
        ops = getattr(getattr(owner, "recipe", None), "ops", transform if isinstance(transform, list | tuple) else ())
        if ops:
            facts["ops"] = tuple(type(op).__name__ for op in ops)
    readers = (getattr(owner, "reader", None) for owner in owners)
    reader = next((reader for reader in readers if isinstance(reader, Reader)), None)
    return facts | (_of_files(owners) if reader is None else _of_reader(reader))


def _of_reader(reader: Reader) -> dict[str, Any]:
    rows = np.unique(np.linspace(0, len(reader) - 1, min(_PEEKED, len(reader))).astype(np.int64))
    place = reader.byte_range(int(rows[0]))
    store, forms = reader.store, reader.table.forms
    while hasattr(store, "source"):
        store = store.source
    facts: dict[str, Any] = {"ours": True, "samples": len(reader), "mean_bytes": float(np.mean(reader.sizes()))}
    if place is not None:
        remote = not isinstance(place[0], Path)
        facts["place"] = str(place[0]).rpartition("/")[0]
        facts["files"] = "remote" if remote else "loose" if isinstance(store, LooseFiles) else "shards"
        with suppress(Exception):  # a set has a directory, which commands accept
            facts["place"] = str(reader.path)
    if type(reader).__name__ == "CachedReader":
        facts["cached"] = forms[-1].kind if forms else reader.keep.kind  # type: ignore[attr-defined]
    return facts | _of_images(reader.image_info(rows))


def _of_images(info: ImageInfo) -> dict[str, Any]:
    known = np.flatnonzero(np.asarray(info.height) > 0)
    if not len(known):
        return {}
    sides = np.stack([np.asarray(info.height)[known], np.asarray(info.width)[known]])
    media = np.bincount(np.asarray(info.media)[known].astype(np.int64)).argmax()
    return {
        "short_side": int(median(sides.min(0).tolist())),
        "long_side": int(median(sides.max(0).tolist())),
        "media": MEDIA[int(media)],
    }


def _of_files(owners: Sequence[Any]) -> dict[str, Any]:
    """Facts of a data set of another package: of its list of files, or whether it reads any file."""
    for owner, name in itertools.product(owners, _LISTS):
        listed = getattr(owner, name, None)
        if not isinstance(listed, Sequence) or isinstance(listed, str | bytes) or not len(listed):
            continue
        some = [listed[number] for number in range(0, len(listed), max(1, len(listed) // _PEEKED))][:_PEEKED]
        paths = [item[0] if isinstance(item, list | tuple) and item else item for item in some]
        if isinstance(paths[0], str | os.PathLike):
            base = Path() if Path(paths[0]).is_file() else Path(getattr(owner, "root", "") or "")
            if (base / paths[0]).is_file():
                return _of_paths([base / path for path in paths], len(listed))
    data = owners[-1]
    if len(owners) > 1 and hasattr(data, "__getitem__"):
        process = psutil.Process()
        before = process.io_counters().read_chars  # from files, cached or not
        data[0], data[len(data) - 1]
        if process.io_counters().read_chars - before < _NO_BYTES:
            return {"files": "none"}
    return {}


def _of_paths(paths: list[Path], samples: int) -> dict[str, Any]:
    end, images = time.monotonic() + _PEEK_SECONDS, list[bytes]()
    sizes = [path.stat().st_size for path in paths]
    for path, size in zip(paths, sizes, strict=True):
        if time.monotonic() > end:
            break
        if size <= _PEEK_BYTES:
            images.append(path.read_bytes())
    folder = os.path.commonpath([str(path.absolute().parent) for path in paths])
    facts = {"place": folder, "files": "loose", "samples": samples, "mean_bytes": sum(sizes) / len(sizes)}
    return {**facts, "decoder": "pillow", **_of_images(headers_of(images))}


# --- The evidence: a diagnosis, the facts of the loader, and the model.
_WORTHWHILE = 0.1  # of a step


@dataclass(frozen=True)
class Evidence:
    """A diagnosis with its facts and its model. model: None if the times of the stages are unknown."""

    diagnosis: Diagnosis
    facts: Facts
    model: Model | None

    @classmethod
    def of(cls, diagnosis: Diagnosis, facts: Facts) -> Evidence:
        """Fit the model to a diagnosis."""
        if facts.loader == "ImageLoader":  # its threads decode concurrently, but only one reads at a time
            return cls(diagnosis, facts, fit(diagnosis, serial=("storage", "read")))
        return cls(diagnosis, facts, fit(diagnosis, facts.workers if facts.loader == "DataLoader" else None))

    def freed(self, stage: str) -> float:
        """Seconds of a step gained if a stage is free; 0 for a missing stage."""
        return sum(cost.freed for cost in self.diagnosis.costs if cost.stage == stage)

    def added(self, stage: str) -> float:
        """Seconds that the line of a stage adds to a step; 0 for a missing stage."""
        return sum(cost.added for cost in self.diagnosis.costs if cost.stage == stage)

    def costs(self, *stages: str) -> bool:
        """Whether a step is more than a tenth shorter if these stages are free, alone or together."""
        full = self.diagnosis.full.seconds
        gain = max(map(self.freed, stages), default=0.0)
        if (left := self.predict(*stages)) is not None:
            gain = max(gain, full - left)
        return any(map(self.freed, stages)) and gain > _WORTHWHILE * full

    def predict(self, *stages: str, left: float = 0.0) -> float | None:
        """Seconds of a step if only the share `left` of these stages' work is left; None without a model."""
        return None if self.model is None else self.model.seconds(share=dict.fromkeys(stages, left))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all stages, "step" first."""
        return tuple(cost.stage for cost in self.diagnosis.costs)

    def waits(self, stage: str) -> bool:
        """Whether a stage mostly waits rather than computes; True for storage, of which only the wait is measured."""
        busy = self.diagnosis.full.cpu_busy
        return any(cost.stage == stage and not is_computing(cost, busy) for cost in self.diagnosis.costs)
