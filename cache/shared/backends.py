"""The backends by name, each imported when it is asked for."""

from __future__ import annotations

from cache.shared.segment import Backend

__all__ = ["backend_named"]


def backend_named(name: str) -> Backend:
    """file, memfd or mpi. Raises ValueError for another name."""
    if name == "file":
        from cache.shared.file import FileBackend

        return FileBackend()
    if name == "memfd":
        from cache.shared.memfd import MemfdBackend

        return MemfdBackend()
    if name == "mpi":
        from cache.shared.mpi import MpiBackend

        return MpiBackend()
    raise ValueError(f"no cache backend {name!r}: there are file, memfd and mpi")
