"""`ImageLoader`: every sample in its place, whatever the threads do; resume; bad samples; a clean end."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_jpeg, tree_of
from suites.children import in_child

import packer
import readers
from cache.errors import BadSampleError, ResumeError
from readers.augment import CenterCrop, ColorJitter, Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize
from readers.decode import decode_image
from readers.loader import ImageLoader
from readers.order import ClassBalanced, NodeLocal, Shuffled

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


def damaged_set(photos: Path, folder: Path, numbers: tuple[int, ...]) -> Path:
    """The set with some images whose pixels are other than the index says."""
    out = folder / "damaged"
    packer.convert(photos, to="tar", output=out, samples_per_shard=20)
    with readers.open(out) as opened:
        for number in numbers:
            place = opened.byte_range(number)
            assert place is not None
            shard, offset, length = place
            with open(shard, "r+b") as file:
                file.seek(offset)
                file.write(make_jpeg(1, (16, 16)).ljust(length, b"\0")[:length])
    return out


def run(loader: ImageLoader) -> list[tuple[Any, ...]]:
    return list(loader)


def same(a: list[tuple[Any, ...]], b: list[tuple[Any, ...]]) -> bool:
    return len(a) == len(b) and all(
        all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(p, q, strict=True))
        for p, q in zip(a, b, strict=True)
    )


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("packer-loader")]


# --- what a batch is ----------------------------------------------------------------------------------------------
def test_every_sample_comes_once_in_its_place(reader: readers.Reader) -> None:
    loader = ImageLoader(
        reader, 7, augment=[Resize((34, 34))], tail="exact", fields=("image", "label", "key", "index"), seed=3
    )
    seen = []
    for images, labels, keys, indices in loader:
        assert images.dtype == torch.uint8 and images.shape[1:] == (3, 34, 34)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert labels.tolist() == reader.labels[indices.numpy()].tolist()
        assert keys == [reader.keys[i] for i in indices.tolist()]
        for image, index in zip(images, indices.tolist(), strict=True):
            whole = torch.from_numpy(decode_image(reader.read(index)).copy()).permute(2, 0, 1)[None]
            expected = torch.nn.functional.interpolate(whole, (34, 34), mode="bilinear", antialias=True)[0]
            assert torch.equal(image, expected), index
            seen.append(index)
    assert sorted(seen) == list(range(COUNT)) and seen != list(range(COUNT))
    assert seen == Shuffled(COUNT, 3).indices(0, np.arange(COUNT)).tolist()


def test_layouts_and_dtypes_hold_the_same_values(reader: readers.Reader) -> None:
    def first(**options: Any) -> torch.Tensor:
        images: torch.Tensor = next(iter(ImageLoader(reader, 8, augment=CROP, seed=1, **options)))[0]
        return images

    raw = first()
    assert torch.equal(first(layout="NCHW"), raw) and first(layout="NCHW").is_contiguous()
    assert torch.equal(first(layout="NHWC").permute(0, 3, 1, 2), raw) and first(layout="NHWC").is_contiguous()
    for layout in ("channels_last", "NCHW", "NHWC"):
        values = first(layout=layout, dtype=torch.float32)
        values = values.permute(0, 3, 1, 2) if layout == "NHWC" else values
        assert torch.allclose(values, raw / 255, atol=1e-6)
    assert first(dtype=torch.bfloat16).dtype == torch.bfloat16
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    normal = next(iter(ImageLoader(reader, 8, augment=[*CROP, Normalize(mean, std)], seed=1)))[0]
    expected = (raw / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert normal.dtype == torch.float32 and torch.allclose(normal, expected, atol=1e-5)


def test_the_result_does_not_depend_on_threads_or_batches(reader: readers.Reader) -> None:
    augment = [*CROP, ColorJitter(0.4, 0.4, 0.4)]
    fields = ("image", "label", "index")
    one = run(ImageLoader(reader, 10, augment=augment, threads=1, prefetch=1, seed=5, fields=fields))
    for threads, prefetch in ((2, 1), (3, 2), (8, 5)):
        assert same(
            run(ImageLoader(reader, 10, augment=augment, threads=threads, prefetch=prefetch, seed=5, fields=fields)),
            one,
        )
    flat = run(ImageLoader(reader, 1, augment=augment, threads=4, seed=5, fields=fields))
    assert torch.equal(torch.cat([b[0] for b in flat]), torch.cat([b[0] for b in one]))


def test_ranks_share_the_epoch_of_one(reader: readers.Reader) -> None:
    whole = run(ImageLoader(reader, 12, augment=CROP, seed=5, fields=("image", "index")))
    parts = [
        run(ImageLoader(reader, 4, augment=CROP, seed=5, rank=r, world_size=3, fields=("image", "index")))
        for r in range(3)
    ]
    for step, batch in enumerate(whole):
        assert same([tuple(torch.cat([part[step][k] for part in parts]) for k in (0, 1))], [batch])


def test_epochs_differ_and_repeat(reader: readers.Reader) -> None:
    loader = ImageLoader(reader, 10, augment=CROP, seed=2, fields=("image", "index"))
    first, second = run(loader), run(loader)
    assert loader.epoch == 2 and not same(first, second)
    loader.set_epoch(1)
    assert same(run(loader), second)
    assert not same(run(ImageLoader(reader, 10, augment=CROP, seed=3, fields=("image", "index"))), first)


def test_memory_is_used_again(reader: readers.Reader) -> None:
    loader = ImageLoader(reader, 5, augment=CROP, prefetch=2)
    places = {images.data_ptr() for _ in range(4) for images, _ in loader}
    assert len(places) <= 2 + 2 + 1


def test_images_of_one_size_need_no_augmentation(reader: readers.Reader) -> None:
    same_size = reader.select(indices=[i for i in range(COUNT) if decode_image(reader.read(i)).shape == (32, 40, 3)])
    images, _ = next(iter(ImageLoader(same_size, 4, shuffle=False)))
    assert torch.equal(images[1], torch.from_numpy(decode_image(same_size.read(1)).copy()).permute(2, 0, 1))


def test_images_of_many_sizes_do(reader: readers.Reader) -> None:
    with pytest.raises(BadSampleError, match=r"differ in size: .* begin augment= with RandomResizedCrop"):
        run(ImageLoader(reader, 8))


def test_orders_and_selections(reader: readers.Reader) -> None:
    balanced = ImageLoader(reader, 10, augment=CROP, order=ClassBalanced(reader.labels, seed=1), fields=("label",))
    assert all(sorted(labels.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4] for (labels,) in balanced)
    chosen = reader.select(labels=["class2"])
    assert all((labels == 2).all() for _, labels in ImageLoader(chosen, 5, augment=CROP))
    in_order = ImageLoader(reader, 10, augment=CROP, shuffle=False, fields=("index",))
    assert torch.cat([b[0] for b in in_order]).tolist() == list(range(COUNT))


def test_a_plain_folder_is_a_reader_too(photos: Path, reader: readers.Reader) -> None:
    folder = readers.open_folder(photos)
    assert same(run(ImageLoader(folder, 10, augment=CROP, seed=4)), run(ImageLoader(reader, 10, augment=CROP, seed=4)))


def test_the_mmap_back_end(packed: Path, reader: readers.Reader) -> None:
    with readers.open(packed, backend="mmap") as mapped:
        assert same(run(ImageLoader(mapped, 10, augment=CROP)), run(ImageLoader(reader, 10, augment=CROP)))


def test_other_fields(tmp_path: Path, photos: Path) -> None:
    files = sorted(photos.rglob("*.jpg"))[:8]
    rows = ["path,label,caption", *(f"{file},{i % 2},text {i}" for i, file in enumerate(files))]
    (tmp_path / "table.csv").write_text("\n".join(rows))
    packer.convert(tmp_path / "table.csv", to="hdf5", output=tmp_path / "set")
    reader = readers.open(tmp_path / "set")
    loader = ImageLoader(reader, 4, augment=CROP, shuffle=False, fields=("json", "image"))
    texts = [json.loads(bytes(text))["caption"] for batch, _ in loader for text in batch]
    assert texts == [f"text {i}" for i in range(8)]


def test_a_field_that_a_sample_lacks_is_none(tmp_path: Path, photos: Path) -> None:
    files = sorted(photos.rglob("*.jpg"))[:4]
    masks = [files[1], "", files[3], ""]
    rows = ["path,label,mask", *(f"{file},0,{mask}" for file, mask in zip(files, masks, strict=True))]
    (tmp_path / "table.csv").write_text("\n".join(rows))
    packer.convert(tmp_path / "table.csv", to="tar", output=tmp_path / "set")
    loader = ImageLoader(readers.open(tmp_path / "set"), 4, augment=CROP, shuffle=False, fields=("mask", "image"))
    ((found, _),) = loader
    assert [None if mask is None else bytes(mask) for mask in found] == [
        Path(mask).read_bytes() if mask else None for mask in masks
    ]


def test_a_tensor_goes_to_the_device(reader: readers.Reader) -> None:
    images, labels = next(iter(ImageLoader(reader, 4, augment=CROP, device="meta")))
    assert images.device.type == labels.device.type == "meta"


# --- length and tails ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tail", "world", "sizes"),
    [
        ("drop_last", 1, [[16, 16, 16]]),
        ("exact", 1, [[16, 16, 16, 2]]),
        ("pad", 3, [[16, 1]] * 3),
        ("exact", 3, [[16, 0], [16, 1], [16, 1]]),
    ],
)
def test_tails(reader: readers.Reader, tail: Any, world: int, sizes: list[list[int]]) -> None:
    for rank in range(world):
        loader = ImageLoader(reader, 16, augment=CROP, tail=tail, rank=rank, world_size=world)
        assert [len(images) for images, _ in loader] == sizes[rank]
        assert len(loader) == len(sizes[rank])


# --- resume -------------------------------------------------------------------------------------------------------


def test_resumed_pixels_are_the_same(reader: readers.Reader) -> None:
    augment = [*CROP, ColorJitter(0.5)]
    whole = run(ImageLoader(reader, 10, augment=augment, seed=1))
    loader = ImageLoader(reader, 10, augment=augment, seed=1)
    stream = iter(loader)
    start = [next(stream), next(stream)]
    other = ImageLoader(reader, 10, augment=augment, seed=77)
    other.load_state_dict(loader.state_dict())
    assert same(start + run(other), whole)


def test_a_state_can_be_loaded_in_the_middle_of_a_loop(reader: readers.Reader) -> None:
    loader = ImageLoader(reader, 10, augment=CROP, fields=("index",))
    stream = iter(loader)
    next(stream)
    state = loader.state_dict()
    next(stream)
    loader.load_state_dict(state)
    assert next(stream, None) is None
    assert len(run(loader)) == 4 and not loader_threads()


def test_a_state_of_another_set(reader: readers.Reader) -> None:
    state = ImageLoader(reader, 10, augment=CROP).state_dict()
    other = reader.select(labels=[0, 1])
    with pytest.raises(ResumeError, match="the data set"):
        ImageLoader(other, 10, augment=CROP).load_state_dict(state)
    with pytest.raises(ResumeError, match=r"shuffled.*sequential"):
        ImageLoader(reader, 10, augment=CROP, shuffle=False).load_state_dict(state)
    for nonsense in ({}, {"kind": "x"}, {**state, "cursor": -1}, {**state, "cursor": 51}, {**state, "version": 99}):
        with pytest.raises(ResumeError):
            ImageLoader(reader, 10, augment=CROP).load_state_dict(nonsense)


def test_an_epoch_of_other_nodes_is_finished_as_it_began(reader: readers.Reader) -> None:
    options: dict[str, Any] = {"fields": ("index",), "tail": "exact"}
    seen = []
    for rank in range(4):
        loader = ImageLoader(reader, 4, order=NodeLocal(COUNT, 2, 4), rank=rank, world_size=4, **options)
        part = next(iter(loader))[0].tolist()
        assert all((index < COUNT // 2) == (rank < 2) for index in part)
        seen += part
    rest = ImageLoader(reader, 4, order=NodeLocal(COUNT, 1, 4), **options)
    rest.load_state_dict(loader.state_dict())
    assert sorted(seen + [int(index) for (batch,) in rest for index in batch]) == list(range(COUNT))


# --- bad samples --------------------------------------------------------------------------------------------------
BAD = (3, 17, 18, 40)


def test_a_bad_sample_ends_the_epoch(photos: Path, tmp_path: Path) -> None:
    reader = readers.open(damaged_set(photos, tmp_path, BAD))
    loader = ImageLoader(reader, 10, augment=CROP, shuffle=False)
    with pytest.raises(BadSampleError, match=r"sample 3 \(.*\): jpeg image: the index says .* `packer verify --deep`"):
        run(loader)
    assert not loader_threads()


@pytest.mark.parametrize("threads", [1, 4])
def test_bad_samples_are_skipped(photos: Path, tmp_path: Path, threads: int) -> None:
    reader = readers.open(damaged_set(photos, tmp_path, BAD))
    loader = ImageLoader(
        reader, 10, augment=CROP, shuffle=False, on_error="skip", fields=("index", "image", "label"), threads=threads
    )
    with pytest.warns(UserWarning, match=r"epoch 0: 4 bad samples were skipped, the first is sample 3 "):
        batches = run(loader)
    assert [len(indices) for indices, *_ in batches] == [9, 8, 10, 10, 9]
    assert torch.cat([b[0] for b in batches]).tolist() == [i for i in range(COUNT) if i not in BAD]
    assert all(len(images) == len(indices) == len(labels) for indices, images, labels in batches)
    assert [sample.index for sample in loader.bad_samples] == list(BAD)
    expected = {int(i): image for i, image, _ in _singles(batches)}
    whole = ImageLoader(reader, 1, augment=CROP, shuffle=False, on_error="skip", fields=("index", "image"), threads=1)
    with pytest.warns(UserWarning):
        for indices, images in whole:
            assert all(torch.equal(expected[int(i)], image) for i, image in zip(indices, images, strict=True))


def _singles(batches: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    for batch in batches:
        yield from zip(*batch, strict=True)


def test_bad_samples_are_replaced(photos: Path, tmp_path: Path) -> None:
    reader = readers.open(damaged_set(photos, tmp_path, BAD))
    results = []
    for threads in (1, 4):
        loader = ImageLoader(
            reader,
            10,
            augment=CROP,
            shuffle=False,
            on_error="substitute",
            fields=("index", "image", "label"),
            threads=threads,
        )
        with pytest.warns(UserWarning, match="4 bad samples were replaced"):
            results.append(run(loader))
    assert same(*results)
    indices, _, labels = (torch.cat([batch[k] for batch in results[0]]) for k in range(3))
    assert len(indices) == COUNT and not set(indices.tolist()) & set(BAD)
    assert labels.tolist() == reader.labels[indices.numpy()].tolist()
    assert [i for i in range(COUNT) if int(indices[i]) != i] == list(BAD)


def test_crops_that_do_not_fit_are_bad_samples(reader: readers.Reader) -> None:
    loader = ImageLoader(reader, 50, augment=[CenterCrop(33)], on_error="skip", tail="exact", fields=("image", "index"))
    with pytest.warns(UserWarning, match="does not fit into"):
        ((images, indices),) = run(loader)
    assert len(images) == 24 and {decode_image(reader.read(i)).shape[0] for i in indices.tolist()} == {33, 64}


def test_a_damaged_sample_under_verify(photos: Path, tmp_path: Path) -> None:
    out = damaged_set(photos, tmp_path, BAD)
    with readers.open(out, verify=True) as reader:
        loader = ImageLoader(reader, 10, augment=CROP, shuffle=False, on_error="skip", fields=("index", "image"))
        with pytest.warns(UserWarning, match="CRC32C"):
            seen = torch.cat([batch[0] for batch in loader]).tolist()
    assert seen == [i for i in range(COUNT) if i not in BAD]


@pytest.mark.parametrize("augment", [CROP, [Resize(40), CenterCrop(24)], []], ids=["crop", "centre", "none"])
def test_files_that_are_no_images(tmp_path: Path, augment: list[Any]) -> None:
    """Nothing is known of their size before they are decoded."""
    for i in range(12):
        (tmp_path / f"{i:02d}.jpg").write_bytes(make_jpeg(i, (64, 64) if i == 7 and augment else (40, 32)))
    (tmp_path / "00.jpg").write_bytes(b"not an image")
    (tmp_path / "05.jpg").write_bytes(b"")
    reader = readers.open_folder(tmp_path)
    options: dict[str, Any] = {"augment": augment, "shuffle": False}
    with pytest.warns(UserWarning, match="2 bad samples were skipped, the first is sample 0"):
        assert [len(images) for images, _ in ImageLoader(reader, 4, on_error="skip", **options)] == [3, 3, 4]
    with pytest.warns(UserWarning, match="2 bad samples were replaced"):
        assert [len(images) for images, _ in ImageLoader(reader, 4, on_error="substitute", **options)] == [4, 4, 4]
    with pytest.raises(BadSampleError, match=r"sample 0 \(00\): image, byte 0"):
        run(ImageLoader(reader, 4, **options))


def test_a_substitute_has_the_size_of_its_batch(tmp_path: Path) -> None:
    for i in range(8):
        (tmp_path / f"{i}.jpg").write_bytes(make_jpeg(i, (64, 48) if i % 2 else (40, 32)))
    (tmp_path / "0.jpg").write_bytes(make_jpeg(0, (40, 32))[:-200])
    reader = readers.open_folder(tmp_path)
    for seed in range(5):
        loader = ImageLoader(reader.select(indices=[0, 2, 4, 1]), 1, on_error="substitute", seed=seed)
        with pytest.warns(UserWarning, match="replaced"):
            assert len(run(loader)) == 4


def test_a_missing_shard_is_never_skipped(packed: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(packed, copy)
    reader = readers.open(copy)
    next(iter(sorted(copy.glob("*.tar"))[-1:])).unlink()
    with pytest.raises(readers.StaleIndexError):
        run(ImageLoader(reader, 10, augment=CROP, on_error="skip"))
    assert not loader_threads()


# --- the end ------------------------------------------------------------------------------------------------------
def wait_for_no_threads() -> None:
    deadline = time.monotonic() + 10
    while loader_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not loader_threads()


def test_threads_end_with_the_loop_the_break_and_the_reference(reader: readers.Reader) -> None:
    loader = ImageLoader(reader, 5, augment=CROP, threads=3)
    run(loader)
    assert not loader_threads()
    for _ in loader:
        assert loader_threads()
        break
    gc.collect()
    wait_for_no_threads()
    stream = iter(loader)
    next(stream)
    del stream, loader
    gc.collect()
    wait_for_no_threads()


def test_an_exception_in_the_loop_leaves_nothing(reader: readers.Reader) -> None:
    loader = ImageLoader(reader, 5, augment=CROP)

    def train() -> None:
        for _ in loader:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        train()
    gc.collect()
    wait_for_no_threads()


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


def test_two_loops_at_once(reader: readers.Reader) -> None:
    a, b = (ImageLoader(reader, 10, augment=CROP, seed=1) for _ in range(2))
    assert all(torch.equal(x[0], y[0]) for x, y in zip(a, b, strict=True))


SCRIPT = """
import sys, torch, readers
from readers.loader import ImageLoader
from readers.augment import RandomResizedCrop
reader = readers.open(sys.argv[1])
print("ready", flush=True)
while True:
    for images, labels in ImageLoader(reader, 2, augment=[RandomResizedCrop(24)], threads=3):
        pass
