"""`ImageLoader`: every sample in its place for any number of threads, bad samples, and a clean end."""

from __future__ import annotations

import gc
import inspect
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coefficient_cases import SAMPLINGS, made_jpeg
from conftest import make_jpeg, tree_of
from image_cases import encoded, picture
from loader_options import grouped
from PIL import Image

import packer
import readers
from cache.errors import BadSampleError
from packer.testing.samples import Samples, overwrite
from readers import Decode, FieldOptions, Ranks, Threads, Views
from readers.augment import CenterCrop, ColorJitter, Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize, cpu
from readers.dali import DaliLoader, Source
from readers.dali import external_source as dali_source
from readers.decode import decode_image
from readers.headers import parse_header
from readers.loader import ImageLoader
from readers.order import NodeLocal, Shuffled
from readers.rocal import external_source as rocal_source
from readers.torch import EpochBatchSampler, EpochSampler, ImageDataset, ImageStream

SIZES = [(40, 32), (32, 40), (57, 33), (64, 64)]  # width, height
CROP = [RandomResizedCrop(24), RandomHorizontalFlip()]
COUNT = 50


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 JPEGs of four sizes in five classes."""
    root = tmp_path_factory.mktemp("photos") / "images"
    return tree_of(root, {f"class{i % 5}/photo{i:03d}.jpg": make_jpeg(1000 + i, SIZES[i % 4]) for i in range(COUNT)})


@pytest.fixture(scope="module")
def packed(photos: Path, pack: Callable[..., Path]) -> Path:
    return pack(photos, samples_per_shard=20)


BAD = (3, 17, 18, 40)


@pytest.fixture
def damaged(packed: Path, tmp_path: Path) -> Path:
    """The set with some images whose size differs from the index."""
    out = shutil.copytree(packed, tmp_path / "damaged")
    with readers.open(out) as opened:
        for number in BAD:
            overwrite(opened, number, make_jpeg(1, (16, 16)))
    return out


def by_number(*loaders: ImageLoader) -> dict[int, torch.Tensor]:
    """The images of loaders with the fields ("image", "index"), by sample number."""
    batches = [batch for loader in loaders for batch in loader]
    return {int(i): image for images, indices in batches for image, i in zip(images, indices, strict=True)}


def same(a: dict[int, torch.Tensor], b: dict[int, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[i], b[i]) for i in a)


def planar(pixels: Any) -> torch.Tensor:
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("packer-loader")]


# --- the content of a batch ---------------------------------------------------------------------------------------
def test_each_image_is_its_sample(reader: readers.Reader) -> None:
    seen = []
    fields = ("image", "label", "key", "index")
    for images, labels, keys, indices in ImageLoader(
        reader, 7, augment=[Resize((34, 34))], ranks=Ranks(tail="exact"), fields=fields, seed=3
    ):
        assert images.dtype == torch.uint8 and images.shape[1:] == (3, 34, 34)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert labels.tolist() == reader.labels[indices.numpy()].tolist()
        assert keys == [reader.keys[i] for i in indices.tolist()]
        for image, index in zip(images, indices.tolist(), strict=True):
            whole = planar(decode_image(reader.read(index)))[None]
            expected = torch.nn.functional.interpolate(whole, (34, 34), mode="bilinear", antialias=True)[0]
            assert torch.equal(image, expected), index
            seen.append(index)
    assert seen == Shuffled(COUNT, 3).indices(0, np.arange(COUNT)).tolist()


def test_layouts_and_dtypes_hold_the_same_values(reader: readers.Reader) -> None:
    def first(*more: Any, **options: Any) -> torch.Tensor:
        images: torch.Tensor = next(
            iter(ImageLoader(reader, 8, seed=1, **grouped({"augment": [*CROP, *more], **options})))
        )[0]
        return images

    raw = first()
    for layout in ("channels_last", "NCHW", "NHWC"):
        for dtype, values in ((torch.uint8, raw), (torch.float32, raw / 255), (torch.bfloat16, raw / 255)):
            images = first(layout=layout, dtype=dtype)
            assert images.dtype == dtype and images.is_contiguous() == (layout != "channels_last")
            images = images.permute(0, 3, 1, 2) if layout == "NHWC" else images
            assert torch.allclose(images.float(), values.float(), atol=1e-6 if dtype != torch.bfloat16 else 4e-3)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    normal = first(Normalize(mean, std))
    expected = (raw / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert normal.dtype == torch.float32 and torch.allclose(normal, expected, atol=1e-5)


def test_an_image_depends_on_seed_epoch_and_sample_alone(reader: readers.Reader, photos: Path, packed: Path) -> None:
    def loader(batch_size: int = 10, over: Any = reader, seed: int = 5, **options: Any) -> ImageLoader:
        augment = [*CROP, ColorJitter(0.4, 0.4, 0.4)]
        return ImageLoader(
            over, batch_size, seed=seed, fields=("image", "index"), **grouped({"augment": augment, **options})
        )

    expected = by_number(first := loader(threads=1, prefetch=1))
    for threads, prefetch in ((2, 1), (8, 5)):
        assert same(by_number(loader(threads=threads, prefetch=prefetch)), expected)
    assert same(by_number(loader(1, threads=4)), expected), "the batch size changed an image"
    assert same(by_number(*(loader(4, rank=r, world_size=3, tail="exact") for r in range(3))), expected), (
        "the ranks changed an image"
    )
    assert same(by_number(loader(over=readers.open_folder(photos))), expected)
    with readers.open(packed, backend="mmap") as mapped:
        assert same(by_number(loader(over=mapped)), expected)
    second = by_number(first)
    assert first.epoch == 2 and not same(second, expected) and not same(by_number(loader(seed=6)), expected)
    first.set_epoch(1)
    assert same(by_number(first), second)


def test_memory_is_reused(reader: readers.Reader) -> None:
    loader = ImageLoader(reader, 5, augment=CROP, threads=Threads(prefetch=2))
    assert len({images.data_ptr() for _ in range(4) for images, _ in loader}) <= 2 + 2 + 1


def test_only_images_of_one_size_need_no_augmentation(reader: readers.Reader) -> None:
    same_size = reader.select(indices=[i for i in range(COUNT) if decode_image(reader.read(i)).shape == (32, 40, 3)])
    images, _ = next(iter(ImageLoader(same_size, 4, shuffle=False)))
    assert torch.equal(images[1], planar(decode_image(same_size.read(1))))
    with pytest.raises(BadSampleError, match=r"differ in size: .* begin augment= with RandomResizedCrop"):
        list(ImageLoader(reader, 8))


def test_other_fields_are_lists_with_none_for_samples_without(samples: Samples) -> None:
    truth, fields = samples.truth, ("mask", "label", "key", "image")
    with readers.open(samples.packed()) as reader:
        ((masks, labels, keys, _),) = ImageLoader(reader, len(truth), augment=CROP, shuffle=False, fields=fields)
    assert [None if mask is None else bytes(mask) for mask in masks] == truth.fields["mask"]
    assert (labels.tolist(), keys) == (truth.labels, truth.keys)


def test_a_tensor_goes_to_the_device(reader: readers.Reader) -> None:
    loader = ImageLoader(reader, 4, augment=CROP)
    loader.device = torch.device("meta")  # it exists on every machine
    images, labels = next(iter(loader))
    assert images.device.type == labels.device.type == "meta"


def test_the_last_batch_of_a_rank_may_be_empty(reader: readers.Reader) -> None:
    ranks = [
        ImageLoader(reader, 16, augment=CROP, ranks=Ranks(tail="exact", rank=rank, world_size=3)) for rank in range(3)
    ]
    assert [[len(images) for images, _ in loader] for loader in ranks] == [[16, 0], [16, 1], [16, 1]]
    assert [len(loader) for loader in ranks] == [2, 2, 2]


# --- resume -------------------------------------------------------------------------------------------------------


def test_an_epoch_started_on_other_nodes_keeps_its_order(reader: readers.Reader) -> None:
    options: dict[str, Any] = {"fields": ("index",), "tail": "exact"}
    seen = []
    for rank in range(4):
        loader = ImageLoader(
            reader, 4, order=NodeLocal(COUNT, 2, 4), **grouped({"ranks": Ranks(rank=rank, world_size=4), **options})
        )
        part = next(iter(loader))[0].tolist()
        assert all((index < COUNT // 2) == (rank < 2) for index in part)
        seen += part
    rest = ImageLoader(reader, 4, order=NodeLocal(COUNT, 1, 4), **grouped(options))
    rest.load_state_dict(loader.state_dict())
    assert sorted(seen + [int(index) for (batch,) in rest for index in batch]) == list(range(COUNT))


@pytest.mark.parametrize("keep", ["encoded", "coefficients"])
def test_rows_that_the_codec_fills_in_one_call(
    tmp_path: Path, pack: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, keep: Any
) -> None:
    """They equal libjpeg's rows, and so do the rows that the codec leaves alone; only the damaged rows are bad."""
    native = pytest.importorskip("readers.coefficients.native")
    jpegs = [made_jpeg(70 + 9 * i, 130 - 5 * i, kind, seed=i) for i, kind in enumerate((*SAMPLINGS, "gray"))]
    jpegs += [encoded(picture(80, 90), "JPEG", 1, progressive=True), encoded(picture(80, 90), "JPEG", 6)]
    files = {f"c/{i:02d}.jpg": jpegs[i % len(jpegs)] for i in range(24)} | {"c/p.png": encoded(picture(80, 90), "PNG")}
    calls, norm = list[int](), Normalize((0.5, 0.4, 0.3), (0.2, 0.2, 0.3))
    resize = native.resize
    monkeypatch.setattr(native, "resize", lambda images, *rest: calls.append(len(images)) or resize(images, *rest))
    with readers.open(pack(tree_of(tmp_path / "images", files))) as opened:
        for number, damage in ((4, bytes(40)), (9, made_jpeg(71, 70)), (13, jpegs[6][:-900] + b"\xff\xd9")):
            overwrite(opened, number, damage)
        source = opened if keep == "encoded" else readers.cached(opened, keep=keep, backend="memfd")
        for ops, options in (
            (CROP, {}),
            ([*CROP, norm], {"layout": "NCHW"}),
            ([*CROP, norm], {}),
            (CROP, {"dtype": torch.float16}),
        ):
            made = []
            for decoder in ("auto", "cpu"):
                decode = Decode(**options, decoder=decoder)
                loader = ImageLoader(
                    source, 5, augment=ops, decode=decode, on_error="skip", seed=2, fields=("image", "index")
                )
                with pytest.warns(UserWarning, match="2 bad samples were skipped"):
                    made.append([(images, indices.tolist()) for images, indices in loader])
                assert sorted(sample.index for sample in loader.bad_samples) == [4, 9]
            for (images, indices), (expected, rows) in zip(*made, strict=True):
                assert indices == rows and torch.equal(images, expected)
    assert max(calls) > 1


