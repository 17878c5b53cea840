"""Statistics of a loader: seconds by stage, rates, and one line that names the bottleneck."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from cache.stores.base import TIERS
from readers.table import Buffer
from readers.trace import TraceSlot

CLOCKED = ("read", "cache", "plan", "decode", "resize", "augment", "collate", "copy")
_WAITS = 0.05  # share of the time from which waiting is reported
_NAMED = 0.01


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """Statistics of the current or last loop, since it began or since the last reset.

    batches, images: returned to training.
    seconds: from the start of the loop to its end, or to now; an epoch ends when its last batch is returned.
    stages: seconds by stage, summed over the threads: "read" (bytes from the store), "cache" (reading from and writing
        to a cache), "plan" (choosing samples and crops, allocating the batch), "decode", "resize", "augment" (flips,
        crops without a resize, pixel ops, normalisation, dtype), "collate" (labels and other fields, skipped rows),
        "copy" (host to device, as seen by the host).
    cpu_seconds: CPU time of the loader's threads, including training code that runs in them.
    busy_seconds: working time of the `threads`, summed.
    wait_seconds: time that training waited for batches; first_wait_seconds: for the first batch, when threads start.
    idle_seconds: time that the loader waited for training, with all prefetched batches ready.
    made: images made, including batches not returned yet.
    bytes_read: bytes of images, as stored or cached. reads: images requested; cache_hits: images that a cache had.
    ready: how often training found 0, 1, …, prefetch batches ready.
    decoded_images: images of batches finished on a device, including batches not returned yet. Of these,
        device_images: decoded by the device; failed_images: decoded by the threads after the device failed;
        shared_images: decoded by the threads as their share (cpu_share).
    cpu_share: the threads' share in the next batches, as set or measured; None if no device decodes.
    """

    epoch: int = 0
    batches: int = 0
    images: int = 0
    seconds: float = 0.0
    stages: Mapping[str, float] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    busy_seconds: float = 0.0
    wait_seconds: float = 0.0
    first_wait_seconds: float = 0.0
    idle_seconds: float = 0.0
    threads: int = 0
    prefetch: int = 0
    made: int = 0
    bytes_read: int = 0
    reads: int = 0
    cache_hits: int = 0
    ready: tuple[int, ...] = ()
    decoded_images: int = 0
    device_images: int = 0
    failed_images: int = 0
    shared_images: int = 0
    cpu_share: float | None = None

    @property
    def wait(self) -> float:
        """Share of the time in which training waited for data, 0 to 1."""
        return _share(self.wait_seconds, self.seconds)

    @property
    def idle(self) -> float:
        """Share of the time in which data waited for training, 0 to 1."""
        return _share(self.idle_seconds, self.seconds)

    @property
    def busy(self) -> float:
        """Share of the threads' time in which they worked, 0 to 1."""
        return _share(self.busy_seconds, self.seconds * self.threads)

    @property
    def images_per_second(self) -> float:
        """Images returned to training per second."""
        return self.images / self.seconds if self.seconds else 0.0

    @property
    def possible_images_per_second(self) -> float:
        """Images per second that the threads would make at their present speed if they never waited."""
        return self.made * self.threads / self.busy_seconds if self.busy_seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Bytes of images read per second."""
        return self.bytes_read / self.seconds if self.seconds else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Share of each stage in the time of all stages, 0 to 1, largest first."""
        whole = sum(self.stages.values())
        ordered = sorted(self.stages.items(), key=lambda one: -one[1])
        return {stage: _share(seconds, whole) for stage, seconds in ordered}

    @property
    def full(self) -> float:
        """Share of the steps that found `prefetch` batches ready, 0 to 1."""
        return _share(self.ready[-1], sum(self.ready)) if self.ready else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers, lists and dictionaries."""
        derived = ("wait", "idle", "busy", "images_per_second", "possible_images_per_second", "bytes_per_second")
        return {**asdict(self), "ready": list(self.ready)} | {name: getattr(self, name) for name in derived}

    def __str__(self) -> str:
        if not self.batches and not self.wait_seconds:
            return "no batch yet"
        return f"{self._where()}{self._who()}"

    def _where(self) -> str:
        """The share of images that the device decoded; "" without a device."""
        if not self.decoded_images:
            return ""
        failed = f" (it failed on {self.failed_images:,})" if self.failed_images else ""
        return f"decoded on the device: {_percent(_share(self.device_images, self.decoded_images))}{failed}; "

    def _who(self) -> str:
        """The side that waits, with the shares of the stages."""
        crew = f"{self.threads} thread{'s' if self.threads != 1 else ''} {_percent(self.busy)} busy"
        rate = f"{self.images_per_second:,.0f} images/s"
        if self.cpu_share:
            by = f"{self.shared_images:,} images by the CPU, {self.device_images:,} by the device"
            rate += f"; cpu_share {self.cpu_share:.2f} ({by})"
        stages = ", ".join(f"{stage} {_percent(share)}" for stage, share in self.shares.items() if share >= _NAMED)
        if self.wait >= _WAITS:
            return f"training waits {_percent(self.wait)} of the time for data: {stages}; {crew}; {rate}"
        ready = f"{self.prefetch} batches ready on {_percent(self.full)} of steps"
        waits = f"training waits {_percent(self.wait)} of the time"
        who = "data wait for training" if self.idle >= _WAITS else "data and training keep pace"
        return f"{who}: {ready}; {waits}; {crew} ({stages}); {rate}"


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# Sums over loops as integers, times in nanoseconds: by the names of `LoopTimers._totals`, and counts of batches by
# ("batch" or "wait", bucket). Buckets are ranges of durations, each a sixteenth of a power of two wide.
Totals: TypeAlias = Counter[Any]
_LENGTHS = ("batch", "wait")
_PERCENTILES = (50, 95, 99)


def bucket_of(ns: int) -> int:
    shift = max(0, ns.bit_length() - 5)
    return (shift << 4) + (ns >> shift)


def bucket_ns(bucket: int) -> tuple[int, int]:
    """The range of durations of a bucket in nanoseconds, half-open."""
    shift = max(0, (bucket >> 4) - 1)
    first = bucket - (shift << 4)
    return first << shift, (first + 1) << shift


def lengths_of(totals: Totals, kind: str) -> list[tuple[int, int]]:
    """(bucket, count) of one kind, shortest durations first."""
    return sorted((name[1], count) for name, count in totals.items() if isinstance(name, tuple) and name[0] == kind)


def stage_ns(spent: Mapping[Any, int], ever: Mapping[Any, int] | None = None) -> dict[str, int]:
    """Nanoseconds by stage. ever: sums whose sampled images represent fast images if `spent` has none."""
    stages = {stage: spent.get(stage, 0) for stage in CLOCKED}
    for sums in (spent, ever or {}):
        sampled = {stage: sums.get(f"sampled {stage}", 0) for stage in _RENDERED}
        if whole := sum(sampled.values()):
            for stage, ns in sampled.items():
                stages[stage] += spent.get("rows", 0) * ns // whole
            break
    return stages


def metrics_of(totals: Totals, threads: int = 0, prefix: str = "packer/") -> dict[str, float]:
    """Sums as metrics for a logger; see `ImageLoader.metrics`. threads: the loader's threads, 0 without."""
    seconds, reads, decoded = totals["seconds"], totals["reads"], totals["decoded"]
    figures = {
        "wait_share": _share(totals["wait"], seconds),
        "images_per_s": 1e9 * totals["images"] / seconds if seconds else 0.0,
        "cache_hit_share": _share(totals["hits"], reads),
        "bad_samples": float(totals["bad"]),
    }
    if threads:
        figures["threads_busy_share"] = _share(totals["busy"], seconds * threads)
        figures["read_bytes_per_s"] = 1e9 * totals["bytes read"] / seconds if seconds else 0.0
        figures["device_decode_share"] = _share(totals["by device"], decoded)
    for kind in _LENGTHS:
        lengths = lengths_of(totals, kind)
        for percent in _PERCENTILES:
            figures[f"{kind}_ms_p{percent}"] = _percentile(lengths, percent / 100)
    return {prefix + name: value for name, value in figures.items()}


