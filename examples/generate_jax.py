"""Training data made on the device, in the same compiled loop as training: no files, no loader, no copies.

    python examples/generate_jax.py [--steps 200] [--tiny]

JAX draws the images of `make_text.py`, 224 x 224 pixels of random text, from random bytes, and a small convolutional
network learns whether a word is in one of the lines. A call is one `lax.scan` of many steps: each makes a batch,
computes its gradient, and updates the network by Adam, all on the device. The script prints images/s of making images
and of training on them, and the accuracy on new images. --tiny: smaller images and one letter, which the network learns
within seconds on a CPU.

On a CPU, XLA computes gradients of convolutions several times slower inside a loop (issue 12868 of jax-ml/jax). So
there the steps of a call are unrolled, and a call has few steps.

For the same images from a packed set, use `make_text.py`, `packer convert`, then `jax_consumer.py`. Needs jax, with or
without a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from make_text import CELL, GRID, LETTERS, WORD, contains, glyphs, text_images

Parameters: TypeAlias = list[tuple[jax.Array, jax.Array]]
_RATE, _MEAN, _SQUARE = 6e-3, 0.9, 0.999


@dataclass(frozen=True)
class Task:
    """cell: height and width of a letter. grid: lines, letters per line. word: the word to find.

    layers: of the network: side of the kernel, stride, channels.
    """

    cell: tuple[int, int] = CELL
    grid: tuple[int, int] = GRID
    word: str = WORD
    layers: tuple[tuple[int, int, int], ...] = ((7, 4, 16), (3, 2, 32), (3, 1, 32), (3, 1, 32))
    batch: int = 64


TINY = Task((12, 10), (3, 4), "s", ((5, 2, 8), (3, 2, 16), (3, 1, 16)))


class State(NamedTuple):
    """The network, and Adam's moments of its gradients."""

    parameters: Parameters
    mean: Parameters
    square: Parameters
    steps: jax.Array


def new_key(seed: int) -> jax.Array:
    """A key of XLA's generator, which is faster than JAX's default generator, and compiles faster."""
    return random.key(seed, impl="rbg")


def make_batch(task: Task, key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Make images, uint8 [count, height, width, 3], and labels, bool [count]: whether the image contains the word."""
    keys = iter(random.split(key, 4))

    def random_bytes(shape: tuple[int, ...]) -> jax.Array:
        return random.bits(next(keys), shape, jnp.uint8)

    letters, ink = jnp.asarray(LETTERS), jnp.asarray(glyphs(*task.cell))
    images, text = text_images(random_bytes, count, letters, ink, task.grid)
    return images, contains(text, task.word)


def begin(task: Task, seed: int) -> State:
    """An untrained network."""
    draw, parameters, channels = np.random.default_rng(seed), [], 3
    for side, _, width in task.layers:
        scale = (2 / (side * side * channels)) ** 0.5
        kernel = draw.normal(0, scale, (side, side, channels, width))
        parameters.append((jnp.asarray(kernel, jnp.float32), jnp.zeros(width)))
        channels = width
    parameters.append((jnp.zeros(channels), jnp.zeros(())))
    nothing = jax.tree.map(jnp.zeros_like, parameters)
    return State(parameters, nothing, nothing, jnp.zeros((), jnp.int32))


def scores(task: Task, parameters: Parameters, images: jax.Array) -> jax.Array:
    """Scores, float32 [count], above 0 if the network recognises the word: the maximum over all places."""
    *layers, (weights, offset) = parameters
    x = images.astype(jnp.float32) / 64
    x = x - x.mean((1, 2), keepdims=True)
    for (kernel, bias), (_, stride, _) in zip(layers, task.layers, strict=True):
        x = lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x + bias)
    return x.max((1, 2)) @ weights + offset


def step(task: Task, state: State, images: jax.Array, labels: jax.Array) -> tuple[State, jax.Array]:
    """One step of Adam; also returns the accuracy on the batch before the step."""

    def loss(parameters: Parameters) -> tuple[jax.Array, jax.Array]:
        logits = scores(task, parameters, images)
        return jnp.mean(jax.nn.softplus(logits) - labels * logits), jnp.mean((logits > 0) == labels)

    gradient, right = jax.grad(loss, has_aux=True)(state.parameters)
    steps = state.steps + 1
    mean = jax.tree.map(lambda m, g: _MEAN * m + (1 - _MEAN) * g, state.mean, gradient)
    square = jax.tree.map(lambda s, g: _SQUARE * s + (1 - _SQUARE) * g * g, state.square, gradient)
    rate = _RATE * jnp.sqrt(1 - _SQUARE**steps) / (1 - _MEAN**steps)
    changed = jax.tree.map(lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), state.parameters, mean, square)
    return State(changed, mean, square, steps), right


@partial(jax.jit, static_argnums=(0, 3))
def train(task: Task, state: State, key: jax.Array, steps: int) -> tuple[State, jax.Array]:
    """Train `steps` steps, each on a new batch, as one program on the device; also returns the accuracy."""

    def one(state: State, key: jax.Array) -> tuple[State, jax.Array]:
        return step(task, state, *make_batch(task, key, task.batch))

    unroll = steps if jax.default_backend() == "cpu" else 1
    state, right = lax.scan(one, state, random.split(key, steps), unroll=unroll)
    return state, right.mean()


def images_per_second(call: Callable[[int], Any], images: int, seconds: float = 1.0) -> float:
    """Images/s of calls of `call`, which takes the call's number and makes or uses `images` images. The first call,
    which compiles, does not count."""
    jax.block_until_ready(call(0))
    start, calls = time.perf_counter(), 0
    while not calls or time.perf_counter() - start < seconds:
        calls += 1
        jax.block_until_ready(call(calls))
    return calls * images / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--in-a-call", type=int, help="steps in a call; default 50, on a CPU 2")
    parser.add_argument("--tiny", action="store_true", help="use images of 36 x 40 pixels and a word of one letter")
    arguments = parser.parse_args()
    task = TINY if arguments.tiny else Task()
    height, width = (cell * count for cell, count in zip(task.cell, task.grid, strict=True))
    make = jax.jit(make_batch, static_argnums=(0, 2))
    key = new_key(1)
    rate = images_per_second(lambda call: make(task, random.fold_in(key, call), task.batch), task.batch)
    print(f"{rate:,.0f} images/s of {height} x {width} made on {jax.devices()[0]}", flush=True)

    state = begin(task, 8)
    in_a_call = arguments.in_a_call or (2 if jax.default_backend() == "cpu" else 50)
    state, _ = train(task, state, new_key(3), in_a_call)  # compiles
    begun, start = int(state.steps), time.perf_counter()
    for call in range(-(-(arguments.steps - begun) // in_a_call)):
        state, right = train(task, state, random.fold_in(key, call), in_a_call)
        if call % max(1, 40 // in_a_call) == 0:
            print(f"step {state.steps}: {float(right):.1%} right", flush=True)
    jax.block_until_ready(state)
    rate = (int(state.steps) - begun) * task.batch / (time.perf_counter() - start)
    print(f"{rate:,.0f} images/s made and used for training")

    see, answers = jax.jit(scores, static_argnums=0), []
    for new in random.split(new_key(4), 16):
        images, labels = make(task, new, task.batch)
        answers.append((np.asarray(see(task, state.parameters, images) > 0), np.asarray(labels)))
    predicted, true = map(np.concatenate, zip(*answers, strict=True))
    guess = max(true.mean(), 1 - true.mean())
    print(f"accuracy {(predicted == true).mean():.1%} on new images; {guess:.1%} by a constant answer")


if __name__ == "__main__":
    main()
