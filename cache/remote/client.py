"""The objects below one address, for a process and all its threads, also in forks and pickled copies.

    with Remote("s3://bucket/set") as remote:
        text, facts = remote.whole("dataset.json", 1 << 20)
        parts = remote.read_many([Span("train-000000.tar", 0, 1024), …])      # in parallel, in this order

All addresses of a process share one pool of threads, which is created on first use. No read waits longer than
`Patience.most_seconds` for the network.

obstore's threads do not survive a fork, so a process that was forked after obstore was imported reads through a small
process of its own, the courier, which is started on the first read:

    this process                                        courier
    (7, address, patience, "read", arguments)   ──►     a thread for each request, at most 32 at a time
    future of 7   ◄──   (7, the result, or the error)

Both directions are streams of pickles. One courier serves all threads and all addresses of a process. It ends when its
standard input closes, at the latest with the process that started it. Every wait for it is bounded.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from typing import IO, Any, TypeVar

from cache.errors import RemoteError, SlowError, UnsupportedError
from cache.remote.store import Facts, ObjectStore, Patience, Span
from cache.remote.url import RemoteUrl, parse_url

__all__ = ["PARALLEL", "Courier", "Remote", "serve"]

PARALLEL = 32
_START_SECONDS = 60.0
_ENDED = "the process that fetches for this forked one has ended; try again"
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from cache.remote.client import serve; serve(sys.stdin.buffer, sys.stdout.buffer)"
)
_T = TypeVar("_T")
_V = TypeVar("_V")


class _Process:
    """The pool of this process, and its courier where it was forked with obstore."""

    def __init__(self, forked: bool) -> None:
        self.forked = forked
        self.lock = threading.Lock()
        self.pool: ThreadPoolExecutor | None = None
        self.courier: Courier | None = None


_process = _Process(False)


def _after_fork() -> None:
    """A child has neither the parent's threads nor those of obstore."""
    global _process
    _process = _Process(_process.forked or "obstore" in sys.modules)


os.register_at_fork(after_in_child=_after_fork)


class Remote:
    """Reading and writing below an address. It pickles by that; the copy connects by itself.

    Raises RemoteError and its kinds from every method, and MissingExtraError where obstore is missing.
    """

    def __init__(self, url: str | RemoteUrl, patience: Patience | None = None) -> None:
        self.url = parse_url(url)
        self.patience = patience or Patience.from_environment()
        self._store: ObjectStore | _ReadByCourier | None = None
        self._process: _Process | None = None

    def __repr__(self) -> str:
        return f"Remote({str(self.url)!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "patience": self.patience, "_store": None, "_process": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    # --- reading ------------------------------------------------------------------------------------------------
    def read(self, span: Span) -> tuple[Any, Facts]:
        """The bytes of one span (bytes-like), by one GET, and the facts of its object. An empty span needs no GET."""
        if span.start >= span.stop:
            return b"", Facts(span.bytes or 0, span.etag, 0.0)
        return self._reading().read(span)

    def read_many(self, spans: Sequence[Span]) -> list[tuple[Any, Facts]]:
        """The same for many spans, `PARALLEL` at a time, in their order."""
        return self.each(self.read, spans)

    def submit(self, span: Span) -> Future[tuple[Any, Facts]]:
        """Begin to read. Raises RuntimeError when the interpreter is about to end."""
        return _pool().submit(self.read, span)

    def whole(self, path: str, most_bytes: int, cut: bool = False) -> tuple[bytes, Facts]:
        """A whole object that has at most so many bytes; cut: or as many of them, by one ranged GET."""
        return self._reading().whole(path, most_bytes, cut)

    def head(self, path: str) -> tuple[Facts, Mapping[str, str]]:
        """Size, ETag and time of an object, and its attributes."""
        return self._reading().head(path)

    def each(self, work: Callable[[_T], _V], items: Iterable[_T]) -> list[_V]:
        """Call `work`, which calls one of these methods, for each item in parallel; the first error ends it."""
        waiting = list(items)
        if len(waiting) == 1:
            return [work(waiting[0])]
        futures: list[Future[_V]] = [_pool().submit(work, item) for item in waiting]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)  # requests under way end before the caller cleans up

    # --- writing ------------------------------------------------------------------------------------------------
    @property
    def store(self) -> ObjectStore:
        """For listing and writing. Raises UnsupportedError in a process that was forked with obstore in it."""
        store = self._reading()
        if isinstance(store, _ReadByCourier):
            raise UnsupportedError(f"{self.url}: a forked process can only read; write from one that was spawned")
        return store

    # --- life ---------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Close the connection; the next call connects again."""
        self._store = None

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _reading(self) -> ObjectStore | _ReadByCourier:
        store = self._store
        if store is None or self._process is not _process:
            if _process.forked:
                store = _ReadByCourier(_courier(), self.url, self.patience)
            else:
                store = ObjectStore(self.url, self.patience)
            self._store, self._process = store, _process
        return store


def _pool() -> ThreadPoolExecutor:
    process = _process
    with process.lock:
        if process.pool is None:
            process.pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="remote")
        return process.pool


def _courier() -> Courier:
    process = _process
    with process.lock:
        if process.courier is None or not process.courier.alive:
            process.courier = Courier()
        return process.courier


# --- reading for a forked process -----------------------------------------------------------------------------------
class Courier:
    """A process that answers like an `ObjectStore`. Threads may share it."""

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
        """Call a method of the `ObjectStore` of an address. Raises what that raises."""
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
        """End the courier; pending requests get an error."""
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


class _ReadByCourier:
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
    """The main function of the courier: answer until its input ends, then end at once."""
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

    crew = ThreadPoolExecutor(PARALLEL)
    try:
        while True:
            crew.submit(answer, *pickle.load(requests))
    except (EOFError, pickle.UnpicklingError):
        os._exit(0)  # further answers are not read
