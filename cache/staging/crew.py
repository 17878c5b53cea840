"""A few threads that work off a list; the caller's thread watches. Copying releases the interpreter's lock.

Threads are daemons and stop within one chunk when one of them fails, when the caller is interrupted (Ctrl-C), or when
somebody sets the stop event; the caller always waits for them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

__all__ = ["work_off"]

_T = TypeVar("_T")
_TICK_SECONDS = 0.2


def work_off(
    items: Iterable[_T], work: Callable[[_T], None], threads: int, stop: threading.Event, tick: Callable[[], None]
) -> None:
    """Call `work` for each item from so many threads, and `tick` now and then from this one.

    Raises the first error of any thread, when all have stopped. `stop` is set then, so `work` should look at it.
    """
    waiting, errors, ended = deque(items), list[BaseException](), threading.Semaphore(0)

    def run() -> None:
        try:
            while waiting and not stop.is_set():
                try:
                    item = waiting.popleft()
                except IndexError:  # another thread was quicker
                    break
                work(item)
        except BaseException as error:
            errors.append(error)
            stop.set()
        finally:
            ended.release()

    crew = [threading.Thread(target=run, name=f"stage-{n}", daemon=True) for n in range(min(threads, len(waiting)))]
    left = len(crew)
    try:
        for thread in crew:
            thread.start()
        while left:
            if ended.acquire(timeout=_TICK_SECONDS):
                left -= 1
            else:
                tick()
    finally:
        if left:
            stop.set()
        for thread in crew:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]
