"""Reading for a forked process: by a small process of its own, since obstore's threads do not survive a fork.

    this process                                        courier (started on the first read after a fork)
    (7, address, patience, "read", arguments)   ──►     a thread for each request, at most 32 at a time
    future of 7   ◄──   (7, what came of it, or the error)

Both directions are a stream of pickles. One courier serves all threads and all addresses of a process. It ends when its
standard input closes, which happens at the latest when the process that started it is gone. Every wait for it is
bounded.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import IO, Any

from cache.errors import RemoteError, SlowError
from cache.remote.store import Facts, ObjectStore, Patience, Span
from cache.remote.url import RemoteUrl

__all__ = ["Courier", "ReadByCourier", "serve"]

_THREADS = 32
_START_SECONDS = 60.0
_ENDED = "the process that fetches for this forked one has ended; try again"
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from cache.remote.courier import serve; serve(sys.stdin.buffer, sys.stdout.buffer)"
)


class Courier:
    """What a process asks instead of an `ObjectStore`; started when it is made. Threads may share it."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", _BOOT, json.dumps([path or os.getcwd() for path in sys.path])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._listener = threading.Thread(target=self._listen, name="courier", daemon=True)
        self._listener.start()

    def ask(self, url: RemoteUrl, patience: Patience, method: str, *arguments: Any) -> Any:
        """What a method of `ObjectStore` gives for an address. Raises what that does."""
        number, answer = next(self._numbers), Future[Any]()
        with self._lock:
            self._waiting[number] = answer
            try:
                pickle.dump((number, url, patience, method, arguments), self._requests)
                self._requests.flush()
            except (OSError, ValueError) as error:
                self._waiting.pop(number, None)
                raise RemoteError(f"{url}: {_ENDED}") from error
        try:
            return answer.result(patience.most_seconds + _START_SECONDS)
        except FutureTimeout:
            self.close()
            raise SlowError(
                f"{url}: the process that fetches for this forked one did not answer and was ended"
            ) from None

    @property
    def alive(self) -> bool:
        return self._listener.is_alive() and self._process.poll() is None

    def close(self) -> None:
        """End the courier; what waits for it gets an error."""
        try:
            self._requests.close()
        except OSError:
            pass
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join()
        self._answers.close()

    def _listen(self) -> None:
        try:
            while True:
                number, result, error = pickle.load(self._answers)
                answer = self._waiting.pop(number, Future())
                if error is None:
                    answer.set_result(result)
                else:
                    answer.set_exception(error)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError):  # it has ended, perhaps in mid-answer
            pass
        with self._lock:
            left, self._waiting = self._waiting, {}
        for answer in left.values():
            answer.set_exception(RemoteError(_ENDED))


class ReadByCourier:
    """The reading side of `ObjectStore`, carried out by a courier."""

    def __init__(self, courier: Courier, url: RemoteUrl, patience: Patience) -> None:
        self._courier, self._url, self._patience = courier, url, patience

    def read(self, span: Span) -> tuple[Any, Facts]:
        data, facts = self._ask("read", span)
        return data, facts

    def whole(self, path: str, most_bytes: int, cut: bool = False) -> tuple[bytes, Facts]:
        data, facts = self._ask("whole", path, most_bytes, cut)
        return data, facts

    def head(self, path: str) -> tuple[Facts, Mapping[str, str]]:
        facts, attributes = self._ask("head", path)
        return facts, attributes

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._courier.ask(self._url, self._patience, method, *arguments)


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """What the courier's process does: answer until its input ends, and then end at once."""
    lock, stores = threading.Lock(), dict[tuple[RemoteUrl, Patience], ObjectStore]()

    def answer(number: int, url: RemoteUrl, patience: Patience, method: str, arguments: tuple[Any, ...]) -> None:
        result, error = None, None
        try:
            if (url, patience) not in stores:
                stores[url, patience] = ObjectStore(url, patience)
            result = getattr(stores[url, patience], method)(*arguments)
        except Exception as failure:
            error = failure
        with lock:
            pickle.dump((number, result, error), answers)
            answers.flush()

    crew = ThreadPoolExecutor(_THREADS)
    try:
        while True:
            crew.submit(answer, *pickle.load(requests))
    except (EOFError, pickle.UnpicklingError):
        os._exit(0)  # no answer on its way is wanted any more
