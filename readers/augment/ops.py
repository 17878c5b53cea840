"""What can be done to an image, as plain values: a list of these says all that a CPU or a GPU needs to know.

    [RandomResizedCrop(224), RandomHorizontalFlip(), Normalize(IMAGENET_MEAN, IMAGENET_STD)]

Names and meanings are those of torchvision.transforms; resizing is bilinear with antialiasing, as Pillow's. Sizes are
pixels of the upright image, one number for a square, or (height, width).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "CenterCrop",
    "ColorJitter",
    "Crop",
    "GaussianBlur",
    "Normalize",
    "Op",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomVerticalFlip",
    "Resize",
    "Size",
]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_MAX_SIDE = 1 << 15

Size: TypeAlias = int | tuple[int, int]


def _check_size(op: object, size: Size) -> None:
    sides = (size, size) if isinstance(size, int) else size
    if len(sides) != 2 or not all(isinstance(side, int) and 0 < side <= _MAX_SIDE for side in sides):
        raise ValueError(f"{type(op).__name__}: a size is one or two whole numbers from 1 to {_MAX_SIDE}, not {size!r}")


def _check_range(op: object, name: str, bounds: Sequence[float], lowest: float, highest: float) -> None:
    if len(bounds) != 2 or not lowest <= bounds[0] <= bounds[1] <= highest:
        raise ValueError(f"{type(op).__name__}: {name} is (low, high) within {lowest} to {highest}, not {bounds!r}")


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """A box with `scale` of the area and `ratio` of width to height, resized to `size`.

    Ten tries, then the largest central box within the ratio (Szegedy et al., 2015, as torchvision does it). Where the
    box is so large that the image can be decoded at 1/2, 1/4 or 1/8, its edges are multiples of 2, 4 or 8 pixels.
    """

    size: Size
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        _check_size(self, self.size)
        _check_range(self, "scale", self.scale, 1e-6, 1.0)
        _check_range(self, "ratio", self.ratio, 1e-3, 1e3)


@dataclass(frozen=True, slots=True)
class Resize:
    """To `size`; one number is the short side, and the other side keeps the proportions."""

    size: Size

    def __post_init__(self) -> None:
        _check_size(self, self.size)


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """The middle `size` pixels. The image must be that large."""

    size: Size

    def __post_init__(self) -> None:
        _check_size(self, self.size)


@dataclass(frozen=True, slots=True)
class RandomCrop:
    """`size` pixels somewhere. The image must be that large."""

    size: Size

    def __post_init__(self) -> None:
        _check_size(self, self.size)


@dataclass(frozen=True, slots=True)
class Crop:
    """The box with this upper left corner, height and width. The image must hold it."""

    top: int
    left: int
    height: int
    width: int

    def __post_init__(self) -> None:
        _check_size(self, (self.height, self.width))
        if not (0 <= self.top <= _MAX_SIDE and 0 <= self.left <= _MAX_SIDE):
            raise ValueError(f"Crop: a corner is at 0 to {_MAX_SIDE}, not {(self.top, self.left)}")


@dataclass(frozen=True, slots=True)
class RandomHorizontalFlip:
    """Left and right exchanged, with probability p."""

    p: float = 0.5

    def __post_init__(self) -> None:
        _check_range(self, "p", (self.p, self.p), 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class RandomVerticalFlip:
    """Top and bottom exchanged, with probability p."""

    p: float = 0.5

    def __post_init__(self) -> None:
        _check_range(self, "p", (self.p, self.p), 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class RandomRotation:
    """Turned about its centre by -degrees to +degrees, counter-clockwise; what comes into view is black. Bilinear."""

    degrees: float

    def __post_init__(self) -> None:
        _check_range(self, "degrees", (self.degrees, self.degrees), 0.0, 180.0)


@dataclass(frozen=True, slots=True)
class ColorJitter:
    """Brightness, contrast and saturation, in this order, each times a factor from [max(0, 1-x), 1+x]."""

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            value = getattr(self, name)
            _check_range(self, name, (value, value), 0.0, 100.0)


@dataclass(frozen=True, slots=True)
class GaussianBlur:
    """Convolved with a Gaussian of a standard deviation from `sigma` (pixels), with probability p; edges mirrored."""

    sigma: tuple[float, float] = (0.1, 2.0)
    p: float = 1.0

    def __post_init__(self) -> None:
        _check_range(self, "sigma", self.sigma, 1e-3, 100.0)
        _check_range(self, "p", (self.p, self.p), 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Normalize:
    """(x / 255 - mean) / std, by channel; the result is a float. The last of a list."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __post_init__(self) -> None:
        if len(self.mean) != 3 or len(self.std) != 3 or not all(value > 0 for value in self.std):
            raise ValueError(f"Normalize: three means and three positive deviations, not {self.mean!r}, {self.std!r}")


Op: TypeAlias = (
    RandomResizedCrop
    | Resize
    | CenterCrop
    | RandomCrop
    | Crop
    | RandomHorizontalFlip
    | RandomVerticalFlip
    | RandomRotation
    | ColorJitter
    | GaussianBlur
    | Normalize
)
