"""Coefficients finished on a GPU: coefficient_kernel_cases.py tests the kernels under Triton's interpreter; this file
compiles them for GPUs, and runs them on a GPU where one is present."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from coefficient_cases import SAMPLINGS, made_jpeg
from suites.programs import run_cases, run_python

from cache.errors import MissingExtraError
from readers.coefficients import decode, encode_strictly, unsupported_reason
from readers.decode import Region
from readers.decode.device import DecodeStream, Picture

if unsupported_reason():
    pytest.skip(unsupported_reason(), allow_module_level=True)

TESTS = Path(__file__).parent
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@NEEDS_TRITON
def test_the_kernels_under_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    run_cases(TESTS / "coefficient_kernel_cases.py")


COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from readers.coefficients.device.kernels import BLOCKS, PIXELS, decode_rows, make_pixels

tables = {"table": "*i64", "programs": "*i64", "samples": "*u8"}
types = {"data": "*u8", **tables, "damaged": "*i32"}
for target, sizes in eval(sys.argv[1]):
    kernels = [(decode_rows, types, {"BLOCKS": BLOCKS, "SIZE": size}) for size in sizes]
    kernels.append((make_pixels, {**tables, "out": "*u8"}, {"PIXELS": PIXELS}))
    for kernel, pointers, values in kernels:
        signature = {name: pointers.get(name, "constexpr") for name in kernel.arg_names}
        source = ASTSource(kernel, signature=signature, constexprs=values)
        options = {"num_warps": 4, "enable_fp_fusion": False}
        made = compile(source, target=GPUTarget(*target), options=options)
        print(made.metadata.shared, *made.asm)
"""
_Targets: TypeAlias = list[tuple[tuple[Any, ...], tuple[int, ...]]]
# Every target, and every number of samples in a line of a block
SOME: _Targets = [(("cuda", 80, 32), (8,)), (("cuda", 90, 32), (4, 1)), (("hip", "gfx942", 64), (2,))]
ALL: _Targets = [(target, (8, 4, 2, 1)) for target, _ in SOME]


@NEEDS_TRITON
@pytest.mark.parametrize("targets", [SOME, pytest.param(ALL, marks=pytest.mark.faults)], ids=["some", "all"])
def test_the_kernels_compile_for_gpus(targets: _Targets, tmp_path: Path) -> None:
    """Machine code for NVIDIA and AMD GPUs, compiled without a GPU."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRITON")}
    environment = {**inherited, "TRITON_CACHE_DIR": str(tmp_path)}
    done = run_python("-W", "error", "-c", COMPILE, repr(targets), env=environment, cwd=TESTS.parent)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    binaries = [{"cuda": "cubin", "hip": "hsaco"}[target[0]] for target, sizes in targets for _ in (*sizes, "pixels")]
    assert [line[-1] for line in lines] == binaries
    assert max(int(line[0]) for line in lines) <= 16 << 10, "the shared memory of a program, in bytes"


def test_triton_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "readers.coefficients.device.kernels", raising=False)
    from readers.coefficients.device.decoder import CoefficientDecoder

    with pytest.raises(MissingExtraError, match=r"pip install 'packer-vision\[triton\]'"):
        CoefficientDecoder(torch.device("cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the kernels were only interpreted")
@pytest.mark.parametrize("sampling", [*SAMPLINGS, "gray"])
def test_the_kernels_on_a_gpu(sampling: str) -> None:
    from readers.coefficients.device.decoder import CoefficientDecoder, vetted_shape

    device = torch.device("cuda", 0)
    rng, decoder = np.random.default_rng(1), CoefficientDecoder(device)
    images, regions = [], []
    for number in range(64):
        height, width = (int(side) for side in rng.integers(1, 700, 2))
        images.append(encode_strictly(made_jpeg(height, width, sampling, seed=number), 200))
        reduce = 2 ** int(rng.integers(4))
        top, left = (int(rng.integers(-(-side // reduce))) * reduce for side in (height, width))
        regions.append(Region(top, left, height - top, width - left, reduce))
    with DecodeStream(device).decoding():
        pictures = decoder.decode(decoder.upload(images, [vetted_shape(image) for image in images]), regions)
    for image, region, picture in zip(images, regions, pictures, strict=True):
        assert isinstance(picture, Picture)
        assert np.array_equal(picture.pixels.permute(1, 2, 0).cpu().numpy(), decode(image, region))
