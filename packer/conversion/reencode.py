"""Make an image smaller: Pillow decodes, resizes with its antialiasing Lanczos filter, and encodes.

EXIF and colour profile are kept, so an orientation tag still applies. Whatever needs no change keeps its bytes.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

from packer.conversion.options import Reencode
from readers.errors import BadSampleError
from readers.headers import SUFFIX, ImageHeader, read_header
from readers.sample import Buffer
from readers.shrink import shrunk

__all__ = ["reencode", "target_size"]

_QUALITY = 90
_PILLOW = {"jpeg": "JPEG", "png": "PNG", "webp": "WEBP"}


def target_size(width: int, height: int, options: Reencode) -> tuple[int, int]:
    """(width, height) after resizing; never larger than before, and never 0."""
    if options.max_side is not None:
        factor = options.max_side / max(width, height)
    elif options.resize_short is not None:
        factor = options.resize_short / min(width, height)
    else:
        return width, height
    return shrunk(width, height, factor)


def reencode(image: Buffer, header: ImageHeader, name: str, options: Reencode) -> tuple[Buffer, ImageHeader, str]:
    """The image as `options` want it: its bytes, header, and its name with the suffix of the new codec."""
    size = target_size(header.width, header.height, options)
    kept = header.media if header.media in _PILLOW else "png"
    codec = kept if options.codec == "keep" else options.codec
    resizes = size != (header.width, header.height)
    lossy_again = options.quality is not None and codec in ("jpeg", "webp")
    if codec == header.media and not resizes and not lossy_again:
        return image, header, name
    data = _encode(image, header, size, codec, options.quality or _QUALITY)
    if codec == header.media and not resizes and len(data) >= len(image):
        return image, header, name
    return data, read_header(data), _renamed(name, header.media, codec)


def _encode(image: Buffer, header: ImageHeader, size: tuple[int, int], codec: str, quality: int) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(image)) as picture:
                options: dict[str, Any] = {
                    name: picture.info[name] for name in ("exif", "icc_profile") if picture.info.get(name)
                }
                if size != picture.size:
                    picture.draft(None, (size[0] * 2, size[1] * 2))  # JPEG: let the DCT do what it can do well
                converted = _in_mode(picture, codec, size != (header.width, header.height))
                if converted.size != size:
                    converted = converted.resize(size, Image.Resampling.LANCZOS)
                if picture.mode == "CMYK":
                    options.pop("icc_profile", None)  # it describes the colours that are no longer there
                if codec != "png":
                    options["quality"] = quality
                converted.save(out, _PILLOW[codec], **options)
    except Exception as error:  # Pillow's codecs raise whatever they meet
        raise BadSampleError(f"cannot be re-encoded: {error}") from error
    return out.getvalue()


def _in_mode(picture: Any, codec: str, resizes: bool) -> Any:
    """The picture in a mode that the codec can write and the filter can resize."""
    mode = picture.mode
    transparent = "A" in mode or "transparency" in picture.info
    if codec == "jpeg":
        return picture.convert("L") if mode in ("1", "L") else picture.convert("RGB")
    if codec == "webp":
        return picture.convert("RGBA" if transparent else "RGB")
    if (mode == "P" and resizes) or mode in ("CMYK", "YCbCr", "LAB", "HSV"):
        return picture.convert("RGBA" if transparent else "RGB")
    if mode == "1" and resizes:
        return picture.convert("L")
    picture.load()
    return picture


def _renamed(name: str, media: str, codec: str) -> str:
    if media == codec or not name:
        return name
    dot = name.rfind(".")
    stem = name[:dot] if dot > name.rfind("/") + 1 else name
    return f"{stem}.{SUFFIX[codec]}"
