"""Tips on raw data: where they are, in which files, how they are read and cached."""

from __future__ import annotations

from cache.messages import human_bytes, quoted
from readers.diagnosis.evidence import Evidence
from readers.diagnosis.findings import Change
from readers.diagnosis.tips.base import DALI, HPC, PART_8, WORKERS, Suggestion, Tip, in_ms, option

__all__ = ["DATA", "code_for_cache"]

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
    change = None
    if f.ours and f.files == "shards":
        share = tuple((stage, 0.0) for stage in waiting)
        change = Change("stage", room, f"the shards in {room}", share=share)
    return Suggestion(why, f"packer stage {f.source} --target {quoted(room)}", e.predict(*waiting), change)


def _places(e: Evidence) -> Suggestion | None:
    f = e.facts
    if not f.place or f.files == "remote" or f.in_memory or not e.costs("storage"):
        return None
    others = ",".join(place for place, _ in f.faster)
    places = quoted(f"{f.place},{others}") if others else "/scratch,/tmp,/dev/shm"
    why = f"{_where(e)}; file systems of one machine differ, and {_cost(e)}"
    return Suggestion(why, f"packer diagnose {f.source} --simulate-step 20ms --places {places}")


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
    how, change = option(e, "workers", more, WORKERS)
    return Suggestion(why, how, None, change)


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
    how, change = option(e, "workers", f.workers // 2, WORKERS)
    return Suggestion(why, how, None, change)


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
    free = tuple((stage, 0.0) for stage in _raw(e))
    change = Change("cache", "encoded", "readers.cached, from the second epoch", share=free)
    return Suggestion(why, code_for_cache(), seconds, change)


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
