"""`ImageLoader` with a batch decoder behind its threads: the same batches as without it, in the same order, with bad
samples and after a resume; a clean end. On the CPU with doubles of torchcodec and torchvision, on a GPU with the
installed packages."""

from __future__ import annotations

import gc
import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tree_of
from gpu_doubles import Double, hide
from loader_options import grouped
from PIL import Image
from test_device_decode import jpeg, png, turned

import packer
import readers
from cache.errors import BadSampleError, DeviceError, MissingExtraError
from cache.node import own_gpu
from packer.testing.samples import overwrite
from readers import Decode, Threads
from readers.augment import (
    ColorJitter,
    CutMix,
    GaussianBlur,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)
from readers.augment.cpu import Renderer
from readers.decode.batch import routes
from readers.decode.device import DecodeStream
from readers.headers import sniff
from readers.loader import ImageLoader, device
from readers.loader.loader import find_device
from readers.order import Sequential

# Large enough that the CPU decodes neither at a reduced scale nor with reduced chroma: then both sides are equal to the
# bit.
CROP = [RandomResizedCrop(50, (0.5, 1.0)), RandomHorizontalFlip()]
NORMALIZE = Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.25))
FIELDS = ("image", "label", "key", "index")
COUNT = 40
NO_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: batches were never made on a GPU here"
)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 images of 10 kinds, six of which a device decodes."""
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
    images = [kinds[i % len(kinds)](i) for i in range(COUNT)]
    tree_of(root, {f"class{i % 3}/photo{i:03d}.{sniff(data)}": data for i, data in enumerate(images)})
    packer.convert(root, to="tar", output=root.parent / "set", shards=packer.Shards(samples=16))
    return root.parent / "set"


def flat(batch: tuple[Any, ...]) -> list[Any]:
    """The values of a batch, with views one by one."""
    images = batch[0] if isinstance(batch[0], tuple) else (batch[0],)
    return [*images, *batch[1:]]


def compare(batches: list[tuple[Any, ...]], plain: list[tuple[Any, ...]], largest: float) -> None:
    assert len(batches) == len(plain) > 0
    for values, others in zip(map(flat, batches), map(flat, plain), strict=True):
        for a, b in zip(values, others, strict=True):
            if isinstance(a, torch.Tensor) and a.ndim == 4:
                assert (a.dtype, a.stride(), a.shape) == (b.dtype, b.stride(), b.shape)
                assert float((a.to(torch.float32) - b.to(torch.float32)).abs().max()) <= largest
            else:
                assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def device_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("packer-loader")]


# --- the same batches ---------------------------------------------------------------------------------------------
CASES: dict[str, tuple[float, dict[str, Any]]] = {
    "uint8": (0, {"layout": "channels_last", "threads": 1, "prefetch": 1}),
    "normalised, more threads": (1e-5, {"layout": "NCHW", "threads": 3, "prefetch": 4, "augment": [*CROP, NORMALIZE]}),
    "bfloat16": (1e-5, {"layout": "NHWC", "dtype": torch.bfloat16}),
    "pixel ops": (1, {"layout": "NHWC", "augment": [*CROP, ColorJitter(0.4, 0.4, 0.4), GaussianBlur((0.1, 1), 0.5)]}),
    "views": (0, {"views": 2}),
    "mixed": (0, {"augment": [*CROP, CutMix()]}),
}


REFUSED = pytest.mark.filterwarnings("ignore:the device cpu failed on .* of the first:UserWarning")


@REFUSED
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("refused", [(), (0, 10, 27)], ids=["", "some refused"])
def test_the_same_batches_as_without_a_device(
    reader: readers.Reader, double: Double, case: str, refused: tuple[int]
) -> None:
    """Also where the device refuses images, which the CPU then decodes."""
    largest, more = CASES[case]
    options: dict[str, Any] = {"augment": CROP, "seed": 3, "tail": "exact", "fields": FIELDS, **more}
    double.refuse = {bytes(reader.read(i)) for i in refused}
    loader = ImageLoader(reader, 7, **grouped({"decode": Decode(decoder=double.name), **options}))
    compare(list(loader), list(ImageLoader(reader, 7, **grouped(options))), largest)
    assert loader.decoder == f"{double.name}/cpu"
    if not refused:
        assert sum(double.calls) == int(routes(reader.info).sum()) == 24
        assert len(double.calls) == len(loader), "not one call a batch"


def test_a_batch_of_large_images_is_decoded_in_parts(
    reader: readers.Reader, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part has as many images as the limit of decoded bytes allows; only one part is in memory."""
    monkeypatch.setattr(device, "DECODED_BYTES", 2 * 3 * 96 * 72)
    for more in ({"views": 2}, {"augment": [*CROP, CutMix()]}):
        options: dict[str, Any] = {"augment": CROP, "seed": 3, "tail": "exact", "fields": FIELDS, **more}
        double.calls.clear()
        loader = ImageLoader(reader, 20, **grouped({"decode": Decode(decoder=double.name), **options}))
        compare(list(loader), list(ImageLoader(reader, 20, **grouped(options))), 0)
        assert sum(double.calls) == 24 and max(double.calls) == 2 and loader.stats().decoded_images == COUNT


