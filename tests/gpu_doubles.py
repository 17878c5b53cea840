"""Stand-ins for torchcodec and torchvision: the functions this project calls, with their arguments, results and
manners, on the CPU by libjpeg: orientation by EXIF, not by XMP. They count calls and fail as the real ones do: as a
whole for one bad image, and by RuntimeError alone, with the texts of torchcodec 0.17 and torchvision 0.29, read in
their sources and binaries. Whether the image or the device is at fault these texts do not say."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest
import simplejpeg
import torch

from readers.decode.batch import PROBE
from readers.decode.region import upright
from readers.headers import exif_orientation, parse_header

__all__ = ["FAULTS", "Double", "FakeCuda", "hide", "install", "set_engine"]

_CODEC = "/__w/torchcodec/torchcodec/meta-pytorch/torchcodec/src/torchcodec/_core/DecodeJpegCuda.cpp"
_VISION = "/__w/vision/vision/pytorch/vision/torchvision/csrc/io/image/cuda/decode_jpegs_cuda.cpp"
_EMPTY = "torch_empty( size.data(), size.size(), &handle) API call failed at /torch/csrc/stable/ops.h, line 271"
Fault = Literal["create", "lost", "memory", "bad jpeg"]
# What they say where every call fails: torchcodec, torchvision.
FAULTS: dict[Fault, tuple[str, str]] = {
    "create": (
        f"CUDAJpegDecoder, {_CODEC}:209, Failed to initialize nvjpeg with hardware backend: 1",
        f"CUDAJpegDecoder, {_VISION}:163, Failed to initialize nvjpeg with hardware backend: 1",
    ),
    "lost": (
        f"decode_images, {_CODEC}:466, Failed to synchronize CUDA stream: 700",
        f"decode_jpegs_cuda, {_VISION}:127, Error while decoding JPEG images: decode_images, {_VISION}:389, Failed to "
        f"synchronize CUDA stream: 700",
    ),
    "memory": (
        _EMPTY,
        f"decode_jpegs_cuda, {_VISION}:127, Error while decoding JPEG images: {_EMPTY}",
    ),
    "bad jpeg": (
        f"decode_software, {_CODEC}:438, nvjpegDecode failed: 3",
        f"decode_jpegs_cuda, {_VISION}:127, Error while decoding JPEG images: decode_images, {_VISION}:515, Failed to "
        f"parse jpeg stream: 3",
    ),
}


class Double:
    """name: of the package. turns: whether EXIF orientation is applied. calls: how many images each call had, those of
    the probe image left out; probes: how many those were. refuse: bytes that it cannot decode, though the CPU can; True
    for all but the probe. fault: of every call. after: calls that succeed before the fault. room: images of a call for
    which there is memory on the device.
    """

    def __init__(self, turns: bool) -> None:
        self.turns, self.name = turns, "torchcodec" if turns else "torchvision"
        self.calls: list[int] = []
        self.probes = 0
        self.refuse: set[bytes] | Literal[True] = set()
        self.fault: Fault | None = None
        self.after = 0
        self.room = sys.maxsize
        self.wrong_shape = False

    def decode_jpeg(self, source: Sequence[torch.Tensor], *, mode: Any, device: torch.device) -> list[torch.Tensor]:
        """The results are on the CPU for any device."""
        assert isinstance(source, list) and source and getattr(mode, "name", mode) == "RGB"
        assert device.type == "cpu" or device.index is not None
        assert all(one.dtype == torch.uint8 and one.dim() == 1 and one.numel() for one in source)
        images = [bytes(encoded.numpy()) for encoded in source]
        if images == [PROBE]:
            self.probes += 1
        else:
            self.calls.append(len(images))
        if self.fault is not None and len(self.calls) > self.after:
            raise self.error(self.fault)
        if len(images) > self.room:
            raise self.error("memory")
        return [self.decode_one(data) for data in images]

    def error(self, fault: Fault) -> RuntimeError:
        return RuntimeError(FAULTS[fault][0 if self.turns else 1])

    def decode_one(self, data: bytes) -> torch.Tensor:
        header = parse_header(data)
        refused = data != PROBE if self.refuse is True else data in self.refuse
        if refused or header.components == 4 or header.process != 0xC0:
            raise self.error("bad jpeg")
        pixels = simplejpeg.decode_jpeg(data, "RGB", strict=False)
        if self.turns:
            pixels = upright(pixels, exif_orientation(data))
        if self.wrong_shape and data != PROBE:
            pixels = pixels[:-1]
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def set_engine(monkeypatch: pytest.MonkeyPatch, engine: bool | None) -> None:
    """As on a GPU with an engine for JPEGs, without one, or where nvJPEG cannot be asked."""
    monkeypatch.setattr("readers.decode.batch.has_jpeg_engine", lambda: engine)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


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
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.side)
        monkeypatch.setattr(torch.cuda, "stream", on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.here())

    def here(self) -> FakeStream:
        return getattr(self._current, "stream", self.consumer)

    def tensor(self, *values: float, pinned: bool = False) -> Garbage:
        """On the host."""
        return Garbage.of(self, torch.tensor(values), pinned=pinned)
