"""Augmentation as a list of plain values, and what executes it. `readers.augment` itself does not need torch."""

from readers.augment.ops import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    CenterCrop,
    ColorJitter,
    Crop,
    GaussianBlur,
    Normalize,
    Op,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
    Size,
)
from readers.augment.presets import CELEBA_CROP, celeba
from readers.augment.recipe import Plan, Recipe

__all__ = [
    "CELEBA_CROP",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "CenterCrop",
    "ColorJitter",
    "Crop",
    "GaussianBlur",
    "Normalize",
    "Op",
    "Plan",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomVerticalFlip",
    "Recipe",
    "Resize",
    "Size",
    "celeba",
]