# --- bad samples --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("on_error", ["raise", "skip", "substitute"])
def test_images_that_differ_from_the_index(damaged: Path, on_error: Any) -> None:
    """Also where only the checksum reveals it."""
    with readers.open(damaged, verify=True) as checked:
        loader = ImageLoader(checked, 10, augment=CROP, shuffle=False, on_error="skip", fields=("index", "image"))
        with pytest.warns(UserWarning, match="CRC32C"):
            assert [int(i) for indices, _ in loader for i in indices] == [i for i in range(COUNT) if i not in BAD]
    reader, results = readers.open(damaged), []
    for threads, batch in ((1, 10), (4, 10)):
        options: dict[str, Any] = {"augment": CROP, "fields": ("image", "index", "label"), "threads": threads}
        loader = ImageLoader(reader, batch, shuffle=False, on_error=on_error, **grouped(options))
        if on_error == "raise":
            with pytest.raises(BadSampleError, match=r"sample 3 \(.*\): jpeg image: the index .* `packer verify"):
                list(loader)
            assert not loader_threads()
            continue
        done = "skipped" if on_error == "skip" else "replaced"
        with pytest.warns(UserWarning, match=f"epoch 0: 4 bad samples were {done}, the first is sample 3 "):
            batches = list(loader)
        images, indices, labels = (torch.cat([batch[k] for batch in batches]) for k in range(3))
        assert len(images) == len(labels) and labels.tolist() == reader.labels[indices.numpy()].tolist()
        good = [i for i in range(COUNT) if i not in BAD]
        if on_error == "skip":
            assert [len(part) for part, *_ in batches] == [9, 8, 10, 10, 9]
            assert indices.tolist() == good
        else:
            assert not {*indices.tolist()} & {*BAD} and indices[good].tolist() == good and len(indices) == COUNT
        assert [sample.index for sample in loader.bad_samples] == list(BAD)
        results.append(images)
    assert all(torch.equal(images, results[0]) for images in results)


