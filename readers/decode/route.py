"""Which images a device decodes, by header facts; the others are the CPU's, and so is what the device failed on.

JPEG, baseline (SOF0), 1 or 3 components, both sides 64 or more      device
JPEG, extended or progressive: nvJPEG's and rocJPEG's slow path      CPU
JPEG, 4 components (CMYK, YCCK): refused by both, or wrong colours   CPU
JPEG, a side under 64: rocJPEG refuses it, nvJPEG gains nothing      CPU
PNG, WebP, GIF, BMP, TIFF, pixels of a cache, unknown                CPU
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cache.errors import BadSampleError
from readers.decode.backend import CpuDecoder, Decoded, Decoder
from readers.decode.orient import upright_size
from readers.decode.picture import Picture
from readers.decode.region import MAX_PIXELS
from readers.headers import MEDIA, ImageHeader, parse_held, read_frame
from readers.sample import Buffer, ImageInfo

__all__ = ["decode_batch", "device_takes", "routes", "same_as_promised"]

_JPEG = MEDIA.index("jpeg")
_BASELINE = 0xC0
_LEAST_SIDE = 64


def routes(info: ImageInfo) -> npt.NDArray[np.bool_]:
    """Which of n images a device decodes, bool [n]."""
    height, width = info.height.astype(np.float64), info.width.astype(np.float64)  # whose product fits
    return np.asarray(_rule(info.media, info.process, info.components, height, width))


def device_takes(header: ImageHeader) -> bool:
    """The same for one image."""
    media = MEDIA.index(header.media)
    return bool(_rule(media, header.process, header.components, header.height, header.width))


def _rule(media: Any, process: Any, components: Any, height: Any, width: Any) -> Any:
    """Numbers, or arrays of them."""
    coding = (media == _JPEG) & (process == _BASELINE) & ((components == 1) | (components == 3))
    return coding & (height >= _LEAST_SIDE) & (width >= _LEAST_SIDE) & (height * width <= MAX_PIXELS)


def same_as_promised(data: Buffer, size: tuple[int, int]) -> ImageHeader | None:
    """The header of an image that a device may get: one it takes, of the upright (height, width) that the index
    promises. None sends it to the CPU, which will say what is wrong: no GPU library shall see bytes that lie about
    themselves.
    """
    try:
        header = parse_held(data)
    except BadSampleError:
        return None
    promised = upright_size(header.height, header.width, header.orientation) == size
    return header if promised and device_takes(header) else None


def decode_batch(images: Sequence[Buffer], decoder: Decoder, executor: Executor | None = None) -> list[Decoded]:
    """Decode images of any kind: a picture on the decoder's device for each, or why there is none; in their order.

    executor: decodes what is the CPU's while the device works; without one that comes afterwards.
    """
    cpu = CpuDecoder(torch.device("cpu"))  # copied to the device by this thread alone, on its current stream
    results: dict[int, Decoded] = {}
    headers: dict[int, ImageHeader] = {}
    sound: set[int] = set()  # those that our own parser takes: no GPU library shall see the others
    for row, image in enumerate(images):
        try:
            headers[row], frame = read_frame(image)
            if frame:
                sound.add(row)
        except BadSampleError as error:
            results[row] = error

    def on_the_cpu(row: int) -> Decoded:
        return cpu.decode([images[row]], [headers[row]])[0]

    mine = [row for row, header in headers.items() if row in sound and device_takes(header)]
    others = [row for row in headers if row not in mine]
    waiting: dict[int, Future[Decoded]] = {}
    if executor is not None:
        waiting = {row: executor.submit(on_the_cpu, row) for row in others}
    decoded = decoder.decode([images[row] for row in mine], [headers[row] for row in mine])
    for row, found in zip(mine, decoded, strict=True):
        results[row] = found if isinstance(found, Picture) else on_the_cpu(row)
    for row in others:
        results[row] = waiting[row].result() if row in waiting else on_the_cpu(row)
    return [_moved(results[row], decoder.device) for row in range(len(images))]


def _moved(found: Decoded, device: torch.device) -> Decoded:
    return Picture(found.pixels.to(device), found.orientation) if isinstance(found, Picture) else found
