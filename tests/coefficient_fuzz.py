"""Decode damaged coefficients, encode damaged JPEGs and decode boxes of them, between pages that no one may touch.

    PYTHONPATH=. python tests/coefficient_fuzz.py decode|encode|strips|beyond TRIALS SEED

An access outside of the bytes, the pixels or the memory to work in ends the process with SIGSEGV. `beyond` shows that
it does: it says that the image is longer than it is. Prints how many trials ended how.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections import Counter
from collections.abc import Callable

import numpy as np
from coefficient_cases import SAMPLINGS, made_jpeg
from image_cases import encoded, picture

from cache.errors import BadSampleError
from readers.coefficients import Refused, encode_strictly, parse_coefficients, strips
from readers.coefficients.compiled import load_functions
from readers.coefficients.decode import memory_bytes, resize_bytes
from readers.coefficients.encode import Memory
from readers.coefficients.layout import SPARSE_TO_WORKING, Shape
from readers.decode.cpu import has_clean_header
from readers.decode.region import Region, Scratch
from readers.headers import read_header

PAGE = mmap.PAGESIZE
MOST_PAGES = 512
FACTORS = np.ones(48, np.float32)


class Guarded:
    """Memory that ends, or begins, at a page that no one may touch."""

    def __init__(self, pages: int = MOST_PAGES) -> None:
        self.map = mmap.mmap(-1, (pages + 2) * PAGE)
        self.array = np.frombuffer(self.map, np.uint8)
        self.size = pages * PAGE
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for page in (0, pages + 1):
            if libc.mprotect(self.array.ctypes.data + page * PAGE, PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")

    def at_end(self, size: int) -> np.ndarray:
        return self.array[PAGE + self.size - size : PAGE + self.size]

    def at_begin(self, size: int) -> np.ndarray:
        return self.array[PAGE : PAGE + size]


class GuardedMemory(Memory):
    """Memory of exactly the sizes that the encoder asks for."""

    def __init__(self) -> None:
        self.parts: dict[str, Guarded] = {}

    def take(self, name: str, size: int) -> np.ndarray:
        if name not in self.parts:
            self.parts[name] = Guarded()
        return self.parts[name].at_end(size)


class GuardedScratch(Scratch):
    """Memory of exactly the sizes that the decoder asks for, also that in which it works."""

    def __init__(self) -> None:
        self.parts = [Guarded(), Guarded(), Guarded()]

    def encoded(self, size: int) -> memoryview:  # type: ignore[override]
        return memoryview(self.parts[0].at_end(size))

    def pixels(self, size: int) -> memoryview:
        return memoryview(self.parts[1].at_end(size))

    def address(self, size: int) -> int:
        return int(self.parts[2].at_end(size).ctypes.data)


def images() -> list[bytes]:
    sizes = ((40, 56), (17, 90), (64, 33), (8, 8))
    made = [made_jpeg(*size, sampling, 90, seed=n) for n, size in enumerate(sizes) for sampling in (*SAMPLINGS, "gray")]
    return [*made, *(made_jpeg(30, 50, sampling, 100, noise=True) for sampling in ("420", "444"))]


def spoiled(rng: np.random.Generator, data: bytes, shape: Shape) -> bytes:
    """Flips, truncation, and lies in the index, whose checksum nobody compares."""
    found = bytearray(data)
    kind = rng.integers(5)
    index = np.frombuffer(found, "<u4", (shape.rows_at - shape.index_at) // 4, shape.index_at)
    if kind == 0:  # any bytes behind the header
        for _ in range(rng.integers(1, 12)):
            found[rng.integers(24, len(found))] = rng.integers(256)
    elif kind == 1:  # lies that may pass for truth
        entry = rng.integers(len(index))
        index[entry] = (int(index[entry]) + int(rng.integers(-40, 41))) & 0xFFFFFFFF
    elif kind == 2:  # and others
        entry, far = rng.integers(len(index)), int(rng.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1, len(found)]))
        index[entry] = rng.choice([far, rng.integers(2**32), len(found) - rng.integers(70)])
    elif kind == 3:  # heads and masks, which say how long the parts of a row are
        begin = int(index[rng.integers(len(index) - 1)])
        for _ in range(rng.integers(1, 30)):
            found[min(begin + int(rng.integers(400)), len(found) - 1)] = rng.choice([0, 255, rng.integers(256)])
    else:
        del index
        del found[rng.integers(24, len(found) + 1) :]
        found[20:24] = len(found).to_bytes(4, "little")
    return bytes(found)


def fuzz_decoder(trials: int, rng: np.random.Generator, longer: int = 0) -> Counter[str]:
    functions, counts = load_functions(), Counter[str]()
    sources = [encode_strictly(data) for data in images()]
    shapes = [parse_coefficients(data) for data in sources]
    data, pixels, memory = Guarded(), Guarded(), Guarded()
    for trial in range(trials):
        number = trial % len(sources)
        one = spoiled(rng, sources[number], shapes[number]) if not longer else sources[number]
        try:
            shape = parse_coefficients(one)
        except BadSampleError:
            counts["refused by its header"] += 1
            continue
        size = int(rng.choice([8, 4, 2, 1]))
        height, width = -(-shape.height * size // 8), -(-shape.width * size // 8)
        top, left = int(rng.integers(height)), int(rng.integers(width))
        lines, columns = int(rng.integers(1, height - top + 1)), int(rng.integers(1, width - left + 1))
        place: Callable[[Guarded, int], np.ndarray] = Guarded.at_end if trial % 2 or longer else Guarded.at_begin
        source = place(data, shape.total_bytes)
        source[:] = np.frombuffer(one, np.uint8, shape.total_bytes)
        if longer:  # an index that is right for a longer image
            index = source[shape.index_at : shape.rows_at].view("<u4")
            index[-1] += longer
        scale, box = (size, bool(size > 1 and trial % 5 > 1)), (top, left, lines, columns)
        image = np.lib.stride_tricks.as_strided(source, (shape.total_bytes + longer,))
        if trial % 3:
            out, lent = place(pixels, lines * columns * 3), place(memory, memory_bytes(columns))
            target = out.ctypes.data, 3 * columns
            status = functions.decode_box(image, shape[:5], scale, box, target, lent.ctypes.data, SPARSE_TO_WORKING)
        else:
            resized = [int(rng.integers(-(-side // 4), side + 40)) for side in (lines, columns)]
            h, w = (int(rng.integers(1, side + 1)) for side in resized)
            corner = int(rng.integers(resized[0] - h + 1)), int(rng.integers(resized[1] - w + 1))
            kind, resize = int(rng.integers(4)), (*resized, *corner, h, w, int(rng.integers(4)))
            out, lent = place(pixels, h * w * (12 if kind else 3)), place(memory, resize_bytes(columns, h, w))
            strides = [(3 * w, 0), (12 * w, 0), (12 * w, 0), (4 * w, 4 * h * w)][kind]
            target = out.ctypes.data, *strides, kind, FACTORS.ctypes.data
            status = functions.resize_box(
                image, shape[:5], scale, box, resize, target, lent.ctypes.data, SPARSE_TO_WORKING
            )
        counts["refused by the decoder" if status else "decoded"] += 1
    return counts


def spoiled_jpeg(rng: np.random.Generator, data: bytes, trial: int) -> bytearray:
    """Changed bytes, of the data alone or of all, and sometimes a part left out."""
    found = bytearray(data)
    start = 0 if trial % 3 == 0 else found.index(b"\xff\xda") - 4
    for _ in range(rng.integers(1, 5)):
        found[rng.integers(start, len(found))] = rng.choice([0, 255, rng.integers(256)])
    if trial % 5 == 0:
        cut = int(rng.integers(4, len(found)))
        del found[cut : int(rng.integers(cut, len(found) + 1))]
    return found


def fuzz_strips(trials: int, rng: np.random.Generator) -> Counter[str]:
    """Boxes of damaged JPEGs."""
    counts, data, scratch = Counter[str](), Guarded(), GuardedScratch()
    strips.working_memory = scratch  # type: ignore[assignment]
    sizes = ((64, 80), (97, 130), (200, 66))
    kinds = (*SAMPLINGS, "gray")
    sources = [made_jpeg(*size, kind, 90, seed=n) for n, size in enumerate(sizes) for kind in kinds]
    for trial in range(trials):
        found = spoiled_jpeg(rng, sources[trial % len(sources)], trial)
        source = data.at_end(len(found))
        source[:] = found
        try:
            header = read_header(memoryview(source))
        except BadSampleError:
            counts["refused by its header"] += 1
            continue
        if header.height * header.width > 200 * 200 or header.components not in (1, 3):
            counts["other images"] += 1
            continue
        reduce = int(rng.choice([1, 2, 4, 8]))
        height, width = header.upright_size
        top, left = (int(rng.integers(-(-side // reduce))) * reduce for side in (height, width))
        box = top, left, int(rng.integers(1, height - top + 1)), int(rng.integers(1, width - left + 1))
        if reduce > 1:  # to the grid, or the edge
            ends = (min(-(-(box[i] + box[i + 2]) // reduce) * reduce, (height, width)[i]) for i in (0, 1))
            box = top, left, *(end - begin for end, begin in zip(ends, (top, left), strict=True))
        pixels = strips.decode_strips(
            memoryview(source), header, Region(*box, reduce, trial % 2 > 0), has_clean_header, scratch
        )
        counts["left to libjpeg" if pixels is None else "decoded"] += 1
    return counts


def fuzz_encoder(trials: int, rng: np.random.Generator) -> Counter[str]:
    counts, data, memory = Counter[str](), Guarded(), GuardedMemory()
    sources = images()[::3]
    for size in ((40, 56), (17, 33)):
        for options in (
            {"progressive": True},
            {"restart_marker_blocks": 2},
            {"progressive": True, "restart_marker_rows": 1},
        ):
            sources.append(encoded(picture(*size), "JPEG", quality=85, **options))
    for trial in range(trials):
        found = spoiled_jpeg(rng, sources[trial % len(sources)], trial)
        source = data.at_end(len(found))
        source[:] = found
        try:
            encode_strictly(memoryview(source), memory=memory)
            counts["encoded"] += 1
        except Refused:
            counts["kept as a JPEG"] += 1
    return counts


if __name__ == "__main__":
    what, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    generator = np.random.default_rng(seed)
    if what in ("encode", "strips"):
        print(dict({"encode": fuzz_encoder, "strips": fuzz_strips}[what](count, generator)))
    else:
        print(dict(fuzz_decoder(count, generator, longer=4 * PAGE if what == "beyond" else 0)))