def test_crops_that_do_not_fit_are_bad_samples(reader: readers.Reader) -> None:
    loader = ImageLoader(
        reader, 50, augment=[CenterCrop(33)], on_error="skip", ranks=Ranks(tail="exact"), fields=("image", "index")
    )
    with pytest.warns(UserWarning, match="does not fit into"):
        ((images, indices),) = loader
    assert len(images) == 24 and {decode_image(reader.read(i)).shape[0] for i in indices.tolist()} == {33, 64}


@pytest.mark.parametrize("augment", [CROP, []], ids=["crop", "none"])
def test_files_that_are_not_images(tmp_path: Path, augment: list[Any]) -> None:
    """Their size is unknown until they are decoded."""
    files = {f"{i:02d}.jpg": make_jpeg(i, (64, 64) if i == 7 and augment else (40, 32)) for i in range(12)}
    reader = readers.open_folder(tree_of(tmp_path, {**files, "00.jpg": b"not an image", "05.jpg": b""}))
    options: dict[str, Any] = {"augment": augment, "shuffle": False}
    with pytest.warns(UserWarning, match="2 bad samples were skipped, the first is sample 0"):
        assert [len(images) for images, _ in ImageLoader(reader, 4, on_error="skip", **options)] == [3, 3, 4]
    with pytest.warns(UserWarning, match="2 bad samples were replaced"):
        assert [len(images) for images, _ in ImageLoader(reader, 4, on_error="substitute", **options)] == [4, 4, 4]
    with pytest.raises(BadSampleError, match=r"sample 0 \(00\): image, byte 0"):
        list(ImageLoader(reader, 4, **options))


