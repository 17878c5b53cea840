"""Make data for DLIO, and packed sets of the data:  python prepare.py IMAGES WORK [--photos N] [--samples N]

    WORK/retinanet   JPEGs of 1024x768 and 322,957 bytes on average, as in MLPerf Storage's RetinaNet
    WORK/resnet50    the JPEGs of IMAGES
    WORK/arrays      HDF5 files of one array each, uint8 [3, 320, 320]

NAME/train has --samples names: --photos files, and hard links to them. NAME/set is the packed set of the files, merged
with itself, which links its shards. Both contain the same bytes, and neither fills the disk.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
from PIL import Image, ImageOps

MEAN_BYTES = 322_957  # record_length_bytes of retinanet_b200.yaml in mlcommons/storage
PER_FOLDER, MOST_MERGED = 100_000, 100


def encoded(image: Image.Image, quality: int) -> bytes:
    memory = io.BytesIO()
    image.save(memory, "JPEG", quality=quality)
    return memory.getvalue()


def mosaic(images: list[Path], number: int) -> Image.Image:
    """Combine four images, so that 1024x768 pixels have the detail of a photograph of that size."""
    whole = Image.new("RGB", (1024, 768))
    for quarter in range(4):
        part = Image.open(images[(number + quarter * 251) % len(images)]).convert("RGB")
        whole.paste(ImageOps.fit(part, (512, 384)), (quarter % 2 * 512, quarter // 2 * 384))
    return whole


def write_retinanet(images: list[Path], folder: Path, count: int) -> None:
    some = [mosaic(images, number) for number in range(50)]
    sizes = {quality: np.mean([len(encoded(image, quality)) for image in some]) for quality in range(80, 100)}
    quality = min(sizes, key=lambda value: abs(sizes[value] - MEAN_BYTES))
    for number in range(count):
        (folder / f"{number:08d}.jpeg").write_bytes(encoded(mosaic(images, number), quality))


def write_resnet50(images: list[Path], folder: Path, count: int) -> None:
    for number, path in enumerate(itertools.islice(itertools.cycle(images), count)):
        (folder / f"{number:08d}.jpeg").write_bytes(path.read_bytes())


def write_arrays(images: list[Path], folder: Path, count: int) -> None:
    for number in range(count):
        array = np.asarray(ImageOps.fit(Image.open(images[number % len(images)]).convert("RGB"), (320, 320)))
        with h5py.File(folder / f"{number:08d}.hdf5", "w") as file:
            file["records_0"] = array.transpose(2, 0, 1)[None]


def packer(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "packer", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def pack(files: Path, place: Path, times: int) -> None:
    """Make a set with `times` as many samples as `files`, by repeatedly merging a set with itself."""
    if files.name == "arrays":
        source = files.with_suffix(".npy")
        source.mkdir()
        for path in sorted(files.iterdir()):
            with h5py.File(path) as file:
                np.save(source / f"{path.stem}.npy", file["records_0"][0])
        files = source
    packer("convert", files, "--split", "train", "-o", place / "1")
    made, size = place / "1", 1
    while size < times:
        more = min(MOST_MERGED, times // size)
        names = [place / f"{size}-{number:03d}" for number in range(more)]
        for name in names:
            name.symlink_to(made.name)
        size *= more
        made = place / str(size)
        packer("merge", *names, "-o", made, "--prefix-keys")
    made.rename(place.parent / "set")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--photos", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--only", choices=("retinanet", "resnet50", "arrays"))
    options = parser.parse_args()
    images = sorted(path for path in options.images.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    writers: dict[str, Callable[[list[Path], Path, int], None]] = {
        "retinanet": write_retinanet,
        "resnet50": write_resnet50,
        "arrays": write_arrays,
    }
    for name, write in writers.items():
        if options.only in (None, name):
            place = options.work / name
            files = place / "files" / name
            files.mkdir(parents=True)
            (place / "valid").mkdir()  # DLIO lists it, too
            write(images, files, options.photos)
            link(sorted(files.iterdir()), place / "train", options.samples)
            pack(files, place / "files", options.samples // options.photos)


def link(files: list[Path], folder: Path, names: int) -> None:
    """Link files under the names of DLIO's generator; more than PER_FOLDER names go into subfolders."""
    for number in range(names):
        if number % PER_FOLDER == 0:
            part = folder / str(number // PER_FOLDER) if names > PER_FOLDER else folder
            part.mkdir(parents=True)
        path = files[number % len(files)]
        os.link(path, part / f"img_{number:08d}_of_{names}{path.suffix}")


if __name__ == "__main__":
    main()
