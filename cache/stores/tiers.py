"""What the caches among a thread's stores have spent and given, apart from the stores below them.

A cache adds here the time that it takes itself, without that of the store below it, so that caches over each other add
up. The share of one read is the difference of the counts before and after it, in the thread that reads.
"""

from __future__ import annotations

import threading

__all__ = ["TIERS", "Tiers"]


class Tiers(threading.local):
    """Sums of one thread. nanoseconds: spent in caches. hits, hit_bytes: payloads that they gave."""

    nanoseconds = 0
    hits = 0
    hit_bytes = 0

    def state(self) -> tuple[int, int, int]:
        """(nanoseconds, hits, hit_bytes) so far."""
        return self.nanoseconds, self.hits, self.hit_bytes


TIERS = Tiers()