def test_a_substitute_has_the_size_of_its_batch(tmp_path: Path) -> None:
    files = {f"{i}.jpg": make_jpeg(i, (64, 48) if i % 2 else (40, 32)) for i in range(8)}
    reader = readers.open_folder(tree_of(tmp_path, {**files, "0.jpg": files["0.jpg"][:-200]}))
    for seed in range(2):
        loader = ImageLoader(reader.select(indices=[0, 2, 4, 1]), 1, on_error="substitute", seed=seed)
        with pytest.warns(UserWarning, match="replaced"):
            assert len(list(loader)) == 4


def test_a_missing_shard_is_never_skipped(packed: Path, tmp_path: Path) -> None:
    reader = readers.open(shutil.copytree(packed, tmp_path / "copy"))
    max((tmp_path / "copy").glob("*.tar")).unlink()
    with pytest.raises(readers.StaleIndexError):
        list(ImageLoader(reader, 10, augment=CROP, on_error="skip"))
    assert not loader_threads()


# --- the end ------------------------------------------------------------------------------------------------------
def test_threads_end_with_the_loop_however_it_ends(reader: readers.Reader) -> None:
    loader = ImageLoader(reader, 5, augment=CROP, threads=3)

    list(loader)
    assert not loader_threads()
    for _ in loader:
        assert loader_threads()
        break
    gc.collect()
    assert not loader_threads()

    def train() -> None:
        for _ in loader:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        train()
    gc.collect()
    assert not loader_threads()
    stream = iter(loader)
    next(stream)
    del stream
    gc.collect()
    assert not loader_threads()


