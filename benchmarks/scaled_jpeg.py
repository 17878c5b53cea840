"""Part of a JPEG by simplejpeg, decoded at a fraction of its size: what the peers' rows with simplejpeg and cv2 do."""

from __future__ import annotations

from typing import Any

__all__ = ["scaled_decode"]


def scaled_decode(
    data: bytes, shape: tuple[int, int], box: tuple[int, int, int, int], size: int
) -> tuple[Any, tuple[int, int, int, int]]:
    """simplejpeg's smallest decoding in which the box still has `size` pixels a side (0: full size), and the box there,
    rounded to whole pixels."""
    import simplejpeg

    (height, width), (top, left, h, w) = shape, box
    least_height = -(-height * size // h) if size and h > size else height
    least_width = -(-width * size // w) if size and w > size else width
    image = simplejpeg.decode_jpeg(data, min_height=least_height, min_width=least_width)
    y, x = image.shape[0] / height, image.shape[1] / width
    return image, (int(top * y), int(left * x), max(1, int(h * y)), max(1, int(w * x)))
