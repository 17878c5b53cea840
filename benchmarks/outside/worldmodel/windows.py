"""The clips of stable-worldmodel's data sets, from a packed set of frames."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from stable_worldmodel.data import Dataset

import readers
from readers.fields import decode_field

__all__ = ["COLUMNS", "Windows"]

COLUMNS = ("action", "proprio")


class Windows(Dataset):
    """The clips of a packed set of frames. A batch reads all its fields in one call, and each frame once."""

    def __init__(self, path: str, keys_to_cache: list[str], keys_to_load: list[str], **options: Any) -> None:
        self.reader = readers.open(path)
        lengths = np.bincount([int(key.partition("/")[0]) for key in self.reader.keys])
        super().__init__(lengths, np.cumsum(lengths) - lengths, **options)
        self.cached = self.read(dict.fromkeys(keys_to_cache, range(len(self.reader))))

    def read(self, rows: dict[str, Any]) -> dict[str, torch.Tensor]:
        kinds, data = self.reader.kinds, self.reader.read_fields(rows)
        return {
            name: torch.from_numpy(np.stack([decode_field(kinds[name], payload) for payload in data[name]]))
            for name in rows
        }

    def __getitems__(self, clips: list[int]) -> list[dict[str, torch.Tensor]]:
        starts = np.array([self.offsets[episode] + start for episode, start in (self.clip_indices[i] for i in clips)])
        steps = starts[:, None] + np.arange(self.span)
        seen, at = np.unique(steps[:, :: self.frameskip], return_inverse=True)
        every, where = np.unique(steps, return_inverse=True)
        rows = {self.reader.main: seen} | {name: every for name in COLUMNS if name not in self.cached}
        values = self.read(rows) | {name: column[every] for name, column in self.cached.items()}
        pixels = values[self.reader.main].permute(0, 3, 1, 2)
        where, at = where.reshape(steps.shape), at.reshape(len(clips), -1)
        return [
            {
                "pixels": pixels[a],
                "action": values["action"][w].reshape(self.num_steps, -1),
                "proprio": values["proprio"][w[:: self.frameskip]],
            }
            for a, w in zip(at, where, strict=True)
        ]
