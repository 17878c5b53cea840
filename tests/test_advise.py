"""`packer advise`: recommendations follow from figures, figures from images, and the commands keep their promises."""

from __future__ import annotations

import itertools
import json
import shlex
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import tree_of
from image_cases import encoded, picture
from PIL import Image
from suites.programs import run_packer

import packer
import readers
from cache.errors import SourceError
from packer.cli.convert import command as convert_command
from packer.cli.group import cli
from packer.cli.look import export_command, verify_command
from packer.conversion.options import Reencode
from packer.tools.advise import (
    READERS,
    Choices,
    Estimate,
    Facts,
    Job,
    Measured,
    Variant,
    choose,
    choose_variants,
    estimate_total,
    frontier,
    recommend,
)
from readers.headers import ImageHeader

GB = 10**9
TRAIN, VAL = 100_000, 5_000


def one(
    name: str, ms: float, kilobytes: float, error: float = 0.0, how: Reencode | None = None, keep: str = ""
) -> Measured:
    size = 1000 * kilobytes
    whole = size * (TRAIN + VAL)
    seconds, psnr = ms / 1000, 48 - 20 * np.log10(error) if error else None
    return Measured(
        Variant(name, how, keep), 100, size, Estimate(whole, whole, whole), Estimate(seconds, seconds, seconds), 0.005,
        error, 3 * error, 90 if error else 0, psnr,
    )  # fmt: skip


# On four CPUs: 2,000 images/s as stored, 2,500, 4,000, 5,000, and 20,000 from pixels.
MEASURED = (
    one("unchanged", 2.0, 100),
    one("same size, q95", 1.6, 70, 1.0, Reencode("keep", quality=95)),
    one("max side 400, q90", 1.0, 40, 2.5, Reencode("keep", 400, quality=90)),
    one("short side 256, q90", 0.8, 30, 3.5, Reencode("keep", None, 256, 90)),
    one("pixels", 0.2, 200, 3.0, keep="decoded:256"),
)
FACTS = Facts("images", MEASURED, Job(), {"train": TRAIN, "val": VAL}, 4, name="images")


def wanting(rate: float | None, cpus: int = 4, **job: Any) -> Facts:
    return replace(FACTS, cpus=cpus, job=Job(rate, **job))


def topics(facts: Facts) -> dict[str, Any]:
    return {recommendation.topic: recommendation for recommendation in recommend(facts)}


@pytest.mark.parametrize(
    ("facts", "images"),
    [
        (wanting(1000), "unchanged"),
        (wanting(2000), "same size, q95"),
        (wanting(3000), "max side 400, q90"),
        (wanting(4500), "short side 256, q90"),
        (wanting(10_000), "short side 256, q90"),
        (wanting(3000, max_error=2), "same size, q95"),
        (wanting(3000, max_error=0.5), "unchanged"),
    ],
)
def test_the_least_error_that_keeps_up(facts: Facts, images: str) -> None:
    assert choose(facts).variant.name == images
    lossy = choose(facts).psnr is not None
    for text in ("mean", "of 255", "PSNR", "keep the originals"):
        assert not lossy or text in topics(facts)["images"].reason, "the loss of quality is not stated"


@pytest.mark.parametrize(
    ("facts", "images"),
    [
        (wanting(1000), "unchanged"),
        (wanting(4500), "unchanged"),
        (wanting(10_000), "short side 256, q90"),
        (wanting(4500, reader="dali"), "short side 256, q90"),
    ],
)
def test_a_cache_that_loses_nothing_comes_before_images_that_lose(facts: Facts, images: str) -> None:
    """On four CPUs 5,714 images/s from 15 GB."""
    more = replace(facts, measured=(*MEASURED, one("coefficients", 0.7, 141, keep="coefficients")))
    assert choose(more).variant.name == images
    if facts == wanting(4500):
        reason = topics(more)["images"].reason
        assert "5,714 without any loss" in reason and 'readers.cached(reader, keep="coefficients")' in reason


