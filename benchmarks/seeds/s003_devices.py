"""The rows of `s003.py` on a GPU, and those of JAX, on the device that it has; kinds as in `s003_rows`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from harness import NotHere, contender
from machine import cpu_seconds_of_tree, has_gpu
from s003_rows import Job, data_loader, image_loader
from s003_sources import cached, example

from readers import Decode

__all__ = ["GPU_ROWS"]

GPU_ROWS = (
    "GPU: files",
    "GPU: byte array",
    "GPU: files in /dev/shm",
    "ours: GPU, ImageLoader, files",
    "ours: GPU, ImageLoader, byte cache",
)


# --- decoding on a GPU ----------------------------------------------------------------------------------------------
def _need_gpu() -> None:
    if not has_gpu():
        raise NotHere("needs a CUDA GPU")


def _tensor(data: Any) -> Any:
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _decoded_on_gpu(name: str, source: str) -> None:
    @contender(name, kind="batches", note="read by the workers; decode_jpeg of torchvision, a list at a time")
    @contextmanager
    def row(job: Job) -> Iterator[Iterator[Any]]:
        _need_gpu()
        import torch
        from torchvision.io import ImageReadMode, decode_jpeg

        def decode(batches: Iterator[Any]) -> Iterator[Any]:
            for encoded, labels in batches:
                images = decode_jpeg(list(encoded), ImageReadMode.RGB, device="cuda")
                yield torch.stack(images), torch.tensor(labels).to("cuda", non_blocking=True)

        with job.source(source) as found:
            yield decode(data_loader(job, found, _tensor, lambda samples: tuple(zip(*samples, strict=True))))


for _name in GPU_ROWS[:3]:
    _decoded_on_gpu(_name, _name.partition(": ")[2])


def _loaded_on_gpu(name: str) -> None:
    @contender(name, kind="batches")
    @contextmanager
    def row(job: Job) -> Iterator[Iterator[Any]]:
        _need_gpu()
        import readers

        reader = cached(job.place) if name.endswith("cache") else readers.open_folder(job.place.tree)
        with reader as opened:
            yield image_loader(job, opened, device="cuda")


for _name in GPU_ROWS[3:]:
    _loaded_on_gpu(_name)


# --- JAX ------------------------------------------------------------------------------------------------------------
def _rate(job: Job, count: int, call: Callable[[int], Any]) -> dict[str, Any]:
    """call: makes or uses `count` images; the first call compiles."""
    import jax

    call(0)
    cpu, started, calls = cpu_seconds_of_tree(), time.perf_counter(), 0
    while not calls or time.perf_counter() - started < job.seconds:
        calls += 1
        call(calls)
    seconds, cpu, done = time.perf_counter() - started, cpu_seconds_of_tree() - cpu, calls * count
    return {"images_s": done / seconds, "cpu_us": 1e6 * cpu / done, "jax": jax.default_backend()}


@contender("JAX: made on the device", imports="jax", kind="own", smoke=True)
def jax_alone(job: Job) -> dict[str, Any]:
    import jax

    made = example("generate_jax")
    make, task = jax.jit(made.make_batch, static_argnums=(0, 2)), made.Task(batch=job.batch)
    return _rate(job, job.batch, lambda call: jax.block_until_ready(make(task, made.new_key(call), job.batch)))


@contender("JAX: made and trained on", imports="jax", kind="own", note="`examples/generate_jax.py`, two steps a call")
def jax_trained(job: Job) -> dict[str, Any]:
    import jax

    made = example("generate_jax")
    task, steps = made.Task(batch=job.batch), 2
    state = made.begin(task, 0)
    return _rate(
        job,
        steps * job.batch,
        lambda call: jax.block_until_ready(made.train(task, state, made.new_key(call), steps)),
    )


@contender("ours: packed set, trained on in JAX", imports="torch readers.loader jax", kind="own", note="the same step")
def jax_loaded(job: Job) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    import readers

    made = example("generate_jax")
    task = made.Task(batch=job.batch)
    step, state = jax.jit(made.step, static_argnums=0), made.begin(task, 0)
    with readers.open(job.place.packed) as reader:
        batches = image_loader(job, reader, decode=Decode(layout="NHWC"))

        def call(number: int) -> None:
            images, labels = next(batches)
            jax.block_until_ready(step(task, state, jnp.from_dlpack(images), jnp.from_dlpack(labels.int()) == 0))

        return _rate(job, job.batch, call)
