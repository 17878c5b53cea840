"""Reading for a forked process: by a small process of its own, since obstore's threads do not survive a fork.

    this process                                     courier (started on the first read after a fork)
    {"id": 7, "url": …, "do": "read", …}\\n   ──►    a thread for each request, at most 32 at a time
    future of 7  ◄──  {"id": 7, "bytes": n, …}\\n + n bytes

One courier serves all threads and all addresses of a process. It ends when its standard input closes, which happens at
the latest when the process that started it is gone. Every wait for it is bounded.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import astuple
from typing import IO, Any

from cache.errors import MissingExtraError, RemoteError, SlowError
from cache.remote.obstore_errors import error_named
from cache.remote.store import Facts, ObjectStore, Patience, Span
from cache.remote.url import RemoteUrl, parse_url

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
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[tuple[dict[str, Any], bytes]]] = {}
        self._lock = threading.Lock()
        self._listener = threading.Thread(target=self._listen, name="courier", daemon=True)
        self._listener.start()

    def ask(self, url: RemoteUrl, patience: Patience, do: str, **what: Any) -> tuple[dict[str, Any], bytes]:
        """One request. Raises what `ObjectStore` does."""
        number, answer = next(self._numbers), Future[tuple[dict[str, Any], bytes]]()
        request = {"id": number, "url": url.full(), "patience": astuple(patience), "do": do, **what}
        with self._lock:
            self._waiting[number] = answer
            try:
                stdin = self._process.stdin
                assert stdin is not None
                stdin.write(json.dumps(request).encode() + b"\n")
                stdin.flush()
            except (OSError, ValueError) as error:
                self._waiting.pop(number, None)
                raise _gone(url) from error
        try:
            told, data = answer.result(patience.most_seconds + _START_SECONDS)
        except FutureTimeout:
            self.close()
            raise SlowError(
                f"{url}: the process that fetches for this forked one did not answer and was ended"
            ) from None
        if "error" in told:
            raise _error(url, told)
        return told, data

    @property
    def alive(self) -> bool:
        return self._listener.is_alive() and self._process.poll() is None

    def close(self) -> None:
        """End the courier; what waits for it gets an error."""
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except OSError:
                pass
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _listen(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        try:
            while line := stdout.readline():
                told = json.loads(line)
                data = stdout.read(told.get("bytes", 0))
                if len(data) != told.get("bytes", 0):
                    break
                answer = self._waiting.pop(told["id"], None)
                if answer is not None:
                    answer.set_result((told, data))
        except (OSError, ValueError):
            pass
        with self._lock:
            left, self._waiting = self._waiting, {}
        for answer in left.values():
            answer.set_result(({"error": "RemoteError", "text": _ENDED}, b""))


class ReadByCourier:
    """The reading side of `ObjectStore`, carried out by a courier."""

    def __init__(self, courier: Courier, url: RemoteUrl, patience: Patience) -> None:
        self._courier, self._url, self._patience = courier, url, patience

    def read(self, span: Span) -> tuple[Any, Facts]:
        told, data = self._courier.ask(self._url, self._patience, "read", span=astuple(span))
        return data, Facts(*told["facts"])

    def whole(self, path: str, most_bytes: int, cut: bool = False) -> tuple[bytes, Facts]:
        told, data = self._courier.ask(self._url, self._patience, "whole", path=path, most=most_bytes, cut=cut)
        return data, Facts(*told["facts"])

    def head(self, path: str) -> tuple[Facts, Mapping[str, str]]:
        told, _ = self._courier.ask(self._url, self._patience, "head", path=path)
        return Facts(*told["facts"]), told["attributes"]


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """What the courier's process does: answer until its input ends, and then end at once."""
    lock, stores = threading.Lock(), dict[tuple[str, tuple[Any, ...]], ObjectStore]()

    def answer(request: dict[str, Any]) -> None:
        data: Any = b""
        try:
            key = (request["url"], tuple(request["patience"]))
            if key not in stores:
                stores[key] = ObjectStore(parse_url(request["url"]), Patience(*request["patience"]))
            told, data = _carried_out(stores[key], request)
        except (OSError, ImportError, ValueError) as error:
            told = {"error": type(error).__name__, "text": str(error)}
        with lock:
            answers.write(json.dumps({"id": request["id"], "bytes": len(data), **told}).encode() + b"\n")
            answers.write(data)
            answers.flush()

    crew = ThreadPoolExecutor(_THREADS)
    for line in requests:
        crew.submit(answer, json.loads(line))
    os._exit(0)  # nobody waits for what is still on its way


def _carried_out(store: ObjectStore, request: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    if request["do"] == "read":
        data, facts = store.read(Span(*request["span"]))
        return {"facts": astuple(facts)}, data
    if request["do"] == "whole":
        data, facts = store.whole(request["path"], request["most"], request["cut"])
        return {"facts": astuple(facts)}, data
    facts, attributes = store.head(request["path"])
    return {"facts": astuple(facts), "attributes": dict(attributes)}, b""


def _error(url: RemoteUrl, told: Mapping[str, Any]) -> Exception:
    """The error that a courier met, under its own name."""
    if told["error"] == MissingExtraError.__name__:
        return MissingExtraError("obstore", "remote", f"{url.scheme}://")
    return error_named(told["error"], told["text"])


def _gone(url: RemoteUrl) -> RemoteError:
    return RemoteError(f"{url}: {_ENDED}")
