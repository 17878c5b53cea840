"""The answers to requests, by path, independent of sockets and HTTP headers.

A path arrives as unquoted parts, which are only keys of look-ups: no part is ever used as a file name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlencode

from cache.errors import PackerError, UnknownNameError
from packer.tools.view.document import Body, Bytes, Column, Pending, SplitView, View, order_document
from packer.tools.view.samples import Batches, BatchRequest, abilities, as_png, field_bytes, sample_document, thumbnail

__all__ = ["PAGE_TYPES", "Answer", "Answers", "Query", "error_answer", "page_files"]

PAGE_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
_JSON, _BYTES, _JPEG, _PNG = "application/json", "application/octet-stream", "image/jpeg", "image/png"
_LEAST_SIDE, _MOST_SIDE, _SIDE = 16, 1024, 160
_BATCH_NUMBERS = ("seed", "epoch", "batch", "batch_size", "ranks", "rank")
_NUMBER = re.compile(r"[0-9]{1,18}")
_SELF = "connect-src 'self'"  # in the policy of index.html
Query = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Answer:
    """An answer. type: media type of the body. kept: whether browsers may cache it while this server runs."""

    status: int
    type: str = _JSON
    body: Body = field(default_factory=lambda: Bytes(b""))
    kept: bool = False


class Refused(Exception):
    """Raised for a request that cannot be answered, with the status, type and message of the error."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


def page_files(*origins: str) -> dict[str, bytes]:
    """The files of the page, by name. origins: other servers that the page may read."""
    folder = files("packer.tools.view") / "page"
    allowed = " ".join((_SELF, *origins)).encode()
    return {
        entry.name: entry.read_bytes().replace(_SELF.encode(), allowed)
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.is_file() and entry.name[entry.name.rfind(".") :] in PAGE_TYPES
    }


def error_answer(status: int, kind: str, message: str) -> Answer:
    return _json({"error": {"type": kind, "message": message}}, status)


def _json(content: Any, status: int = 200) -> Answer:
    return Answer(status, _JSON, Bytes(json.dumps(content, separators=(",", ":")).encode()))


