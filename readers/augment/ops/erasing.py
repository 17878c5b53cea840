"""Random erasing (Zhong et al., 2020, https://arxiv.org/abs/1708.04896), with the names and tries of torchvision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from readers.augment.geometry import Planner
from readers.augment.ops.base import (
    RANGED,
    SMOOTH,
    Floats,
    Op,
    Rows,
    Stage,
    check_probability,
    check_range,
    refuses_all_but,
    tried_sides,
)
from readers.order.permutation import counter_hash

if TYPE_CHECKING:
    import torch

__all__ = ["RandomErasing"]

_TRIES = 10


@dataclass(frozen=True, slots=True, repr=False)
class RandomErasing(Op):
    """A box with `scale` of the area and `ratio` of height to width gets another value, with probability p.

    Ten tries to fit a box, else nothing is erased. value: of all three channels, one for each, or "random", noise of
    its own for each pixel; 0 to 255, as ops on pixels come before Normalize. What torchvision calls 0 after
    normalisation is the mean times 255 here.
    """

    p: float = 0.5
    scale: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)
    value: float | tuple[float, float, float] | Literal["random"] = 0.0

    stage: ClassVar[Stage] = Stage.PIXELS
    draws: ClassVar[int] = 4 + 2 * _TRIES

    def __post_init__(self) -> None:
        check_probability(self, self.p)
        check_range(self, "scale", self.scale, 1e-6, 1.0)
        check_range(self, "ratio", self.ratio, 1e-3, 1e3)
        if self.value != "random":
            colour = self._colour()
            if len(colour) != 3 or not all(isinstance(v, int | float) and 0 <= v <= 255 for v in colour):
                raise ValueError(
                    f"RandomErasing: value is a number from 0 to 255, three of them, or 'random', not {self.value!r}"
                )

    def _colour(self) -> tuple[float, ...]:
        return self.value if isinstance(self.value, tuple) else (self.value,) * 3  # type: ignore[return-value]

    def refuses(self, dtype: str, channels: int) -> str:
        if isinstance(self.value, tuple) and channels != 3:
            return "has a value for each of 3 channels"
        return refuses_all_but(SMOOTH if self.value == 0.0 else RANGED, dtype, channels)

    def plan(self, planner: Planner, u: Floats) -> None:
        """Parameters: top, left, height, width of the box, height 0 for none; and a key of the noise."""
        height, width = planner.height, planner.width
        tried_height, tried_width = tried_sides(self.scale, self.ratio, height * width, u[:, 4:])
        fits = (tried_height < height[:, None]) & (tried_width < width[:, None])
        rows, first = np.arange(len(height)), fits.argmax(axis=1)
        erased = (u[:, 0] < self.p) & fits[rows, first]
        box_height = np.where(erased, tried_height[rows, first], 0).astype(np.int64)
        box_width = np.where(erased, tried_width[rows, first], 0).astype(np.int64)
        top, left = planner.inside(u[:, 1], height - box_height), planner.inside(u[:, 2], width - box_width)
        key = np.floor(u[:, 3] * (1 << 53))
        planner.step(self, np.stack([top, left, box_height, box_width, key], axis=1).astype(np.float64))

    def apply(self, images: torch.Tensor, rows: Rows) -> torch.Tensor:
        import torch

        for image, row in zip(images, rows, strict=True):
            top, left, height, width, key = (int(value) for value in row)
            if not height * width:
                continue
            if self.value == "random":
                noise = counter_hash(np.uint64(key), np.arange(len(image) * height * width)) >> np.uint64(56)
                pixels = torch.from_numpy(noise.astype(np.float32)).view(-1, height, width)
            else:
                colour = self.value if isinstance(self.value, tuple) else (self.value,)
                pixels = torch.tensor(colour, dtype=torch.float32).view(-1, 1, 1)
            image[:, top : top + height, left : left + width] = pixels.to(images.device, non_blocking=True)
        return images

    @property
    def on_dali(self) -> bool:
        """Noise has no node of DALI."""
        return self.value != "random"

    def dali(self, dali: Any, images: Any, parameters: Any) -> Any:
        return dali.fn.erase(
            images, anchor=parameters[0:2], shape=parameters[2:4], axis_names="HW", fill_value=list(self._colour())
        )
