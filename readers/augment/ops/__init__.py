"""The ops; `readers.augment.ops.base` defines ops.

A new one is a file, or a class in the file of its kind, and its entry here: the import, and its name in `__all__`.
"""

from readers.augment.ops.base import Interpolation, Op, Size, Stage
from readers.augment.ops.boxes import (
    AspectBuckets,
    CenterCrop,
    Crop,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    ResizeToBucket,
)
from readers.augment.ops.color import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ColorJitter,
    CutMix,
    GaussianBlur,
    MixUp,
    Normalize,
    RandomErasing,
    RandomGrayscale,
)
from readers.augment.ops.turns import (
    RandAugment,
    RandomHorizontalFlip,
    RandomRotation,
    RandomVerticalFlip,
    TrivialAugmentWide,
)

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
