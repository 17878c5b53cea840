"""torchvision's transforms of Pillow images, for rows of PyTorch where torchvision cannot be imported.

Each class equals the transform of the same name in torchvision.transforms (0.20 and later): the same arithmetic by the
same functions of Pillow, and the same random numbers from torch's generator in the same order. So after the same
`torch.manual_seed` both give the same pixels, and worker processes of a DataLoader, which torch seeds, draw
independently. Transforms of tensors are not included.

Sizes are pixels, (height, width) or one number. Images are Pillow images in mode RGB until `ToTensor`.
This module imports torch and Pillow: import it in the function that needs it.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance

Picture = Image.Image
Size = int | tuple[int, int]
_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_TRIES = 10


def read_image(source: str | Path | bytes) -> Picture:
    """Decode a file or its bytes to RGB, as torchvision.datasets.folder.pil_loader does; EXIF is not applied."""
    with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
        return image.convert("RGB")


# --- without random numbers: torchvision.transforms.functional --------------------------------------------------------


def crop(image: Picture, top: int, left: int, height: int, width: int) -> Picture:
    """Crop to the box; black outside the image."""
    return image.crop((left, top, left + width, top + height))


def resize(image: Picture, size: Size) -> Picture:
    """Resize to (height, width), or to the short side `size`, by Pillow: bilinear, antialiased."""
    width, height = image.size
    if isinstance(size, int):
        short, long = sorted((width, height))
        longer = int(size * long / short)
        rows, columns = (longer, size) if width <= height else (size, longer)
        if (rows, columns) == (height, width):
            return image
    else:
        rows, columns = size
    return image.resize((columns, rows), Image.Resampling.BILINEAR)


def hflip(image: Picture) -> Picture:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def vflip(image: Picture) -> Picture:
    return image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)


def rotate(image: Picture, degrees: float, *, bilinear: bool = False) -> Picture:
    """Rotate about the centre, counter-clockwise, without a change of size; black outside the image."""
    method = Image.Resampling.BILINEAR if bilinear else Image.Resampling.NEAREST
    return image.rotate(degrees, method, fillcolor=(0, 0, 0))


def _sides(size: Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _uniform(low: float, high: float) -> float:
    return float(torch.empty(1).uniform_(low, high).item())


def _below(end: int) -> int:
    return int(torch.randint(0, end, size=(1,)).item())


# --- transforms -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compose:
    """Applies transforms one after the other."""

    transforms: Sequence[Callable[[Any], Any]]

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


@dataclass(frozen=True)
class Crop:
    """Crops to a fixed box, as `functional.crop`."""

    top: int
    left: int
    height: int
    width: int

    def __call__(self, image: Picture) -> Picture:
        return crop(image, self.top, self.left, self.height, self.width)


@dataclass(frozen=True)
class Resize:
    """Resizes, bilinear and antialiased; one number is the length of the short side."""

    size: Size

    def __call__(self, image: Picture) -> Picture:
        return resize(image, self.size)


@dataclass(frozen=True)
class CenterCrop:
    """Crops to the middle; black outside the image."""

    size: Size

    def __call__(self, image: Picture) -> Picture:
        height, width = _sides(self.size)
        top, left = round((image.height - height) / 2), round((image.width - width) / 2)
        return crop(image, top, left, height, width)


@dataclass(frozen=True)
class RandomCrop:
    """Crops to a random box of this size, without padding. Raises ValueError for a smaller image."""

    size: Size

    def __call__(self, image: Picture) -> Picture:
        height, width = _sides(self.size)
        if image.height < height or image.width < width:
            raise ValueError(f"a crop of {height} x {width} does not fit into {image.height} x {image.width} pixels")
        if (image.height, image.width) == (height, width):
            return image
        top = _below(image.height - height + 1)
        return crop(image, top, _below(image.width - width + 1), height, width)


@dataclass(frozen=True)
class RandomResizedCrop:
    """Crops to a random box, and resizes it to `size`. scale: range of the box's share of the area. ratio: range of
    width / height."""

    size: Size
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __call__(self, image: Picture) -> Picture:
        return resize(crop(image, *self.draw(image.height, image.width)), _sides(self.size))

    def draw(self, height: int, width: int) -> tuple[int, int, int, int]:
        """A random box (top, left, height, width) of an image of this size. After ten boxes that do not fit, the
        largest box in the middle with an allowed ratio."""
        # torchvision computes the logarithms in float32.
        low, high = torch.log(torch.tensor(self.ratio)).tolist()
        for _ in range(_TRIES):
            area = height * width * _uniform(*self.scale)
            ratio = float(torch.exp(torch.empty(1).uniform_(low, high)).item())
            columns, rows = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < columns <= width and 0 < rows <= height:
                top = _below(height - rows + 1)
                return top, _below(width - columns + 1), rows, columns
        rows, columns = height, width
        if width / height < min(self.ratio):
            rows = round(width / min(self.ratio))
        elif width / height > max(self.ratio):
            columns = round(height * max(self.ratio))
        return (height - rows) // 2, (width - columns) // 2, rows, columns


@dataclass(frozen=True)
class RandomHorizontalFlip:
    p: float = 0.5

    def __call__(self, image: Picture) -> Picture:
        return hflip(image) if torch.rand(1).item() < self.p else image


@dataclass(frozen=True)
class RandomVerticalFlip:
    p: float = 0.5

    def __call__(self, image: Picture) -> Picture:
        return vflip(image) if torch.rand(1).item() < self.p else image


@dataclass(frozen=True)
class RandomRotation:
    """Rotates by -degrees to +degrees: nearest neighbour, which is torchvision's default, or bilinear."""

    degrees: float
    bilinear: bool = False

    def __call__(self, image: Picture) -> Picture:
        return rotate(image, _uniform(-self.degrees, self.degrees), bilinear=self.bilinear)