def test_a_smaller_lossless_variant_is_packed() -> None:
    exact = one("png", 1.9, 50, 0.0, Reencode("keep"))
    assert choose(replace(FACTS, measured=(*MEASURED, exact))).variant.name == "png"
    assert choose(replace(FACTS, measured=(*MEASURED, replace(exact, image_bytes=90_000)))).variant.name == "unchanged"
    assert choose(replace(FACTS, measured=(*MEASURED, replace(exact, refused=1)))).variant.name == "unchanged"


def test_the_frontier_has_no_dominated_variant() -> None:
    worse = one("worse", 1.7, 70, 2.0, Reencode("keep", quality=85))
    names = [point.variant.name for point in frontier(replace(FACTS, measured=(*MEASURED, worse)))]
    assert names == ["unchanged", "same size, q95", "max side 400, q90", "short side 256, q90"]


@pytest.mark.parametrize(
    ("reader", "packed", "format", "converts", "commands"),
    [
        ("packer", "", "hdf5", True, 0),
        ("packer", "tar", "tar", False, 0),
        ("dali", "", "tfrecord", True, 1),
        ("rocal", "tfrecord", "tfrecord", False, 1),
        ("webdataset", "hdf5", "tar", True, 0),
        ("tensorflow", "", "tfrecord", True, 0),
        ("h5py", "hdf5", "hdf5", False, 0),
    ],
)
def test_the_format_is_one_that_the_reader_supports(
    reader: str, packed: str, format: str, converts: bool, commands: int
) -> None:
    by_topic = topics(replace(wanting(1000, reader=reader), packed=packed))
    assert by_topic["format"].choice == format and len(by_topic["format"].commands) == commands
    assert bool(by_topic["images"].commands) is converts is ("shards" in by_topic)
    if converts:
        assert f"--to {format}" in by_topic["images"].commands[0]


@pytest.mark.parametrize(
    ("facts", "shards", "flags"),
    [
        (wanting(1000), "10 shards of about 1 GB", []),
        (wanting(3000), "8 shards of about 500 MB", ["--samples-per-shard", "12500"]),
        (wanting(1000, gpus=4, reader="webdataset"), "10 shards of about 1 GB", []),
        (wanting(1000, 64, gpus=4, reader="webdataset"), "65 shards", ["--samples-per-shard", "1562"]),
        (replace(wanting(1000), splits={"all": 3}), "1 shard of about 300 kB", []),
    ],
)
def test_shards_are_large_but_enough_for_all_workers(facts: Facts, shards: str, flags: list[str]) -> None:
    by_topic = topics(facts)
    assert by_topic["shards"].choice.startswith(shards)
    words = shlex.split(by_topic["images"].commands[0])
    place = words.index("--samples-per-shard") if "--samples-per-shard" in words else len(words)
    assert words[place : place + 2] == flags


