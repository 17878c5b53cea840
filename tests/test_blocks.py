"""Blocks are used again, but only without views of them."""

from __future__ import annotations

import random
import threading

import numpy as np

from cache.stores.ranges import BlockPool


def test_a_block_is_used_again_without_views_of_it() -> None:
    pool = BlockPool()
    first = pool.take(1000)
    first[:] = b"x" * 1000
    place = np.frombuffer(first, np.uint8).__array_interface__["data"][0]
    array = np.frombuffer(first.toreadonly()[10:20], np.uint8)
    del first
    other = pool.take(1000)  # `array` still looks at the first block
    assert np.frombuffer(other, np.uint8).__array_interface__["data"][0] != place
    other[:] = b"y" * 1000
    assert array.tobytes() == b"x" * 10
    del array
    again = pool.take(500)
    assert np.frombuffer(again, np.uint8).__array_interface__["data"][0] == place


def test_sizes() -> None:
    pool = BlockPool()
    for size in (0, 1, 1 << 20, (1 << 20) + 1, 5 << 20):
        assert len(pool.take(size)) == size
    held = [pool.take(10) for _ in range(10)]
    assert len({np.frombuffer(view, np.uint8).__array_interface__["data"][0] for view in held}) == 10
    pool.clear()
    assert all(len(view) == 10 for view in held)


def test_threads_never_share_a_block() -> None:
    pool = BlockPool()
    wrong: list[int] = []

    def work(mark: int) -> None:
        rng = random.Random(mark)
        kept = []
        for _ in range(300):
            view = pool.take(rng.randrange(1, 3000))
            view[:] = bytes([mark]) * len(view)
            kept.append(view.toreadonly())
            if len(kept) > rng.randrange(4):
                kept.pop(0)
            wrong.extend(mark for v in kept if v.tobytes() != bytes([mark]) * len(v))

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
