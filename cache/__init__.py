"""What one node has and keeps: its CPUs and memory as this process may use them, its page cache, and who else is there.

This is the bottom of the house: it imports nothing of ours, and neither click, h5py nor torch.
"""

from cache.node import available_memory_bytes, usable_cpus
from cache.page import drop, prefetch, resident_bytes, write_behind
from cache.ranks import Ranks, detect_ranks

__all__ = [
    "Ranks",
    "available_memory_bytes",
    "detect_ranks",
    "drop",
    "prefetch",
    "resident_bytes",
    "usable_cpus",
    "write_behind",
]
