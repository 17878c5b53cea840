"""A denoising diffusion model: the network, its settings, training and sampling.

From Ho, Jain and Abbeel, "Denoising Diffusion Probabilistic Models" (2020), with ddpm-torch's learning rate for CelebA
at 64 x 64 pixels. `train_ddpm.py` trains it.
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["TINY", "Learner", "Settings", "UNet"]


@dataclass(frozen=True)
class Settings:
    """hidden: channels of the first level. multipliers: channels of each level / hidden. blocks: blocks per level.

    attention: side of the feature maps with attention. patch: side in pixels of an element of the first map. decay: of
    the moving average. warmup: steps until the full learning rate.
    """

    hidden: int = 128
    multipliers: tuple[int, ...] = (1, 2, 2, 2)
    blocks: int = 2
    attention: int = 16
    patch: int = 1
    timesteps: int = 1000
    learning_rate: float = 2e-5
    warmup: int = 5000
    decay: float = 0.9999

    @property
    def multiple(self) -> int:
        """The side of images must be a multiple of this, because each level halves the feature maps."""
        return self.patch << (len(self.multipliers) - 1)


TINY = Settings(16, (1, 2), 1, patch=2, timesteps=100, learning_rate=3e-3, warmup=10, decay=0.98)


# --- the network ------------------------------------------------------------------------------------------------------
def norm(channels: int) -> nn.Module:
    return nn.GroupNorm(min(32, channels // 4), channels)


def zero(layer: nn.Conv2d) -> nn.Conv2d:
    """Set a layer to zero, so that it adds nothing before training."""
    nn.init.zeros_(layer.weight)
    return layer


class Attention(nn.Module):
    """Attention with one head over all elements of a feature map, with a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.project = nn.Sequential(norm(channels), nn.Conv2d(channels, 3 * channels, 1))
        self.out = zero(nn.Conv2d(channels, channels, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).flatten(2).transpose(1, 2).chunk(3, dim=2)
        return x + self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """Two convolutions with a shortcut and the time step added between them; then, optionally, attention."""

    def __init__(self, inputs: int, outputs: int, embedding: int, attends: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(norm(inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, 1, 1))
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(embedding, outputs))
        self.second = nn.Sequential(norm(outputs), nn.SiLU(), zero(nn.Conv2d(outputs, outputs, 3, 1, 1)))
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.attention = Attention(outputs) if attends else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) + self.time(time)[:, :, None, None]
        return self.attention(self.shortcut(x) + self.second(hidden))


