"""Batches from decoded images: the same boxes, flips, pixel ops and values as `readers.augment.cpu` gives for the same
plan.

kernel_cases.py tests the kernel under Triton's interpreter; the end of this file runs it on a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from augment_cases import CPU, Pixels, on_a_device, on_the_cpu
from suites.programs import run_cases, run_python

from cache.errors import MissingExtraError
from readers.augment import (
    CenterCrop,
    ColorJitter,
    GaussianBlur,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
)
from readers.augment.fused import TILING, BatchRenderer, triton_fault
from readers.augment.geometry import Job, Pass
from readers.decode import Region
from readers.decode.device import Picture, layout, upright_tensor
from readers.decode.region import upright

NORMALIZE = Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.25))
CROP = [RandomResizedCrop(24, (0.3, 1.0)), RandomHorizontalFlip(), RandomVerticalFlip()]
PIXEL_OPS = [RandomRotation(15), ColorJitter(0.4, 0.4, 0.4), GaussianBlur((0.1, 1.5), p=0.6)]
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
TESTS = Path(__file__).parent
WHEREVER_CUDA = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: the kernel was only interpreted"
)


def noise(count: int = 9) -> list[Pixels]:
    rng = np.random.default_rng(5)
    sides = rng.integers(26, 40, (count, 2))
    return [rng.integers(0, 256, (height, width, 3), np.uint8) for height, width in sides]


@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "ops", [CROP, [*CROP, *PIXEL_OPS], [Resize(30), CenterCrop(21)]], ids=["crop", "pixels", "fixed"]
)
def test_torch_ops_give_the_pixels_of_the_cpu(ops: list[Any], dtype: torch.dtype, planar: bool) -> None:
    ops = ops if dtype == torch.uint8 else [*ops, NORMALIZE]
    images = noise()
    pixels = on_a_device(ops, images, dtype=dtype, planar=planar, engine="torch")
    expected = on_the_cpu(ops, images, dtype, planar)
    assert pixels.dtype == dtype and pixels.stride() == expected.stride()
    # Sums in another order may round the other way after pixel ops: one step of 255, which a standard deviation of 0.2
    # enlarges.
    step = (1.0 if dtype == torch.uint8 else 1 / 255 / 0.2 + 0.03) if any(op in ops for op in PIXEL_OPS) else 1e-5
    apart = (pixels.to(torch.float32) - expected.to(torch.float32)).abs()
    assert float(apart.max()) <= step and float(apart.mean()) < 0.01 * max(step, 0.01)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_layout_of_a_rotated_picture_is_that_of_the_upright_one(orientation: int) -> None:
    stored = np.random.default_rng(1).integers(0, 256, (5, 7, 3), np.uint8)
    expected = upright(stored, orientation)
    for pixels in (torch.from_numpy(stored).permute(2, 0, 1), torch.from_numpy(stored).permute(2, 0, 1).contiguous()):
        picture = Picture(pixels, orientation)
        assert picture.size == expected.shape[:2]
        assert np.array_equal(upright_tensor(picture).permute(1, 2, 0).numpy(), expected)
        address, row, column, channel = layout(picture)
        flat, start = (
            pixels.flatten() if pixels.is_contiguous() else torch.from_numpy(stored).flatten(),
            pixels.data_ptr(),
        )
        for y, x, c in np.ndindex(expected.shape):
            assert flat[address - start + y * row + x * column + c * channel] == expected[y, x, c]


def picture(*shape: int, dtype: torch.dtype = torch.uint8) -> Picture:
    return Picture(torch.zeros(*shape, dtype=dtype))


@pytest.mark.parametrize(
    ("pictures", "box", "message"),
    [
        *(
            ([picture(3, 4, 4)], box, r"picture 0: box .* is not inside")
            for box in ((0, 0, 5, 4), (1, 0, 4, 4), (-1, 0, 2, 2), (0, 3, 4, 2), (0, 0, 0, 4))
        ),
        ([picture(3, 4, 4, dtype=torch.float32)], (0, 0, 4, 4), r"expected uint8 \[3, height, width\]"),
        ([picture(1, 4, 4)], (0, 0, 4, 4), r"expected uint8 \[3, height, width\]"),
        ([], (0, 0, 4, 4), "0 pictures for 1 jobs"),
    ],
)
def test_pictures_and_boxes_that_do_not_fit_are_refused(
    pictures: list[Picture], box: tuple[int, int, int, int], message: str
) -> None:
    job = Job(Pass(Region(*box), (4, 4), (0, 0), (), (), (4, 4)))
    with pytest.raises(ValueError, match=message):
        BatchRenderer(CPU, dtype=torch.uint8).render(pictures, [job], (4, 4))


def test_empty_batches_and_unknown_engines() -> None:
    assert BatchRenderer(CPU, dtype=torch.float32).render([], [], (4, 5)).shape == (0, 3, 4, 5)
    with pytest.raises(ValueError, match="engine is one of auto, triton, torch"):
        BatchRenderer(CPU, dtype=torch.uint8, engine="cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='resizes bilinearly only: use engine="torch"'):
        BatchRenderer(CPU, dtype=torch.uint8, engine="triton", interpolation="bicubic")


# --- the kernel ---------------------------------------------------------------------------------------------------
@NEEDS_TRITON
def test_the_kernel_under_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    run_cases(TESTS / "kernel_cases.py")


COMPILE = f"""
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from readers.augment.kernel import render_tiles
import sys

