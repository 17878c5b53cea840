"""Sizes as people write them."""

from __future__ import annotations

import re

__all__ = ["parse_size"]

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}


def parse_size(text: str) -> int:
    """Bytes of a size such as "1GiB", "256MB", "4096". Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is no size; write it as 256MiB or 1GiB")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])
