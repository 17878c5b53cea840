"""Ready-made lists of ops: for ImageNet, and for faces, with the box that models of CelebA are trained on.

CelebA's aligned faces are 178 pixels wide and 218 high. The box of 148 x 148 at 40 from the top and 15 from the left is
that of Real NVP (Dinh et al., 2017) and of ddpm-torch. It is five rows below the middle.
"""

from __future__ import annotations

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

__all__ = ["CELEBA_CROP", "celeba", "classification"]

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
