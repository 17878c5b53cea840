"""Decoders of batches: routing by header facts, order, failures that cost one image, orientation, streams.

Tested with doubles of torchcodec and torchvision, and with the real packages where they can be imported, on a GPU where
one is present.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import numpy as np
import pytest
import torch
from gpu_doubles import FAULTS, Double, hide, install, set_engine
from image_cases import XMP_PREFIX, encoded, picture, with_segments, xmp

from cache.errors import BadSampleError, DeviceError, MissingExtraError
from readers.decode import decode_image
from readers.decode.batch import CpuDecoder, decode_batch, device_takes, open_decoder, routes, same_as_promised
from readers.decode.device import DecodeStream, Picture, has_jpeg_engine, upright_tensor
from readers.decode.region import with_header
from readers.headers import MEDIA, ImageHeader, parse_any
from readers.table import Buffer, ImageInfo

CPU = torch.device("cpu")
NAMES = ("torchcodec", "torchvision")


def jpeg(seed: int, size: tuple[int, int] = (80, 72), mode: str = "RGB", **options: Any) -> bytes:
    """size: (width, height)."""
    return encoded(picture(size[1], size[0], seed).convert(mode), "JPEG", **options)


def turned(seed: int, orientation: int) -> bytes:
    return jpeg(seed, (96, 72), orientation=orientation)


def png(seed: int) -> bytes:
    return encoded(picture(72, 80, seed), "PNG")


MIXED: list[tuple[Callable[[], Buffer], bool]] = [
    (lambda: jpeg(1), True),
    (lambda: jpeg(2, mode="L"), True),
    (lambda: jpeg(3, progressive=True), False),
    (lambda: jpeg(4, mode="CMYK"), False),
    (lambda: jpeg(5, (80, 60)), False),
    (lambda: jpeg(6, (64, 64)), True),
    (lambda: png(7), False),
    (lambda: turned(8, 6), True),
    (lambda: with_header(np.full((70, 70, 3), 9, np.uint8)), False),
    (lambda: jpeg(9), True),
]


def expected(data: Buffer) -> torch.Tensor:
    return torch.from_numpy(decode_image(data).copy()).permute(2, 0, 1)


def pixels_of(outcome: Any) -> torch.Tensor:
    assert isinstance(outcome, Picture), outcome
    return upright_tensor(outcome)


def test_a_mixed_batch_is_split_and_joined_in_order(double: Double) -> None:
    images = [make() for make, _ in MIXED]
    assert [device_takes(parse_any(image)) for image in images] == [device for _, device in MIXED]
    decoded = decode_batch(images, open_decoder(double.name, CPU))
    assert all(torch.equal(pixels_of(a), expected(b)) for a, b in zip(decoded, images, strict=True))
    assert double.calls == [5], "the images of the device took several calls"


def test_routes_by_the_index_equal_those_by_headers() -> None:
    headers = [parse_any(make()) for make, _ in MIXED]
    columns = [[getattr(header, name) for header in headers] for name in ImageHeader._fields[1:]]
    info = ImageInfo(*(np.array(column) for column in columns), np.array([MEDIA.index(h.media) for h in headers], "u1"))
    assert routes(info).tolist() == [device for _, device in MIXED]
    unknown = ImageInfo(*(np.zeros(2, column.dtype) for column in info))
    assert not routes(unknown).any()


def test_no_device_gets_an_image_of_too_many_pixels() -> None:
    for side in (20000, 65536, 2**32 - 1):
        facts = (np.array([value], np.uint32) for value in (side, side, 3, 0xC0, 1, 1))
        assert not routes(ImageInfo(*facts)).any() and not device_takes(ImageHeader("jpeg", side, side, 3, 0xC0, 1))


def test_bytes_that_differ_from_their_header_facts_go_to_the_cpu() -> None:
    data = jpeg(1)
    assert same_as_promised(data, (72, 80)) is not None
    assert same_as_promised(data, (80, 72)) is None
    assert same_as_promised(data[:-300], (72, 80)) is None
    assert same_as_promised(png(1), (72, 80)) is None
    assert same_as_promised(turned(1, 6), (96, 72)) is not None


def test_a_jpeg_that_stores_rgb_goes_to_the_cpu(double: Double) -> None:
    """nvJPEG takes the values for YCbCr. Adobe's transform flag takes precedence over the component names."""
    stored, usual = jpeg(1, keep_rgb=True), jpeg(2)
    named, ycc = b"Adobe\0\x64\0\0\0\0\0", b"Adobe\0\x64\0\0\0\0\1"
    assert device_takes(parse_any(stored)) and same_as_promised(stored, (72, 80)) is None
    assert same_as_promised(with_segments(usual, named, marker=0xEE), (72, 80)) is None
    assert same_as_promised(with_segments(usual, ycc, marker=0xEE), (72, 80)) is not None
    decoded = decode_batch([stored, usual], open_decoder(double.name, CPU))
    assert double.calls == [1] and torch.equal(pixels_of(decoded[0]), expected(stored))


