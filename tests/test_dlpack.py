"""Batches in other libraries: DLPack shares their memory, and a batch lives as long as a reference to it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
from suites.programs import run_python

import readers
from readers import Decode, Threads
from readers.augment import RandomResizedCrop
from readers.loader import ImageLoader

ROOT = Path(__file__).parent.parent
NO_JAX = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")


def test_an_array_outlives_the_loader_and_is_not_overwritten(tree: Path) -> None:
    """NumPy reads DLPack as the other libraries do."""
    reader = readers.open_folder(tree, split="train")
    loader = ImageLoader(
        reader, 4, augment=[RandomResizedCrop(16)], decode=Decode(layout="NHWC"), threads=Threads(prefetch=1), seed=1
    )
    batches = [images for images, _ in loader]
    kept, copies = [], []
    for images, _ in ImageLoader(
        reader, 4, augment=[RandomResizedCrop(16)], decode=Decode(layout="NHWC"), threads=Threads(prefetch=1), seed=1
    ):
        kept.append(np.from_dlpack(images))
        copies.append(kept[-1].copy())
        assert kept[-1].ctypes.data == images.data_ptr(), "the memory is not shared"
        del images
    assert all(np.array_equal(a, b) and np.array_equal(a, c) for a, b, c in zip(kept, copies, batches, strict=True))


@NO_JAX
def test_jax_sees_the_same_memory_and_trains_on_it(tree: Path) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(ROOT / "examples")!r})
import jax.numpy as jnp, jax_consumer, numpy as np, readers, torch
from readers.augment import RandomResizedCrop
from readers.loader import ImageLoader
reader = readers.open_folder({str(tree)!r}, split="train")
for dtype in (None, "bfloat16"):
    options = {{}} if dtype is None else {{"dtype": torch.bfloat16}}
    images, labels = next(iter(ImageLoader(reader, 4, augment=[RandomResizedCrop(16)], layout="NHWC", **options)))
    array = jnp.from_dlpack(images)
    assert array.shape == (4, 16, 16, 3) and str(array.dtype) == (dtype or "uint8"), array.dtype
    assert np.array_equal(np.asarray(array.astype("float32")), images.float().numpy())
sys.argv = ["jax_consumer.py", {str(tree)!r}, "--steps", "5", "--batch-size", "8"]
jax_consumer.main()
"""
    done = run_python("-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("5 steps on") and "loss" in done.stdout


@NO_JAX
def test_the_plain_loop_shares_batches_among_devices_and_resumes(source: Path, tmp_path: Path) -> None:
    """Twelve steps at once, and with a stop in the middle of an epoch and one at its end; two devices."""
    code = f"""
import sys; sys.path.insert(0, {str(ROOT / "examples")!r})
from pathlib import Path
import train_jax
train_jax.BATCH = 6
for name, stops in (("whole", (12,)), ("stopped", (2, 6, 12))):
    for steps in stops:
        train_jax.main({str(source)!r}, Path({str(tmp_path)!r}) / f"{{name}}.npz", steps)
"""
    environ = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = run_python("-c", code, cwd=ROOT, env=environ)
    assert done.returncode == 0, done.stderr
    assert [line.partition(",")[0] for line in done.stdout.splitlines()] == [
        f"{steps} steps on 2 devices" for steps in (12, 2, 6, 12)
    ]
    whole, stopped = (np.load(tmp_path / f"{name}.npz") for name in ("whole", "stopped"))
    assert np.array_equal(whole["weights"], stopped["weights"]) and whole["weights"].any()
    assert str(whole["loader"]) == str(stopped["loader"])