def test_the_thread_count_of_torch_is_unchanged(reader: readers.Reader) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for _ in ImageLoader(reader, 5, augment=CROP, threads=2):
            assert torch.get_num_threads() == 3
        counts: list[int] = []
        thread = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert counts == [3]
    finally:
        torch.set_num_threads(before)


def test_ctrl_c_ends_the_program_at_once_and_no_gpu_package_is_imported(packed: Path) -> None:
    script = """
import sys, readers
from readers.loader import ImageLoader
from readers.augment import RandomResizedCrop
reader, first = readers.open(sys.argv[1]), True
for_gpus = ("triton", "torchcodec", "torchvision", "readers.augment.fused", "readers.augment.kernel",
            "readers.loader.device", "readers.decode.batch")
while True:
    for images, labels in ImageLoader(reader, 2, augment=[RandomResizedCrop(24)], threads=3, device="cpu"):
        if first:
            print([name for name in for_gpus if name in sys.modules], flush=True)
        first = False
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(packer.__file__).parent.parent)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen([sys.executable, "-c", script, str(packed)], **pipes) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "[]\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=300)
        finally:
            process.kill()
    assert "KeyboardInterrupt" in errors and process.returncode in (1, -signal.SIGINT, 130)


# --- wrong use ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "CHWN"}, "layout is one of"),
        ({"device": "mps:0"}, "device is 'cpu' or 'cuda' .*, not 'mps:0'; .* images.to"),
        ({"device": torch.device("meta")}, "device is 'cpu' or 'cuda' .*, not 'meta'"),
        ({"on_error": "ignore"}, "on_error is one of"),
        ({"threads": 0}, "at least 1"),
        ({"prefetch": 0}, "at least 1"),
        ({"rank": 1}, "both rank and world_size"),
        ({"dtype": torch.int32}, "dtype is torch.uint8"),
        ({"dtype": torch.uint8, "augment": [Normalize((0, 0, 0), (1, 1, 1))]}, "do not fit into uint8"),
        ({"batch_size": 0}, "batch_size"),
        ({"tail": "wrap"}, "tail must be"),
        ({"order": Shuffled(9)}, "the order is for 9 samples, but the reader has"),
        ({"augment": CROP[0]}, r"expected a list of ops, found a single op: write  \[RandomResizedCrop"),
        ({"rank": 2, "world_size": 2}, "outside the world"),
        ({"order": Shuffled(COUNT, 3), "seed": 4}, "seed=4, but the order has seed 3"),
    ],
)
def test_wrong_options(reader: readers.Reader, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageLoader(reader, **grouped({"batch_size": 4, "augment": CROP, **options}))
    with pytest.raises(TypeError, match=r"write  readers.open\('some-set', split=…\)"):
        ImageLoader("some-set", 4)  # type: ignore[arg-type]


OPS = [CenterCrop(32), RandomHorizontalFlip()]
PUBLIC = [ImageLoader, DaliLoader, Source, dali_source, rocal_source, ImageDataset, ImageStream]
OLD_AND_NEW: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ranks": ({"rank": 1, "world_size": 2, "tail": "pad"}, {"ranks": Ranks(1, 2, "pad")}),
    "decode": (
        {"dtype": torch.float16, "layout": "NHWC", "exact_colours": True},
        {"decode": Decode(dtype=torch.float16, layout="NHWC", exact_colours=True)},
    ),
    "threads": ({"threads": 1, "prefetch": 2, "pin_memory": False}, {"threads": Threads(1, 2, False)}),
    "views": ({"augment": OPS, "views": 2}, {"augment": Views(OPS, 2)}),
    "views of ops each": ({"views": [OPS, OPS[:1]]}, {"augment": Views([OPS, OPS[:1]])}),
    "fields": (
        {"fields": ("image", "index"), "field_options": FieldOptions(mask_fill=7)},
        {"fields": FieldOptions(names=("image", "index"), mask_fill=7)},
    ),
}


def batches_with(reader: readers.Reader, options: dict[str, Any]) -> list[Any]:
    return [
        list(batch) for batch in ImageLoader(reader, 8, **({} if "views" in options else {"augment": OPS}) | options)
    ]


def alike(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype == other.dtype and value.shape == other.shape and torch.equal(value, other)
    return len(value) == len(other) and all(map(alike, value, other))


@pytest.mark.parametrize("case", OLD_AND_NEW)
def test_old_names_warn_and_mean_the_same(reader: readers.Reader, case: str) -> None:
    old, new = OLD_AND_NEW[case]
    with pytest.warns(DeprecationWarning, match="= is deprecated: write  ") as warned:
        before = batches_with(reader, old)
    assert {Path(warning.filename).name for warning in warned} == {Path(__file__).name}
    assert alike(before, batches_with(reader, new))


def test_old_names_and_new_ones_mix(reader: readers.Reader) -> None:
    with pytest.warns(DeprecationWarning):
        loader = ImageLoader(reader, 8, augment=OPS, ranks=Ranks(0, 2), tail="exact")
    assert alike(list(loader), batches_with(reader, {"ranks": Ranks(0, 2, "exact")}))


def test_options_with_a_single_value_do_not_exist(reader: readers.Reader) -> None:
    with pytest.warns(DeprecationWarning, match="prefetch= is deprecated: leave it out"):
        rocal_source(reader, 4, prefetch=2).close()
    with pytest.raises(ValueError, match="prefetch is always 2"):
        rocal_source(reader, 4, prefetch=3)


@pytest.mark.parametrize("public", [*PUBLIC, EpochSampler, EpochBatchSampler], ids=lambda value: value.__name__)
def test_public_names_have_twelve_parameters_at_most(public: Any) -> None:
    assert len(inspect.signature(public).parameters) <= 12


def test_an_unknown_name_is_refused(reader: readers.Reader) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        ImageLoader(reader, 8, colour="RGB")  # type: ignore[call-arg]


@pytest.mark.parametrize("options", [{"ops": OPS, "count": 0}, {"ops": [OPS, OPS], "count": 2}, {"ops": [*OPS, OPS]}])
def test_invalid_views_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"count of views|not both"):
        Views(**options)


# --- resizing images of one size together ---------------------------------------------------------------------------
FACE_SIZE = (89, 109)  # width, height
FACES: list[Any] = [CenterCrop(74), Resize((32, 32)), RandomHorizontalFlip()]
FACE_COUNT = 24


@pytest.fixture
def faces(tmp_path: Path) -> Path:
    for i in range(FACE_COUNT):
        (tmp_path / f"{i:02d}.jpg").write_bytes(make_jpeg(i, FACE_SIZE))
    return tmp_path


def turned_face(seed: int) -> bytes:
    """A JPEG that is upright at FACE_SIZE after its EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return make_jpeg(seed, FACE_SIZE[::-1], exif=exif)


