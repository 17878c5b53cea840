"""Stand-ins for torchcodec and torchvision: the functions this project calls, with their arguments, results and
manners, on the CPU by libjpeg: orientation by EXIF, not by XMP. They count calls and fail as a whole for one bad image,
as the real ones do."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch

from readers.decode.region import upright
from readers.headers import exif_orientation, parse_header

__all__ = ["Double", "FakeCuda", "hide", "install"]


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


# --- a CUDA device ------------------------------------------------------------------------------------------------
class Garbage(torch.Tensor):
    """A tensor on the CPU that says where it is: a copy to the device has its values only once its stream has run."""

    cuda: FakeCuda
    place: torch.device
    pinned: bool

    @staticmethod
    def of(cuda: FakeCuda, values: torch.Tensor, place: str = "cpu", pinned: bool = False) -> Garbage:
        made = values.detach().clone().as_subclass(Garbage)
        made.cuda, made.place, made.pinned = cuda, torch.device(place), pinned
        return made

    @property
    def device(self) -> torch.device:
        return self.place

    def is_pinned(self) -> bool:
        return self.pinned

    def pin_memory(self) -> Garbage:
        assert not self.pinned and self.place.type == "cpu"
        return Garbage.of(self.cuda, self, pinned=True)

    def to(self, device: torch.device, *, non_blocking: bool) -> Garbage:
        assert self.pinned and non_blocking, "a copy from pageable memory makes the host wait"
        there = Garbage.of(self.cuda, torch.full_like(self, -1).as_subclass(torch.Tensor), str(device))
        source = weakref.ref(self)

        def copy() -> None:
            read = source()
            if read is not None:  # else its memory is someone else's by now
                torch.Tensor.copy_(there, read)

        self.cuda.here().queue(copy)
        return there

    def record_stream(self, stream: FakeStream) -> None:
        self.cuda.recorded.append((stream.name, id(self)))


class FakeStream:
    """Work that is done in order when somebody waits for it, and not before."""

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name
        self._lock = threading.Lock()
        self._queued: list[Callable[[], None]] = []
        self._done = 0
        self.copies = threading.Semaphore(0)  # those that were queued and nobody has waited for here

    def queue(self, work: Callable[[], None]) -> None:
        self._queued.append(work)
        self.copies.release()

    def run(self, until: int) -> None:
        with self._lock:
            for work in self._queued[self._done : until]:
                work()
            self._done = max(self._done, until)

    def synchronize(self) -> None:
        self.run(len(self._queued))

    @property
    def idle(self) -> bool:
        return self._done == len(self._queued)

    def record_event(self) -> tuple[FakeStream, int]:
        return self, len(self._queued)

    def wait_event(self, event: tuple[FakeStream, int]) -> None:
        event[0].run(event[1])


class FakeCuda:
    """Streams of torch.cuda, with copies that happen as late as they may. recorded: (stream, id of a tensor)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded: list[tuple[str, int]] = []
        self.consumer, self.side = FakeStream(self, "consumer"), FakeStream(self, "side")
        self._current = threading.local()

        @contextlib.contextmanager
        def on(stream: FakeStream) -> Iterator[None]:
            self._current.stream = stream
            yield
            del self._current.stream

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.side)
        monkeypatch.setattr(torch.cuda, "stream", on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.here())

    def here(self) -> FakeStream:
        return getattr(self._current, "stream", self.consumer)

    def tensor(self, *values: float, pinned: bool = False) -> Garbage:
        """On the host."""
        return Garbage.of(self, torch.tensor(values), pinned=pinned)
