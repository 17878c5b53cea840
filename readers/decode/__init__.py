"""Decoders: encoded bytes to pixels, by what the bytes are and not by file names."""

from readers.decode.cpu import DECODER, decode_image, decode_unchanged
from readers.decode.region import MAX_PIXELS, Region, Scratch

__all__ = ["DECODER", "MAX_PIXELS", "Region", "Scratch", "decode_image", "decode_unchanged"]
