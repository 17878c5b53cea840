"""Python's search for cycles of references, out of the way where millions of small objects hold none.

It looks through all that is there each time their number has grown by a quarter: a twentieth of the time of packing
small files. Memory of objects without cycles is given back at once as ever.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_search_for_cycles", "search_seldom"]

_ALLOCATIONS = 100_000


@contextmanager
def no_search_for_cycles() -> Iterator[None]:
    """None in this process meanwhile, in any of its threads."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def search_seldom() -> None:
    """For a process that packs: leave out what came along in the fork, whose pages looking would copy; wait longer."""
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS, 50, 50)
