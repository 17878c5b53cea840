"""Tips on raw data: where they lie, in which files, how they are read and cached."""

from __future__ import annotations

import shlex

from cache.messages import human_bytes
from readers.diagnosis.evidence import Evidence
from readers.diagnosis.findings import Change
from readers.diagnosis.tips.base import DALI, HPC, PART_8, Suggestion, Tip, in_ms

__all__ = ["DATA", "code_for_cache"]

_SMALL_FILE = 1 << 20
_LARGE = 50_000  # bytes of a sample; of smaller ones headers are a part
_LARGE_PIXEL = 1.0  # encoded bytes of a pixel; a JPEG takes 0.2 to 0.6
_MANY_READERS = 16
_ROOM = 0.9  # of the free memory that a cache may take
_SHM_SHARE = 0.25
_CAUTIOUS = 64 << 20


def _raw(e: Evidence) -> tuple[str, ...]:
    """The stages that fetch raw data: storage, and reading where it mostly waits."""
    stages = ["storage"] if "storage" in e.names else []
    if "read" in e.names and (e.waits("read") or "decode" in e.names):
        stages.append("read")
    return tuple(stages)


def _fetching(e: Evidence) -> bool:
    return e.costs(*_raw(e))


def _cost(e: Evidence) -> str:
    stages = _raw(e)
    gain = max(e.freed(stage) for stage in stages)
    return f"{' and '.join(stages)} cost {in_ms(gain)} of a step of {in_ms(e.diagnosis.full.seconds)}"


def _predict(e: Evidence, *stages: str) -> float | None:
    """Seconds of a step if these stages are free."""
    return None if e.model is None else e.model.seconds(share=dict.fromkeys(stages, 0.0))


def _where(e: Evidence) -> str:
    kind = e.facts.filesystem or ("an object store or web server" if e.facts.files == "remote" else "storage")
    return f"the data are on {kind} ({e.facts.place})"


def _needed_bytes(e: Evidence) -> float:
    """Bytes a second of raw data that the training would read if it never waited."""
    return e.facts.mean_bytes * (e.facts.batch_size or 0) / e.diagnosis.step.seconds


def _stage(e: Evidence) -> Suggestion | None:
    f = e.facts
    if f.files not in ("shards", "remote") or not _fetching(e):
        return None
    room = next((place for place in f.faster if place[1] > f.set_bytes > 0), None)
    if room is None:
        return None
    why = f"{_where(e)}, and {_cost(e)}; {room[0]} is nearer and has room for {human_bytes(f.set_bytes)}"
    change = None
    if f.ours and f.files == "shards":
        change = Change("stage", room[0], f"the shards in {room[0]}", share=(("storage", 0.0),))
    command = f"packer stage {shlex.quote(f.place)} --target {shlex.quote(room[0])}"
    return Suggestion(why, command, _predict(e, "storage"), change)


def _places(e: Evidence) -> Suggestion | None:
    f = e.facts
    if not f.place or f.files == "remote" or f.in_memory or not e.costs("storage"):
        return None
    places = [f.place, *(place for place, _ in f.faster)]
    why = f"{_where(e)}; file systems of one machine differ, and {_cost(e)}"
    target = f"--places {shlex.quote(','.join(places))}" if len(places) > 1 else "--places /scratch,/tmp,/dev/shm"
    return Suggestion(why, f"packer diagnose {shlex.quote(f.place)} --simulate-step 20ms {target}")


def _node_local(e: Evidence) -> Suggestion | None:
    f, full = e.facts, e.diagnosis.full
    if f.local is not False or full.high - full.low < 0.3 * full.seconds or not e.costs("storage"):
        return None
    why = f"{_where(e)}, shared with other nodes, and a step takes from {in_ms(full.low)} to {in_ms(full.high)}"
    return Suggestion(why, f"packer stage {shlex.quote(f.place)} --target '$TMPDIR' -- python train.py")


def _bandwidth(e: Evidence) -> Suggestion | None:
    f = e.facts
    if (f.files != "remote" and f.local is not False) or not e.costs("storage") or not _needed_bytes(e):
        return None
    if any(room > f.set_bytes for _, room in f.faster):
        return None  # then a copy on the node is better
    now = f.mean_bytes * (f.batch_size or 0) / e.diagnosis.full.seconds
    why = f"the training needs {human_bytes(_needed_bytes(e))}/s of raw data and gets {human_bytes(now)}/s; the set of "
    why += f"{human_bytes(f.set_bytes)} fits into nothing on this node"
    return Suggestion(
        why, "Use a machine with a faster network or a larger local disk; no option of the loader changes this."
    )


def _concurrency(e: Evidence) -> Suggestion | None:
    f = e.facts
    if (f.files != "remote" and f.local is not False) or not e.costs("storage") or f.workers >= _MANY_READERS:
        return None
    more = min(_MANY_READERS, max(4, 2 * f.workers))
    why = f"{_where(e)}: requests wait, and {f.workers} at a time do not use what it can serve"
    if f.files == "remote":
        return Suggestion(why, f"packer stage {shlex.quote(f.place)} --threads {more}")
    name = "threads" if f.loader == "ImageLoader" else "num_workers"
    return Suggestion(why, f"{name}={more}", None, Change("workers", more, f"{name}={more}"))


