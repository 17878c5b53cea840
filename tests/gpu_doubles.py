"""Stand-ins for torchcodec and torchvision: the functions that this project calls, with their arguments, results and
behaviour, on the CPU by libjpeg. They apply orientation from EXIF, not from XMP. They count calls and fail as the
originals do: the whole call for one bad image, and always by RuntimeError, with the messages of torchcodec 0.17 and
torchvision 0.29 from their sources and binaries. These messages do not say whether the image or the device is at
fault."""

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
# Messages of torchcodec and torchvision where every call fails.
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
    """name: the package. turns: whether EXIF orientation is applied. calls: the number of images in each call, without
    the probe image; probes: the number of probe images. refuse: bytes that the double cannot decode, though the CPU
    can; True for all images but the probe. fault: the error of every call. after: the number of calls that succeed
    before the fault. room: the number of images in a call that fit into the memory of the device.
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
        """Decode; the results are on the CPU for any device."""
        assert isinstance(source, list) and source and getattr(mode, "name", mode) == "RGB"
        assert device.type == "cpu" or device.index is not None
        assert all(image.dtype == torch.uint8 and image.dim() == 1 and image.numel() for image in source)
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
    """Act like a GPU with an engine for JPEGs, a GPU without one, or a system where nvJPEG cannot be queried."""
    monkeypatch.setattr("readers.decode.batch.has_jpeg_engine", lambda: engine)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


def hide(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Act as if a package were not installed, even if its modules are loaded."""
    loaded = [module for module in sys.modules if module.startswith(f"{name}.")]
    for module in (name, *loaded):
        monkeypatch.setitem(sys.modules, module, None)


def install(monkeypatch: pytest.MonkeyPatch, name: str) -> Double:
    """Install a double in place of torchcodec or torchvision."""
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
    """A tensor on the CPU that pretends to be on a device: a copy to the device has its values only once its stream has
    run."""

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
        assert self.pinned and non_blocking, "a copy from pageable memory, for which the host waits"
        there = Garbage.of(self.cuda, torch.full_like(self, -1).as_subclass(torch.Tensor), str(device))
        source = weakref.ref(self)

        def copy() -> None:
            read = source()
            if read is not None:  # otherwise the memory may belong to another tensor by now
                torch.Tensor.copy_(there, read)

        self.cuda.here().queue(copy)
        return there

    def record_stream(self, stream: FakeStream) -> None:
        self.cuda.recorded.append((stream.name, id(self)))


class FakeStream:
    """Work that is done in order when a wait asks for it, and not earlier."""

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name
        self._lock = threading.Lock()
        self._queued: list[Callable[[], None]] = []
        self._done = 0
        self.copies = threading.Semaphore(0)  # queued copies that no wait in this test has seen yet

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
    """The streams of torch.cuda, with copies done as late as allowed. recorded: (stream, id of a tensor)."""

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
        """A tensor on the host."""
        return Garbage.of(self, torch.tensor(values), pinned=pinned)
