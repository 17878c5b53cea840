"""`ImageLoader` where a decoder of batches works behind the crew: the same batches as without, in the same order,
whatever fails; resume; a clean end. On the CPU by doubles of torchcodec and torchvision, on a GPU by what is
installed there."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_doubles import Double, hide, install
from PIL import Image
from test_device_decode import jpeg, png, turned

import packer
import readers
from cache.errors import BadSampleError, MissingExtraError
from readers.augment import (
    ColorJitter,
    CutMix,
    GaussianBlur,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)
from readers.decode.route import routes
from readers.headers import sniff
from readers.loader import ImageLoader, device
from readers.loop import Stopped
from readers.order import Sequential

# Not so small that the CPU decodes at a fraction, or with coarse colours: then both sides are the same to the bit.
CROP = [RandomResizedCrop(50, (0.5, 1.0)), RandomHorizontalFlip()]
NORMALIZE = Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.25))
FIELDS = ("image", "label", "key", "index")
COUNT = 40
NO_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: batches were never made on a GPU here"
)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 images of 10 kinds, six of them for a device to decode."""
    root = tmp_path_factory.mktemp("photos") / "images"
    kinds = (
        lambda i: jpeg(i),
        lambda i: jpeg(i, mode="L"),
        lambda i: jpeg(i, progressive=True),
        lambda i: jpeg(i, mode="CMYK"),
        lambda i: jpeg(i, (80, 60)),
        lambda i: turned(i, 6),
        lambda i: png(i),
        lambda i: jpeg(i, (70, 90)),
        lambda i: turned(i, 3),
        lambda i: jpeg(i, (64, 64)),
    )
    for i in range(COUNT):
        data = kinds[i % len(kinds)](i)
        folder = root / f"class{i % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"photo{i:03d}.{sniff(data)}").write_bytes(data)
    out = root.parent / "set"
    packer.convert(root, to="tar", output=out, samples_per_shard=16)
    return out


@pytest.fixture
def reader(packed: Path) -> Iterator[readers.Reader]:
    with readers.open(packed) as opened:
        yield opened


@pytest.fixture(params=["torchcodec", "torchvision"])
def double(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Double:
    return install(monkeypatch, request.param)


def name_of(double: Double) -> Any:
    return "torchcodec" if double.turns else "torchvision"


def compare(ours: list[tuple[Any, ...]], plain: list[tuple[Any, ...]], largest: float) -> None:
    assert len(ours) == len(plain) > 0
    for a, b in zip(ours, plain, strict=True):
        assert a[0].dtype == b[0].dtype and a[0].stride() == b[0].stride() and a[0].shape == b[0].shape
        assert float((a[0].to(torch.float32) - b[0].to(torch.float32)).abs().max()) <= largest
        assert all(
            torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a[1:], b[1:], strict=True)
        )


def device_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("packer-loader")]


# --- the same batches ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["channels_last", "NCHW", "NHWC"])
@pytest.mark.parametrize(("ops", "dtype"), [(CROP, None), ([*CROP, NORMALIZE], None), (CROP, torch.bfloat16)])
def test_the_same_batches_as_without(
    reader: readers.Reader, double: Double, layout: Any, ops: list[Any], dtype: torch.dtype | None
) -> None:
    options: dict[str, Any] = {
        "augment": ops, "dtype": dtype, "layout": layout, "seed": 3, "tail": "exact", "fields": FIELDS,
    }  # fmt: skip
    loader = ImageLoader(reader, 7, decoder=name_of(double), **options)
    compare(
        list(loader), list(ImageLoader(reader, 7, **options)), 0 if dtype is None and NORMALIZE not in ops else 1e-5
    )
    assert loader.decoder == f"{name_of(double)}/cpu"
    assert sum(double.calls) == int(routes(reader.info).sum()) == 24 and len(double.calls) == len(loader), (
        "one call a batch"
    )


def test_pixel_ops_are_those_of_the_cpu(reader: readers.Reader, double: Double) -> None:
    options: dict[str, Any] = {"augment": [*CROP, ColorJitter(0.4, 0.4, 0.4), GaussianBlur((0.1, 1.0), 0.5)], "seed": 1}
    compare(
        list(ImageLoader(reader, 8, decoder=name_of(double), **options)), list(ImageLoader(reader, 8, **options)), 1
    )


def test_threads_and_prefetch_change_nothing(reader: readers.Reader, double: Double) -> None:
    def run(threads: int, prefetch: int) -> list[tuple[Any, ...]]:
        options: dict[str, Any] = {"augment": CROP, "seed": 5, "threads": threads, "prefetch": prefetch}
        return list(ImageLoader(reader, 6, decoder=name_of(double), fields=FIELDS, **options))

    one = run(1, 1)
    for threads, prefetch in ((2, 1), (3, 4)):
        compare(run(threads, prefetch), one, 0)


