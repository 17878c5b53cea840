"""Trees of JPEGs for the experiments: of real images where a folder of them is given, else made ones."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

__all__ = ["make"]

_DIFFERENT = 200  # made images are repeated after so many; files of their own


def make(
    folder: Path,
    count: int,
    *,
    size: tuple[int, int] | None = None,
    classes: int = 10,
    source: Path | None = None,
    quality: int = 90,
) -> Path:
    """`count` JPEGs in class folders, "class0" and so on; a folder that is there already is taken as it is.

    size: width and height; None: real images keep theirs, byte for byte, and made ones are 500 x 375.
    source: a folder of JPEGs at any depth, the first again after the last. Real images are scaled so that they just
        cover the size, and cropped in the middle.

    Raises ValueError for a source without JPEGs.
    """
    if folder.exists():
        return folder
    real = sorted(p for p in source.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg")) if source else []
    if source and not real:
        raise ValueError(f"{source}: no .jpg or .jpeg files")
    partial = folder.with_name(folder.name + ".partial")
    encoded: dict[int, bytes] = {}
    for number in range(count):
        key = number % (len(real) or _DIFFERENT)
        if key not in encoded:
            if real and size is None:
                encoded[key] = real[key].read_bytes()
            else:
                image = _covering(real[key], size) if real and size else _made(key, size or (500, 375))
                encoded[key] = _jpeg(image, quality)
        path = partial / f"class{number % classes}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded[key])
    return partial.rename(folder)


def _covering(path: Path, size: tuple[int, int]) -> Any:
    from PIL import Image, ImageOps

    with Image.open(path) as image:
        return ImageOps.fit(image.convert("RGB"), size, Image.Resampling.BICUBIC)


def _made(number: int, size: tuple[int, int]) -> Any:
    """Noise at several scales, which takes about as many bytes as a photograph of the size does."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(number)
    pixels = np.zeros((size[1], size[0], 3))
    for scale, weight in ((64, 70.0), (16, 40.0), (4, 30.0), (1, 26.0)):
        coarse = draw.random((size[1] // scale + 2, size[0] // scale + 2, 3)).astype(np.float32)
        planes = [np.asarray(Image.fromarray(coarse[..., i]).resize(size, Image.Resampling.BICUBIC)) for i in range(3)]
        pixels += weight * 2 * (np.stack(planes, -1) - 0.5)
    return Image.fromarray((128 + pixels).clip(0, 255).astype(np.uint8))


def _jpeg(image: Any, quality: int) -> bytes:
    memory = io.BytesIO()
    image.save(memory, "JPEG", quality=quality)
    return memory.getvalue()
