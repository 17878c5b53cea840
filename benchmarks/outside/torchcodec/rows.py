"""Packer's rows for torchcodec's benchmark_image_decoders: its pictures, timing and decoders, in turn with packer's."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import benchmark_image_decoders as theirs
import simplejpeg
import torch

from readers.coefficients import encode
from readers.decode import decode_image

ROUNDS, RUNS = 5, int(os.environ.get("RUNS", 50)) // 5


def planar(decode: Any, data: bytes, **options: str) -> torch.Tensor:
    return torch.from_numpy(decode(data, **options)).permute(2, 0, 1)


def main() -> None:
    picture = os.environ.get("PICTURE")
    image = theirs.load_source_image(Path(picture) if picture else None)
    with tempfile.TemporaryDirectory() as folder:
        paths = theirs.encode_images(image, theirs.RESOLUTIONS, Path(folder))
        for size in theirs.RESOLUTIONS:
            path = paths["jpeg", size]
            raw = path.read_bytes()
            data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            rows = {
                "simplejpeg": partial(planar, simplejpeg.decode_jpeg, raw, colorspace="RGB"),
                "packer": partial(planar, decode_image, raw),
                "packer-coefficients": partial(planar, decode_image, encode(raw) or raw),
                "torchcodec": partial(theirs.decode_torchcodec, "jpeg", path, data, False),
                "torchvision": partial(theirs.decode_torchvision, "jpeg", path, data, False),
                "PIL": partial(theirs.decode_pil, path, raw, False),
            }
            times = defaultdict(list)
            for _ in range(ROUNDS):
                for name, decode in rows.items():
                    times[name].append(theirs.bench(decode, num_exp=RUNS))
            medians = {name: theirs._median_ms(torch.cat(each)) for name, each in times.items()}
            base = medians["simplejpeg"]
            print(size, "  ".join(f"{name} {ms:.3f} ({ms / base:.2f})" for name, ms in medians.items()))
            for name in ("packer", "packer-coefficients"):
                row = f"{medians[name]:.3f} | {base:.3f} | {medians[name] / base:.2f}"
                print(f"| torchcodec, JPEG {size}, ms | {name} / simplejpeg | {row} |")


if __name__ == "__main__":
    main()
