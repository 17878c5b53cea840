"""Pass damaged coefficients and damaged JPEGs to the codec, between protected memory pages.

    PYTHONPATH=. python tests/coefficient_fuzz.py decode|encode|strips|affine|files TRIALS SEED
    PYTHONPATH=. python tests/coefficient_fuzz.py read|write|read-facts|read-heap|write-heap|read-facts-heap 1 SEED

An access outside the bytes or the pixels of an image ends the process with SIGSEGV. The codec's own memory is checked
in a build with AddressSanitizer (CODEC=FOLDER names the folder of that build; VARIANT=NAME the variant). `read` and
`write` show that faults are detected: they pass a wrong length of the bytes or of the pixels, between pages or on the
heap. Prints the number of trials by outcome.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

if "CODEC" in os.environ:
    import readers.coefficients

    sys.path.insert(0, os.environ["CODEC"])
    import native  # type: ignore[import-not-found]

    sys.modules["readers.coefficients.native"] = readers.coefficients.native = native  # type: ignore[attr-defined]
from coefficient_cases import SAMPLINGS, made_jpeg
from image_cases import encoded, exif_blob, picture, xmp

from cache.errors import BadSampleError
from readers.coefficients import Refused, decode, encode_strictly, parse_coefficients
from readers.coefficients.compiled import load_codec
from readers.coefficients.layout import Shape
from readers.headers import read_header
from readers.headers.formats import header_of_facts, parse_jpeg

PAGE = mmap.PAGESIZE
MOST_PAGES = 512


class Guarded:
    """Memory that ends, or begins, at a protected page."""

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


_Place = Callable[[Guarded, int], np.ndarray]


def images() -> list[bytes]:
    sizes = ((40, 56), (17, 90), (64, 33), (8, 8))
    made = [made_jpeg(*size, sampling, 90, seed=n) for n, size in enumerate(sizes) for sampling in (*SAMPLINGS, "gray")]
    return [*made, *(made_jpeg(30, 50, sampling, 100, noise=True) for sampling in ("420", "444"))]


def spoiled(rng: np.random.Generator, data: bytes, shape: Shape) -> bytes:
    """Damage by flips, truncation, or wrong entries in the index, whose checksum is not compared."""
    damaged = bytearray(data)
    kind = rng.integers(5)
    index = np.frombuffer(damaged, "<u4", (shape.rows_at - shape.index_at) // 4, shape.index_at)
    if kind == 0:  # any bytes after the header
        for _ in range(rng.integers(1, 12)):
            damaged[rng.integers(24, len(damaged))] = rng.integers(256)
    elif kind == 1:  # wrong entries that are plausible
        entry = rng.integers(len(index))
        index[entry] = (int(index[entry]) + int(rng.integers(-40, 41))) & 0xFFFFFFFF
    elif kind == 2:  # wrong entries that are not
        entry, far = rng.integers(len(index)), int(rng.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1, len(damaged)]))
        index[entry] = rng.choice([far, rng.integers(2**32), len(damaged) - rng.integers(70)])
    elif kind == 3:  # heads and masks, which say how long the parts of a row are
        begin = int(index[rng.integers(len(index) - 1)])
        for _ in range(rng.integers(1, 30)):
            damaged[min(begin + int(rng.integers(400)), len(damaged) - 1)] = rng.choice([0, 255, rng.integers(256)])
    else:
        del index
        del damaged[rng.integers(24, len(damaged) + 1) :]
        damaged[20:24] = len(damaged).to_bytes(4, "little")
    return bytes(damaged)


def spoiled_jpeg(rng: np.random.Generator, data: bytes, trial: int) -> bytes:
    """Change some bytes of a JPEG: in three of four trials codes and bits of the scan, otherwise the scan with its
    header or the whole file; sometimes cut out a part. Only a scan without a new marker reaches the codec's loops."""
    damaged = bytearray(data)
    scan = damaged.index(b"\xff\xda")
    start = 0 if trial % 8 == 0 else scan - 4
    for _ in range(rng.integers(1, 5)):
        at = int(rng.integers(start, len(damaged)))
        value = int(rng.choice([0, 255, rng.integers(256)]))
        if trial % 4 > 0:
            at = int(rng.integers(scan + 12, len(damaged) - 2))
            if 255 in damaged[at - 1 : at + 1]:
                continue
            value = min(value, 254)
        damaged[at] = value
    if trial % 32 == 1:
        cut = int(rng.integers(4, len(damaged)))
        del damaged[cut : int(rng.integers(cut, len(damaged) + 1))]
    return bytes(damaged)


def copied(memory: np.ndarray, data: bytes) -> np.ndarray:
    memory[:] = np.frombuffer(data, np.uint8)
    return memory


