"""The clips of stable-worldmodel's data sets, from a packed set of frames."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from stable_worldmodel.data import Dataset

import readers
from readers.fields import decode_field
from readers.torch import ImageDataset

__all__ = ["COLUMNS", "Windows"]

COLUMNS = ("action", "proprio")


class Windows(Dataset):
    """The same clips of a packed set of frames: each frame of a batch is read and decoded once."""

    def __init__(self, path: str, keys_to_cache: list[str], keys_to_load: list[str], **options: Any) -> None:
        self.reader = readers.open(path)
        self.frames = ImageDataset(self.reader, fields=(self.reader.main,))
        lengths = np.bincount([int(key.partition("/")[0]) for key in self.reader.keys])
        super().__init__(lengths, np.cumsum(lengths) - lengths, **options)
        self.cached = {name: self.column(name, range(len(self.reader))) for name in keys_to_cache}

    def column(self, name: str, rows: Any) -> torch.Tensor:
        return torch.from_numpy(np.stack([decode_field("array", one) for one in self.reader.read_many(rows, name)]))

    def __getitems__(self, clips: list[int]) -> list[dict[str, torch.Tensor]]:
        starts = np.array([self.offsets[episode] + start for episode, start in (self.clip_indices[i] for i in clips)])
        steps = starts[:, None] + np.arange(self.span)
        seen, at = np.unique(steps[:, :: self.frameskip], return_inverse=True)
        frames = [torch.as_tensor(frame) for (frame,) in self.frames.__getitems__(seen.tolist())]
        pixels = torch.stack(frames)
        if pixels.shape[-1] == 3:
            pixels = pixels.permute(0, 3, 1, 2)
        every, where = np.unique(steps, return_inverse=True)
        action, proprio = (self.cached[c][every] if c in self.cached else self.column(c, every) for c in COLUMNS)
        where, at = where.reshape(steps.shape), at.reshape(len(clips), -1)
        return [
            {
                "pixels": pixels[a],
                "action": action[w].reshape(self.num_steps, -1),
                "proprio": proprio[w[:: self.frameskip]],
            }
            for a, w in zip(at, where, strict=True)
        ]
