"""Stand-ins for torchcodec and torchvision: the functions this project calls, with their arguments, results and
manners, on the CPU by libjpeg: orientation by EXIF, not by XMP. They count calls and fail as a whole for one bad image,
as the real ones do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch

from readers.decode.region import upright
from readers.headers import exif_orientation, parse_header

__all__ = ["Double", "hide", "install"]


class Double:
    """calls: how many images each call had. turns: whether EXIF orientation is applied. refuse: bytes that it cannot
    decode, though the CPU can."""

    def __init__(self, turns: bool) -> None:
        self.turns = turns
        self.calls: list[int] = []
        self.refuse: set[bytes] = set()
        self.fault: BaseException | None = None
        self.wrong_shape = False

    def decode_jpeg(self, source: Sequence[torch.Tensor], *, mode: Any, device: torch.device) -> list[torch.Tensor]:
        assert isinstance(source, list) and device.type == "cpu" and getattr(mode, "name", mode) == "RGB"
        self.calls.append(len(source))
        if self.fault is not None:
            raise self.fault
        return [self.decode_one(bytes(encoded.numpy())) for encoded in source]

    def decode_one(self, data: bytes) -> torch.Tensor:
        header = parse_header(data)
        if data in self.refuse or header.components == 4 or header.process != 0xC0:
            raise RuntimeError("nvjpegDecode failed: 5")
        pixels = simplejpeg.decode_jpeg(data, "RGB", strict=False)
        if self.turns:
            pixels = upright(pixels, exif_orientation(data))
        if self.wrong_shape:
            pixels = pixels[:-1]
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def hide(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As where a package is not installed, its modules that are loaded already included."""
    loaded = [module for module in sys.modules if module.startswith(f"{name}.")]
    for module in (name, *loaded):
        monkeypatch.setitem(sys.modules, module, None)


def install(monkeypatch: pytest.MonkeyPatch, name: str) -> Double:
    """A double in place of torchcodec or torchvision."""
    double = Double(turns=name == "torchcodec")
    package, module = ModuleType(name), ModuleType({"torchcodec": "decoders", "torchvision": "io"}[name])
    module.decode_jpeg = double.decode_jpeg  # type: ignore[attr-defined]
    if name == "torchvision":
        mode = type("ImageReadMode", (), {"RGB": type("RGB", (), {"name": "RGB"})()})
        module.ImageReadMode = mode  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, f"{name}.{module.__name__}", module)
    return double