def _transfer_tool(e: Evidence) -> Suggestion | None:
    f = e.facts
    if f.files != "remote" or not _fetching(e):
        return None
    why = f"every sample is a request to {f.place}; whole shards in parallel come faster, once"
    return Suggestion(why, f"packer stage {shlex.quote(f.place)} --target /local --threads 8")


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
    why = f"{f.workers} workers of each process read from {f.filesystem} at a time, and still {_cost(e)}: it may be at "
    why += "its limit, and more workers then make it worse for all"
    return Suggestion(why, f"num_workers={f.workers // 2}", None, Change("workers", f.workers // 2, "half the workers"))


def _compress(e: Evidence) -> Suggestion | None:
    f = e.facts
    pixels = f.short_side * f.long_side
    if not pixels or f.mean_bytes < max(_LARGE, _LARGE_PIXEL * pixels) or not _fetching(e):
        return None
    why = (
        f"a sample takes {human_bytes(f.mean_bytes)}, {f.mean_bytes / pixels:.1f} bytes a pixel, and {_cost(e)}; data "
    )
    why += "that were prepared as pixels cost more to read than they save"
    return Suggestion(why, f"packer convert {shlex.quote(f.place or 'SET')} --to tar --reencode jpeg --quality 90")


def _pack(e: Evidence) -> Suggestion | None:
    f = e.facts
    if f.files != "loose" or not 0 < f.mean_bytes < _SMALL_FILE or not e.costs(*e.fetches):
        return None
    why = f"{f.samples:,} files of {human_bytes(f.mean_bytes)}: each is looked up, opened and closed for one read"
    return Suggestion(why, f"packer convert {shlex.quote(f.place)} --to hdf5")


def code_for_cache(keep: str = "") -> str:
    """The line that puts a cache over a reader."""
    return f'reader = readers.cached(reader, keep="{keep}")' if keep else "reader = readers.cached(reader)"


def _cache(e: Evidence) -> Suggestion | None:
    f = e.facts
    if f.cached or not _fetching(e) or f.in_memory or not 0 < f.set_bytes < _ROOM * f.shm_bytes:
        return None
    why = f"{_cost(e)}; the encoded set is {human_bytes(f.set_bytes)} and fits into the {human_bytes(f.shm_bytes)} of "
    why += "shared memory, once for all workers of the node"
    if f.pixel_bytes:
        why += f"; decoded it would be {human_bytes(f.pixel_bytes)}"
    seconds = _predict(e, *_raw(e))
    if f.ours:
        free = tuple((stage, 0.0) for stage in _raw(e))
        change = Change("cache", "encoded", "readers.cached, from the second epoch", share=free)
        return Suggestion(why, code_for_cache(), seconds, change)
    return Suggestion(why, f"reader = readers.cached(readers.open_folder({f.place!r}))", seconds)


def _cache_part(e: Evidence) -> Suggestion | None:
    f = e.facts
    if f.cached or f.in_memory or not _fetching(e) or not _CAUTIOUS < _ROOM * f.shm_bytes < f.set_bytes:
        return None
    share = _ROOM * f.shm_bytes / f.set_bytes
    why = f"{_cost(e)}; of {human_bytes(f.set_bytes)} shared memory holds {share:.0%}, always the same samples"
    seconds = None if e.model is None else e.model.seconds(share=dict.fromkeys(_raw(e), 1 - share))
    return Suggestion(why, f'reader = readers.cached(reader, "{share:.0%}")', seconds)


def _cache_elsewhere(e: Evidence) -> Suggestion | None:
    f = e.facts
    if f.cached or f.in_memory or not _fetching(e) or f.shm_bytes > _SHM_SHARE * f.memory_bytes:
        return None
    if not f.set_bytes or f.shm_bytes > f.set_bytes:
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
    if f.nodes < 2 or not _fetching(e) or f.files not in ("shards", "remote"):
        return None
    why = f"each of {f.nodes} nodes reads the whole set in a global shuffle; a part each, mixed again now and then, is "
    why += f"{human_bytes(f.set_bytes / f.nodes)} a node"
    lines = f"order = readers.order.NodeLocal(len(reader), {f.nodes}, seed=1)  # packer stage --part node"
    return Suggestion(why, lines)


DATA = (
    Tip("network", "a machine with more bandwidth", ((PART_8, 1),), _bandwidth),
    Tip("stage", "copy the set to faster storage of the node", ((PART_8, 2), (HPC, 4), (HPC, 8)), _stage),
    Tip("places", "find the best file system", ((HPC, 3),), _places),
    Tip("node-local", "read where no other job interferes", ((HPC, 4),), _node_local),
    Tip("concurrency", "more requests at a time", ((PART_8, 3), (PART_8, 7)), _concurrency),
    Tip("requests", "fewer, larger reads", ((PART_8, 7),), _fewer_requests),
    Tip("fewer-readers", "fewer readers at a time", ((DALI, 6),), _overloaded),
    Tip("transfer", "fetch whole shards in parallel", ((PART_8, 6), (PART_8, 3)), _transfer_tool),
    Tip("compress", "store the samples compressed", ((PART_8, 4), (DALI, 11)), _compress),
    Tip("pack", "pack small files into shards", ((PART_8, 5), (HPC, 5)), _pack),
    Tip("cache", "keep the encoded samples in shared memory", ((HPC, 6), (HPC, 7), (HPC, 8)), _cache),
    Tip("cache-part", "keep a part of the samples in memory", ((HPC, 10),), _cache_part),
    Tip("cache-elsewhere", "a cache without a tmpfs", ((HPC, 9),), _cache_elsewhere),
    Tip("clean", "remove caches that are not used", ((HPC, 8),), _clean),
    Tip("node-shuffle", "shuffle on the node, and between nodes now and then", ((HPC, 11),), _nodes),
)
