"""The ops; `readers.augment.ops.base` says what an op is.

A new one is a file, or a class in the file of its kind, and its entry here: the import, and its name in `__all__`.
"""

from readers.augment.ops.aspect import AspectBuckets, ResizeToBucket
from readers.augment.ops.auto import RandAugment, TrivialAugmentWide
from readers.augment.ops.base import Interpolation, Op, Size, Stage
from readers.augment.ops.boxes import CenterCrop, Crop, RandomCrop, RandomResizedCrop, Resize
from readers.augment.ops.color import IMAGENET_MEAN, IMAGENET_STD, ColorJitter, Normalize, RandomGrayscale
from readers.augment.ops.erasing import RandomErasing
from readers.augment.ops.gaussian_blur import GaussianBlur
from readers.augment.ops.mix import CutMix, MixUp
from readers.augment.ops.turns import RandomHorizontalFlip, RandomRotation, RandomVerticalFlip

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "AspectBuckets",
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
    "ResizeToBucket",
    "Size",
    "Stage",
    "TrivialAugmentWide",
]
