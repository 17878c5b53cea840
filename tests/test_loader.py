"""`ImageLoader`: every sample in its place for any number of threads, bad samples, and a clean end."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_jpeg, tree_of
from loader_options import grouped

import packer
import readers
from cache.errors import BadSampleError
from packer.testing.samples import Samples, overwrite
from readers import Ranks, Threads
from readers.augment import CenterCrop, ColorJitter, Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize
from readers.decode import decode_image
from readers.loader import ImageLoader
from readers.order import NodeLocal, Shuffled

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


@pytest.fixture
def reader(packed: Path) -> Iterator[readers.Reader]:
    with readers.open(packed) as opened:
        yield opened


BAD = (3, 17, 18, 40)


@pytest.fixture
def damaged(packed: Path, tmp_path: Path) -> Path:
    """The set with some images whose pixels are other than the index says."""
    out = shutil.copytree(packed, tmp_path / "damaged")
    with readers.open(out) as opened:
        for number in BAD:
            overwrite(opened, number, make_jpeg(1, (16, 16)))
    return out


def by_number(*loaders: ImageLoader) -> dict[int, torch.Tensor]:
    """The images of loaders with the fields ("image", "index")."""
    batches = [batch for loader in loaders for batch in loader]
    return {int(i): image for images, indices in batches for image, i in zip(images, indices, strict=True)}


def same(a: dict[int, torch.Tensor], b: dict[int, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[i], b[i]) for i in a)


def planar(pixels: Any) -> torch.Tensor:
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("packer-loader")]


# --- what a batch is ----------------------------------------------------------------------------------------------
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


def test_an_image_follows_from_seed_epoch_and_sample_alone(reader: readers.Reader, photos: Path, packed: Path) -> None:
    def loader(batch_size: int = 10, over: Any = reader, seed: int = 5, **options: Any) -> ImageLoader:
        augment = [*CROP, ColorJitter(0.4, 0.4, 0.4)]
        return ImageLoader(
            over, batch_size, seed=seed, fields=("image", "index"), **grouped({"augment": augment, **options})
        )

    one = by_number(first := loader(threads=1, prefetch=1))
    for threads, prefetch in ((2, 1), (8, 5)):
        assert same(by_number(loader(threads=threads, prefetch=prefetch)), one)
    assert same(by_number(loader(1, threads=4)), one), "another batch size"
    assert same(by_number(*(loader(4, rank=r, world_size=3, tail="exact") for r in range(3))), one), "several ranks"
    assert same(by_number(loader(over=readers.open_folder(photos))), one)
    with readers.open(packed, backend="mmap") as mapped:
        assert same(by_number(loader(over=mapped)), one)
    second = by_number(first)
    assert first.epoch == 2 and not same(second, one) and not same(by_number(loader(seed=6)), one)
    first.set_epoch(1)
    assert same(by_number(first), second)


def test_memory_is_used_again(reader: readers.Reader) -> None:
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
    loader.device = torch.device("meta")  # which is on every machine
    images, labels = next(iter(loader))
    assert images.device.type == labels.device.type == "meta"


def test_the_last_batch_of_a_rank_may_be_empty(reader: readers.Reader) -> None:
    ranks = [
        ImageLoader(reader, 16, augment=CROP, ranks=Ranks(tail="exact", rank=rank, world_size=3)) for rank in range(3)
    ]
    assert [[len(images) for images, _ in loader] for loader in ranks] == [[16, 0], [16, 1], [16, 1]]
    assert [len(loader) for loader in ranks] == [2, 2, 2]


# --- resume -------------------------------------------------------------------------------------------------------


def test_an_epoch_of_other_nodes_is_finished_as_it_began(reader: readers.Reader) -> None:
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


# --- bad samples --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("on_error", ["raise", "skip", "substitute"])
def test_images_that_are_not_those_of_the_index(damaged: Path, on_error: Any) -> None:
    """Also where the checksum says so."""
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
    """Nothing is known of their size before they are decoded."""
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


def test_torch_keeps_its_threads(reader: readers.Reader) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for _ in ImageLoader(reader, 5, augment=CROP, threads=2):
            assert torch.get_num_threads() == 3
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert found == [3]
    finally:
        torch.set_num_threads(before)


def test_control_c_ends_the_program_at_once_which_imports_nothing_for_gpus(packed: Path) -> None:
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
        ({"order": Shuffled(9)}, "the order is of 9 samples, and the reader has"),
        ({"augment": CROP[0]}, r"expected a list of ops, not one: write  \[RandomResizedCrop"),
        ({"rank": 2, "world_size": 2}, "outside the world"),
        ({"order": Shuffled(COUNT, 3), "seed": 4}, "seed=4, but the order has the seed 3"),
    ],
)
def test_wrong_options(reader: readers.Reader, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageLoader(reader, **grouped({"batch_size": 4, "augment": CROP, **options}))
    with pytest.raises(TypeError, match=r"write  readers.open\('some-set', split=…\)"):
        ImageLoader("some-set", 4)  # type: ignore[arg-type]
