"""Train a classifier on a packed set, on one CPU or many GPUs, and continue after any interruption.

    packer convert imagenette2 --to hdf5
    python examples/train_imagenette.py imagenette2-hdf5 --checkpoint run.pt
    torchrun --nproc-per-node 4 examples/train_imagenette.py imagenette2-hdf5 --checkpoint run.pt

The checkpoint holds the model, the optimizer and the loader's position: a few numbers, independent of ranks and
threads. The same command continues from it in mid-epoch, also on another number of ranks: every sample of the epoch is
seen once. After SIGTERM, which batch systems send before the time limit, the run saves a last checkpoint and ends.

Copy and change this script: the library does not use it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import readers
from readers import Ranks
from readers.augment import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    CenterCrop,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)
from readers.loader import ImageLoader


# --- models -------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    """Two 3x3 convolutions with a shortcut (He et al., Deep residual learning, 2015)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = stride == 1 and inputs == outputs
        projection = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Identity() if same else projection

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def resnet18(classes: int) -> nn.Module:
    """ResNet-18 of torchvision if installed, otherwise the same layers."""
    try:
        from torchvision.models import resnet18 as build

        return build(num_classes=classes)
    except (ImportError, RuntimeError):
        pass
    widths = (64, 128, 256, 512)
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for i, width in enumerate(widths):
        layers += [Block(inputs, width, 1 if i == 0 else 2), Block(width, width, 1)]
        inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def small(classes: int) -> nn.Module:
    """A network of three residual blocks, for small images and small machines."""
    stem = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True)]
    body = [Block(32, 32, 1), Block(32, 64, 2), Block(64, 128, 2)]
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))


MODELS = {"resnet18": resnet18, "small": small}


# --- data ---------------------------------------------------------------------------------------------------------
def train_loader(args: argparse.Namespace) -> ImageLoader:
    """A loader with random crops and flips of uint8 images; rank and world size come from torch.distributed."""
    reader = readers.open(args.dataset, args.split)
    augment = [RandomResizedCrop(args.size, scale=(args.min_scale, 1.0))]
    if not args.no_flip:
        augment.append(RandomHorizontalFlip())
    fields = ("image", "label", "index")
    return ImageLoader(reader, args.batch_size, augment=augment, seed=args.seed, fields=fields, on_error="substitute")


