"""What the users of a cache must agree on: the process that comes first writes it into the shared memory."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from cache import SharedByteCache

__all__ = ["Terms", "agree"]

_AGREE_SECONDS = 2.0


@dataclass(frozen=True)
class Terms:
    """What the users of a cache must agree on.

    threshold: see `Subset`.
    packed: the fields that are compressed.
    rate: of a form that has one, as measured; else 0.
    """

    threshold: int
    packed: tuple[str, ...] = ()
    rate: float = 0.0

    def to_json(self) -> bytes:
        return json.dumps({"threshold": self.threshold, "packed": self.packed, "rate": self.rate}).encode()


def agree(shared: SharedByteCache, mine: Terms) -> Terms | None:
    """The terms of the process that came first; None where they cannot be read."""
    until = time.monotonic() + _AGREE_SECONDS
    while True:
        text = shared.get(0)
        if text is not None:
            try:
                found = json.loads(bytes(text))
                return Terms(int(found["threshold"]), tuple(map(str, found["packed"])), float(found["rate"]))
            except (ValueError, KeyError, TypeError):
                return None
        # Refused while another process writes its terms.
        if not shared.put(0, mine.to_json()) and time.monotonic() > until:
            return None
        time.sleep(0.001)
