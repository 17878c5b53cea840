"""The registry of decoders of batches by optional packages, and which decoder is used on a device.

A new one is a file with a function of a device, which raises MissingExtraError where its package is missing, and its
entry in `_REGISTRY`, in the order in which "auto" tries them.
"""

from __future__ import annotations

import warnings
from typing import Literal, TypeAlias, get_args

import torch

from cache.errors import MissingExtraError
from readers.decode.backend import CpuDecoder, Decoder
from readers.decode.torchcodec import open_torchcodec
from readers.decode.torchvision import open_torchvision

__all__ = ["DECODERS", "DecoderName", "open_decoder"]

DecoderName: TypeAlias = Literal["auto", "cpu", "torchcodec", "torchvision"]
DECODERS: tuple[DecoderName, ...] = get_args(DecoderName)
_REGISTRY = {"torchcodec": open_torchcodec, "torchvision": open_torchvision}


def open_decoder(name: DecoderName, device: torch.device) -> Decoder:
    """The decoder called `name`. "auto" is the first that there is of torchcodec, torchvision and the CPU, which it
    warns of, on a CUDA device, and the CPU elsewhere. Raises MissingExtraError for one that is named and cannot be
    had.
    """
    if name in _REGISTRY:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name} decodes on cpu and cuda devices, not on {device}; use decoder='cpu'")
        return _REGISTRY[name](device)
    if name not in DECODERS:
        raise ValueError(f"decoder is one of {', '.join(DECODERS)}, not {name!r}")
    if name == "cpu" or device.type != "cuda":
        return CpuDecoder(device)
    reasons = []
    for open_one in _REGISTRY.values():
        try:
            return open_one(device)
        except MissingExtraError as error:
            reasons.append(str(error))
    warnings.warn(f"images are decoded on the CPU: {'; '.join(reasons)}", stacklevel=2)
    return CpuDecoder(device)
