"""A plain loop for JAX: batches sharded over all devices, and resume with the next batch.

    XLA_FLAGS=--xla_force_host_platform_device_count=2 python examples/train_jax.py SET run.npz 20

Trains a linear classifier for 20 steps; continues from run.npz if it exists. With several processes, call
`jax.distributed.initialize()` first: each process loads its share of a batch. Needs torch and jax.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import readers
from readers import Decode, Ranks
from readers.augment import RandomHorizontalFlip, RandomResizedCrop
from readers.loader import ImageLoader

SIDE, BATCH = 32, 16  # samples of a batch in each process


@jax.jit
def step(weights: jax.Array, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step of gradient descent. images: uint8 [n, height, width, 3]."""

    def loss(weights: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax((images.reshape(len(images), -1) / 255 - 0.5) @ weights)
        return -jnp.take_along_axis(scores, labels[:, None], 1).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - 0.01 * gradient, value


def main(place: str, checkpoint: Path, steps: int) -> None:
    reader = readers.open(place, "train")
    ops = [RandomResizedCrop(SIDE), RandomHorizontalFlip()]
    ranks = Ranks(jax.process_index(), jax.process_count())
    loader = ImageLoader(reader, BATCH, augment=ops, decode=Decode(layout="NHWC"), seed=1, ranks=ranks)
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), PartitionSpec("rows"))
    weights, done = jnp.zeros((SIDE * SIDE * 3, len(reader.classes))), 0
    if checkpoint.exists():
        with np.load(checkpoint) as saved:
            weights, done = jnp.asarray(saved["weights"]), int(saved["done"])
            loader.load_state_dict(json.loads(str(saved["loader"])))
    while done < steps:
        for batch in loader:
            images, labels = (jax.make_array_from_process_local_data(rows, part.numpy()) for part in batch)
            weights, value = step(weights, images, labels)
            done += 1
            if done == steps:
                break
    written = checkpoint.with_suffix(".new.npz")
    np.savez(written, weights=weights, done=done, loader=json.dumps(loader.state_dict()))
    written.replace(checkpoint)
    print(f"{done} steps on {jax.device_count()} devices, loss {float(value):.6f}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
