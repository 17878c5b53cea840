"""The compiled codec: see `_codec/module.c` for what the arguments are."""

from typing import Any

from readers.headers.base import Buffer

COMPILER: str

def find_marker(data: Buffer, at: int) -> int: ...
def build_codes(counts: bytes, symbols: bytes, is_raw: bool) -> bytes: ...
def encode(
    jpeg: Buffer, shape: tuple[int, ...], is_progressive: bool, scans: Any, codes: bytes, limits: Any, room: int
) -> bytearray | int: ...
def decode(data: Buffer, shape: tuple[int, ...], region: tuple[int, ...], out: Any) -> int: ...
def decode_resized(
    data: Buffer,
    shape: tuple[int, ...],
    region: tuple[int, ...],
    resize: tuple[int, ...],
    out: Any,
    scaling: Any,
    is_fused: bool,
) -> int: ...
def decode_jpeg(jpeg: Buffer, shape: tuple[int, int], region: tuple[int, ...], out: Any) -> int: ...
def decode_jpeg_resized(
    jpeg: Buffer,
    shape: tuple[int, int],
    region: tuple[int, ...],
    resize: tuple[int, ...],
    out: Any,
    scaling: Any,
    is_fused: bool,
) -> int: ...
def affine(source: Any, out: Any, by: tuple[float, ...], grid: tuple[int, int, int, int], is_nearest: bool) -> None: ...
def choose(name: str = "") -> str: ...