def validation_loader(args: argparse.Namespace) -> ImageLoader:
    """A loader of every sample once, on any number of ranks."""
    reader = readers.open(args.dataset, args.val_split)
    augment = [Resize(round(args.size * 256 / 224)), CenterCrop(args.size), Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    return ImageLoader(reader, args.batch_size, augment=augment, shuffle=False, ranks=Ranks(tail="exact"))


class Normalized(nn.Module):
    """Normalises uint8 images on the device, so that a quarter of the bytes cross the bus."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", 255 * torch.tensor(IMAGENET_MEAN).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", 255 * torch.tensor(IMAGENET_STD).view(1, 3, 1, 1), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.dtype == torch.uint8:
            images = (images.float() - self.mean) / self.std
        output: torch.Tensor = self.model(images)
        return output


# --- training -----------------------------------------------------------------------------------------------------
class Run:
    """A training run: the content of a checkpoint, and the loop."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.main = not dist.is_initialized() or dist.get_rank() == 0
        self.signalled = self.stopped = False
        self.loader = train_loader(args)
        classes = len(self.loader.reader.classes) or int(self.loader.reader.labels.max()) + 1
        torch.manual_seed(args.seed)
        self.model = Normalized(MODELS[args.model](classes)).to(device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True
        )
        self.step = 0
        if args.checkpoint.exists():
            self.load()
        on_gpu = [device] if device.type == "cuda" else None
        self.ddp = DistributedDataParallel(self.model, device_ids=on_gpu) if dist.is_initialized() else self.model

    def save(self) -> None:
        """Write the checkpoint atomically: a kill leaves the previous one intact."""
        if self.main:
            state = {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "loader": self.loader.state_dict(),
                "step": self.step,
            }
            temporary = self.args.checkpoint.with_suffix(".tmp")
            torch.save(state, temporary)
            temporary.replace(self.args.checkpoint)

    def load(self) -> None:
        state = torch.load(self.args.checkpoint, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loader"])
        self.step = state["step"]
        if self.main:
            print(f"resumed at epoch {self.loader.epoch}, step {self.step}, {self.loader.left} batches left in it")

    def train(self) -> None:
        last = self.args.stop_after and self.step + self.args.stop_after
        while self.loader.epoch < self.args.epochs:
            epoch, start, seen, losses = self.loader.epoch, time.perf_counter(), 0, []
            self.ddp.train()
            for images, labels, indices in self.loader:
                losses.append(self.one_step(images, labels))
                self.trace(epoch, indices)
                seen += len(images)
                self.step += 1
                self.stopped = self.time_is_up()
                if self.stopped or self.step % self.args.save_every == 0 or self.step == last:
                    self.save()
                if self.stopped or self.step == last:
                    return
            self.save()
            accuracy = self.evaluate()
            if self.main:
                rate, loss = seen / (time.perf_counter() - start), sum(losses) / max(1, len(losses))
                print(
                    f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy:.1%}, {rate:,.0f} images/s a rank", flush=True
                )

    def on_signal(self, *_: object) -> None:
        """The handler of SIGTERM: stop after this step."""
        self.signalled = True

    def time_is_up(self) -> bool:
        """Whether any rank received a signal to stop; all ranks return the same answer."""
        signalled = torch.tensor(float(self.signalled), device=self.device)
        if dist.is_initialized():
            dist.all_reduce(signalled, dist.ReduceOp.MAX)
        return bool(signalled)

    def one_step(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        images = images.to(self.device, non_blocking=True, memory_format=torch.channels_last)
        labels = labels.to(self.device, non_blocking=True)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        loss = F.cross_entropy(self.ddp(images), labels, label_smoothing=0.1)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def learning_rate(self) -> float:
        """Rises linearly over the first tenth of all samples, then falls linearly to zero."""
        total = self.args.epochs * len(self.loader.reader)
        state = self.loader.state_dict()
        done = min(1.0, (state["epoch"] * state["samples"] + state["cursor"]) / total)
        return float(self.args.lr * min(done / 0.1 + 0.01, (1 - done) / 0.9 + 1e-3))

    @torch.no_grad()
    def evaluate(self) -> float:
        self.ddp.eval()
        right = torch.zeros(2, device=self.device)
        for images, labels in validation_loader(self.args):
            if len(images):
                guesses = self.model(images.to(self.device)).argmax(1)
                right += torch.tensor([float((guesses == labels.to(self.device)).sum()), float(len(labels))]).to(
                    self.device
                )
        if dist.is_initialized():
            dist.all_reduce(right)
        return float(right[0] / right[1].clamp(min=1))

    def trace(self, epoch: int, indices: torch.Tensor) -> None:
        """Log the trained samples for --trace, which shows that a resume neither repeats nor loses samples."""
        if self.args.trace:
            rank = dist.get_rank() if dist.is_initialized() else 0
            with open(f"{self.args.trace}.{rank}", "a", encoding="utf-8") as file:
                file.writelines(f"{epoch} {index}\n" for index in indices.tolist())


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path, help="a packed set")
    parser.add_argument("--split", default="train")
    parser.add_argument("--val-split", default="val")
    parser.add_argument("--model", choices=sorted(MODELS), default="resnet18")
    parser.add_argument("--size", type=int, default=128, help="side of the images in pixels (%(default)s)")
    parser.add_argument("--min-scale", type=float, default=0.25, help="smallest area of a random crop (%(default)s)")
    parser.add_argument("--no-flip", action="store_true", help="for digits, letters and traffic signs")
    parser.add_argument("--batch-size", type=int, default=64, help="images per rank (%(default)s)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--stop-after", type=int, default=0, metavar="STEPS", help="save and exit, as at a time limit")
    parser.add_argument("--trace", type=Path, help="write the trained samples to TRACE.<rank>")
    return parser.parse_args(arguments)


def train(args: argparse.Namespace, device: torch.device) -> bool:
    """Train; return whether a signal stopped it.

    The run, and with it DistributedDataParallel, ends with this function, before the process group. If it ended after
    the group, it would join gloo's threads while it holds the GIL, which they may need: the rank would hang.
    """
    run = Run(args, device)
    before = signal.signal(signal.SIGTERM, run.on_signal)
    try:
        run.train()
        return run.stopped
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: list[str] | None = None) -> bool:
    args = parse(arguments)
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        return train(args, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(128 + signal.SIGTERM if main() else 0)