def test_the_cpu_decoder_behind_the_stage(reader: readers.Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """What device="cuda", decoder="cpu" does: uint8 of the size of the batch crosses, and is finished on the device."""
    found = device.open_decoder("cpu", torch.device("cpu"))
    path = device.DevicePath(
        found, device.BatchRenderer(torch.device("cpu"), dtype=torch.float32, normalize=NORMALIZE), 2
    )
    options: dict[str, Any] = {"augment": [*CROP, NORMALIZE], "seed": 2, "fields": FIELDS}
    plain = list(ImageLoader(reader, 8, **options))
    monkeypatch.setattr("readers.loader.loader.device_path", lambda *_, **__: path)
    loader = ImageLoader(reader, 8, **options)
    assert not path.decodes and loader.decoder == "cpu"
    uploads: list[torch.Tensor] = []
    uploaded = device.DeviceStage._uploaded

    def upload(stage: Any, images: torch.Tensor, batch: Any) -> Any:
        uploads.append(images)
        return uploaded(stage, images, batch)

    monkeypatch.setattr(device.DeviceStage, "_uploaded", upload)
    compare(list(loader), plain, 1e-5)
    assert {(images.dtype, tuple(images.shape)) for images in uploads} == {(torch.uint8, (8, 3, 50, 50))}


def test_an_image_larger_than_its_result_by_much(tmp_path: Path, double: Double) -> None:
    """The CPU decodes it at a fraction, the device in full: the difference is that of docs/training.md."""
    rng = np.random.default_rng(1)
    for i in range(4):
        small = Image.fromarray(rng.integers(0, 256, (8, 10, 3), np.uint8))
        small.resize((800, 640), Image.Resampling.BICUBIC).save(tmp_path / f"{i}.jpg", quality=95)
    reader = readers.open_folder(tmp_path)
    options: dict[str, Any] = {"augment": [Resize((40, 50))], "shuffle": False}
    ((ours, _),) = ImageLoader(reader, 4, decoder=name_of(double), **options)
    ((plain, _),) = ImageLoader(reader, 4, **options)
    assert 0 < float((ours.float() - plain.float()).abs().mean()) < 1.5


def test_views_and_mixed_batches_are_those_of_the_cpu(reader: readers.Reader, double: Double) -> None:
    options: dict[str, Any] = {"augment": CROP, "seed": 3, "views": 2}
    double.refuse = {bytes(reader.read(i)) for i in (0, 10, 27)}
    plain, ours = (list(ImageLoader(reader, 8, decoder=name, **options)) for name in ("cpu", name_of(double)))
    for (mine, labels), (theirs, others) in zip(ours, plain, strict=True):
        assert torch.equal(labels, others) and all(map(torch.equal, mine, theirs))
    options = {"augment": [*CROP, CutMix()], "seed": 3}
    plain, ours = (list(ImageLoader(reader, 8, decoder=name, **options)) for name in ("cpu", name_of(double)))
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(ours, plain, strict=True))


# --- what fails ---------------------------------------------------------------------------------------------------
def test_what_the_device_refuses_the_cpu_decodes(reader: readers.Reader, double: Double) -> None:
    options: dict[str, Any] = {"augment": CROP, "seed": 3, "fields": FIELDS}
    plain = list(ImageLoader(reader, 8, **options))
    double.refuse = {bytes(reader.read(i)) for i in (0, 10, 27)}
    compare(list(ImageLoader(reader, 8, decoder=name_of(double), **options)), plain, 0)


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[readers.Reader]:
    """12 images for a device, of which 3 has lost its end and 7 is another than the index says."""
    (tmp_path / "images").mkdir()
    for i in range(12):
        (tmp_path / f"images/{i:02d}.jpg").write_bytes(jpeg(i))
    packer.convert(tmp_path / "images", to="tar", output=tmp_path / "set")
    with readers.open(tmp_path / "set") as reader:
        for number, data in ((3, jpeg(3)[:-300]), (7, jpeg(7, (65, 64)))):
            shard, offset, length = reader.byte_range(number) or (tmp_path, 0, 0)
            with open(shard, "r+b") as file:
                file.seek(offset)
                file.write(data.ljust(length, b"\0")[:length])
        yield reader


def test_bad_samples_are_what_they_are_without(damaged: readers.Reader, double: Double) -> None:
    options: dict[str, Any] = {"augment": CROP, "shuffle": False, "fields": ("image", "index")}
    for on_error in ("skip", "substitute"):
        pair = []
        for decoder in (name_of(double), "cpu"):
            loader = ImageLoader(damaged, 4, on_error=on_error, decoder=decoder, **options)
            with pytest.warns(UserWarning, match="2 bad samples"):
                pair.append(list(loader))
            assert [(bad.index, bad.key) for bad in loader.bad_samples] == [(3, "03"), (7, "07")]
        compare(*pair, 0)
    with pytest.raises(BadSampleError, match=r"sample 3 \(03\): jpeg image"):
        list(ImageLoader(damaged, 4, decoder=name_of(double), **options))
    assert not device_threads()


