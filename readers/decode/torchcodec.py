"""JPEGs by torchcodec: nvJPEG on NVIDIA's GPUs, libjpeg-turbo on the CPU. Needs `pip install 'packer-vision[gpu]'`.

`torchcodec.decoders.decode_jpeg` (0.16 and later) takes a list and turns images by their EXIF orientation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

__all__ = ["load_torchcodec"]


def load_torchcodec(device: torch.device) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """The function that decodes a list of images, uint8 [bytes] on the CPU, to uint8 [3, height, width] on `device`.

    Raises ImportError, OSError and RuntimeError, as importing torchcodec does where it is missing or does not fit.
    """
    from torchcodec.decoders import decode_jpeg

    return lambda encoded: decode_jpeg(encoded, mode="RGB", device=device)
