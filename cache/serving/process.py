"""The server in a process of its own, so that training threads and answers do not wait for each other.

    this process                                    server
    terms and ranges, pickled   ──►  its input      opens the ranges, listens
    port, or why not            ◄──  its output     serves until a line or the end of its input, at the latest
                                                    with this process

`own_address` is where other nodes reach this one.
"""

from __future__ import annotations

import ipaddress
import json
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO

from cache.errors import PackerError, ServingError
from cache.serving.server import Ranges, Server, ServeTerms

__all__ = ["ServerProcess", "own_address", "serve"]

_START_SECONDS = 120.0
_END_SECONDS = 5.0
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from cache.serving.process import serve; serve(sys.stdin.buffer, sys.stdout.buffer)"
)
_END = b"\n"
_ANY_PORT = 9  # discard; nothing is sent to it


class ServerProcess:
    """A server in another process. Raises ServingError where it does not start.

    ranges: pickled; the other process opens them by itself.
    """

    def __init__(self, ranges: Ranges, terms: ServeTerms) -> None:
        try:
            work = pickle.dumps((terms, ranges))
        except Exception as error:
            raise ServingError(f"this reader cannot be opened by the process that serves it: {error}") from error
        command = [sys.executable, "-c", _BOOT, json.dumps([path or os.getcwd() for path in sys.path])]
        self._owner = os.getpid()
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None and self._process.stdout is not None
        timer = threading.Timer(_START_SECONDS, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(work)
            self._process.stdin.flush()
            line = self._process.stdout.readline(1 << 16)
        except OSError:
            line = b""
        finally:
            timer.cancel()
        try:
            self.port = int(json.loads(line)["port"])
        except (ValueError, KeyError, TypeError):
            self.close()
            raise ServingError(_reason(line, self._process.returncode)) from None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> None:
        """Wait until it has ended."""
        self._process.wait()

    def close(self) -> None:
        """End the server. Does nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError, ValueError):  # it has ended, or this was called before
            self._process.stdin.write(_END)  # a forked process may have the other end open, too
        with suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _reason(line: bytes, status: int | None) -> str:
    try:
        return str(json.loads(line)["error"])
    except (ValueError, KeyError, TypeError):
        return f"the process that serves this node has ended with status {status}, or did not start in time"


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """The main function of the server's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; this process ends with its input
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection is a file
    try:
        terms, ranges = pickle.load(requests)
        server = Server(ranges, terms)
    except Exception as error:
        known = isinstance(error, PackerError)
        said = str(error) if known else f"the process that serves this node cannot open the reader: {error!r}"
        _say(answers, {"error": said})
        os._exit(1)
    _say(answers, {"port": server.port})
    requests.read(len(_END))
    server.close()
    ranges.close()  # the last user of a cache removes it
    os._exit(0)  # reads under way are not waited for


def _say(answers: IO[bytes], content: dict[str, object]) -> None:
    try:
        answers.write(json.dumps(content).encode() + b"\n")
        answers.flush()
    except OSError:
        pass


def own_address(host: str | None = None) -> str:
    """The address of this machine to listen at.

    host: a name or an address of this machine; a network, as 10.1.0.0/16, for this machine's address in it, so that
        all nodes can be given the same text; None for that of this machine's own name. Raises ServingError.
    """
    if host is not None and "/" in host:
        return _address_in(host)
    name = host or socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ServingError(
            f"{name!r} is not known here as the name of a machine; name an address or a network of this machine with "
            f"host=, as 10.1.0.0/16"
        ) from error
    address = str(sorted(found, key=lambda one: one[0] != socket.AF_INET)[0][4][0])
    known = ipaddress.ip_address(address.partition("%")[0])
    if known.is_loopback and host is None:
        raise ServingError(
            f"the name of this machine, {name}, means {address} here, where no other node can reach it; name an "
            f"address or a network of this machine with host=, as 10.1.0.0/16"
        )
    if known.is_unspecified:
        raise ServingError(f"{name}: means every network of this machine; name the one of the cluster, as 10.1.0.0/16")
    return address


def _address_in(text: str) -> str:
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise ServingError(f"{text!r} is not a network, as 10.1.0.0/16") from error
    family = socket.AF_INET if network.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: the kernel chooses the address from which it would.
            probe.connect((str(network.network_address + (1 if network.num_addresses > 1 else 0)), _ANY_PORT))
            address = str(probe.getsockname()[0])
        except OSError:
            address = ""
    if not address or ipaddress.ip_address(address) not in network:
        raise ServingError(f"this machine ({socket.gethostname()}) has no address in the network {text}")
    return address
