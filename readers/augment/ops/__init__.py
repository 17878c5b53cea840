"""The ops, one file each; `readers.augment.ops.base` says what an op is.

A new one is its file and its entry here: the import, and its name in `__all__`.
"""

from readers.augment.ops.auto import RandAugment, TrivialAugmentWide
from readers.augment.ops.base import Interpolation, Op, Size, Stage
from readers.augment.ops.color_jitter import ColorJitter
from readers.augment.ops.crops import CenterCrop, Crop, RandomCrop
from readers.augment.ops.erasing import RandomErasing
from readers.augment.ops.flips import RandomHorizontalFlip, RandomVerticalFlip
from readers.augment.ops.gaussian_blur import GaussianBlur
from readers.augment.ops.grayscale import RandomGrayscale
from readers.augment.ops.mix import CutMix, MixUp
from readers.augment.ops.normalize import IMAGENET_MEAN, IMAGENET_STD, Normalize
from readers.augment.ops.resize import RandomResizedCrop, Resize
from readers.augment.ops.rotation import RandomRotation

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "CenterCrop",
    "ColorJitter",
    "Crop",
    "CutMix",
    "GaussianBlur",
    "Interpolation",
    "MixUp",
    "Normalize",
    "Op",
    "RandAugment",
    "RandomCrop",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomVerticalFlip",
    "Resize",
    "Size",
    "Stage",
    "TrivialAugmentWide",
]