@dataclass(frozen=True)
class ColorJitter:
    """Changes brightness, contrast and saturation by factors from max(0, 1 - value) to 1 + value, in random order; the
    value 0 leaves that property unchanged.

    Hue does not change, but the random order includes it, as torchvision's does.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0

    def __call__(self, image: Picture) -> Picture:
        enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
        order = torch.randperm(4).tolist()
        values = (self.brightness, self.contrast, self.saturation)
        factors = [_uniform(max(0.0, 1 - value), 1 + value) if value else None for value in values]
        for number in order:
            factor = factors[number] if number < len(factors) else None
            if factor is not None:
                image = enhancers[number](image).enhance(factor)
        return image


@dataclass(frozen=True)
class PILToTensor:
    """Converts to uint8 [3, height, width]."""

    def __call__(self, image: Picture) -> torch.Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@dataclass(frozen=True)
class ToTensor:
    """Converts to float32 [3, height, width], 0 to 1."""

    def __call__(self, image: Picture) -> torch.Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().to(torch.float32).div(255)


@dataclass(frozen=True)
class Normalize:
    """Computes (x - mean) / std per channel of [3, height, width]."""

    mean: Sequence[float]
    std: Sequence[float]

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        mean, std = (torch.tensor(values, dtype=image.dtype).view(-1, 1, 1) for values in (self.mean, self.std))
        return image.clone().sub_(mean).div_(std)


# --- the data set -----------------------------------------------------------------------------------------------------


class Folder:
    """A data set of a tree of class folders, as torchvision.datasets.ImageFolder: (image, label) by number.

    samples: (path, label) in the order of the names. transform: applied to each image.
    """

    def __init__(self, root: str | Path, transform: Callable[[Picture], Any]) -> None:
        classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        self.samples = [
            (os.path.join(folder, name), label)
            for label, cls in enumerate(classes)
            for folder, _, names in sorted(os.walk(os.path.join(root, cls), followlinks=True))
            for name in sorted(names)
            if name.lower().endswith(_SUFFIXES)
        ]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        return self.transform(read_image(path)), label