class Answers:
    """The answers of a view."""

    page: str = ""
    origins: tuple[str, ...] = ()

    def __init__(self, view: View) -> None:
        self._view = view
        self._page = page_files()
        self._batches = {name: Batches(split.reader) for name, split in view.splits.items()}
        self._routes: dict[str, Callable[[Sequence[str], Query], Answer]] = {
            "view.json": self._document,
            "classes.json": self._classes,
            "where.json": self._where,
            "batches.json": self._batch,
            "batch.png": self._batch_picture,
            "column": self._column,
            "order": self._order,
            "sample": self._sample,
            "thumb": self._thumb,
        }

    def answer(self, parts: Sequence[str], query: Query) -> Answer:
        """Answer a GET request for a path below the token. Raises nothing."""
        try:
            if len(parts) == 1 and (parts[0] or "index.html") in self._page:
                name = parts[0] or "index.html"
                return Answer(200, PAGE_TYPES[name[name.rfind(".") :]], Bytes(self._page[name]))
            route = self._routes.get(parts[0])
            if route is None:
                raise Refused(404, "NotFound", "not found")
            return route(parts[1:], query)
        except Pending as pending:
            return _json({"pending": True, **pending.scan.progress()}, 202)
        except Refused as refused:
            return error_answer(refused.status, refused.kind, str(refused))
        except (UnknownNameError, IndexError) as error:
            return error_answer(404, type(error).__name__, str(error))
        except (PackerError, OSError) as error:
            return error_answer(415, type(error).__name__, str(error))
        except ValueError as error:
            return error_answer(400, type(error).__name__, str(error))
        except MemoryError:
            return error_answer(503, "MemoryError", "not enough memory")
        except Exception as error:  # otherwise a browser would wait for the answer
            return error_answer(500, type(error).__name__, f"{error}; this is a defect of packer, please report it")

    # --- documents --------------------------------------------------------------------------------------------------
    def _document(self, rest: Sequence[str], query: Query) -> Answer:
        _expect(rest, 0)
        return _json(self._view.document(abilities(next(iter(self._view.splits.values())).reader)))

    def _classes(self, rest: Sequence[str], query: Query) -> Answer:
        _expect(rest, 0)
        return _json(list(self._view.classes))

    def _where(self, rest: Sequence[str], query: Query) -> Answer:
        _expect(rest, 0)
        split = self._split(_one(query, "split"))
        try:
            name, order = split.select(
                _one(query, "where", ""), _one(query, "search", ""), _one(query, "order", "stored")
            )
        except (ValueError, UnknownNameError) as error:
            raise Refused(400, type(error).__name__, str(error)) from error
        return _json(order_document(order, f"order/{quote(split.name, safe='')}/{name}.npy"))

    def _order(self, rest: Sequence[str], query: Query) -> Answer:
        _expect(rest, 2)
        split, (name, _, suffix) = self._split(rest[0]), rest[1].rpartition(".")
        order = split.order(name)
        if suffix == "npy":
            return Answer(200, _BYTES, Column(order.values), kept=True)
        if suffix == "json":
            return _json(order_document(order, f"order/{quote(split.name, safe='')}/{quote(name, safe='')}.npy"))
        raise Refused(404, "NotFound", "orders are .json and .npy")

    def _column(self, rest: Sequence[str], query: Query) -> Answer:
        _expect(rest, 2)
        split = self._split(rest[0])
        columns = split.columns() | split.more_columns
        name = rest[1].removesuffix(".npy")
        if name not in columns or name == rest[1]:
            raise Refused(404, "NotFound", f"there is no column {name!r}")
        return Answer(200, _BYTES, Column(columns[name]), kept=True)

    # --- samples ----------------------------------------------------------------------------------------------------
    def _sample(self, rest: Sequence[str], query: Query) -> Answer:
        split = self._split(rest[0] if rest else "")
        if len(rest) == 2 and rest[1].endswith(".json"):
            return _json(sample_document(split.reader, _index(split, rest[1].removesuffix(".json"))))
        _expect(rest, 3)
        index, name = _index(split, rest[1]), rest[2]
        if _one(query, "as", "") == "png":
            return Answer(200, _PNG, Bytes(as_png(split.reader, index, name)), kept=True)
        data, media = field_bytes(split.reader, index, name)
        return Answer(200, media, Bytes(data), kept=True)

    def _thumb(self, rest: Sequence[str], query: Query) -> Answer:
        _expect(rest, 2)
        split = self._split(rest[0])
        side = _number(query, "side", _SIDE)
        data = thumbnail(split.reader, _index(split, rest[1]), min(max(side, _LEAST_SIDE), _MOST_SIDE))
        return Answer(200, _JPEG, Bytes(data), kept=True)

    # --- batches ----------------------------------------------------------------------------------------------------
    def _batch(self, rest: Sequence[str], query: Query) -> Answer:
        _expect(rest, 0)
        split, request = self._split(_one(query, "split")), _batch_request(query)
        batch = self._batches[split.name].describe(request)
        if batch.pop("has_pixels"):
            parameters = {"split": split.name, **asdict(request), "op": request.ops}
            del parameters["ops"]
            for sample in batch["samples"]:
                sample["image"] = f"batch.png?{urlencode({**parameters, 'item': sample['item']}, doseq=True)}"
        return _json(batch)

    def _batch_picture(self, rest: Sequence[str], query: Query) -> Answer:
        _expect(rest, 0)
        split, item = self._split(_one(query, "split")), _number(query, "item")
        data = self._batches[split.name].picture(_batch_request(query), item)
        return Answer(200, _PNG, Bytes(data), kept=True)

    def _split(self, name: str) -> SplitView:
        if name not in self._view.splits:
            raise Refused(404, "UnknownNameError", f"no split {name!r}; there are {', '.join(self._view.splits)}")
        return self._view.splits[name]


def _expect(rest: Sequence[str], count: int) -> None:
    if len(rest) != count:
        raise Refused(404, "NotFound", "not found")


def _one(query: Query, name: str, default: str | None = None) -> str:
    """The only value of a name in a query, or its default. Raises Refused."""
    values = query.get(name, ())
    if len(values) == 1:
        return values[0]
    if not values and default is not None:
        return default
    raise Refused(400, "UsageError", f"expected {name}= once, found it {len(values)} times")


def _number(query: Query, name: str, default: int | None = None) -> int:
    text = _one(query, name, None if default is None else str(default))
    if not _NUMBER.fullmatch(text):
        raise Refused(400, "UsageError", f"{name} is {text!r:.40}, expected a whole number")
    return int(text)


def _batch_request(query: Query) -> BatchRequest:
    usual = BatchRequest()
    numbers = {name: _number(query, name, getattr(usual, name)) for name in _BATCH_NUMBERS}
    return BatchRequest(**numbers, order=_one(query, "order", usual.order), ops=tuple(query.get("op", ())))


def _index(split: SplitView, text: str) -> int:
    if not _NUMBER.fullmatch(text) or int(text) >= len(split.reader):
        raise Refused(404, "IndexError", f"{text!r:.40} is not a sample of {split.name}, which has {len(split.reader)}")
    return int(text)