def _percentile(lengths: Sequence[tuple[int, int]], share: float) -> float:
    """A percentile in milliseconds, the middle of its bucket; NaN without batches."""
    left = share * sum(count for _, count in lengths)
    for bucket, count in lengths:
        left -= count
        if left <= 0:
            return sum(bucket_ns(bucket)) / 2e6
    return math.nan


# The clocks of a loader measure the time of its threads by stage, and the waits of both sides.
#
# Each thread writes to a separate `ThreadClock`, without a lock; sums are merged when they are read. Measured are
#
#     read, cache, plan, collate, copy    once a batch
#     decode, resize, augment             for each image, if images take more than 50 µs; for faster images only in
#                                         every 32nd task of a thread (8 to 64 rows of a batch): the time of the other
#                                         tasks is measured as a whole, and divided by the shares of these
#
# so the sum of the stages is exact; for fast images the shares of the stages are estimated from one image in 32.
# Clock: time.perf_counter_ns; CPU time: time.thread_time_ns of the loader's threads.


_RENDERED = ("decode", "resize", "augment")
_SLOW_NS = 50_000
_EVERY = 32


class ThreadClock:
    """The time that one thread spends. Only this thread writes; any thread may read the sums, which grow by task.

    ns: nanoseconds by stage, where measured. rows_ns: nanoseconds of tasks measured as a whole; sampled: nanoseconds by
    stage of the tasks that represent them.
    """

    __slots__ = (
        "_before", "_cpu", "_fine", "_mark", "_skip", "_slot", "_start", "_task", "busy", "bytes_read", "cpu", "hits",
        "images", "name", "ns", "reads", "rows_ns", "sampled",
    )  # fmt: skip

    def __init__(self, name: str, slot: TraceSlot) -> None:
        self.name, self._slot = name, slot
        self.ns = dict.fromkeys(CLOCKED, 0)
        self.sampled = dict.fromkeys(_RENDERED, 0)
        self.rows_ns = self.busy = self.cpu = self.images = self.reads = self.bytes_read = self.hits = 0
        self._skip, self._fine = 0, True
        self._task = dict.fromkeys(CLOCKED, 0)
        self._start = self._mark = self._cpu = 0
        self._before = (0, 0, 0)

    def start(self) -> None:
        """Begin a task."""
        self._task = dict.fromkeys(CLOCKED, 0)
        self._cpu = time.thread_time_ns()
        self._start = self._mark = time.perf_counter_ns()

    def lap(self, stage: str) -> None:
        """Add the time since the task began, or since the last call, to `stage`."""
        now = time.perf_counter_ns()
        self._task[stage] += now - self._mark
        self._mark = now

    def lap_device(self, copied: int) -> None:
        """Add the time since the last call, in which the thread waited for a device, to "copy" and "augment".

        copied: nanoseconds of the device's copies, which may have run before the thread waited.
        """
        began = self._mark
        self.lap("augment")
        self._task["augment"] -= min(copied, self._mark - began)
        self._task["copy"] += copied

    def stop(self, stage: str, **args: Any) -> None:
        """End the task; adds the rest of its time to `stage`, which is also its name in a trace."""
        self.lap(stage)
        self._add(self._mark - self._start, stage, args)

    def start_rows(self) -> Callable[[str], None] | None:
        """Begin to render images of a batch. Returns the function to call after each stage, None if not needed."""
        self.start()
        self._fine = self._skip == 0
        return self.lap if self._fine else None

    def stop_rows(self, images: int, **args: Any) -> None:
        """End the rendering of `images` images."""
        spent = time.perf_counter_ns() - self._start
        fast = spent < _SLOW_NS * images
        if self._fine:
            self._task["augment"] += self._start + spent - self._mark
            self._skip = _EVERY - 1 if fast else 0
            if fast:
                for stage in _RENDERED:
                    self.sampled[stage] += self._task[stage]
        else:
            self.rows_ns += spent
            self._skip = self._skip - 1 if fast else 0
        self.images += images
        self._add(spent, "render", {"images": images, **args})

    def begin_read(self) -> None:
        """Add the time so far to planning, and begin to read."""
        self.lap("plan")
        self._before = TIERS.state()

    def end_read(self, data: Sequence[Buffer | Exception]) -> float:
        """Add the time of reading `data`, split into "read" and "cache". Returns the seconds."""
        began, (cached, hits, _) = self._mark, self._before
        self.lap("read")
        spent, cached = self._mark - began, min(TIERS.nanoseconds - cached, self._mark - began)
        self._task["cache"] += cached
        self._task["read"] -= cached
        self.reads += len(data)
        self.hits += TIERS.hits - hits
        self.bytes_read += _bytes_of(data)
        if self._slot.trace is not None:
            self._slot.trace.add(self.name, "cache" if cached > spent - cached else "read", began, self._mark)
        return spent / 1e9

    def _add(self, spent: int, name: str, args: dict[str, Any]) -> None:
        self.busy += spent
        self.cpu += time.thread_time_ns() - self._cpu
        for stage, ns in self._task.items():
            if ns:
                self.ns[stage] += ns
        if self._slot.trace is not None:
            args |= {f"{stage}_ms": ns / 1e6 for stage, ns in self._task.items() if ns and stage != name}
            self._slot.trace.add(self.name, name, self._start, self._start + spent, args)

    def wait(self, start: int) -> None:
        """Record in a trace that the thread was idle from `start` until now."""
        if self._slot.trace is not None and (now := time.perf_counter_ns()) - start > _SLOW_NS:
            self._slot.trace.add(self.name, "wait", start, now)


