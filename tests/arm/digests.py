"""Digests of the compiled codec's pixels on this machine, for comparison between machines.

    PYTHONPATH=SITE python digests.py FOLDER [VARIANT] > digests.json

FOLDER holds *.jpg files. Prints a JSON object: {"variant", "compiler", "machine", "digests": {case: SHA-256}}. Each
image as a whole is also compared with libjpeg; a difference ends the program.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

from readers.coefficients import Refused, decode, decode_resized, encode_strictly
from readers.coefficients.compiled import load_codec
from readers.coefficients.decode import Scaling, decode_jpeg
from readers.decode import Region
from readers.headers import read_header

SCALING = Scaling(np.array([[0.017, 0.0175, 0.0174], [-2.1, -2.03, -1.8]], np.float32), True)


def digest(data: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(data).tobytes()).hexdigest()[:16]


def regions(rng: np.random.Generator, height: int, width: int) -> list[Region]:
    made = [Region(0, 0, height, width, reduce) for reduce in (1, 2, 4, 8)]
    for reduce in (1, 1, 2, 4, 8):
        (top, rows), (left, columns) = (
            (start * reduce, min(int(rng.integers(1, side // reduce - start + 1)) * reduce, side - start * reduce))
            for side in (height, width)
            for start in [int(rng.integers(side // reduce))]
        )
        made.append(Region(top, left, rows, columns, reduce, bool(rng.integers(2))))
    return made


def cases(name: str, jpeg: bytes) -> dict[str, str]:
    made: dict[str, str] = {}
    header = read_header(jpeg)
    rng = np.random.default_rng(header.height * 10_000 + header.width)
    try:
        kept: bytes | None = bytes(encode_strictly(jpeg, 200))
    except Refused:
        kept = None
    exact = simplejpeg.decode_jpeg(jpeg, "RGB", fastdct=False, fastupsample=False)
    if kept is not None:
        made[f"{name} kept"] = digest(np.frombuffer(kept, np.uint8))
        assert header.orientation != 1 or np.array_equal(decode(kept), exact), f"{name}: not libjpeg's pixels"
    for number, region in enumerate(regions(rng, header.height, header.width)):
        sources = {"jpeg": jpeg} if kept is None else {"jpeg": jpeg, "kept": kept}
        decoded = decode_jpeg(jpeg, header, region)
        made[f"{name} {number} box"] = "libjpeg" if decoded is None else digest(decoded)
        if kept is not None:
            pixels = decode(kept, region)
            made[f"{name} {number} box of kept"] = digest(pixels)
            assert decoded is None or np.array_equal(decoded, pixels), f"{name}, {region}: JPEG and coefficients differ"
        resized = (int(rng.integers(60, 240)), int(rng.integers(60, 240)))
        flips = (bool(rng.integers(2)), bool(rng.integers(2)))
        for kind, source in sources.items():
            for scaling, dtype in ((None, np.uint8), (SCALING, np.float32)):
                out = np.zeros((50, 57, 3), dtype)
                done = decode_resized(source, region, resized, out, corner=(3, 2), flips=flips, scaling=scaling)
                made[f"{name} {number} {kind} {np.dtype(dtype)}"] = digest(out) if done else "left"
    return made


def main() -> None:
    folder, *variant = sys.argv[1:]
    codec, digests = load_codec(), {}
    chosen = codec.choose(*variant)
    for path in sorted(Path(folder).glob("*.jpg")):
        digests.update(cases(path.name, path.read_bytes()))
    facts = {"variant": chosen, "compiler": codec.COMPILER, "machine": platform.machine(), "digests": digests}
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
