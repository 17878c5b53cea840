"""What the caches among a thread's stores have spent and given: a read below a cache is told from one in it.

A cache adds here what it takes itself, without what the store below it takes, so that caches over each other add up.
Whoever wants to know of one read compares the counts before and after it, in the thread that reads.
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
