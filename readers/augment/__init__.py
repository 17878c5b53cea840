"""Augmentation as a list of plain values, and what executes it. `readers.augment` itself does not need torch."""

from readers.augment import ops
from readers.augment.ops import *  # noqa: F403  every op; its file and its entry there are all it needs
from readers.augment.presets import CELEBA_CROP, celeba, classification
from readers.augment.recipe import Plan, Recipe

__all__ = ["CELEBA_CROP", "Plan", "Recipe", "celeba", "classification"]
__all__ += ops.__all__
