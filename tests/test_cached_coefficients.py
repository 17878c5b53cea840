"""A cache of DCT coefficients: decoders get the same pixels from it, and every other reader the stored images."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from cached_sources import SlowReader, images
from coefficient_cases import exact
from gpu_doubles import install
from image_cases import encoded, picture
from loader_options import grouped
from PIL import Image
from suites.programs import run_packer
from torch.utils.data import DataLoader

import readers
from cache.errors import BadSampleError
from readers import Decode, Ranks, Views
from readers.augment import CenterCrop, Normalize, Op, RandomHorizontalFlip, RandomResizedCrop, RandomRotation, Resize
from readers.coefficients import unsupported_reason
from readers.dali import Source
from readers.decode.batch import routes
from readers.headers import parse_any
from readers.loader import ImageLoader
from readers.order import Sequential
from readers.rocal import external_source
from readers.torch import EpochSampler, ImageDataset

if unsupported_reason():
    pytest.skip(unsupported_reason(), allow_module_level=True)

ROOT = Path(__file__).resolve().parent.parent
KEEP = "coefficients"
HEIGHT, WIDTH = 216, 288
AUGMENTS: dict[str, list[Op]] = {
    "a box, scaled": [RandomResizedCrop(48), RandomHorizontalFlip()],
    "scaled": [Resize(64), CenterCrop(48)],
    "a box as it is": [CenterCrop(96)],
    "the whole": [Resize((200, 200))],
    "a crop of changed pixels": [RandomRotation(20), RandomResizedCrop(32)],
}


def jpeg(image: Image.Image, sampling: str) -> bytes:
    data: bytes = simplejpeg.encode_jpeg(np.asarray(image), 90, "RGB", sampling)
    return data


def _images() -> dict[str, bytes]:
    """Images by name: JPEGs of all kinds, and images that are cached unconverted."""
    pixels = picture(HEIGHT, WIDTH, 2)
    files = {f"jpeg {kind}": jpeg(pixels, kind) for kind in ("420", "422", "440", "444")}
    files["jpeg grey"] = encoded(pixels.convert("L"), "JPEG")
    for orientation in range(2, 9):
        files[f"jpeg turned {orientation}"] = encoded(pixels, "JPEG", orientation)
    files["jpeg progressive"] = encoded(pixels, "JPEG", progressive=True, quality=80)
    files["jpeg odd"] = jpeg(picture(HEIGHT - 3, WIDTH + 5), "420")
    files["other png"] = encoded(pixels, "PNG")
    files["other cmyk"] = encoded(pixels.convert("CMYK"), "JPEG")
    files["other damaged"] = files["jpeg 444"][:-900] + files["jpeg 444"][-2:]
    return files


IMAGES = _images()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images") / "train" / "all"
    root.mkdir(parents=True)
    for name, data in IMAGES.items():
        (root / f"{name}.{'png' if 'png' in name else 'jpg'}").write_bytes(data)
    return root.parent.parent


@pytest.fixture(params=("shards", "folder"))
def base(request: pytest.FixtureRequest, folder: Path, pack: Any) -> Any:
    if request.param == "folder":
        return readers.open_folder(folder, "train")
    return readers.open(pack(folder, samples_per_shard=4), "train")


@pytest.fixture
def packed_base(folder: Path, pack: Any) -> Any:
    return readers.open(pack(folder, samples_per_shard=4), "train")


def batches(reader: Any, ops: list[Op], epochs: int = 1, **options: Any) -> list[bytes]:
    loader = ImageLoader(
        reader, 4, seed=5, **grouped({"augment": ops, "ranks": Ranks(tail="exact"), "threads": 2, **options})
    )
    return [_digest(batch) for _ in range(epochs) for batch in loader]


def items(reader: Any, transform: Any, output: Any = "tensor") -> list[bytes]:
    data = ImageDataset(reader, transform, output=output)
    return [_digest(data[i]) for i in range(len(reader))]


def joined(reader: Any, ops: list[Op]) -> list[bytes]:
    """Batches of some of the samples, which follow a sample of another reader."""
    return batches(readers.concat([reader.select(indices=[0]), reader.select(indices=range(3, len(reader)))]), ops)


def _digest(batch: Any) -> bytes:
    return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in batch)).digest()


def kept_media(reader: Any) -> list[str]:
    """The media type that the decoders get for each sample."""
    return [parse_any(data).media for data in reader.for_decoding().read_many(range(len(reader)))]


# --- pixels -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", AUGMENTS)
def test_batches_equal_those_without_a_cache(base: Any, name: str, place: dict[str, Any]) -> None:
    """In the epoch that fills the cache and in the next, for every kind of batch."""
    with readers.cached(base, keep=KEEP, **place) as reader:
        assert batches(reader, AUGMENTS[name], 2) == batches(base, AUGMENTS[name], 2)
        stats = reader.stats()
        assert stats.present == stats.misses == len(IMAGES) <= stats.hits and stats.passed == 0


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [(torch.uint8, "NCHW"), (torch.float32, "NCHW"), (torch.float32, "NHWC"), (torch.bfloat16, "NHWC")],
)
def test_mixed_batches_equal_those_without_a_cache(
    packed_base: Any, place: dict[str, Any], dtype: torch.dtype, layout: str
) -> None:
    """Images that are finished in one pass and images that are not share a batch."""
    ops = [*AUGMENTS["a box, scaled"], *([] if dtype == torch.uint8 else [Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.1))])]
    with readers.cached(packed_base, keep=KEEP, **place) as reader:
        reader.prefill()
        loaders = (
            ImageLoader(each, 5, augment=Views(ops, 2), seed=5, decode=Decode(dtype=dtype, layout=layout))
            for each in (reader, packed_base)
        )
        for (cached, _), (plain, _) in zip(*loaders, strict=True):
            assert all(torch.equal(*views) for views in zip(cached, plain, strict=True))


@pytest.mark.parametrize("check", ["never", "always"])
def test_returned_bytes_are_not_overwritten(packed_base: Any, place: dict[str, Any], check: Any) -> None:
    """Neither the images that were encoded for the read, nor those that did not fit into the cache."""
    for capacity in (1.0, 0.5):
        with readers.cached(packed_base, capacity, KEEP, check=check, **place) as reader:
            first = reader.for_decoding().read_many(range(len(IMAGES)))
            assert [bytes(data) for data in first] == images(reader.for_decoding())


def test_sizes_are_estimated(packed_base: Any, place: dict[str, Any]) -> None:
    """ "auto" caches everything; a share caches a share, and the other images stay unconverted."""
    with readers.cached(packed_base, keep=KEEP, **place) as reader:
        reader.prefill()
        whole = reader.stats()
        assert whole.present == len(IMAGES) and whole.used_bytes > 0.7 * whole.capacity_bytes
    slow = SlowReader(packed_base)
    with readers.cached(slow, 0.5, KEEP, **place) as reader:
        kept = [reader.kept.keeps(i) for i in range(len(IMAGES))]
        assert 0 < sum(kept) < len(IMAGES)
        for _ in range(2):
            slow.reads.clear()
            media = kept_media(reader)
        assert sorted(slow.reads) == [i for i, keeps in enumerate(kept) if not keeps]
        for key, keeps, medium in zip(reader.keys, kept, media, strict=True):
            assert (medium == "coefficients") == (keeps and "jpeg" in key)
        assert batches(reader, AUGMENTS["scaled"]) == batches(packed_base, AUGMENTS["scaled"])


@pytest.mark.parametrize("output", ["numpy", "pil", "ops"])
def test_items_equal_those_without_a_cache(packed_base: Any, output: str, place: dict[str, Any]) -> None:
    arguments = (AUGMENTS["scaled"],) if output == "ops" else (np.asarray, output)
    with readers.cached(packed_base, keep=KEEP, **place) as reader:
        assert items(reader, *arguments) == items(packed_base, *arguments) == items(reader, *arguments)
        assert reader.stats().hits == len(IMAGES)


def dali_source(reader: Any) -> list[bytes]:
    source = Source(reader, 1, shuffle=False, ranks=Ranks(tail="exact"))
    return [source.batch(0, step)[0][0].tobytes() for step in range(len(reader))]


def rocal_source(reader: Any) -> list[bytes]:
    source = external_source(reader, 2, shuffle=False, ranks=Ranks(rank=0, world_size=1))
    fed = [bytes(image) for _ in range(len(reader) // 2) for image in next(source)[0]]
    source.close()
    return fed


def test_exact_colours(packed_base: Any, place: dict[str, Any], tmp_path: Path) -> None:
    """Chroma is interpolated where it would be repeated otherwise: as from the pixels of the whole image. States name
    the option."""
    data = IMAGES["jpeg 420"]
    for kind, contents in (("jpg", data), ("png", encoded(Image.fromarray(exact(data)), "PNG"))):
        (tmp_path / kind / "all").mkdir(parents=True)
        (tmp_path / kind / "all" / f"image.{kind}").write_bytes(contents)
    ops = [Resize((100, 100))]
    coarse, whole = (batches(readers.open_folder(tmp_path / kind), ops) for kind in ("jpg", "png"))
    expected = ImageDataset(readers.open_folder(tmp_path / "png"), ops)[0][0]
    with readers.cached(readers.open_folder(tmp_path / "jpg"), keep=KEEP, **place) as reader:
        assert batches(reader, ops) == coarse != whole == batches(reader, ops, exact_colours=True)
        exactly, quickly = (ImageDataset(reader, ops, exact_colours=exact) for exact in (True, False))
        assert (exactly[0][0] == expected).all() and (quickly[0][0] != expected).any()
        states = [ImageLoader(reader, 1, decode=Decode(exact_colours=True)).state_dict(), exactly.state_dict()]
        states.append(EpochSampler(Sequential(1), exactly).state_dict())
        assert {state["decoder"] for state in states} == {"cpu, exact colours"}
        plain = ImageDataset(reader, output="numpy", exact_colours=True)  # whole images always have exact colours
        assert plain.decoder == ImageDataset(reader, ops).decoder == "cpu"


# --- everything else ----------------------------------------------------------------------------------------------
def test_reading_gives_the_stored_images(base: Any, place: dict[str, Any]) -> None:
    with readers.cached(base, keep=KEEP, **place) as reader:
        reader.prefill(2)
        assert reader.stats().present == len(IMAGES) and reader.keep == readers.Coefficients()
        expected = images(base)
        some = reader.select(indices=[3, 1])
        assert images(reader) == [bytes(data) for data in reader.stream()] == expected
        assert [bytes(reader.read(i)) for i in range(len(expected))] == expected
        assert [bytes(sample.image) for sample in reader] == expected
        media = kept_media(reader)
        assert [medium == "coefficients" for medium in media] == ["jpeg" in key for key in reader.keys]
        assert reader.stats().misses == 0
        assert images(some) == [expected[3], expected[1]] and kept_media(some) == [media[3], media[1]]
        joined = readers.concat([reader, base])
        assert images(joined) == 2 * expected and kept_media(joined)[: len(expected)] == media
        encoded = ImageDataset(reader, decode=None)
        unchanged, others = (ImageDataset(each, decode="unchanged", output="numpy") for each in (reader, base))
        for i, data in enumerate(expected):
            assert encoded[i][0] == data and np.array_equal(unchanged[i][0], others[i][0])
        assert reader.fingerprint == base.fingerprint
        assert (reader.sizes() == base.sizes()).all()
        assert all((cached == stored).all() for cached, stored in zip(reader.info, base.info, strict=True))


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_devices_get_jpegs_and_the_cpu_coefficients(
    packed_base: Any, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    double = install(monkeypatch, "torchvision")
    ops, options = AUGMENTS["a box, scaled"], {"decoder": "torchvision", "cpu_share": share}
    expected = batches(packed_base, ops, **options)
    by_device = sum(double.calls)
    assert by_device == routes(packed_base.info).sum() * (1 - share) if share != 0.5 else 0 < by_device < 10
    with readers.cached(packed_base, keep=KEEP, **place) as reader:
        reader.prefill()
        assert batches(reader, ops, **options) == expected and sum(double.calls) == 2 * by_device
        assert reader.stats().hits == len(IMAGES) - by_device and reader.stats().misses == 0


def test_the_sources_of_dali_and_rocal_get_jpegs(packed_base: Any, place: dict[str, Any]) -> None:
    good = packed_base.select(indices=[i for i, key in enumerate(packed_base.keys) if "jpeg" in key])
    with readers.cached(good, keep=KEEP, **place) as reader:
        reader.prefill()
        for make in (dali_source, rocal_source):
            cached, plain = make(reader), make(good)
            assert len(cached) == len(good) and cached == plain


# --- runs ---------------------------------------------------------------------------------------------------------
def test_runs_continue_with_and_without_the_cache(packed_base: Any, place: dict[str, Any]) -> None:
    def run(reader: Any, state: Any = None, stop: int | None = None) -> tuple[list[bytes], Any]:
        loader = ImageLoader(reader, 3, augment=AUGMENTS["a box, scaled"], seed=7, threads=2)
        if state is not None:
            loader.load_state_dict(state)
        digests: list[bytes] = []
        for batch in loader:
            digests.append(_digest(batch))
            if len(digests) == stop:
                break
        return digests, loader.state_dict()

    whole, _ = run(packed_base)
    with readers.cached(packed_base, keep=KEEP, **place) as reader:
        for first, then in ((packed_base, reader), (reader, packed_base), (reader, reader)):
            digests, state = run(first, stop=2)
            assert digests + run(then, state)[0] == whole


def test_workers_share_coefficients(packed_base: Any, place: dict[str, Any]) -> None:
    ops = AUGMENTS["scaled"]
    workers = {"num_workers": 2, "multiprocessing_context": "fork", "timeout": 60, "persistent_workers": True}
    with readers.cached(packed_base, keep=KEEP, **place) as reader:
        expected = [_digest(batch) for batch in DataLoader(ImageDataset(packed_base, ops), 3)]
        loader = DataLoader(ImageDataset(reader, ops), 3, **workers)
        assert [_digest(batch) for batch in loader] == expected and reader.stats().present == len(IMAGES)
        puts = reader.stats().puts
        assert [_digest(batch) for batch in loader] == expected and reader.stats().puts == puts
        del loader


def rank_epoch(path: Path, place: dict[str, Any], rank: int) -> list[bytes]:
    with readers.open(path, "train") as base, readers.cached(base, keep=KEEP, **place) as reader:
        return batches(reader, AUGMENTS["scaled"], 2, rank=rank, world_size=2)


def test_two_ranks_at_once(packed_base: Any, place: dict[str, Any], spawned: ProcessPoolExecutor) -> None:
    persisting = {**place, "persist": True}
    other = spawned.submit(rank_epoch, packed_base.path, persisting, 1)
    for rank, epoch in enumerate((rank_epoch(packed_base.path, persisting, 0), other.result(timeout=120))):
        assert epoch == batches(packed_base, AUGMENTS["scaled"], 2, rank=rank, world_size=2)
    slow = SlowReader(packed_base)
    with readers.cached(slow, keep=KEEP, **persisting) as reader:
        slow.reads.clear()  # reads that measure sizes
        assert batches(reader, AUGMENTS["scaled"]) == batches(packed_base, AUGMENTS["scaled"])
        assert slow.reads == [] and reader.stats().present == len(IMAGES)
    for path in place["directory"].iterdir():
        path.unlink()


def test_a_cache_that_is_filled_from_the_command_line(packed_base: Any, tmp_path: Path) -> None:
    done = run_packer("cache", "warm", packed_base.path, "--keep", KEEP, "--directory", tmp_path)
    kept = f"{len(IMAGES)} of {len(IMAGES)} samples of train kept as coefficients-1"
    assert done.returncode == 0 and kept in done.stdout, done.stderr
    slow = SlowReader(packed_base)
    with readers.cached(slow, keep=KEEP, directory=tmp_path, persist=True) as reader:
        slow.reads.clear()  # reads that measure sizes
        assert batches(reader, AUGMENTS["scaled"]) == batches(packed_base, AUGMENTS["scaled"]) and slow.reads == []
    assert "coefficients-1 image" in run_packer("cache", "clean", "--all", "--target", tmp_path).stdout


def test_memory_over_a_disk(packed_base: Any, place: dict[str, Any], tmp_path: Path) -> None:
    """Coefficients on the disk are not computed again."""
    disk = tmp_path / "disk"
    disk.mkdir()
    slow = SlowReader(packed_base)
    with readers.cached(slow, keep=KEEP, **{**place, "directory": disk}) as below:
        below.prefill()
        with readers.cached(below, keep=KEEP, **place) as reader:
            slow.reads.clear()
            assert batches(reader, AUGMENTS["scaled"], 2) == batches(packed_base, AUGMENTS["scaled"], 2)
            assert not slow.reads and reader.stats().hits == below.stats().hits == len(IMAGES)
            assert images(reader) == images(packed_base) and sorted(slow.reads) == list(range(len(IMAGES)))


# --- faults -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("consumer", "check", "at"),
    [
        (batches, "never", 9),
        (items, "first", 13),
        (joined, "never", 200),
        (batches, "first", -40),
        (items, "never", 13),
    ],
)
def test_damaged_bytes_are_made_again(
    packed_base: Any, place: dict[str, Any], spoil: Any, at: int, check: Any, consumer: Any
) -> None:
    """A form that a decoder refuses is read from below the cache; byte 13 belongs to the height."""
    ops = AUGMENTS["scaled"]
    expected = consumer(packed_base, ops)
    with readers.cached(packed_base, keep=KEEP, check=check, **place) as reader:
        reader.prefill()
        number = next(i for i, key in enumerate(reader.keys) if "jpeg odd" in key)
        spoil(reader.for_decoding(), number, at)
        for _ in range(2):
            assert consumer(reader, ops) == expected
            assert reader.stats().dropped == 1 and reader.stats().present == len(IMAGES)


def test_an_image_that_is_bad_below_the_cache_stays_bad(folder: Path, place: dict[str, Any], spoil: Any) -> None:
    slow = SlowReader(readers.open_folder(folder, "train"))
    with readers.cached(slow, keep=KEEP, **place) as reader:
        reader.prefill()
        number = next(i for i, key in enumerate(reader.keys) if "jpeg odd" in key)
        spoil(reader.for_decoding(), number, 200)
        slow.store.broken[number] = BadSampleError("gone from the disk")
        with pytest.raises(BadSampleError, match=rf"sample {number} .*jpeg odd.*gone from the disk"):
            batches(reader, AUGMENTS["scaled"])


WITHOUT_CODEC = """
import sys, warnings
sys.modules["readers.coefficients.native"] = None
import readers
from readers.augment import CenterCrop, Resize
from readers.loader import ImageLoader

with readers.open(sys.argv[1], "train") as base, warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    reader = readers.cached(base, keep="coefficients", directory=sys.argv[2])
    print(*(str(one.message) for one in warned))
    ours, theirs = ([*ImageLoader(each, 4, augment=[Resize(64), CenterCrop(48)])] for each in (reader, base))
    print(all((a[0] == b[0]).all() for a, b in zip(ours, theirs, strict=True)), reader.stats().capacity_bytes)
    try:
        ImageLoader(base, 4, decode=readers.Decode(decoder="compiled"))
    except RuntimeError as error:
        print(error)
"""


def test_without_the_compiled_codec(packed_base: Any, place: dict[str, Any]) -> None:
    """The reader works uncached, with a warning: nodes of different kinds may run the same script."""
    command = [sys.executable, "-c", WITHOUT_CODEC, str(packed_base.path), str(place["directory"])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    warned, result, error = done.stdout.splitlines()
    assert "without a cache of coefficients" in warned and "the compiled codec" in warned and result == "True 0"
    assert "decoder='compiled' does not work here: the compiled codec" in error
