"""Quality: how far each library's resizing is from Pillow's antialiased bilinear, on the same boxes.

    python benchmarks/resize_quality.py --tree FOLDER --work DIR [--images 200] [--python ffcv=PATH] …

The boxes are what our planner draws for RandomResizedCrop, at each target size; small targets have boxes that ours
decodes at 1/2, 1/4 or 1/8. Figures are mean absolute differences of 255, over all values of all images. Images with an
EXIF orientation are left out, and what is not a JPEG of three components.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import resizers
from harness import REPOSITORY, Benchmark, Contender, base_parser, main
from machine import files_below
from report import Claim, Column
from resizers import OURS, Task

__all__ = ["BENCHMARK", "measure"]

SIZES = (224, 96, 64)
_SEED = 1


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """One library at every size: mean difference, and the worst image's."""
    import numpy as np

    figures: dict[str, Any] = {}
    for size in SIZES:
        place = _place(arguments, size)
        task = Task(**json.loads(place.with_suffix(".json").read_text()))
        expected = np.load(place.with_suffix(".npy"), mmap_mode="r")
        found = np.stack([np.array(image) for image in chosen.function(task)])
        by_image = np.abs(found.astype(np.int16) - expected).mean(axis=(1, 2, 3))
        figures[f"difference_{size}"] = float(by_image.mean())
        figures[f"worst_{size}"] = float(by_image.max())
        if chosen.name == OURS:
            figures[f"reduced_{size}"] = sum(box[4] > 1 for box in task.boxes)
    return figures


def _place(arguments: argparse.Namespace, size: int) -> Path:
    return Path(arguments.work) / f"boxes-{size}-of-{arguments.images}"


def before(chosen: Contender, arguments: argparse.Namespace) -> None:
    """Draw the boxes and have Pillow resize them, once."""
    for size in SIZES:
        place = _place(arguments, size)
        if not place.with_suffix(".json").exists():
            _prepare(place, arguments, size)


def _prepare(place: Path, arguments: argparse.Namespace, size: int) -> None:
    if str(REPOSITORY) not in sys.path:
        sys.path.append(str(REPOSITORY))
    import numpy as np

    from readers.augment import RandomResizedCrop, Recipe
    from readers.headers import parse_header

    paths, shapes = [], []
    for path in files_below(arguments.tree):
        header = parse_header(Path(path).read_bytes())
        if header.media == "jpeg" and header.components == 3 and header.orientation == 1:
            paths.append(path)
            shapes.append((header.height, header.width))
        if len(paths) == arguments.images:
            break
    heights, widths = np.array(shapes, np.int64).T
    recipe = Recipe([RandomResizedCrop(size)])
    jobs = recipe.plan(_SEED, 0, np.arange(len(paths)), heights, widths).jobs()
    task = Task(paths, shapes, [job.last.region for job in jobs], size)
    place.parent.mkdir(parents=True, exist_ok=True)
    np.save(place.with_suffix(".npy"), np.stack(list(resizers.reference(task))))
    place.with_suffix(".json").write_text(json.dumps(vars(task)))


BENCHMARK = Benchmark(
    title="Resizing, difference from Pillow's antialiased bilinear",
    columns=(
        *(Column(f"difference_{size}", f"to {size}: mean", "{:.2f}") for size in SIZES),
        *(Column(f"worst_{size}", f"{size}: worst image", "{:.2f}") for size in SIZES),
        *(Column(f"reduced_{size}", f"{size}: boxes reduced") for size in SIZES),
    ),
    key=f"difference_{SIZES[-1]}",
    limits=(),
    measure=measure,
    before=before,
    less_is_better=True,
    claims=tuple(Claim(OURS, f"difference_{size}", at_most=1.5) for size in SIZES),
)


def parser() -> argparse.ArgumentParser:
    options = base_parser(__doc__)
    options.set_defaults(rounds=1)
    options.add_argument("--tree", required=True, type=Path, help="any folder of JPEG files, at any depth")
    options.add_argument("--work", required=True, type=Path, help="folder for the boxes and Pillow's results")
    options.add_argument("--images", type=int, default=200)
    return options


if __name__ == "__main__":
    main(BENCHMARK, parser())