class UNet(nn.Module):
    """Predicts the noise in images [n, 3, size, size] with time steps [n]."""

    def __init__(self, settings: Settings, size: int) -> None:
        super().__init__()
        self.hidden, self.patch = settings.hidden, settings.patch
        embedding, pixels = 4 * settings.hidden, 3 * settings.patch**2
        self.embed = nn.Sequential(nn.Linear(self.hidden, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        self.enter = nn.Conv2d(pixels, self.hidden, 3, 1, 1)
        side, channels = size // settings.patch, self.hidden
        passed, down, up = [channels], [], []
        levels = [*enumerate(settings.hidden * multiplier for multiplier in settings.multipliers)]
        for level, width in levels:
            if level:
                down.append(nn.Conv2d(channels, channels, 3, 2, 1))
                passed.append(channels)
                side //= 2
            for _ in range(settings.blocks):
                down.append(Block(channels, width, embedding, side == settings.attention))
                passed.append(channels := width)
        middle = [Block(channels, channels, embedding, attends) for attends in (True, False)]
        for level, width in reversed(levels):
            for _ in range(settings.blocks + 1):
                up.append(Block(channels + passed.pop(), width, embedding, side == settings.attention))
                channels = width
            if level:
                up.append(nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(channels, channels, 3, 1, 1)))
                side *= 2
        self.down, self.middle, self.up = nn.ModuleList(down), nn.ModuleList(middle), nn.ModuleList(up)
        self.leave = nn.Sequential(norm(channels), nn.SiLU(), zero(nn.Conv2d(channels, pixels, 3, 1, 1)))

    def forward(self, images: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(torch.arange(0, self.hidden, 2, device=images.device) * (-math.log(10_000) / self.hidden))
        angles = steps[:, None] * rates
        time = self.embed(torch.cat([angles.sin(), angles.cos()], dim=1))
        passed = [x := self.enter(F.pixel_unshuffle(images, self.patch))]
        for layer in self.down:
            passed.append(x := layer(x, time) if isinstance(layer, Block) else layer(x))
        for layer in self.middle:
            x = layer(x, time)
        for layer in self.up:
            x = layer(torch.cat([x, passed.pop()], dim=1), time) if isinstance(layer, Block) else layer(x)
        return F.pixel_shuffle(self.leave(x), self.patch)


# --- the diffusion ----------------------------------------------------------------------------------------------------
class Learner:
    """A network, its moving average, its optimizer, and the number of trained steps.

    Noise has a linear schedule: 0.0001 to 0.02 in 1,000 time steps; with fewer steps, proportionally more per step.
    """

    def __init__(self, settings: Settings, size: int, seed: int, device: torch.device) -> None:
        self.settings, self.size, self.seed, self.device, self.step = settings, size, seed, device, 0
        torch.manual_seed(seed)
        self.model = UNet(settings, size).to(device, memory_format=torch.channels_last)
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.model.parameters(), settings.learning_rate)
        scale = 1000 / settings.timesteps
        self.betas = torch.linspace(1e-4 * scale, 0.02 * scale, settings.timesteps, dtype=torch.float64, device=device)
        self.kept = torch.cumprod(1 - self.betas, 0)  # share of the image's variance after each time step
        on_gpu = [device] if device.type == "cuda" else None
        self.ddp = DistributedDataParallel(self.model, device_ids=on_gpu) if dist.is_initialized() else self.model

    def learn(self, images: torch.Tensor) -> float:
        """Train a step on images [n, 3, size, size] from -1 to 1; returns the mean squared error of the predicted
        noise, which is 1 for an untrained network."""
        images = images.to(self.device, non_blocking=True, memory_format=torch.channels_last)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * min(1.0, (self.step + 1) / self.settings.warmup)
        loss = self.loss(self.ddp, images, self.generator(self.step))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        decay = min(self.settings.decay, self.step / (self.step + 10))  # smaller at first, to forget the first steps
        with torch.no_grad():
            for mean, value in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(value, 1 - decay)
        return float(loss.detach())

    def loss(self, model: nn.Module, images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The error for time steps and noise drawn by `generator`."""
        steps = torch.randint(self.settings.timesteps, (len(images),), generator=generator, device=self.device)
        noise = torch.randn(images.shape, generator=generator, device=self.device)
        kept = self.kept[steps].float().view(-1, 1, 1, 1)
        return F.mse_loss(model(kept.sqrt() * images + (1 - kept).sqrt() * noise, steps), noise)

    def generator(self, step: int) -> torch.Generator:
        """A generator for a step on this rank, independent of the number of random numbers in earlier steps."""
        key = (self.seed, step, dist.get_rank() if dist.is_initialized() else 0)
        drawn = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
        return torch.Generator(self.device).manual_seed(int(drawn))

    @torch.no_grad()
    def sample(self, count: int, seed: int = 0) -> torch.Tensor:
        """Draw images [count, 3, size, size] from -1 to 1 by the averaged network and the paper's smaller variance."""
        generator, shape = torch.Generator(self.device).manual_seed(seed), (count, 3, self.size, self.size)
        x = torch.randn(shape, generator=generator, device=self.device)
        for step in reversed(range(self.settings.timesteps)):
            beta, kept, before = float(self.betas[step]), float(self.kept[step]), float(self.kept[step - 1])
            noise = self.average(x, torch.full((count,), step, device=self.device))
            clean = ((x - math.sqrt(1 - kept) * noise) / math.sqrt(kept)).clamp(-1, 1)
            if not step:
                return clean
            x = (math.sqrt(before) * beta * clean + math.sqrt(1 - beta) * (1 - before) * x) / (1 - kept)
            deviation = math.sqrt(beta * (1 - before) / (1 - kept))
            x += deviation * torch.randn(shape, generator=generator, device=self.device)
        return x

    @property
    def configuration(self) -> dict[str, Any]:
        return {**asdict(self.settings), "size": self.size, "seed": self.seed}

    def state_dict(self) -> dict[str, Any]:
        state = {name: getattr(self, name).state_dict() for name in ("model", "average", "optimizer")}
        return {**state, "step": self.step, "configuration": self.configuration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the settings of the state differ."""
        for name, value in self.configuration.items():
            if state["configuration"].get(name) != value:
                raise ValueError(f"its {name} is {state['configuration'].get(name)}, expected {value}")
        for name in ("model", "average", "optimizer"):
            getattr(self, name).load_state_dict(state[name])
        self.step = state["step"]