@pytest.mark.parametrize("factors", [0x11, 0x21, 0x12, 0x22, 0x41])
def test_a_grey_jpeg_with_sampling_factors_goes_to_the_cpu(double: Double, factors: int) -> None:
    """nvJPEG silently gives wrong pixels for such images, which libjpeg decodes as if the factors were 1 x 1."""
    usual = jpeg(1, mode="L")
    at = usual.index(b"\xff\xc0") + 11
    assert usual[at] == 0x11
    image = usual[:at] + bytes((factors,)) + usual[at + 1 :]
    assert (same_as_promised(image, parse_any(image).upright_size) is not None) == (factors == 0x11)
    (outcome,) = decode_batch([image], open_decoder(double.name, CPU))
    assert double.calls == ([1] if factors == 0x11 else []) and torch.equal(pixels_of(outcome), expected(usual))


@pytest.mark.parametrize(
    ("factors", "taken"),
    [
        ((0x22, 0x11, 0x11), True),
        ((0x41, 0x11, 0x11), True),
        ((0x22, 0x12, 0x12), True),
        ((0x21, 0x21, 0x21), True),
        ((0x11, 0x22, 0x22), False),
        ((0x21, 0x12, 0x12), False),
        ((0x22, 0x21, 0x12), False),
        ((0x12, 0x12, 0x11), False),
    ],
)
def test_only_usual_chroma_goes_to_a_device(factors: tuple[int, int, int], taken: bool) -> None:
    """An H200 decoded these samplings correctly; the others were never tested on a GPU."""
    data = bytearray(jpeg(1))
    frame = data.index(b"\xff\xc0") + 5
    data[frame + 6 : frame + 15 : 3] = bytes(factors)
    assert (same_as_promised(bytes(data), (72, 80)) is not None) == taken


@pytest.mark.parametrize("bad", [[0], [3], [6], [2, 3], [0, 1, 2, 3, 4, 5, 6]])
def test_a_failing_image_costs_one_image(double: Double, bad: list[int]) -> None:
    images = [jpeg(i) for i in range(7)]
    double.refuse = {images[i] for i in bad}
    decoder = open_decoder(double.name, CPU)
    decoded = decoder.decode(images, [parse_any(image) for image in images])
    for i, outcome in enumerate(decoded):
        if i in bad:
            assert isinstance(outcome, BadSampleError) and str(outcome).startswith(f"jpeg image: {double.name}/cpu: ")
            assert str(outcome).endswith(("nvjpegDecode failed: 3", "Failed to parse jpeg stream: 3"))
        else:
            assert torch.equal(pixels_of(outcome), expected(images[i]))
    assert len(double.calls) <= 1 + len(bad) * 2 * 3 and double.probes == 3
    # The CPU tries images that the device cannot decode.
    again = decode_batch(images, decoder)
    assert all(torch.equal(pixels_of(a), expected(b)) for a, b in zip(again, images, strict=True))


def test_an_image_that_no_decoder_supports_is_an_error_in_its_row(double: Double) -> None:
    decoded = decode_batch([jpeg(1), b"no image", jpeg(2)[:-400], jpeg(3)], open_decoder(double.name, CPU))
    assert [isinstance(outcome, Picture) for outcome in decoded] == [True, False, False, True]
    assert "expected the magic" in str(decoded[1]) and "truncated" in str(decoded[2])
    assert decode_batch([], open_decoder(double.name, CPU)) == []