def region_of(rng: np.random.Generator, shape: Shape, trial: int) -> tuple[int, ...]:
    size = int(rng.choice([8, 4, 2, 1]))
    height, width = -(-shape.height * size // 8), -(-shape.width * size // 8)
    top, left = int(rng.integers(height)), int(rng.integers(width))
    lines, columns = int(rng.integers(1, height - top + 1)), int(rng.integers(1, width - left + 1))
    return size, size > 1 and trial % 5 > 1, top, left, lines, columns


def run(codec: object, name: str, before: tuple[object, ...], region: tuple[int, ...], how: tuple[object, ...]) -> int:
    """Decode a region between the pages, or decode and resize it in one of two ways. how: random numbers, memory,
    whether to resize."""
    rng, memory, place, resizes = how
    lines, columns = region[4:]
    if not resizes:
        out = place(memory, lines * columns * 3).reshape(lines, columns, 3)  # type: ignore[operator]
        return getattr(codec, name)(*before, region, out)  # type: ignore[no-any-return]
    resized = [int(rng.integers(-(-side // 4), side + 40)) for side in (lines, columns)]  # type: ignore[attr-defined]
    h, w = (int(rng.integers(1, side + 1)) for side in resized)  # type: ignore[attr-defined]
    corner = [int(rng.integers(side - n + 1)) for side, n in zip(resized, (h, w), strict=True)]  # type: ignore[attr-defined]
    is_planar, kind = bool(rng.integers(2)), int(rng.integers(3))  # type: ignore[attr-defined]
    raw = place(memory, 2 * h * w * (12 if kind else 3))  # type: ignore[operator]
    out = raw.view(np.float32) if kind else raw
    out = out.reshape(2, 3, h, w).transpose(0, 2, 3, 1) if is_planar else out.reshape(2, h, w, 3)
    scaling = (np.ones((2, 3), np.float32), kind == 2) if kind else (None, False)
    to = (*resized, *corner, int(rng.integers(4)))  # type: ignore[attr-defined]
    source, shape = before
    row = (name == "decode_jpeg", *(*shape, 1, 1, 1)[:5], *region, *to)  # type: ignore[misc]
    reasons = codec.resize((source, source), np.array([(1, *row), (0, *row)], np.int64), out, *scaling)  # type: ignore[attr-defined]
    assert reasons[0] == reasons[1] and (reasons[0] or np.array_equal(out[0], out[1]))
    return reasons[0]  # type: ignore[no-any-return]


def fuzz_decoder(trials: int, rng: np.random.Generator) -> Counter[str]:
    codec, counts, data, pixels = load_codec(), Counter[str](), Guarded(), Guarded()
    sources = [encode_strictly(damaged) for damaged in images()]
    shapes = [parse_coefficients(damaged) for damaged in sources]
    for trial in range(trials):
        damaged = spoiled(rng, sources[trial % len(sources)], shapes[trial % len(sources)])
        try:
            shape = parse_coefficients(damaged)
        except BadSampleError:
            counts["refused by its header"] += 1
            continue
        place: _Place = Guarded.at_end if trial % 2 else Guarded.at_begin
        before = copied(place(data, shape.total_bytes), damaged[: shape.total_bytes]), shape[:5]
        how = rng, pixels, place, trial % 3 == 0
        status = run(codec, "decode", before, region_of(rng, shape, trial), how)
        counts["refused by the decoder" if status else "decoded"] += 1
    return counts


def fuzz_strips(trials: int, rng: np.random.Generator) -> Counter[str]:
    """Decode boxes of damaged JPEGs."""
    codec, counts, data, pixels = load_codec(), Counter[str](), Guarded(), Guarded()
    sizes = ((64, 80), (97, 130), (200, 66))
    sources = [made_jpeg(*size, kind, 90, seed=n) for n, size in enumerate(sizes) for kind in (*SAMPLINGS, "gray")]
    for trial in range(trials):
        damaged = spoiled_jpeg(rng, sources[trial % len(sources)], trial)
        try:
            header = read_header(damaged)
        except BadSampleError:
            counts["refused by its header"] += 1
            continue
        if header.height * header.width > 200 * 200:
            counts["too large"] += 1
            continue
        place: _Place = Guarded.at_end if trial % 2 else Guarded.at_begin
        source = memoryview(copied(place(data, len(damaged)), damaged))
        shape = Shape(header.height, header.width, 1, 1, 1, 1, 0)
        before = source, shape[:2]
        how = rng, pixels, place, trial % 3 == 0
        status = run(codec, "decode_jpeg", before, region_of(rng, shape, trial), how)
        counts["left to libjpeg by the decoder" if status else "decoded"] += 1
    return counts


def fuzz_affine(trials: int, rng: np.random.Generator) -> Counter[str]:
    """Sample images of any size, mirrored or not, by any map, into a part of any grid."""
    codec, counts, data, pixels = load_codec(), Counter[str](), Guarded(), Guarded()
    for trial in range(trials):
        place: _Place = Guarded.at_end if trial % 2 else Guarded.at_begin
        height, width, rows, columns = rng.integers(1, 40, 4).tolist()
        lines, across = int(rng.integers(1, rows + 1)), int(rng.integers(1, columns + 1))
        grid = rows, columns, int(rng.integers(rows - lines + 1)), int(rng.integers(columns - across + 1))
        source = place(data, height * width * 3).reshape(height, width, 3)[
            :: rng.choice([1, -1]), :: rng.choice([1, -1])
        ]
        out = place(pixels, lines * across * 3).reshape(lines, across, 3)
        by = np.clip(rng.normal(0, rng.choice([0.1, 1, 1e5]), 6), -1e6, 1e6).tolist()
        codec.affine(source, out, tuple(by), grid, trial % 3 == 0)
        counts["decoded"] += 1
    return counts


def fuzz_encoder(trials: int, rng: np.random.Generator) -> Counter[str]:
    counts, data, codec = Counter[str](), Guarded(), load_codec()
    encode, calls = codec.encode, []
    codec.encode = lambda *arguments: calls.append(1) or encode(*arguments)  # type: ignore[attr-defined,func-returns-value]
    sources = images()[::3]
    for size in ((40, 56), (17, 33)):
        for options in (
            {"progressive": True},
            {"restart_marker_blocks": 2},
            {"progressive": True, "restart_marker_rows": 1},
        ):
            sources.append(encoded(picture(*size), "JPEG", quality=85, **options))
    for trial in range(trials):
        damaged = spoiled_jpeg(rng, sources[trial % len(sources)], trial)
        try:
            decode(encode_strictly(memoryview(copied(data.at_end(len(damaged)), damaged))))
            counts["encoded"] += 1
        except Refused:
            counts["refused by the encoder" if calls else "refused by its markers"] += 1
        calls.clear()
    return counts


def fuzz_files(trials: int, rng: np.random.Generator) -> Counter[str]:
    """Compare the headers of damaged JPEGs with those that Python parses, and copy files of any size into buffers of
    any size."""
    codec, counts, data = load_codec(), Counter[str](), Guarded()
    more: tuple[dict[str, Any], ...] = (
        {"progressive": True},
        {"xmp": xmp(6)},
        {"exif": exif_blob(3)},
        {"orientation": 8},
    )
    sources = [*images()[::3], *(encoded(picture(40, 56), "JPEG", quality=85, **options) for options in more)]
    with tempfile.NamedTemporaryFile() as file:
        for trial in range(trials):
            raw = bytearray(sources[trial % len(sources)])
            for _ in range(rng.integers(3)):
                at = int(rng.integers(2, raw.index(b"\xff\xda", 2) + 14)) if trial % 4 else int(rng.integers(len(raw)))
                raw[at : at + 1] = bytes([rng.choice([0, 1, 255, *raw[at - 1 : at + 2], rng.integers(256)])])
                if b"\xff\xda" not in raw:
                    break
            if trial % 8 == 7:
                del raw[rng.integers(4, len(raw)) :]
            place: _Place = Guarded.at_end if trial % 2 else Guarded.at_begin
            facts = codec.read_jpeg_facts(memoryview(copied(place(data, len(raw)), bytes(raw))))
            counts["refused by the decoder" if facts is None else "decoded"] += 1
            assert facts is None or header_of_facts(raw, facts) == parse_jpeg(memoryview(raw))
            has, states, room = (int(n) for n in rng.integers(0, rng.choice([4, 3 * PAGE]), 3))
            os.truncate(file.name, has)
            fits = has == states < room
            assert bool(codec.read_file(file.name, memoryview(place(data, room)), states, None)) == fits
    return counts


def beyond(fault: str) -> None:
    """Read beyond the bytes of an image, or write beyond its pixels: the process must end here."""
    kept = encode_strictly(made_jpeg(64, 64))
    shape = parse_coefficients(kept)
    longer = 4 * PAGE
    source, out = copied(Guarded().at_end(len(kept)), kept), Guarded().at_end(64 * 64 * 3)
    if fault.endswith("-heap"):
        source, out = copied(np.empty(len(kept), np.uint8), kept), np.empty(64 * 64 * 3, np.uint8)
    if fault.startswith("write"):
        short = np.lib.stride_tricks.as_strided(out[-64 * 3 :], (64, 64, 3), (64 * 3, 3, 1))
        load_codec().decode(source, shape[:5], (8, True, 0, 0, 64, 64), short)
        return
    if fault.startswith("read-facts"):
        jpeg = copied(Guarded().at_end(len(head := made_jpeg(64, 64))), head)
        jpeg = copied(np.empty(len(head), np.uint8), head) if fault.endswith("-heap") else jpeg
        load_codec().read_jpeg_facts(memoryview(np.lib.stride_tricks.as_strided(jpeg, (len(head) + 8,))))
        return
    source[shape.index_at : shape.rows_at].view("<u4")[-1] += longer
    image = np.lib.stride_tricks.as_strided(source, (len(kept) + longer,))
    load_codec().decode(image, shape[:5], (8, True, 0, 0, 64, 64), out.reshape(64, 64, 3))


if __name__ == "__main__":
    asked, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    load_codec().choose(os.environ.get("VARIANT", ""))
    if asked.startswith(("read", "write")):
        beyond(asked)
    else:
        kinds = {"decode": fuzz_decoder, "encode": fuzz_encoder, "strips": fuzz_strips, "affine": fuzz_affine}
        print(dict((kinds | {"files": fuzz_files})[asked](count, np.random.default_rng(seed))))
