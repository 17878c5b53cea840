"""Check an image on its way into a shard, and re-encode it where that was asked for."""

from __future__ import annotations

import io
import warnings

from packer.conversion.options import ConvertOptions
from packer.conversion.reencode import reencode
from readers.errors import BadSampleError
from readers.headers import ImageHeader, parse_header
from readers.sample import Buffer

__all__ = ["decode_fully", "prepare_image"]


def prepare_image(image: Buffer, name: str, options: ConvertOptions) -> tuple[Buffer, ImageHeader, str]:
    """The bytes to pack, their header and the file name that fits them. Raises BadSampleError."""
    header = parse_header(image)
    if options.check == "decode":
        decode_fully(image)
    if options.reencode is None:
        return image, header, name
    return reencode(image, header, name, options.reencode)


def decode_fully(image: Buffer) -> None:
    """Decode every pixel. Raises BadSampleError where that fails."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(image)) as picture:
                picture.load()
    except Exception as error:  # Pillow's decoders raise whatever they meet
        raise BadSampleError(f"does not decode: {error}") from error
