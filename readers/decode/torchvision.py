"""JPEGs by torchvision: nvJPEG on NVIDIA's GPUs, libjpeg-turbo on the CPU.

`torchvision.io.decode_jpeg` takes a list since 0.20 and leaves images as they are stored. It is deprecated since
0.29, in favour of torchcodec, and warns at every call; that one warning is silenced, since the user cannot act on it:
"auto" takes torchcodec where it is installed. One decoder serves the process and is rebuilt when the device changes, so
the device is always named with its number.

No release of torchvision decodes JPEGs on AMD's GPUs: rocJPEG was taken out before it was released
(pytorch/vision#9591), to come in torchcodec (#1554, not merged when this was written). AMD's own builds may have it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

__all__ = ["load_torchvision"]

_DEPRECATED = "The image decoding and encoding capabilities of TorchVision are deprecated"


def load_torchvision(device: torch.device) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """The function that decodes a list of images, uint8 [bytes] on the CPU, to uint8 [3, height, width] on `device`.

    Raises ImportError, OSError and RuntimeError, as importing torchvision does where it is missing or does not fit.
    """
    from torchvision.io import ImageReadMode, decode_jpeg

    warnings.filterwarnings("ignore", message=_DEPRECATED, category=DeprecationWarning)
    return lambda encoded: decode_jpeg(encoded, mode=ImageReadMode.RGB, device=device)