@pytest.mark.parametrize("fault", ["create", "lost", "memory"])
def test_a_lost_device_is_not_mistaken_for_a_bad_image(double: Double, fault: Any) -> None:
    """The messages of the libraries allow both: a probe distinguishes them, so that 128 images are not tried one by
    one."""
    decoder, images = open_decoder(double.name, CPU), [jpeg(i) for i in range(8)]
    decode_batch(images, decoder)
    double.fault = fault
    with pytest.raises(DeviceError, match=r"now fails on an image that it decoded before .* not your images") as caught:
        decode_batch(images, decoder)
    assert str(caught.value.__cause__) == FAULTS[fault][0 if double.turns else 1]
    assert double.calls == [8, 8] and double.probes == 2
    double.refuse, double.after = {images[0]}, 6  # lost among bad images
    with pytest.raises(DeviceError, match="now fails on an image that it decoded before"):
        decode_batch(images, decoder)


def test_a_batch_without_room_on_the_device_is_decoded_in_parts(double: Double) -> None:
    """Neither library raises torch's OutOfMemoryError."""
    images = [jpeg(i) for i in range(8)]
    double.room = 3
    decoded = decode_batch(images, open_decoder(double.name, CPU))
    assert all(torch.equal(pixels_of(a), expected(b)) for a, b in zip(decoded, images, strict=True))
    assert sorted(double.calls) == [2, 2, 2, 2, 4, 4, 8]


def test_a_decoder_that_refuses_all_images_is_an_error(double: Double) -> None:
    decoder = open_decoder(double.name, CPU)
    double.refuse = True
    images = [jpeg(i) for i in range(8)]
    assert all(isinstance(p, Picture) for p in decode_batch(images, decoder)), "8 failures may be a coincidence"
    with pytest.raises(
        DeviceError, match=r"refused all 16 images of this set .* failed: 3|stream: 3; give decoder='cpu'"
    ):
        decode_batch(images, decoder)
    double.refuse = set()
    decode_batch(images, decoder)
    double.refuse = True
    assert all(isinstance(p, Picture) for p in decode_batch(3 * images, decoder)), "an image was decoded before"


def test_a_picture_of_another_size_is_an_error(double: Double) -> None:
    double.wrong_shape = True
    data = jpeg(1)
    (error,) = open_decoder(double.name, CPU).decode([data], [parse_any(data)])
    assert "expected torch.uint8 [3, 72, 80], found torch.uint8 [3, 71, 80]" in str(error)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_the_same_on_every_path(double: Double, orientation: int) -> None:
    for data in (turned(4, orientation), with_segments(jpeg(4, (96, 72)), XMP_PREFIX + xmp(orientation))):
        for decoder in (open_decoder(double.name, CPU), CpuDecoder(CPU)):
            (outcome,) = decoder.decode([data], [parse_any(data)])
            assert torch.equal(pixels_of(outcome), expected(data)), decoder.name


def test_the_cpu_decoder_names_what_it_cannot_decode() -> None:
    data = jpeg(1)
    header = parse_any(data)
    good, bad = CpuDecoder(CPU).decode([data, data], [header, header._replace(height=70)])
    assert isinstance(good, Picture) and isinstance(bad, BadSampleError)


