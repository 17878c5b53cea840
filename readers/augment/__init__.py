"""Augmentation as a list of plain values, and its executors. `readers.augment` itself does not need torch.

`classification` and `celeba` are ready-made lists.
"""

from readers.augment import ops
from readers.augment.geometry import Plan
from readers.augment.ops import *  # noqa: F403  every op; its file and its entry there are all it needs
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

# CelebA's aligned faces are 178 pixels wide and 218 high. This box is that of Real NVP (Dinh et al., 2017) and of
# ddpm-torch; it is five rows below the middle.
CELEBA_CROP = Crop(top=40, left=15, height=148, width=148)


def celeba(size: int = 64, *, crop: Crop = CELEBA_CROP, train: bool = True) -> list[Op]:
    """The ops of face models: the box `crop` of 178 x 218 pixels, to `size` x `size`, flip, values from -1 to 1."""
    flips: list[Op] = [RandomHorizontalFlip()] if train else []
    return [crop, Resize((size, size)), *flips, Normalize((0.5,) * 3, (0.5,) * 3)]


def classification(size: int = 224, *, train: bool = True, resize: int | None = None) -> list[Op]:
    """The ops of ImageNet training: a random box to `size`, flip, normalise; else the middle of the resized image.

    resize: the short side before the middle is cut out, by default size × 256 / 224.
    """
    normalize = Normalize(IMAGENET_MEAN, IMAGENET_STD)
    if train:
        return [RandomResizedCrop(size), RandomHorizontalFlip(), normalize]
    return [Resize(resize or size * 256 // 224), CenterCrop(size), normalize]
