"""Augmentation as a list of plain values, and its executors. `readers.augment` itself does not need torch.

`classification` and `celeba` are ready-made lists.
"""

from readers.augment import ops
from readers.augment.geometry import Plan
from readers.augment.ops import *  # noqa: F403  every op; a new op needs only its file and its entry there
from readers.augment.ops import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    CenterCrop,
    Crop,
    Normalize,
    Op,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)
from readers.augment.recipe import Recipe

__all__ = ["CELEBA_CROP", "Plan", "Recipe", "celeba", "classification"]
__all__ += ops.__all__

# CelebA's aligned faces are 178 pixels wide and 218 high. Real NVP (Dinh et al., 2017) and ddpm-torch use this box,
# five rows below the centre.
CELEBA_CROP = Crop(top=40, left=15, height=148, width=148)


def celeba(size: int = 64, *, crop: Crop = CELEBA_CROP, train: bool = True) -> list[Op]:
    """Ops for face models: crop, resize to `size` x `size`, flip (for training), and scale to -1..1."""
    flips: list[Op] = [RandomHorizontalFlip()] if train else []
    return [crop, Resize((size, size)), *flips, Normalize((0.5,) * 3, (0.5,) * 3)]


def classification(size: int = 224, *, train: bool = True, resize: int | None = None) -> list[Op]:
    """Ops for ImageNet: random resized crop, flip and normalise; for validation resize, centre crop and normalise.

    resize: short side before the centre crop; default: size × 256 / 224.
    """
    normalize = Normalize(IMAGENET_MEAN, IMAGENET_STD)
    if train:
        return [RandomResizedCrop(size), RandomHorizontalFlip(), normalize]
    return [Resize(resize or size * 256 // 224), CenterCrop(size), normalize]
