"""CRC32C as TFRecord uses it; sums of whole files are in `cache.checksums`."""

from __future__ import annotations

from cache.checksums import JoinedChecksum, crc32c, crc32c_combine, crc32c_shift

__all__ = ["RECORD_HEAD_BYTES", "JoinedChecksum", "crc32c_combine", "crc32c_shift", "masked_crc", "starts_record"]

RECORD_HEAD_BYTES = 12


def masked_crc(crc: int) -> int:
    """A CRC32C as TFRecord stores it: rotated and shifted, so that a CRC of data with CRCs in it stays meaningful."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def starts_record(head: bytes) -> bool:
    """Whether a record of TFRecord begins here: its length may look like any magic number, but its checksum follows."""
    stated = int.from_bytes(head[8:RECORD_HEAD_BYTES], "little")
    return len(head) >= RECORD_HEAD_BYTES and stated == masked_crc(crc32c(head[:8]))
