"""What a loader says of itself: seconds by stage, rates, and in one line who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["CLOCKED", "LoaderStats"]

CLOCKED = ("read", "cache", "plan", "decode", "resize", "augment", "collate", "copy")
_WAITS = 0.05  # of the time: less is not worth a word
_NAMED = 0.01


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """Of the loop under way, or of the last one, since it began or since the last reset.

    batches, images: handed out to the training.
    seconds: since the loop began, until it ended or now; the end of an epoch is when its last batch is handed out.
    stages: seconds by stage, summed over the threads: "read" (bytes from the store), "cache" (bytes from a cache, and
        what storing them there takes), "plan" (which samples, their crops and the memory of the batch), "decode",
        "resize", "augment" (flips, crops without a resize, pixels ops, normalisation, dtype), "collate" (labels and
        other fields, skipped rows), "copy" (host to device, as the host sees it).
    cpu_seconds: CPU time of the loader's threads, and of the training in them.
    busy_seconds: of the `threads`, summed.
    wait_seconds: the training waited for batches; first_wait_seconds: for the first one, in which threads start.
    idle_seconds: the loader waited for the training: all batches that it may make ahead were ready.
    made: images, also in batches that are not handed out yet.
    bytes_read: of images, as stored or cached. reads: images asked for; cache_hits: those that a cache had.
    ready: of the batches that the training asked for, how many found 0, 1, … prefetch batches ready.
    decoded_images: of batches that were finished on a device, also of those that are not handed out yet. Of them,
        device_images: decoded by the device; failed_images: on which it failed, so that the threads decoded them;
        shared_images: those that it could have decoded, and the threads did, by cpu_share.
    cpu_share: the share of such images in the next batches, as given or as measured; None where no device decodes.
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
        """Share of the time in which the training waited for data, 0 to 1."""
        return _share(self.wait_seconds, self.seconds)

    @property
    def idle(self) -> float:
        """Share of the time in which data waited for the training, 0 to 1."""
        return _share(self.idle_seconds, self.seconds)

    @property
    def busy(self) -> float:
        """Share of the time of the threads in which they worked, 0 to 1."""
        return _share(self.busy_seconds, self.seconds * self.threads)

    @property
    def images_per_second(self) -> float:
        """Images handed out."""
        return self.images / self.seconds if self.seconds else 0.0

    @property
    def possible_images_per_second(self) -> float:
        """Images that the threads would make if they never waited, as fast as they made those so far."""
        return self.made * self.threads / self.busy_seconds if self.busy_seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Bytes of images read."""
        return self.bytes_read / self.seconds if self.seconds else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Of the time of all stages, the share of each, 0 to 1, the largest first."""
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
        """Where images were decoded; "" without a device."""
        if not self.decoded_images:
            return ""
        failed = f" (it failed on {self.failed_images:,})" if self.failed_images else ""
        return f"decoded on the device: {_percent(_share(self.device_images, self.decoded_images))}{failed}; "

    def _who(self) -> str:
        """Who waits for whom."""
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
