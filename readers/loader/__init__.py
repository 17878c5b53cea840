"""The loader: batches for training, made by threads. Needs torch: `pip install 'packer-vision[torch]'`."""

from __future__ import annotations

from cache.errors import MissingExtraError
from readers.feed import BadSample

try:
    import torch  # noqa: F401
except ImportError as error:
    raise MissingExtraError("torch", "torch", "readers.loader") from error

from readers.loader.loader import ImageLoader
from readers.loader.stats import LoaderStats
from readers.options import Decode, FieldOptions, Layout, Ranks, Threads, Views

__all__ = [
    "BadSample",
    "Decode",
    "FieldOptions",
    "ImageLoader",
    "Layout",
    "LoaderStats",
    "Ranks",
    "Threads",
    "Views",
]
