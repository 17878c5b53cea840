"""JPEGs by torchvision: nvJPEG on CUDA devices, rocJPEG on ROCm's, libjpeg-turbo on the CPU.

`torchvision.io.decode_jpeg` takes a list since 0.20 and leaves images as they are stored. It is deprecated since
0.29, in favour of torchcodec, and says so at every call; that one warning is silenced, since our caller cannot act on
it: "auto" takes torchcodec where it can be had. One decoder serves the process and is built anew when the device
changes, so the device is always named with its number.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from cache.errors import MissingExtraError
from readers.decode.backend import ListDecoder

__all__ = ["open_torchvision"]

_DEPRECATED = "The image decoding and encoding capabilities of TorchVision are deprecated"


def open_torchvision(device: torch.device) -> ListDecoder:
    """Raises MissingExtraError where torchvision is missing or cannot be loaded beside this torch."""
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingExtraError("torchvision >= 0.20", "torchvision", f"decoding on {device.type}") from error

    warnings.filterwarnings("ignore", message=_DEPRECATED, category=DeprecationWarning)

    def call(encoded: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        pixels: Sequence[torch.Tensor] = decode_jpeg(encoded, mode=ImageReadMode.RGB, device=device)
        return pixels

    return ListDecoder(f"torchvision/{device.type}", device, call, turns=False)