names = ("FLOAT", "TILE_Y", "TILE_X", "ROWS", "COLUMNS")
steps = ("out_height", "out_width", "image_step", "channel_step", "row_step", "column_step")
for dtype, ones in (("u8", ()), ("fp32", ()), ("bf16", ("column_step",)), ("fp16", ("out_height", "out_width"))):
    # Triton makes constants of integers that are 1: the column step of planar batches, and sides of one pixel.
    types = {{"table": "*i64", "out": "*" + dtype, "factors": "*fp32", **dict.fromkeys(steps, "i32")}}
    signature = {{**types, **dict.fromkeys((*names, *ones), "constexpr")}}
    values = dict(zip(names, (dtype != "u8", *{TILING[:4]}), strict=True)) | dict.fromkeys(ones, 1)
    target = GPUTarget(*eval(sys.argv[1]))
    options = {{"num_warps": {TILING[4]}, "enable_fp_fusion": True}}
    made = compile(ASTSource(render_tiles, signature=signature, constexprs=values), target=target, options=options)
    print(dtype, *made.asm)
"""


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("target", "binary"), [(("cuda", 80, 32), "cubin"), (("cuda", 90, 32), "cubin"), (("hip", "gfx942", 64), "hsaco")]
)
def test_the_kernel_compiles_for_gpus(target: tuple[Any, ...], binary: str, tmp_path: Path) -> None:
    """Machine code for NVIDIA and AMD GPUs, compiled without a GPU."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRITON")}
    environment = {**inherited, "TRITON_CACHE_DIR": str(tmp_path)}
    done = run_python("-W", "error", "-c", COMPILE, repr(target), env=environment, cwd=TESTS.parent)
    assert done.returncode == 0, done.stderr
    assert [line.split()[-1] for line in done.stdout.splitlines()] == [binary] * 4


def test_torch_is_used_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert triton_fault(CPU) == "Triton needs a GPU, or TRITON_INTERPRET=1"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert re.match(r"Triton is not installed: run  pip install .*triton", triton_fault(CPU))
    renderer = BatchRenderer(CPU, dtype=torch.uint8)
    assert (renderer.engine, renderer.fault) == ("torch", triton_fault(CPU))


FIRST_KERNEL = """
import sys, types, warnings, torch
from readers.augment.fused import BatchRenderer, triton_fault
module = types.ModuleType("readers.augment.kernel")
class Kernel:
    def __getitem__(self, grid):
        def launch(*arguments, **options):
            {0}
        return launch
module.render_tiles = Kernel()
sys.modules["readers.augment.kernel"] = module
print(triton_fault(torch.device("cpu")), BatchRenderer(torch.device("cpu"), dtype=torch.uint8).engine)
"""


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("body", "output"),
    [
        (
            "raise RuntimeError('Failed to find C compiler. Please specify via CC environment variable or set "
            "triton.knobs.build.impl.')",
            "Triton's first kernel fails (there is no C compiler here: install gcc, or name one in CC): RuntimeError: "
            "Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl. "
            "torch",
        ),
        ("arguments[1].zero_()", "Triton's first kernel made [[[0]], [[0]], [[0]]] of [[[40]], [[80]], [[120]]] torch"),
    ],
)
def test_triton_that_does_not_run_is_not_used(body: str, output: str, tmp_path: Path) -> None:
    """Triton is installed, and its first kernel fails as it does without a C compiler, or has no effect."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PATH": str(tmp_path), "CC": ""}
    done = run_python("-c", FIRST_KERNEL.format(body), cwd=TESTS.parent, env=env)
    assert done.stdout.rstrip("\n") == output, done.stderr


@NEEDS_TRITON
def test_triton_that_runs_is_used(tmp_path: Path) -> None:
    code = "import torch; from readers.augment.fused import triton_fault; print([triton_fault(torch.device('cpu'))])"
    done = run_python("-c", code, cwd=TESTS.parent, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.stdout == "['']\n", done.stderr


def test_triton_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "readers.augment.kernel", raising=False)
    with pytest.raises(MissingExtraError, match=r"pip install 'packer-vision\[triton\]'"):
        BatchRenderer(CPU, dtype=torch.uint8, engine="triton")


@WHEREVER_CUDA
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float16, torch.bfloat16])
def test_the_kernel_on_a_gpu(dtype: torch.dtype) -> None:
    ops = CROP if dtype == torch.uint8 else [*CROP, NORMALIZE]
    images = noise(200)
    pixels = on_a_device(ops, images, torch.device("cuda"), dtype=dtype, engine="triton").cpu()
    expected = on_the_cpu(ops, images, dtype, False)
    step = 1.0 if dtype == torch.uint8 else 1 / 255 / 0.2 + 0.03
    assert float((pixels.to(torch.float32) - expected.to(torch.float32)).abs().max()) <= step