def converted(kind: str, **options: Any) -> Callable[[int], bytes]:
    def make(seed: int) -> bytes:
        memory = io.BytesIO()
        Image.open(io.BytesIO(make_jpeg(seed, FACE_SIZE))).save(memory, kind, **options)
        return memory.getvalue()

    return make


ODD_ONES: dict[str, Callable[[int], bytes]] = {
    "turned": turned_face,
    "progressive": converted("JPEG", progressive=True),
    "png": converted("PNG"),
    "other size": lambda seed: make_jpeg(seed, (100, 90)),
}


def faces_of(folder: Path, **options: Any) -> list[torch.Tensor]:
    """By libjpeg: the codec resizes each image in the call that decodes it."""
    options = {"augment": FACES, "seed": 3, "decode": Decode(decoder="cpu"), **options}
    return [images.clone() for images, _ in ImageLoader(readers.open_folder(folder), 12, **options)]


def one_by_one(monkeypatch: pytest.MonkeyPatch, folder: Path, **options: Any) -> list[torch.Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "alike", lambda jobs, sizes: False)
        return faces_of(folder, **options)


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count how many images each call resizes, from now on."""
    calls: list[int] = []
    resize = cpu._resize_into

    def counted(image: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        calls.append(len(image))
        return resize(image, *arguments, **named)

    monkeypatch.setattr(cpu, "_resize_into", counted)
    return calls


@pytest.mark.parametrize(
    "augment",
    [
        FACES,
        [Resize((16, 20))],
        [Resize(32), CenterCrop(24), RandomHorizontalFlip()],
        [CenterCrop(64)],
        [*FACES, Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))],
        [*FACES, ColorJitter(0.4, 0.4, 0.4)],
        [RandomResizedCrop(24), RandomHorizontalFlip()],
        [],
    ],
    ids=["faces", "reduced", "cropped after", "not resized", "floats", "colours", "random boxes", "as they are"],
)
def test_images_resized_together_have_the_same_pixels(
    monkeypatch: pytest.MonkeyPatch, faces: Path, augment: list[Any], threads: int = 3
) -> None:
    expected = one_by_one(monkeypatch, faces, augment=augment, threads=threads)
    assert all(map(torch.equal, faces_of(faces, augment=augment, threads=threads), expected)) and len(expected) == 2


def test_images_of_one_size_are_resized_in_one_call(monkeypatch: pytest.MonkeyPatch, faces: Path) -> None:
    calls = count_calls(monkeypatch)
    faces_of(faces, threads=1)
    assert calls == [12, 12]
    calls.clear()
    monkeypatch.setattr(cpu, "MAX_STACK_BYTES", 5 * FACE_SIZE[0] * FACE_SIZE[1] * 3)
    faces_of(faces, threads=1)
    assert calls == [5, 5, 2] * 2
    calls.clear()
    monkeypatch.setattr(cpu, "MAX_STACK_BYTES", 2 * FACE_SIZE[0] * FACE_SIZE[1] * 3 - 1)
    faces_of(faces, threads=1)
    assert calls == [1] * FACE_COUNT


@pytest.mark.parametrize("kind", ODD_ONES)
def test_an_image_of_another_size_among_them(monkeypatch: pytest.MonkeyPatch, faces: Path, kind: str) -> None:
    for number in (0, 7, 13):
        (faces / f"{number:02d}.jpg").write_bytes(ODD_ONES[kind](100 + number))
    assert all(map(torch.equal, faces_of(faces), one_by_one(monkeypatch, faces)))


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_a_bad_image_among_them(monkeypatch: pytest.MonkeyPatch, faces: Path, on_error: str) -> None:
    """The header and its size are intact; the pixels are damaged."""
    data = bytearray(make_jpeg(5, FACE_SIZE))
    header = parse_header(bytes(data))
    (faces / "05.jpg").write_bytes(b"\xff\xd8" + data[2:].replace(b"\xff\xda", b"\xff\xdc", 1))
    (faces / "11.jpg").write_bytes(b"not an image")
    assert (header.width, header.height) == FACE_SIZE
    with pytest.warns(UserWarning, match="2 bad samples"):
        expected = one_by_one(monkeypatch, faces, on_error=on_error)
    with pytest.warns(UserWarning, match="2 bad samples"):
        batches = faces_of(faces, on_error=on_error)
    assert [len(images) for images in batches] == [len(images) for images in expected]
    assert all(map(torch.equal, batches, expected))
