"""Decoders: encoded bytes to pixels, by what the bytes are and not by what they are called."""

from readers.decode.cpu import DECODER, decode_image
from readers.decode.region import MAX_PIXELS, Region, Scratch
from readers.decode.unchanged import decode_unchanged

__all__ = ["DECODER", "MAX_PIXELS", "Region", "Scratch", "decode_image", "decode_unchanged"]