def test_images_that_neither_can_decode(
    reader: readers.Reader, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They pass the check of the header and fail on the device; then the CPU says what is wrong."""
    bad = bytes(reader.read(0))
    double.refuse = {bad}
    render = device.Renderer.render

    def failing(tools: Any, data: Any, *rest: Any) -> None:
        if bytes(data) == bad:
            raise BadSampleError("jpeg image: nobody can decode it")
        render(tools, data, *rest)

    monkeypatch.setattr(device.Renderer, "render", failing)
    options: dict[str, Any] = {"augment": CROP, "order": Sequential(COUNT), "decoder": name_of(double)}
    cases: tuple[tuple[Any, int], ...] = (("skip", 7), ("substitute", 8))
    for on_error, first in cases:
        with pytest.warns(UserWarning, match=r"1 bad samples .*nobody can decode it"):
            (images, _), *_ = ImageLoader(reader, 8, on_error=on_error, **options)
            assert len(images) == first
    with pytest.raises(BadSampleError, match=r"sample 0 \(.*photo000\): jpeg image: nobody can decode it"):
        list(ImageLoader(reader, 8, **options))


def test_a_lost_device_ends_the_epoch(reader: readers.Reader, double: Double) -> None:
    loader = ImageLoader(reader, 8, augment=CROP, decoder=name_of(double))
    double.fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        list(loader)
    assert not device_threads()
    double.fault = None
    assert len(list(loader)) == 5


# --- resume and ends ----------------------------------------------------------------------------------------------
def test_resume_names_the_decoder(reader: readers.Reader, double: Double) -> None:
    options: dict[str, Any] = {"augment": CROP, "seed": 4, "fields": FIELDS}
    loader = ImageLoader(reader, 6, decoder=name_of(double), **options)
    whole = list(loader)
    loader.set_epoch(0)
    batches = iter(loader)
    seen = [next(batches), next(batches)]
    state = loader.state_dict()
    assert state["decoder"] == f"{name_of(double)}/cpu" and state["cursor"] == 12
    other = ImageLoader(reader, 6, decoder=name_of(double), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(state)
    compare([*seen, *other], whole, 0)
    with pytest.warns(UserWarning, match=r"began with the decoder .*/cpu' and continues with 'cpu'"):
        ImageLoader(reader, 6, **options).load_state_dict(state)


def test_leaving_early_leaves_nothing_behind(reader: readers.Reader, double: Double) -> None:
    loader = ImageLoader(reader, 4, augment=CROP, decoder=name_of(double), prefetch=1)
    for _ in loader:
        break
    gc.collect()
    deadline = time.monotonic() + 30
    while device_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not device_threads()
    batches = iter(loader)
    next(batches)
    loader.set_epoch(5)
    assert not device_threads() and next(batches, None) is None


def test_no_more_batches_wait_than_asked_for(reader: readers.Reader, double: Double) -> None:
    loader = ImageLoader(reader, 2, augment=CROP, decoder=name_of(double), prefetch=2)
    batches: Any = iter(loader)
    next(batches)
    stage = batches._maker
    with stage._changed:
        assert stage._changed.wait_for(lambda: len(stage._made) == 2, 30)
    batches.close()
    assert not device_threads()
    with pytest.raises(Stopped):
        stage._made.clear()
        stage.take()


def test_without_such_a_device_or_decoder(reader: readers.Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device 'cuda': torch .* finds no GPU here"):
        ImageLoader(reader, 4, augment=CROP, device="cuda")
    hide(monkeypatch, "torchcodec")
    with pytest.raises(MissingExtraError, match="torchcodec"):
        ImageLoader(reader, 4, augment=CROP, decoder="torchcodec")
    with pytest.raises(ValueError, match="decoder is one of"):
        ImageLoader(reader, 4, augment=CROP, decoder="dali")  # type: ignore[arg-type]


@NO_GPU
@pytest.mark.parametrize("decoder", ["auto", "cpu", "torchcodec", "torchvision"])
def test_on_a_gpu(reader: readers.Reader, decoder: Any) -> None:
    options: dict[str, Any] = {"augment": CROP, "seed": 3, "tail": "exact", "fields": FIELDS}
    try:
        loader = ImageLoader(reader, 8, device="cuda", decoder=decoder, **options)
    except MissingExtraError as error:
        pytest.skip(str(error))
    batches = [tuple(value.cpu() if isinstance(value, torch.Tensor) else value for value in batch) for batch in loader]
    plain = list(ImageLoader(reader, 8, **options))
    # nvJPEG's inverse DCT and upsampling are not libjpeg's; what the CPU decoded differs by its resize alone.
    for a, b in zip(batches, plain, strict=True):
        assert float((a[0].float() - b[0].float()).abs().mean()) < (0.1 if loader.decoder == "cpu" else 3)
        assert a[2] == b[2] and torch.equal(a[3], b[3])
