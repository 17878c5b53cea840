"""Pixels as rocAL makes them: TurboJPEG at the largest of its scales that fits; bilinear, without antialiasing."""

import numpy as np
import simplejpeg
from PIL import Image

MOST, EIGHTHS = 8, range(16, 0, -1)


def header(data):
    """(height, width, colour) of a JPEG that TurboJPEG accepts, or None."""
    try:
        height, width, colour, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except (ValueError, KeyError):
        return None
    return height, width, colour


def scaled(side, eighths):
    return -(-side * eighths // 8)


def decode(data, max_height, max_width):
    """uint8 [height, width, 3], enlarged or reduced; garbage where the image is truncated or has four colours."""
    height, width, colour = header(data)
    if height > MOST * max_height or width > MOST * max_width:
        height, width = min(height, MOST * max_height), min(width, MOST * max_width)
    fits = (n for n in EIGHTHS if scaled(height, n) <= max_height and scaled(width, n) <= max_width)
    eighths = next(fits)
    if colour in ("CMYK", "YCCK"):
        pixels = np.random.default_rng(len(data)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    else:
        pixels = simplejpeg.decode_jpeg(data, "RGB", strict=False)[:height, :width]
    if eighths == 8:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((scaled(width, eighths), scaled(height, eighths)), Image.BILINEAR))


def uninitialised(shape, dtype):
    """Uninitialised memory; as floats, its values are outside the range of images."""
    garbage = np.random.default_rng(7).integers(0, 256, shape, dtype=np.uint8)
    return garbage if dtype == np.uint8 else garbage.astype(np.float32) * np.float32(1e32)


def crop(pixels, size, corner):
    """corner: (x, y) in pixels, rounded down; a corner outside the image counts as 0. Beyond the image is unrelated
    memory."""
    left, top = (int(at) if at < side else 0 for at, side in zip(corner, pixels.shape[1::-1], strict=True))
    part = pixels[top : top + size[0], left : left + size[1]]
    whole = uninitialised((*(min(want, have) for want, have in zip(size, pixels.shape, strict=False)), 3), pixels.dtype)
    whole[: part.shape[0], : part.shape[1]] = part
    return whole


def center_crop(pixels, size):
    height, width = (want if 0 < want <= have else have for want, have in zip(size, pixels.shape, strict=False))
    top, left = round((pixels.shape[0] - height) / 2), round((pixels.shape[1] - width) / 2)
    return pixels[top : top + height, left : left + width]


def resize(pixels, height, width, shorter=0):
    have_h, have_w = pixels.shape[:2]
    if shorter:
        factor = shorter / min(have_h, have_w)
        height, width = max(shorter, round(have_h * factor)), max(shorter, round(have_w * factor))
    image, box = Image.fromarray(np.ascontiguousarray(pixels)), (0, 0, have_w, have_h)
    return np.asarray(image.transform((width, height), Image.Transform.EXTENT, box, Image.Resampling.BILINEAR))


def random_box(pixels, rng):
    height, width = pixels.shape[:2]
    for _ in range(5):
        area, ratio = rng.uniform(0.08, 0.99) * height * width, rng.uniform(0.75, 1.333)
        box_w, box_h = int((area * ratio) ** 0.5), int((area / ratio) ** 0.5)
        if 0 < box_h < height and 0 < box_w < width:
            top, left = int(rng.uniform() * (height - box_h)), int(rng.uniform() * (width - box_w))
            return pixels[top : top + box_h, left : left + box_w]
    return pixels


def normalized(pixels, mean, std):
    return (pixels.astype(np.float32) - np.float32(mean)) / np.float32(std)
