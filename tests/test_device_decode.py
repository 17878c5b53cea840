"""Decoders of batches: routing by header facts, order, failures that cost one image, orientation, streams.

Against doubles of torchcodec and torchvision; the real ones where they can be imported, and on a GPU where there is
one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock, call

import numpy as np
import pytest
import torch
from gpu_doubles import Double, hide, install
from image_cases import XMP_PREFIX, encoded, picture, with_segments, xmp

from cache.errors import BadSampleError, MissingExtraError
from readers.decode import decode_image
from readers.decode.batch import CpuDecoder, decode_batch, device_takes, open_decoder, routes, same_as_promised
from readers.decode.device import DecodeStream, Picture, upright_tensor
from readers.decode.region import with_header
from readers.headers import MEDIA, ImageHeader, parse_any
from readers.sample import Buffer, ImageInfo

CPU = torch.device("cpu")
NAMES = ("torchcodec", "torchvision")


@pytest.fixture(params=NAMES)
def double(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Double:
    return install(monkeypatch, request.param)


def name_of(double: Double) -> Any:
    return "torchcodec" if double.turns else "torchvision"


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


def pixels_of(found: Any) -> torch.Tensor:
    assert isinstance(found, Picture), found
    return upright_tensor(found)


def test_a_mixed_batch_is_split_and_joined_in_order(double: Double) -> None:
    images = [make() for make, _ in MIXED]
    assert [device_takes(parse_any(image)) for image in images] == [device for _, device in MIXED]
    found = decode_batch(images, open_decoder(name_of(double), CPU))
    assert all(torch.equal(pixels_of(a), expected(b)) for a, b in zip(found, images, strict=True))
    assert double.calls == [5], "the device's images go in one call"


def test_routes_of_an_index_are_those_of_headers() -> None:
    headers = [parse_any(make()) for make, _ in MIXED]
    columns = [[getattr(header, name) for header in headers] for name in ImageHeader._fields[1:]]
    info = ImageInfo(*(np.array(column) for column in columns), np.array([MEDIA.index(h.media) for h in headers], "u1"))
    assert routes(info).tolist() == [device for _, device in MIXED]
    unknown = ImageInfo(*(np.zeros(2, column.dtype) for column in info))
    assert not routes(unknown).any()


@pytest.mark.parametrize("size", [(65536, 65536), (2**32 - 1, 2**32 - 1), (20000, 20000)])
def test_no_device_gets_an_image_of_too_many_pixels(size: tuple[int, int]) -> None:
    columns = [np.array([value]) for value in (size[0], size[1], 3, 0xC0, 1, 1)]
    columns[:2] = [column.astype(np.uint32) for column in columns[:2]]
    assert not routes(ImageInfo(*columns)).any()
    assert not device_takes(ImageHeader("jpeg", *size, 3, 0xC0, 1))


def test_bytes_that_lie_about_themselves_go_to_the_cpu() -> None:
    data = jpeg(1)
    assert same_as_promised(data, (72, 80)) is not None
    assert same_as_promised(data, (80, 72)) is None
    assert same_as_promised(data[:-300], (72, 80)) is None
    assert same_as_promised(png(1), (72, 80)) is None
    assert same_as_promised(turned(1, 6), (96, 72)) is not None


@pytest.mark.parametrize("bad", [[0], [3], [6], [2, 3], [0, 1, 2, 3, 4, 5, 6]])
def test_a_failing_image_costs_one_image(double: Double, bad: list[int]) -> None:
    images = [jpeg(i) for i in range(7)]
    double.refuse = {images[i] for i in bad}
    decoder = open_decoder(name_of(double), CPU)
    found = decoder.decode(images, [parse_any(image) for image in images])
    for i, one in enumerate(found):
        if i in bad:
            assert isinstance(one, BadSampleError) and f"{name_of(double)}/cpu: nvjpegDecode failed" in str(one)
        else:
            assert torch.equal(pixels_of(one), expected(images[i]))
    assert len(double.calls) <= 1 + len(bad) * 2 * 3
    # What the device cannot do, the CPU tries.
    again = decode_batch(images, decoder)
    assert all(torch.equal(pixels_of(a), expected(b)) for a, b in zip(again, images, strict=True))


def test_an_image_that_no_decoder_takes_is_an_error_in_its_row(double: Double) -> None:
    found = decode_batch([jpeg(1), b"no image", jpeg(2)[:-400], jpeg(3)], open_decoder(name_of(double), CPU))
    assert [isinstance(one, Picture) for one in found] == [True, False, False, True]
    assert "expected the magic" in str(found[1]) and "truncated" in str(found[2])
    assert decode_batch([], open_decoder(name_of(double), CPU)) == []


@pytest.mark.parametrize(
    "fault",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("HIP error: unspecified launch failure"),
    ],
)
def test_a_lost_device_is_not_taken_for_a_bad_image(double: Double, fault: BaseException) -> None:
    double.fault = fault
    with pytest.raises(type(fault)):
        decode_batch([jpeg(1), jpeg(2)], open_decoder(name_of(double), CPU))
    assert len(double.calls) == 1


def test_a_picture_of_another_size_is_an_error(double: Double) -> None:
    double.wrong_shape = True
    data = jpeg(1)
    (found,) = open_decoder(name_of(double), CPU).decode([data], [parse_any(data)])
    assert "expected torch.uint8 [3, 72, 80], found torch.uint8 [3, 71, 80]" in str(found)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_the_same_on_every_path(double: Double, orientation: int) -> None:
    for data in (turned(4, orientation), with_segments(jpeg(4, (96, 72)), XMP_PREFIX + xmp(orientation))):
        for decoder in (open_decoder(name_of(double), CPU), CpuDecoder(CPU)):
            (found,) = decoder.decode([data], [parse_any(data)])
            assert torch.equal(pixels_of(found), expected(data)), decoder.name


def test_the_cpu_decoder_names_what_it_cannot_decode() -> None:
    data = jpeg(1)
    header = parse_any(data)
    good, bad = CpuDecoder(CPU).decode([data, data], [header, header._replace(height=70)])
    assert isinstance(good, Picture) and isinstance(bad, BadSampleError)


# --- which one ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_a_missing_decoder_is_named_with_its_extra(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, name)
    extra = {"torchcodec": "gpu", "torchvision": "torchvision"}[name]
    with pytest.raises(MissingExtraError, match=rf"decoding on cpu needs {name} >= .*packer-vision\[{extra}\]"):
        open_decoder(name, CPU)


def test_auto_takes_the_first_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    for name in NAMES:
        hide(monkeypatch, name)
    with pytest.warns(UserWarning, match="decoded on the CPU: .*torchcodec.*torchvision"):
        assert isinstance(open_decoder("auto", cuda), CpuDecoder)
    install(monkeypatch, "torchvision")
    assert open_decoder("auto", cuda).name == "torchvision/cuda"
    install(monkeypatch, "torchcodec")
    assert open_decoder("auto", cuda).name == "torchcodec/cuda"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_decoder("auto", CPU).name == open_decoder("cpu", cuda).name == "cpu"
    with pytest.raises(ValueError, match="decoder is one of auto, cpu, torchcodec, torchvision, not 'nvjpeg'"):
        open_decoder("nvjpeg", CPU)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="torchcodec decodes on cpu and cuda devices, not on meta"):
        open_decoder("torchcodec", torch.device("meta"))


@pytest.mark.parametrize("name", NAMES)
def test_the_installed_decoders_on_the_cpu(name: Any) -> None:
    try:
        decoder = open_decoder(name, CPU)
    except MissingExtraError as error:
        if "PACKER_TEST_DECODERS" in os.environ:
            raise  # `make test-decoders` is there to run this
        pytest.skip(f"{error}; only its double was tested (make test-decoders has it)")
    by_xmp = [with_segments(jpeg(8, (96, 72)), XMP_PREFIX + xmp(orientation)) for orientation in range(1, 9)]
    images = [jpeg(1), jpeg(2, mode="L"), *(turned(8, orientation) for orientation in range(1, 9)), *by_xmp]
    for found, data in zip(decoder.decode(images, [parse_any(image) for image in images]), images, strict=True):
        assert int((pixels_of(found).int() - expected(data).int()).abs().max()) <= 1
    stray = [jpeg(seed).replace(marker, bytes(9) + marker) for seed, marker in ((3, b"\xff\xda"), (4, b"\xff\xd9"))]
    for found, data in zip(decode_batch([*stray, png(5)], decoder), [*stray, png(5)], strict=True):
        assert int((pixels_of(found).int() - expected(data).int()).abs().max()) <= 1, "damage that Pillow goes past"


# --- streams ------------------------------------------------------------------------------------------------------
def test_without_cuda_a_stream_does_nothing() -> None:
    stream = DecodeStream(CPU)
    with stream.decoding():
        pass
    assert stream.mark() is None
    DecodeStream.hand_over([torch.zeros(1)], None)


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
def test_decoding_overwrites_nothing_that_is_still_read(name: Any) -> None:
    """The canary: sums of tensors that are freed while the sums are still queued, with decodes in between.

    Without the discipline of `readers.decode.device` the decoder is given the freed blocks and some sums are wrong.
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
