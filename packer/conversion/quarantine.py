"""Copies of files that could not be packed, put aside under their own names."""

from __future__ import annotations

import os
from pathlib import Path

from readers.sample import Buffer

__all__ = ["set_aside"]


def set_aside(folder: Path, name: str, payload: Buffer) -> None:
    """Write `payload` to folder/name, which the caller has checked to stay inside."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