"""


def test_control_c_ends_the_program_at_once(packed: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(packer.__file__).parent.parent)}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(packed)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in errors and process.returncode in (1, -signal.SIGINT, 130)


def test_a_forked_child_has_loaders_of_its_own(reader: readers.Reader) -> None:
    loader = ImageLoader(reader, 10, augment=CROP, seed=1)
    expected = run(loader)

    def child() -> None:
        loader.set_epoch(0)
        assert same(run(loader), expected)

    in_child(child)


# --- wrong use ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "CHWN"}, "layout is one of"),
        ({"on_error": "ignore"}, "on_error is one of"),
        ({"threads": 0}, "at least 1"),
        ({"prefetch": 0}, "at least 1"),
        ({"rank": 1}, "both rank and world_size"),
        ({"dtype": torch.int32}, "dtype is torch.uint8"),
        ({"dtype": torch.uint8, "augment": [Normalize((0, 0, 0), (1, 1, 1))]}, "do not fit into uint8"),
        ({"batch_size": 0}, "batch_size"),
        ({"tail": "wrap"}, "tail must be"),
        ({"rank": 2, "world_size": 2}, "outside the world"),
    ],
)
def test_wrong_options(reader: readers.Reader, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageLoader(reader, **{"batch_size": 4, "augment": CROP, **options})


def test_no_warning_without_bad_samples(reader: readers.Reader) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(ImageLoader(reader, 10, augment=CROP, on_error="skip"))


def test_a_loader_on_the_cpu_imports_nothing_for_gpus(packed: Path) -> None:
    script = f"""
import sys, readers
from readers.loader import ImageLoader
from readers.augment import RandomResizedCrop
with readers.open({str(packed)!r}) as reader:
    images, labels = next(iter(ImageLoader(reader, 4, augment=[RandomResizedCrop(8)], device="cpu")))
for_gpus = ("triton", "torchcodec", "torchvision", "readers.augment.fused", "readers.augment.kernel",
            "readers.loader.device", "readers.decode.device", "readers.decode.batch", "readers.decode.batch")
print([name for name in for_gpus if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
