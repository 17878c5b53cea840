"""What a conversion is asked to do, validated where it is made."""

from __future__ import annotations

from dataclasses import dataclass

from cache.messages import parse_size
from packer.formats import resolve_format
from readers.names import SplitName

__all__ = [
    "CHECKS",
    "CODECS",
    "DECODES",
    "ON_ERROR",
    "ConvertOptions",
    "Reencode",
    "parse_size",
]

ON_ERROR = ("raise", "skip", "quarantine")
CHECKS = ("header", "decode")
DECODES = ("RGB", "unchanged", "none")
CODECS = ("keep", "jpeg", "png", "webp")


@dataclass(frozen=True, slots=True)
class Reencode:
    """Make the images smaller while packing.

    codec: what to write ("keep": the codec an image has; GIF, BMP and TIFF become PNG). max_side: longest side at
    most this many pixels. resize_short: shortest side exactly this many, never enlarged. quality: 1 to 100, of
    JPEG and WebP. Images that need no change keep their bytes.
    """

    codec: str = "keep"
    max_side: int | None = None
    resize_short: int | None = None
    quality: int | None = None

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise ValueError(f"codec must be one of {', '.join(CODECS)}, not {self.codec!r}")
        for name, value in (("max_side", self.max_side), ("resize_short", self.resize_short)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 pixel, not {value}")
        if self.max_side is not None and self.resize_short is not None:
            raise ValueError("max_side and resize_short exclude each other")
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise ValueError(f"quality must be from 1 to 100, not {self.quality}")


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Options of `packer.convert`; see there."""

    to: str
    split: str | None = None
    shard_bytes: int | None = None
    samples_per_shard: int | None = None
    shuffle: int | None = None
    on_error: str = "raise"
    check: str = "header"
    reencode: Reencode | None = None
    label_offset: int = 0
    decode: str = "RGB"

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", resolve_format(self.to))
        for name, value, known in (
            ("on_error", self.on_error, ON_ERROR),
            ("check", self.check, CHECKS),
            ("decode", self.decode, DECODES),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")
        if self.decode == "none" and self.check == "decode":
            raise ValueError("check='decode' decodes images as decode= says, and with decode='none' not at all")
        if self.decode != "RGB" and self.reencode is not None:
            raise ValueError("re-encoded images are for decode='RGB'; leave decode or the re-encoding out")
        if self.split is not None:
            SplitName(self.split)
        if self.shard_bytes is not None and self.samples_per_shard is not None:
            raise ValueError("give either a shard size or the samples per shard, not both")
        if self.shard_bytes is not None and self.shard_bytes < 1:
            raise ValueError(f"a shard must have at least 1 byte, not {self.shard_bytes}")
        if self.samples_per_shard is not None and self.samples_per_shard < 1:
            raise ValueError(f"a shard must have at least 1 sample, not {self.samples_per_shard}")
        if self.shuffle is not None and not 0 <= self.shuffle < 1 << 32:
            raise ValueError(f"the shuffle seed must be from 0 to 2^32 - 1, not {self.shuffle}")
        if isinstance(self.label_offset, bool) or not 0 <= self.label_offset < 1 << 31:
            raise ValueError(f"the label offset must be from 0 to 2^31 - 1, not {self.label_offset}")