def test_every_command_is_one_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of each case is parsed by the real command line, with a set name that needs quotes."""
    seen: list[dict[str, Any]] = []
    for command in (convert_command, export_command, verify_command):
        monkeypatch.setattr(command, "callback", lambda *arguments, **options: seen.append(options))
    monkeypatch.chdir(tmp_path)
    count = 0
    for reader, rate, packed in itertools.product(READERS, (None, 1000, 2000, 3000, 10_000), ("", "hdf5")):
        facts = replace(FACTS, source="-my set's", name="-my set's", flags=("--split", "train"), packed=packed,
                        damaged=2, drawn=100, job=Job(rate, 2, reader))  # fmt: skip
        for line in (line for each in recommend(facts) for line in each.commands):
            words = shlex.split(line)
            assert words[0] == "packer"
            Path(words[2]).mkdir(exist_ok=True)
            cli.main(words[1:], prog_name="packer", standalone_mode=False)
            count += 1
    assert len(seen) == count > 50


# --- measuring ----------------------------------------------------------------------------------------------------
def test_a_sample_estimates_the_bytes_of_the_whole() -> None:
    """Within the interval in about 95 of 100 draws, and exact where the sample is the whole set."""
    rng = np.random.default_rng(5)
    sizes = rng.normal(50_000, 10_000, 2000)
    hits = 0
    for _ in range(300):
        estimate = estimate_total(rng.choice(sizes, 40, replace=False), 2000)
        hits += estimate.low <= sizes.sum() <= estimate.high
    assert 270 <= hits <= 297
    whole = estimate_total(sizes, 2000)
    assert whole.low == whole.high == pytest.approx(sizes.sum())


def test_sizes_above_those_of_all_images_are_left_out() -> None:
    jpeg, png = (ImageHeader(media, 300, 450, 3, 0xC0, 1) for media in ("jpeg", "png"))
    variants, notes = choose_variants([jpeg, jpeg], Choices())
    assert not any(variant.reencode and variant.reencode.max_side == 500 for variant in variants)
    assert "--max-side 500: no image of the sample is larger" in notes[0]
    large = jpeg._replace(height=600, width=800)
    names = [variant.name for variant in choose_variants([jpeg, large], Choices())[0]]
    assert "max side 500, others kept" in names and "max side 400, others kept" not in names
    assert all(variant.reencode.codec != "keep" or variant.reencode.quality is None
               for variant in choose_variants([jpeg, png], Choices())[0] if variant.reencode)  # fmt: skip
    sides = {variant.reencode.max_side for variant in choose_variants([large], Choices(112))[0] if variant.reencode}
    assert sides == {None, 500, 250, 200, 128}, "smaller crops do not give smaller images"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve JPEGs in two classes and one split."""
    root = tmp_path_factory.mktemp("advised") / "photos"
    for number in range(12):
        path = root / "train" / "ab"[number % 2] / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(picture(180 + 10 * number, 240, number), "JPEG", quality=95))
    return root


QUICK: dict[str, Any] = {"seconds": 0.2, "choices": Choices(64, (128,), (95, 60))}


def tar_of(root: Path) -> Path:
    path = root.with_suffix(".tar.gz")
    with tarfile.open(path, "w:gz") as archive:
        archive.add(root, "photos")
    return path


@pytest.mark.parametrize("made", [Path, tar_of])
def test_measuring_gives_the_sizes_that_packing_would(images: Path, made: Callable[[Path], Any]) -> None:
    advice = packer.advise(made(images), **QUICK)
    assert (advice.total, advice.sampled, advice.drawn, advice.left_out) == (12, 12, 12, {})
    by_name = {measured.variant.name: measured for measured in advice.measured}
    original, fine, coarse = (by_name[name] for name in ("unchanged", "same size, q95", "same size, q60"))
    assert original.error == 0 and original.psnr is None and original.encode == 0 and original.unchanged == 1
    assert 0 < fine.error < coarse.error < coarse.worst < coarse.largest and fine.psnr > coarse.psnr > 20  # type: ignore[operator]
    assert original.image_bytes > coarse.image_bytes > by_name["max side 128, q60"].image_bytes
    assert original.set_bytes.value == sum(path.stat().st_size for path in images.rglob("*.jpg"))
    assert all(measured.decode.low <= measured.decode.value <= measured.decode.high for measured in advice.measured)
    assert all(measured.encode > 0 for measured in advice.measured[1:])
    json.dumps(advice.to_dict(), allow_nan=False)


def test_the_same_seed_draws_the_same_images(images: Path) -> None:
    reports = [packer.advise(images, samples=3, **{**QUICK, "seconds": 0.01}, seed=seed) for seed in (0, 0, 1)]
    assert all((report.sampled, report.total) == (3, 12) for report in reports)
    first, again, other = ([each.image_bytes for each in report.measured] for report in reports)
    assert first == again != other


