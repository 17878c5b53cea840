"""The one place where CUDA streams of decoding, augmenting and training meet.

nvJPEG's hardware engine writes its output without regard to what is queued on the stream it is given, so on GPUs that
have one (A100, H100 and later) it may overwrite a block which the allocator has given out again while queued kernels
still read it (pytorch/vision#9606, torchcodec#1634: 134 of 200 decodes). Hence:

1. Decoding has a stream of its own, and so have its blocks. Before each decode that stream is waited for, by the host:
   nothing is queued that could still read a recycled block.
2. What is made of the pixels is queued on the same stream, after them.
3. An event marks the end. The consumer's stream waits for it, on the device, and every tensor that changes hands is
   recorded on the consumer's stream, so that its block is not given out again before the consumer has read it.

On other devices all of this is nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch

__all__ = ["DecodeStream", "Ready"]

Ready: TypeAlias = torch.cuda.Event | None


class DecodeStream:
    """A stream for one thread that decodes. device: with its number, where it is a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Around a decode and what is made of it."""
        if self.stream is None:
            yield
            return
        self.stream.synchronize()
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> Ready:
        """The end of what has been queued, for `hand_over`."""
        return self.stream.record_event() if self.stream is not None else None

    @staticmethod
    def hand_over(tensors: Sequence[torch.Tensor], ready: Ready) -> None:
        """Let the current stream of the calling thread use `tensors` when they are ready; returns at once."""
        if ready is None:
            return
        for tensor in tensors:
            consumer = torch.cuda.current_stream(tensor.device)
            consumer.wait_event(ready)
            tensor.record_stream(consumer)