def _bytes_of(data: Sequence[Buffer | Exception]) -> int:
    try:
        return sum(map(len, data))  # type: ignore[arg-type]
    except TypeError:  # some are errors
        return sum(len(payload) for payload in data if not isinstance(payload, Exception))


class LoopTimers:
    """The clocks of one loop over an epoch.

    Training, the consumer of batches, waits from its request for a batch until it gets the batch. The loader waits for
    training while all batches that it may make ahead are ready.
    """

    def __init__(
        self, epoch: int, steps: int, threads: int, prefetch: int, slot: TraceSlot, before: LoopTimers | None = None
    ) -> None:
        self.epoch, self.threads, self.prefetch, self.slot = epoch, threads, prefetch, slot
        self._steps = steps
        self._earlier: Totals = Counter() if before is None else before.lifetime()
        self._lengths: tuple[dict[int, int], dict[int, int]] = ({}, {})  # of batches, of waits: counts by `bucket_of`
        self._bad = 0
        self.consumer = ThreadClock("training", slot)
        self.device: ThreadClock | None = None
        self._crew: list[ThreadClock] = []
        self._began = self._left = time.perf_counter_ns()
        self._ended = self._asked = self._full = 0
        self._batches = self._images = self._wait = self._first_wait = self._idle = 0
        self._ready = [0] * (prefetch + 1)
        self._decoded = self._by_device = self._failed = self._shared = 0
        self.cpu_share: float | None = None  # written by the thread behind the crew
        self._base: dict[str, int] = {}

    def crew_clock(self, name: str) -> ThreadClock:
        """The clock of one more thread of the crew."""
        clock = ThreadClock(name, self.slot)
        self._crew.append(clock)
        return clock

    def device_clock(self, name: str) -> ThreadClock:
        """The clock of the device stage's thread."""
        self.device = ThreadClock(name, self.slot)
        return self.device

    # --- training: one thread -------------------------------------------------------------------------------------
    def ask(self, ready: int) -> None:
        """Training asks for a batch while `ready` batches are ready."""
        self._asked = time.perf_counter_ns()
        self._ready[min(ready, self.prefetch)] += 1
        if self.slot.trace is not None and self._batches:
            self.slot.trace.add(self.consumer.name, "step", self._left, self._asked)

    def get(self) -> None:
        """Training has got the batch, or an error."""
        now, requested = time.perf_counter_ns(), self._asked
        if self.slot.trace is not None:
            self.slot.trace.add(self.consumer.name, "wait for data", requested, now)

    def hand_out(self, images: int, bad: int = 0) -> None:
        """A batch of `images` images is returned, with `bad` skipped or replaced samples; the last ends the loop."""
        left, (self._left, requested, self._asked) = self._left, (time.perf_counter_ns(), self._asked, 0)
        self._wait += self._left - requested
        if not self._batches:
            self._first_wait = self._left - requested
        for lengths, ns in zip(self._lengths, (self._left - left, self._left - requested), strict=True):
            bucket = bucket_of(ns)
            lengths[bucket] = lengths.get(bucket, 0) + 1
        self._batches += 1
        self._images += images
        self._bad += bad
        if self._batches == self._steps:
            self.end()

    def end(self) -> None:
        """End the loop; may be called again."""
        if self._asked:  # the last request failed
            self._wait, self._asked = self._wait + time.perf_counter_ns() - self._asked, 0
        self._ended = self._ended or time.perf_counter_ns()

    # --- the thread of the device stage ---------------------------------------------------------------------------
    def count_decoded(self, images: int, by_device: int, failed: int, shared: int) -> None:
        """Count images: all, decoded by the device, failed on the device, and decoded as the crew's share."""
        self._decoded += images
        self._by_device += by_device
        self._failed += failed
        self._shared += shared

    # --- the crew: under its lock ---------------------------------------------------------------------------------
    def fill(self, full: bool) -> None:
        """Note whether the loader has nothing to do until training takes a batch."""
        now = self._ended or time.perf_counter_ns()
        if self._full:
            self._idle += max(0, now - self._full)
        self._full = now if full and not self._ended else 0

    # --- reading --------------------------------------------------------------------------------------------------
    def stats(self, *, reset: bool = False) -> LoaderStats:
        """The statistics so far, or since the last reset."""
        now = self._ended or time.perf_counter_ns()
        totals = self._totals(now)
        counts = {name: number - self._base.get(name, 0) for name, number in totals.items()}
        if reset:
            self._base = totals
        stages = stage_ns(counts, totals)
        return LoaderStats(
            epoch=self.epoch,
            batches=counts["batches"],
            images=counts["images"],
            seconds=counts["seconds"] / 1e9,
            stages={stage: ns / 1e9 for stage, ns in stages.items()},
            cpu_seconds=counts["cpu"] / 1e9,
            busy_seconds=counts["busy"] / 1e9,
            wait_seconds=counts["wait"] / 1e9,
            first_wait_seconds=counts["first wait"] / 1e9,
            idle_seconds=counts["idle"] / 1e9,
            threads=self.threads,
            prefetch=self.prefetch,
            made=counts["made"],
            bytes_read=counts["bytes read"],
            reads=counts["reads"],
            cache_hits=counts["hits"],
            ready=tuple(counts[f"ready {count}"] for count in range(self.prefetch + 1)),
            decoded_images=counts["decoded"],
            device_images=counts["by device"],
            failed_images=counts["failed"],
            shared_images=counts["shared"],
            cpu_share=self.cpu_share,
        )

    def lifetime(self) -> Totals:
        """What this loop and those before it have spent; never less than before."""
        lengths = {
            (kind, length): n
            for kind, of in zip(_LENGTHS, self._lengths, strict=True)
            for length, n in dict(of).items()
        }
        return self._earlier + Counter(self._totals(self._ended or time.perf_counter_ns())) + Counter(lengths)

    def _totals(self, now: int) -> dict[str, int]:
        crew = list(self._crew)
        every = [*crew, self.consumer, *([self.device] if self.device is not None else [])]
        requested, full = self._asked, self._full  # what is under way counts
        return {
            **{stage: sum(clock.ns[stage] for clock in every) for stage in CLOCKED},
            **{f"sampled {stage}": sum(clock.sampled[stage] for clock in every) for stage in _RENDERED},
            **{f"ready {count}": number for count, number in enumerate(self._ready)},
            "rows": sum(clock.rows_ns for clock in every),
            "busy": sum(clock.busy for clock in crew),
            "cpu": sum(clock.cpu for clock in every),
            "made": sum(clock.images for clock in crew),
            "reads": sum(clock.reads for clock in every),
            "bytes read": sum(clock.bytes_read for clock in every),
            "hits": sum(clock.hits for clock in every),
            "decoded": self._decoded,
            "by device": self._by_device,
            "failed": self._failed,
            "shared": self._shared,
            "bad": self._bad,
            "seconds": now - self._began,
            "batches": self._batches,
            "images": self._images,
            "wait": self._wait + (max(0, now - requested) if requested else 0),
            "first wait": self._first_wait,
            "idle": self._idle + (max(0, now - full) if full else 0),
        }