def test_images_of_every_kind(tmp_path: Path) -> None:
    root = tmp_path / "odd" / "a"
    root.mkdir(parents=True)
    frames = [picture(90, 120, seed) for seed in (1, 2)]
    deep = np.arange(90 * 120, dtype=np.uint16).reshape(90, 120)
    made = {
        "grey.jpg": encoded(picture(90, 120).convert("L"), "JPEG"),
        "cmyk.jpg": encoded(picture(90, 120).convert("CMYK"), "JPEG"),
        "turned.jpg": encoded(picture(90, 120), "JPEG", 6),
        "clear.png": encoded(picture(90, 120).convert("RGBA"), "PNG"),
        "deep.png": encoded(Image.fromarray(deep), "PNG"),
        "plain.bmp": encoded(picture(90, 120), "BMP"),
        "moving.gif": encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "cut.jpg": encoded(picture(90, 120), "JPEG")[:1500],
        "\x1b[2J.jpg": b"",
        "notes.txt": b"not an image\n",
    }
    for name, data in made.items():
        (root / name).write_bytes(data)
    small = ("--image-size", 32, "--max-side", 64, "--quality", 90)
    done = run_packer("advise", root.parent, *small, "--seconds", 4, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in ("7 images (train 7), of which 7 were sampled", "not an image: text", "empty, 0 bytes",
                 "has 2 frames", "1 image with more than 8 bits", "2 images of 10 drawn (20.0%) cannot be decoded",
                 "--on-error quarantine"):  # fmt: skip
        assert text in done.stdout, text
    assert "\x1b" not in done.stdout
    (exact,) = (line.split() for line in done.stdout.splitlines() if line[2:].startswith("png for"))
    assert "same" in exact and "0.00" in exact, "a PNG is lossless"


def test_a_source_without_images_is_named(tmp_path: Path) -> None:
    for files in ({}, {"a.txt": b"text"}, {"a.jpg": b""}):
        with pytest.raises(SourceError, match=str(tmp_path)):
            packer.advise(tree_of(tmp_path, files), **QUICK)


def test_the_recommended_command_makes_the_promised_set(tmp_path: Path) -> None:
    """Every image of this small set is measured, so its size is known to the byte. Originals are so large that decoding
    them takes longest on a busy machine too."""
    table = tmp_path / "some.csv"
    files = {f"{name}/{number}.jpg": picture(720, 960, number) for number, name in enumerate("aab")}
    tree_of(tmp_path, {name: encoded(pixels, "JPEG", quality=95) for name, pixels in files.items()})
    rows = [f"{name},{name[0]}" for name in files]
    table.write_text("\n".join(["file,kind", *rows]))
    done = run_packer("advise", table, "--path-column", "file", "--label-column", "kind", "--simulate-step", "1us",
                      "--gpus", 2, "--reader", "webdataset", "--max-side", 128, "--quality", 80, "--seconds", 0.2,
                      "--image-size", 64, "--json", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done.stderr
    advice = json.loads(done.stdout)
    chosen = advice["measured"][advice["chosen"]]
    assert advice["job"]["images_per_second"] == pytest.approx(128e6) and chosen["flags"]
    (command,) = next(part["commands"] for part in advice["recommendations"] if part["topic"] == "images")
    words = shlex.split(command)
    done = run_packer(*words[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with readers.open(tmp_path / words[-1]) as reader:
        assert len(reader) == 3 and set(reader.classes) == {"a", "b"}
        assert int(reader.sizes().sum()) == round(chosen["set_bytes"]["value"])
        assert reader.split_info.shards[0].path.endswith(".tar") and len(reader.split_info.shards) >= 2
    assert not packer.advise(tmp_path / words[-1], **QUICK).recommendations[0].commands, "the set is as promised"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--images-per-second", 10, "--simulate-step", "1s"), "either --images-per-second or --simulate-step"),
        (("--batch-size", 10), "--simulate-step"),
        (("--simulate-step", "0s"), "above 0"),
        (("--layout", "nested"), "nested"),
        (("--split", "test"), "test"),
    ],
)
def test_wrong_options_are_one_message(images: Path, options: Sequence[object], message: str) -> None:
    done = run_packer("advise", images, *options)
    assert done.returncode in (1, 2) and message in done.stderr and "Traceback" not in done.stderr