def test_the_cpu_decoder_behind_the_stage(reader: readers.Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of device="cuda", decoder="cpu": uint8 at the size of the batch is copied, and finished on the
    device."""
    decoder = device.open_decoder("cpu", torch.device("cpu"))
    renderer = device.BatchRenderer(torch.device("cpu"), dtype=torch.float32, normalize=NORMALIZE)
    path = device.DevicePath(decoder, renderer, DecodeStream(torch.device("cpu")), 2)
    options: dict[str, Any] = {"augment": [*CROP, NORMALIZE], "seed": 2, "fields": FIELDS}
    plain = list(ImageLoader(reader, 8, **grouped(options)))
    monkeypatch.setattr("readers.loader.loader.device_path", lambda *_, **__: path)
    loader = ImageLoader(reader, 8, **grouped(options))
    assert not path.decodes and loader.decoder == "cpu"
    render, crossed = path.renderer.render, set()

    def record(pictures: Any, *rest: Any) -> torch.Tensor:
        crossed.update((picture.pixels.dtype, tuple(picture.pixels.shape)) for picture in pictures)
        return render(pictures, *rest)

    monkeypatch.setattr(path.renderer, "render", record)
    compare(list(loader), plain, 1e-5)
    assert crossed == {(torch.uint8, (3, 50, 50))}


def test_an_image_much_larger_than_its_result(tmp_path: Path, double: Double) -> None:
    """The CPU decodes it at a reduced scale, the device in full: the difference is within that of docs/training.md."""
    rng = np.random.default_rng(1)
    for i in range(4):
        small = Image.fromarray(rng.integers(0, 256, (8, 10, 3), np.uint8))
        small.resize((800, 640), Image.Resampling.BICUBIC).save(tmp_path / f"{i}.jpg", quality=95)
    reader = readers.open_folder(tmp_path)
    options: dict[str, Any] = {"augment": [Resize((40, 50))], "shuffle": False}
    ((decoded, _),) = ImageLoader(reader, 4, **grouped({"decode": Decode(decoder=double.name), **options}))
    ((plain, _),) = ImageLoader(reader, 4, **grouped(options))
    assert 0 < float((decoded.float() - plain.float()).abs().mean()) < 1.5


# --- failures -----------------------------------------------------------------------------------------------------
@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[readers.Reader]:
    """12 images for a device, of which 3 has lost its end and 7 differs from the index."""
    tree_of(tmp_path / "images", {f"{i:02d}.jpg": jpeg(i) for i in range(12)})
    packer.convert(tmp_path / "images", to="tar", output=tmp_path / "set")
    with readers.open(tmp_path / "set") as reader:
        for number, data in ((3, jpeg(3)[:-300]), (7, jpeg(7, (65, 64)))):
            overwrite(reader, number, data)
        yield reader


def test_bad_samples_are_handled_as_without_a_device(damaged: readers.Reader, double: Double) -> None:
    options: dict[str, Any] = {"augment": CROP, "shuffle": False, "fields": ("image", "index")}
    for on_error in ("skip", "substitute"):
        pair = []
        for decoder in (double.name, "cpu"):
            loader = ImageLoader(
                damaged, 4, on_error=on_error, **grouped({"decode": Decode(decoder=decoder), **options})
            )
            with pytest.warns(UserWarning, match="2 bad samples"):
                pair.append(list(loader))
            assert [(bad.index, bad.key) for bad in loader.bad_samples] == [(3, "03"), (7, "07")]
        compare(*pair, 0)
    with pytest.raises(BadSampleError, match=r"sample 3 \(03\): jpeg image"):
        list(ImageLoader(damaged, 4, **grouped({"decode": Decode(decoder=double.name), **options})))
    assert not device_threads()


def test_images_that_the_device_refuses_go_back_to_the_threads(
    reader: readers.Reader, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader reports this once, with their number; the thread of the device decodes none of them."""
    double.refuse = {bytes(reader.read(i)) for i in (0, 10, 20, 30)}
    name, render, rendered = double.name, Renderer.render, []

    def watched(tools: Any, data: Any, *rest: Any) -> Any:
        rendered.append((bytes(data), threading.current_thread().name))
        return render(tools, data, *rest)

    monkeypatch.setattr(Renderer, "render", watched)
    loader = ImageLoader(reader, 8, augment=CROP, decode=Decode(decoder=name), order=Sequential(COUNT), threads=2)
    with pytest.warns(UserWarning) as caught:
        assert len(list(loader)) == len(list(loader)) == 5
    ((text, file),) = [(str(warning.message), warning.filename) for warning in caught]
    assert text.startswith("the device cpu failed on ") and "of the first " in text and file == __file__
    assert re.search(r"which the CPU decodes: sample 0 \(.*photo000\): jpeg image: .*: 3; the first line", text)
    assert {thread for data, thread in rendered if data in double.refuse} <= {"packer-loader-0", "packer-loader-1"}
    stats = loader.stats()
    assert (stats.decoded_images, stats.device_images, stats.failed_images, stats.made) == (40, 20, 4, 40)
    assert str(stats).startswith("decoded on the device: 50 % (it failed on 4); ")


@REFUSED
def test_images_that_neither_decoder_can_decode(
    reader: readers.Reader, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They pass the header check and fail on the device; the error is that of the CPU and names the sample."""
    bad = bytes(reader.read(0))
    double.refuse = {bad}
    render, hand_over = Renderer.render, DecodeStream.hand_over
    handed = []

    def failing(tools: Any, data: Any, *rest: Any) -> None:
        if bytes(data) == bad:
            raise BadSampleError("jpeg image: no decoder reads it")
        render(tools, data, *rest)

    def counted(tensors: Any, ready: Any) -> None:
        handed.append(len(tensors))
        hand_over(tensors, ready)

    monkeypatch.setattr(Renderer, "render", failing)
    monkeypatch.setattr(DecodeStream, "hand_over", counted)
    options: dict[str, Any] = {"augment": CROP, "order": Sequential(COUNT), "decoder": double.name}
    cases: tuple[tuple[Any, int], ...] = (("skip", 7), ("substitute", 8))
    for on_error, first in cases:
        with pytest.warns(UserWarning, match=r"1 bad samples .*no decoder reads it"):
            (images, _), *_ = ImageLoader(reader, 8, on_error=on_error, **grouped(options))
            assert len(images) == first
    handed.clear()
    with pytest.raises(BadSampleError, match=r"sample 0 \(.*photo000\): jpeg image: no decoder reads it"):
        list(ImageLoader(reader, 8, **grouped(options)))
    assert not handed, "the images are not on the device, so no device stream can use them"


def test_a_lost_device_ends_the_epoch(reader: readers.Reader, double: Double) -> None:
    loader = ImageLoader(reader, 8, augment=CROP, decode=Decode(decoder=double.name))
    double.fault, double.after = "lost", 2
    with pytest.raises(DeviceError, match=r"the GPU, its driver or this library .* Failed to synchronize .*: 700"):
        list(loader)
    assert not device_threads() and len(double.calls) == 3
    double.fault = None
    assert len(list(loader)) == 5


# --- the choice of device and engine ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("visible", "current", "local_rank", "expected"),
    [(8, 0, 3, 3), (1, 0, 3, 0), (2, 0, 3, 1), (8, 5, 3, 5), (8, 0, None, 0)],
)
def test_a_rank_uses_its_gpu(
    visible: int, current: int, local_rank: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device set by torch.cuda.set_device is used; a rank that sees one GPU uses that GPU."""
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.delenv(name, raising=False)
        if local_rank is not None:
            monkeypatch.setenv(name, value)
    for name, result in {
        "is_available": 1,
        "is_initialized": 1,
        "current_device": current,
        "device_count": visible,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda result=result: result)
    assert find_device("cuda") == torch.device("cuda", expected) and own_gpu(visible) == expected
    assert find_device("cuda:7") == torch.device("cuda", 7)


def test_an_engine_is_tried_before_it_is_trusted(
    reader: readers.Reader, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"augment": CROP, "decoder": double.name}
    with pytest.raises(DeviceError, match="engine='triton' does not work on cpu: Triton needs a GPU"):
        ImageLoader(reader, 8, **grouped({"decode": Decode(engine="triton"), **options}))
    assert len(list(ImageLoader(reader, 8, **grouped({"decode": Decode(engine="torch"), **options})))) == 5
    with pytest.raises(ValueError, match="engine='torch' is for a GPU, but with device='cpu' and decoder='cpu'"):
        ImageLoader(reader, 8, decode=Decode(engine="torch", decoder="cpu"))


# --- resume and ends ----------------------------------------------------------------------------------------------
def test_resume_names_the_decoder(reader: readers.Reader, double: Double) -> None:
    options: dict[str, Any] = {"augment": CROP, "seed": 4, "fields": FIELDS}
    loader = ImageLoader(reader, 6, **grouped({"decode": Decode(decoder=double.name), **options}))
    whole = list(loader)
    loader.set_epoch(0)
    batches = iter(loader)
    seen = [next(batches), next(batches)]
    state = loader.state_dict()
    assert state["decoder"] == f"{double.name}/cpu" and state["cursor"] == 12
    other = ImageLoader(reader, 6, **grouped({"decode": Decode(decoder=double.name), **options}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(state)
    compare([*seen, *other], whole, 0)
    with pytest.warns(UserWarning, match=r"began with the decoder .*/cpu' and continues with 'cpu'"):
        ImageLoader(reader, 6, **grouped(options)).load_state_dict(state)


def test_leaving_early_leaves_nothing_behind(reader: readers.Reader, double: Double) -> None:
    loader = ImageLoader(reader, 4, augment=CROP, decode=Decode(decoder=double.name), threads=Threads(prefetch=1))
    for _ in loader:
        break
    gc.collect()
    assert not device_threads()


def test_a_missing_device_or_decoder(reader: readers.Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device 'cuda': torch .* finds no GPU here"):
        ImageLoader(reader, 4, augment=CROP, device="cuda")
    hide(monkeypatch, "torchcodec")
    with pytest.raises(MissingExtraError, match="torchcodec"):
        ImageLoader(reader, 4, augment=CROP, decode=Decode(decoder="torchcodec"))


@NO_GPU
@pytest.mark.parametrize("decoder", ["auto", "cpu", "torchcodec", "torchvision"])
def test_on_a_gpu(reader: readers.Reader, decoder: Any) -> None:
    options: dict[str, Any] = {"augment": CROP, "seed": 3, "tail": "exact", "fields": FIELDS}
    try:
        loader = ImageLoader(reader, 8, device="cuda", **grouped({"decode": Decode(decoder=decoder), **options}))
    except MissingExtraError as error:
        pytest.skip(str(error))
    batches = [tuple(value.cpu() if isinstance(value, torch.Tensor) else value for value in batch) for batch in loader]
    plain = list(ImageLoader(reader, 8, **grouped(options)))
    # nvJPEG's inverse DCT and upsampling are not libjpeg's; images decoded by the CPU differ only by the resize.
    for a, b in zip(batches, plain, strict=True):
        assert float((a[0].float() - b[0].float()).abs().mean()) < (0.1 if loader.decoder == "cpu" else 3)
        assert a[2] == b[2] and torch.equal(a[3], b[3])
