"""Whether this GPU has an engine for JPEGs (A100, H100, Blackwell and some others), asked of nvJPEG itself.

Without one nvJPEG decodes by the host and by kernels, and says nothing: on T4, V100, most GeForce cards, and in
containers that lack libnvcuvid (NVIDIA_DRIVER_CAPABILITIES without "video"). torchcodec and torchvision do not say
either which of the two they use, but both ask nvjpegCreateEx for its hardware backend, and so does this.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

__all__ = ["find_library", "has_jpeg_engine"]

_HARDWARE = 3  # nvjpegBackend_t, nvjpeg.h
_SUCCESS = 0


def has_jpeg_engine(maps: Path = Path("/proc/self/maps")) -> bool | None:
    """Of the current CUDA device, by the libnvjpeg of this process; None where none is loaded, so nobody knows.

    maps: lists the files that are mapped into this process. A decoder has to be loaded before.
    """
    found = None
    for library in find_library("libnvjpeg", maps):
        try:
            nvjpeg = ctypes.CDLL(library)
            handle = ctypes.c_void_p()
            status = nvjpeg.nvjpegCreateEx(_HARDWARE, None, None, 0, ctypes.byref(handle))
        except (OSError, AttributeError):
            continue
        if status == _SUCCESS:
            nvjpeg.nvjpegDestroy(handle)
            return True
        found = False
    return found


def find_library(name: str, maps: Path = Path("/proc/self/maps")) -> list[str]:
    """The libraries of this process whose file names begin with `name`."""
    try:
        lines = maps.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    return sorted({line.split(maxsplit=5)[5] for line in lines if f"/{name}" in line})
