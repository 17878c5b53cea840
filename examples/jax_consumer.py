"""Batches for JAX without a copy: JAX uses the memory of the loader's tensors by DLPack.

    python examples/jax_consumer.py SET [--steps 20] [--device cuda]

SET is a packed set or a folder of images. The script trains a linear classifier on its classes. Needs torch and jax
(`pip install 'packer-vision[torch]' jax`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import readers
from readers import Decode
from readers.augment import RandomHorizontalFlip, RandomResizedCrop
from readers.loader import ImageLoader

SIDE = 32


def lent(tensor: Any) -> jax.Array:
    """A tensor as a JAX array in the same memory. JAX needs contiguous tensors, hence Decode(layout="NHWC")."""
    return jnp.from_dlpack(tensor)


@jax.jit
def step(weights: jax.Array, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step of gradient descent. images: uint8 [n, height, width, 3]."""

    def loss(weights: jax.Array) -> jax.Array:
        inputs = images.reshape(len(images), -1).astype(jnp.float32) / 255 - 0.5
        scores = jax.nn.log_softmax(inputs @ weights)
        return -jnp.take_along_axis(scores, labels[:, None], 1).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - 0.01 * gradient, value


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("set", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda if jax has CUDA, too")
    arguments = parser.parse_args()
    packed = (arguments.set / "dataset.json").is_file()
    reader = (readers.open if packed else readers.open_folder)(arguments.set, split="train")
    augment = [RandomResizedCrop(SIDE), RandomHorizontalFlip()]
    loader = ImageLoader(
        reader, arguments.batch_size, augment=augment, decode=Decode(layout="NHWC"), device=arguments.device
    )
    weights, done = jnp.zeros((SIDE * SIDE * 3, len(reader.classes))), 0
    while done < arguments.steps:
        for images, labels in loader:
            weights, value = step(weights, lent(images), lent(labels.int()))
            done += 1
            if done >= arguments.steps:
                break
    print(f"{done} steps on {weights.devices()}, loss {float(value):.3f}")


if __name__ == "__main__":
    main()
