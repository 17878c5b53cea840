"""The loader: batches for training, made by threads. Needs torch: `pip install 'packer-vision[torch]'`."""

from __future__ import annotations

from cache.errors import MissingExtraError
from readers.feed import BadSample

try:
    import torch  # noqa: F401
except ImportError as error:
    raise MissingExtraError("torch", "torch", "readers.loader") from error

from readers.batch import FieldOptions
from readers.loader.loader import ImageLoader, Layout
from readers.loader.stats import LoaderStats

__all__ = ["BadSample", "FieldOptions", "ImageLoader", "Layout", "LoaderStats"]
