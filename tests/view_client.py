"""A minimal browser for the tests of `packer view`."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
import numpy.typing as npt

__all__ = ["Client", "Reply"]

_MOST_POLLS = 20_000


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return str(self.json["error"]["message"])


class Client:
    """Sends requests to a server in turn. log: bytes of each answer, by path."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.base = parts.path
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
        self.log: list[tuple[str, int]] = []

    def ask(self, path: str, headers: Mapping[str, str] | None = None, method: str = "GET") -> Reply:
        """Request a path literally, from the root."""
        self._connection.request(method, path, headers=dict(headers or {}))
        answer = self._connection.getresponse()
        body = answer.read()
        self.log.append((path, len(body)))
        return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, body)

    def get(self, path: str, **headers: str) -> Reply:
        """Request a path below the token."""
        return self.ask(self.base + path, headers)

    def order(self, document: str) -> tuple[npt.NDArray[Any], list[Any]]:
        """(values, runs) of an order; repeats the request while samples are read for it."""
        for _ in range(_MOST_POLLS):
            reply = self.get(document)
            if reply.status != 202:
                break
        assert reply.status == 200, reply.body
        order = reply.json
        data = self.get(order["url"]).body
        values = np.frombuffer(data, "<u4", offset=order["start"])
        assert len(values) == order["count"]
        return values, order["runs"]

    def column(self, described: Mapping[str, Any]) -> npt.NDArray[Any]:
        """A column, read by a range, as its document describes it."""
        width = np.dtype(described["dtype"]).itemsize
        start, stop = described["start"], described["start"] + width * described["length"]
        if start == stop:
            return np.zeros(0, described["dtype"])
        reply = self.get(described["url"], Range=f"bytes={start}-{stop - 1}")
        assert reply.status == 206
        return np.frombuffer(reply.body, described["dtype"])

    def where(self, split: str, text: str) -> Reply:
        return self.get(f"where.json?split={quote(split)}&where={quote(text)}")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()
