"""JPEGs written from coefficients: any sampling, Huffman table, restart interval and order of scans, and any values.

Image encoders make no unusual JPEGs. Blocks are int [rows, columns, 64] in the order of the JPEG (zigzag), including
the padding blocks of the last MCUs.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["FLAT", "GAPS", "LONG", "Code", "Jpeg", "random_blocks", "segment"]

Blocks: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Code:
    """A Huffman code: the number of codes of each length from 1 to 16 bits, and their symbols."""

    counts: Sequence[int]
    symbols: Sequence[int]

    def table(self, kind: int, number: int) -> bytes:
        return bytes([16 * kind + number, *self.counts, *self.symbols])

    def codes(self) -> dict[int, tuple[int, int]]:
        """symbol: (code, bits)."""
        codes, code, at = {}, 0, 0
        for bits, count in enumerate(self.counts, 1):
            for symbol in self.symbols[at : at + count]:
                codes[symbol] = (code, bits)
                code += 1
            at += count
            code <<= 1
        return codes


_DC = range(16)
_AC = range(256)
# One length for all codes; the longest possible code; a few short codes with a gap before the others.
FLAT = Code([0] * 4 + [16] + [0] * 11, _DC), Code([0] * 8 + [255, 1] + [0] * 6, _AC)
LONG = Code([0] * 15 + [16], _DC), Code([0] * 14 + [1, 255], _AC)
GAPS = (
    Code([0, 1, 0, 0, 3, 0, 0, 0, 0, 4, 0, 8, 0, 0, 0, 0], _DC),
    Code([0, 1, 0, 2, 0, 0, 3, 0, 0, 0, 0, 10, 0, 40, 0, 200], sorted(_AC, key=lambda symbol: (symbol & 15, symbol))),
)


@dataclass
class Jpeg:
    """A JPEG to write. factors: (across, down) of each component."""

    height: int
    width: int
    factors: Sequence[tuple[int, int]]
    blocks: Sequence[Blocks]
    steps: npt.NDArray[np.int64] = field(default_factory=lambda: np.full(64, 1))
    code: tuple[Code, Code] = FLAT
    restart: int = 0
    interleaved: bool = True
    progressive: bool = False
    bits: int = 8
    process: int = 0xC0
    before: bytes = b""

    def encode(self) -> bytes:
        count = len(self.factors)
        wide = int(self.steps.max() > 255)
        table = self.steps.astype(">u2" if wide else np.uint8).tobytes()
        frame = struct.pack(">BHHB", self.bits, self.height, self.width, count)
        frame += b"".join(bytes([k + 1, 16 * h + v, 0]) for k, (h, v) in enumerate(self.factors))
        parts = [b"\xff\xd8", self.before, segment(0xDB, bytes([16 * wide]) + table)]
        parts += [segment(0xC2 if self.progressive else self.process, frame)]
        parts += [segment(0xC4, self.code[0].table(0, 0) + self.code[1].table(1, 0))]
        if self.restart:
            parts.append(segment(0xDD, struct.pack(">H", self.restart)))
        everything = list(range(count))
        if self.progressive:
            parts.append(self.scan(everything, 0, 0))
            parts += [self.scan([k], *band) for k in everything for band in ((1, 5), (6, 63))]
        elif self.interleaved:
            parts.append(self.scan(everything, 0, 63))
        else:
            parts += [self.scan([k], 0, 63) for k in everything]
        return b"".join([*parts, b"\xff\xd9"])

    def scan(self, components: list[int], first: int, last: int) -> bytes:
        header = bytes([len(components), *(value for k in components for value in (k + 1, 0)), first, last, 0])
        return segment(0xDA, header) + b"".join(self._intervals(components, first, last))

    def _mcus(self, components: list[int]) -> list[list[tuple[int, Any]]]:
        """The blocks by MCU, with their components."""
        across, down = (max(pair[k] for pair in self.factors) for k in (0, 1))
        if len(components) == 1:
            k = components[0]
            h, v = self.factors[k] if len(self.factors) > 1 else (across, down)
            rows, columns = _parts(_parts(self.height * v, down), 8), _parts(_parts(self.width * h, across), 8)
            return [[(k, self.blocks[k][row, column])] for row in range(rows) for column in range(columns)]
        return [
            [
                (k, self.blocks[k][row * v + y, column * h + x])
                for k in components
                for h, v in [self.factors[k]]
                for y in range(v)
                for x in range(h)
            ]
            for row in range(_parts(self.height, 8 * down))
            for column in range(_parts(self.width, 8 * across))
        ]

    def _intervals(self, components: list[int], first: int, last: int) -> list[bytes]:
        mcus = self._mcus(components)
        step = self.restart or len(mcus)
        intervals = []
        for number, start in enumerate(range(0, len(mcus), step)):
            if start:
                intervals.append(bytes([0xFF, 0xD0 + (number - 1) % 8]))
            bits = "".join(self._bits(mcus[start : start + step], first, last))
            bits += "1" * (-len(bits) % 8)
            intervals.append(int("1" + bits, 2).to_bytes(len(bits) // 8 + 1, "big")[1:].replace(b"\xff", b"\xff\0"))
        return intervals

    def _bits(self, mcus: list[list[tuple[int, Any]]], first: int, last: int) -> list[str]:
        dc, ac = (code.codes() for code in self.code)
        previous = [0] * len(self.factors)
        bits = []
        for component, block in (pair for mcu in mcus for pair in mcu):
            if first == 0:
                difference = int(block[0]) - previous[component]
                previous[component] = int(block[0])
                bits.append(_written(dc, 0, difference))
            zeros = 0
            for k in range(max(first, 1), last + 1):
                if block[k] == 0:
                    zeros += 1
                    continue
                bits += [_written(ac, 15, 0)] * (zeros // 16)
                bits.append(_written(ac, zeros % 16, int(block[k])))
                zeros = 0
            if zeros and last:
                bits.append(_written(ac, 0, 0))
        return bits


def _written(codes: dict[int, tuple[int, int]], zeros: int, value: int) -> str:
    size = abs(value).bit_length()
    code, bits = codes[16 * zeros + size]
    rest = value if value > 0 else value + (1 << size) - 1
    return f"{code:0{bits}b}" + (f"{rest:0{size}b}" if size else "")


def _parts(whole: int, part: int) -> int:
    return -(-whole // part)


def segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def random_blocks(
    rng: np.random.Generator, height: int, width: int, factors: Sequence[tuple[int, int]], largest: int = 60
) -> list[Blocks]:
    """Blocks with few coefficients, most of them small and of low frequency."""
    across, down = (max(pair[k] for pair in factors) for k in (0, 1))
    blocks = []
    for h, v in factors:
        shape = _parts(height, 8 * down) * v, _parts(width, 8 * across) * h, 64
        values = rng.integers(-largest, largest + 1, shape) // (1 + np.arange(64) // 4)
        values[rng.random(shape) < np.linspace(0.2, 0.98, 64)] = 0
        values[..., 0] = rng.integers(-300, 301, shape[:2])
        blocks.append(values)
    return blocks
