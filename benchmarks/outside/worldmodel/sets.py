"""Write episodes of 224 x 224 frames for `ours.py` from JPEGs, by the writers of stable-worldmodel and by packer.

The frames of an episode are a window that moves over a picture. Packed sets store them as arrays (`raw`), as in HDF5,
or as JPEGs of quality 95 (`jpeg`), as in Lance.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from stable_worldmodel.data import HDF5Writer, LanceWriter

import packer

__all__ = ["make"]

EPISODES, STEPS, SIDE = 16, 80, 224
FIELDS = {"action": "array", "proprio": "array"}


def episodes(images: Path) -> Iterator[dict[str, list[Any]]]:
    draw = np.random.default_rng(1)
    jpegs = [path for path in sorted(images.rglob("*")) if path.suffix.lower() in (".jpg", ".jpeg")]
    for path in jpegs[:EPISODES]:
        side = SIDE + STEPS
        picture = np.asarray(Image.open(path).convert("RGB").resize((side, side)))
        frames = [np.ascontiguousarray(picture[i : i + SIDE, i : i + SIDE]) for i in range(STEPS)]
        numbers = draw.random((STEPS, 6), np.float32)
        yield {"pixels": frames, "action": [*numbers[:, :2]], "proprio": [*numbers[:, 2:]]}


def jpeg(frame: Any) -> bytes:
    kept = io.BytesIO()
    Image.fromarray(frame).save(kept, "JPEG", quality=95)
    return kept.getvalue()


def make(images: Path, out: Path) -> None:
    """Write swm.h5, swm.lance, raw and jpeg into `out`."""
    out.mkdir()
    with HDF5Writer(out / "swm.h5") as hdf5, LanceWriter(out / "swm.lance") as lance:
        for episode in episodes(images):
            hdf5.write_episode(episode)
            lance.write_episode(episode)
    for name, field, kind, form in (("raw", "pixels", "array", np.asarray), ("jpeg", "image", "image", jpeg)):
        with packer.writer(out / name, "hdf5", fields={field: kind, **FIELDS}) as writer:
            for number, episode in enumerate(episodes(images)):
                for step, (frame, action, proprio) in enumerate(zip(*episode.values(), strict=True)):
                    values = {field: form(frame), "action": action, "proprio": proprio}
                    writer.write(f"{number}/{step}", **values)
