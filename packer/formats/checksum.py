"""Arithmetic on CRC32C values: TFRecord's mask, and the checksum of two parts put together."""

from __future__ import annotations

from crc32c import crc32c

__all__ = ["RECORD_HEAD_BYTES", "crc32c_combine", "masked_crc", "starts_record"]

RECORD_HEAD_BYTES = 12


def masked_crc(crc: int) -> int:
    """A CRC32C as TFRecord stores it: rotated and shifted, so that a CRC of data with CRCs in it stays meaningful."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c_combine(first: int, second: int, second_bytes: int) -> int:
    """CRC32C of A + B from those of A and of B: first * x^(8 |B|) + second in GF(2)[x] mod the polynomial.

    The method of zlib's crc32_combine, with the reflected Castagnoli polynomial.
    """
    power, factor, shift = 1 << 31, 0x00800000, second_bytes  # x^0, x^8
    while shift:
        if shift & 1:
            power = _multiply(factor, power)
        factor = _multiply(factor, factor)
        shift >>= 1
    return _multiply(power, first) ^ second


def _multiply(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (0x82F63B78 if b & 1 else 0)
    return product


def starts_record(head: bytes) -> bool:
    """Whether a record of TFRecord begins here: its length may look like any magic number, but its checksum follows."""
    stated = int.from_bytes(head[8:RECORD_HEAD_BYTES], "little")
    return len(head) >= RECORD_HEAD_BYTES and stated == masked_crc(crc32c(head[:8]))