# --- the choice of a decoder --------------------------------------------------------------------------------------
LIBRARY = """
try:
    raise OSError("libcudart.so.13: cannot open shared object file: No such file or directory")
except OSError as error:
    raise OSError("Could not load this library: /site-packages/torchcodec/libtorchcodec_image.so") from error
"""


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("torchcodec", None, r"decoding on cpu needs torchcodec >= .*packer-vision\[gpu\]"),
        ("torchvision", None, r"decoding on cpu needs torchvision >= .*packer-vision\[torchvision\]"),
        (
            "torchcodec",
            LIBRARY,
            r"torchcodec is installed but cannot be loaded .*; libcudart.so.13: cannot open shared",
        ),
        (
            "torchvision",
            "raise RuntimeError('no operator nms')",
            r"cannot be loaded together with torch .*no operator nms",
        ),
        ("torchcodec", "", r"cannot import name 'decode_jpeg' .* needs torchcodec >= 0.16"),
    ],
    ids=["no torchcodec", "no torchvision", "no library", "unfit", "too old"],
)
def test_a_decoder_that_cannot_be_loaded_says_why(
    name: Any, code: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, name)
    if code is not None:  # a package that fails at import
        for module in (f"{name}.decoders", f"{name}.io"):
            monkeypatch.setitem(sys.modules, module, None)
        for module in [module for module in sys.modules if module.split(".")[0] == name]:
            del sys.modules[module]  # until monkeypatch restores the modules
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code)
        (tmp_path / name / "decoders.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtraError if code is None else DeviceError, match=message):
        open_decoder(name, CPU)


@pytest.mark.parametrize("fault", ["create", "lost"])
def test_a_decoder_is_probed_before_it_is_trusted(double: Double, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    double.fault, double.after, name = fault, -1, double.name
    text = FAULTS[fault][0 if double.turns else 1]
    with pytest.raises(DeviceError, match=rf"{name} cannot decode a known JPEG on cpu: {re.escape(text[:60])}"):
        open_decoder(name, CPU)
    hide(monkeypatch, NAMES[1 - NAMES.index(name)])
    with pytest.warns(UserWarning, match=rf"decoded on the CPU: .*{name} cannot decode a known JPEG on cuda:0"):
        assert isinstance(open_decoder("auto", torch.device("cuda", 0)), CpuDecoder)
    assert not double.calls


def test_wrong_pixels_of_the_probe_are_detected(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from nvJPEG on an unsupported GPU: no error, and black images."""
    monkeypatch.setattr(double, "decode_one", lambda data: torch.zeros(3, 64, 64, dtype=torch.uint8))
    with pytest.raises(DeviceError, match=r"it decodes a known image to .*\(0, 0, 0\).*, expected .*\(200, 40, 40\)"):
        open_decoder(double.name, CPU)


def test_auto_chooses_the_first_working_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    set_engine(monkeypatch, True)
    for name in NAMES:
        hide(monkeypatch, name)
    with pytest.warns(UserWarning, match="decoded on the CPU: .*torchcodec.*torchvision"):
        assert isinstance(open_decoder("auto", cuda), CpuDecoder)
    install(monkeypatch, "torchvision")
    assert open_decoder("auto", cuda).name == "torchvision/cuda"
    codec = install(monkeypatch, "torchcodec")
    assert open_decoder("auto", cuda).name == "torchcodec/cuda"
    codec.fault, codec.after = "create", -1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_decoder("auto", cuda).name == "torchvision/cuda"
        assert open_decoder("auto", CPU).name == open_decoder("cpu", cuda).name == "cpu"
    with pytest.raises(ValueError, match="decoder is one of auto, cpu, torchcodec, torchvision, not 'nvjpeg'"):
        open_decoder("nvjpeg", CPU)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="torchcodec decodes on cpu and cuda devices, not on meta"):
        open_decoder("torchcodec", torch.device("meta"))


def test_auto_leaves_gpus_without_a_jpeg_engine_alone(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as T4 and V100, on which nvJPEG decodes by CUDA kernels. An explicit decoder name is honoured."""
    cuda, name = torch.device("cuda", 0), double.name
    set_engine(monkeypatch, False)
    with pytest.warns(UserWarning, match=rf"on the CPU: .*{name} works, but nvJPEG finds no JPEG engine on cuda:0, .*"):
        assert isinstance(open_decoder("auto", cuda), CpuDecoder)
    assert open_decoder(name, cuda).name == f"{name}/cuda"
    set_engine(monkeypatch, None)
    assert open_decoder("auto", cuda).name == f"{name}/cuda", "without an answer the probe decides"


NVJPEG = """
#include <stddef.h>
int nvjpegCreateEx(int backend, void *d, void *p, unsigned flags, void **handle) {
    if (backend != 3 || d || p || flags) return 2;
    *handle = (void *) handle;
    return STATUS;
}
int nvjpegDestroy(void *handle) { return handle ? 0 : 2; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, for a double of libnvjpeg")
@pytest.mark.parametrize(("status", "engine"), [(0, True), (7, False), (1, False)])
def test_nvjpeg_reports_the_engine(tmp_path: Path, status: int, engine: bool) -> None:
    """The library mapped into the process is called, under the file names that wheels use. 7: ARCH_MISMATCH."""
    (tmp_path / "nvjpeg.c").write_text(NVJPEG)
    library = tmp_path / "libnvjpeg-1a359ba7.so.13.0.1.86"
    subprocess.run(["cc", "-shared", "-fPIC", f"-DSTATUS={status}", "-o", library, tmp_path / "nvjpeg.c"], check=True)
    maps = tmp_path / "maps"
    maps.write_text(f"7f0-7f1 r-xp 00000000 00:00 1                  {library}\n7f2-7f3 rw-p 0 00:00 0 \n")
    assert has_jpeg_engine(maps) is engine
    maps.write_text("7f0-7f1 r-xp 00000000 00:00 1                  /usr/lib/libc.so.6\n")
    assert has_jpeg_engine(maps) is None and has_jpeg_engine(tmp_path / "none") is None


@pytest.mark.parametrize("name", NAMES)
def test_the_installed_decoders_on_the_cpu(name: Any) -> None:
    try:
        decoder = open_decoder(name, CPU)
    except (MissingExtraError, DeviceError) as error:
        if "PACKER_TEST_DECODERS" in os.environ:
            raise  # `make test-decoders` exists to run this test
        pytest.skip(f"{error}; only its double was tested (make test-decoders has it)")
    by_xmp = [with_segments(jpeg(8, (96, 72)), XMP_PREFIX + xmp(orientation)) for orientation in range(1, 9)]
    images = [jpeg(1), jpeg(2, mode="L"), *(turned(8, orientation) for orientation in range(1, 9)), *by_xmp]
    for outcome, data in zip(decoder.decode(images, [parse_any(image) for image in images]), images, strict=True):
        assert int((pixels_of(outcome).int() - expected(data).int()).abs().max()) <= 1
    stray = [jpeg(seed).replace(marker, bytes(9) + marker) for seed, marker in ((3, b"\xff\xda"), (4, b"\xff\xd9"))]
    for outcome, data in zip(decode_batch([*stray, png(5)], decoder), [*stray, png(5)], strict=True):
        assert int((pixels_of(outcome).int() - expected(data).int()).abs().max()) <= 1, "Pillow tolerates this damage"


# --- streams ------------------------------------------------------------------------------------------------------
def test_streams_are_used_in_a_safe_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode stream is empty, decodes and is marked; the consumer waits for the mark before it owns the tensors."""
    log = MagicMock()
    log.decode.record_event.return_value = "mark"
    tensor = log.tensor
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: log.decode)
    monkeypatch.setattr(torch.cuda, "stream", log.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: log.consumer)
    stream = DecodeStream(torch.device("cuda", 0))
    with stream.decoding():
        log.work()
        ready = stream.mark()
    DecodeStream.hand_over([tensor], ready)
    assert log.mock_calls == [
        call.decode.synchronize(),
        call.on(log.decode),
        call.on().__enter__(),
        call.work(),
        call.decode.record_event(),
        call.on().__exit__(None, None, None),
        call.consumer.wait_event("mark"),
        call.tensor.record_stream(log.consumer),
    ]


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: the canary of recycled blocks never ran here"
)
@pytest.mark.parametrize("name", NAMES)
def test_decoding_does_not_overwrite_memory_in_use(name: Any) -> None:
    """The canary: sums over tensors that are freed while the sums are still queued, with decodes in between.

    Without the synchronisation in `readers.decode.device` the decoder gets the freed blocks and some sums are wrong.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        decoder = open_decoder(name, device)
    except MissingExtraError as error:
        pytest.skip(str(error))
    images = [jpeg(i, (640, 480)) for i in range(16)]
    headers, stream = [parse_any(image) for image in images], DecodeStream(device)
    wrong = 0
    for _ in range(50):
        with stream.decoding():
            delay = torch.randn(4096, 4096, device=device)
            for _ in range(20):
                delay = delay @ delay.clamp(-1e-3, 1e-3)
            blocks = [torch.ones(3, 480, 640, dtype=torch.uint8, device=device) for _ in images]
            sums = [block.sum() for block in blocks]
            del blocks
        with stream.decoding():
            decoder.decode(images, headers)
            wrong += sum(int(total) != 3 * 480 * 640 for total in sums)
    assert wrong == 0
