"""Train a denoising diffusion model on a packed set, on one CPU or many GPUs, and draw images from it.

    packer convert celeba --to hdf5
    python examples/train_ddpm.py celeba-hdf5 --checkpoint run.pt
    torchrun --nproc-per-node 8 examples/train_ddpm.py celeba-hdf5 --checkpoint run.pt
    python examples/train_ddpm.py celeba-hdf5 --tiny --epochs 2          # a small network, for a CPU

The images are preprocessed as in ddpm-torch: a box of 148 x 148 pixels of CelebA's aligned faces, resized to 64 x 64,
flips, values from -1 to 1. `--crop middle` accepts images of any size. The network is in ddpm_model.py.

The checkpoint holds the network, its moving average, the optimizer, and the position of the loader. Noise is drawn by
(seed, step, rank), so after an interruption the same command continues with the same losses as an uninterrupted run; on
another number of ranks the noise differs. At the end the averaged network draws a grid of images.

Copy and change this script: the library does not use it.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from ddpm_model import TINY, Learner, Settings
from PIL import Image

import readers
from readers.augment import CenterCrop, Normalize, Op, RandomHorizontalFlip, Resize, celeba
from readers.loader import ImageLoader

FACE_HEIGHT, FACE_WIDTH = 218, 178


class Run:
    """A training run: the content of a checkpoint, and the loop. Raises PackerError and ValueError."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.main = args, not dist.is_initialized() or dist.get_rank() == 0
        reader = readers.open(args.dataset, args.split)
        augment = ops(reader, args)
        self.loader = ImageLoader(
            reader, args.batch_size, augment=augment, seed=args.seed, fields=("image",), on_error="substitute"
        )
        self.learner = Learner(TINY if args.tiny else Settings(), args.size, args.seed, device)
        if args.checkpoint.exists():
            self.load(device)

    def load(self, device: torch.device) -> None:
        path, instead = self.args.checkpoint, "remove it, or name another with --checkpoint"
        try:
            state = torch.load(path, map_location=device, weights_only=True)
            learner, loader = state["learner"], state["loader"]
        except Exception as error:  # torch raises many kinds for files that are not its own
            raise ValueError(f"{path} is not a checkpoint of train_ddpm.py; {instead}") from error
        try:
            self.learner.load_state_dict(learner)
            self.loader.load_state_dict(loader)
        except ValueError as error:
            raise ValueError(f"{path} cannot be continued: {error}; {instead}") from error
        self.say(f"resumed at epoch {self.loader.epoch}, step {self.learner.step}")

    def save(self) -> None:
        """Write the checkpoint atomically: a kill leaves the previous one intact."""
        if self.main:
            temporary = self.args.checkpoint.with_suffix(".tmp")
            torch.save({"learner": self.learner.state_dict(), "loader": self.loader.state_dict()}, temporary)
            temporary.replace(self.args.checkpoint)

    def train(self) -> None:
        last = self.args.stop_after and self.learner.step + self.args.stop_after
        while self.loader.epoch < self.args.epochs:
            epoch, start, seen, losses = self.loader.epoch, time.perf_counter(), 0, []
            for (images,) in self.loader:
                losses.append(self.learner.learn(images))
                seen += len(images)
                self.write_loss(losses[-1])
                if self.learner.step == last or self.learner.step % self.args.save_every == 0:
                    self.save()
                if self.learner.step == last:
                    return
            self.save()
            rate = seen / (time.perf_counter() - start)
            self.say(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}, {rate:,.0f} images/s a rank")
        if self.main and self.args.samples:
            self.draw()

    def write_loss(self, loss: float) -> None:
        if self.args.losses and self.main:
            with open(self.args.losses, "a", encoding="utf-8") as file:
                file.write(f"{self.learner.step} {loss!r}\n")

    def draw(self) -> None:
        """Write a grid of samples as a PNG file."""
        count, size = self.args.samples, self.args.size
        images = ((self.learner.sample(count, self.args.seed) + 1) * 127.5).round().clamp(0, 255).byte().cpu()
        columns = math.ceil(math.sqrt(count))
        grid = np.zeros((math.ceil(count / columns) * size, columns * size, 3), np.uint8)
        for number, image in enumerate(images.permute(0, 2, 3, 1).numpy()):
            top, left = (size * place for place in divmod(number, columns))
            grid[top : top + size, left : left + size] = image
        Image.fromarray(grid).save(self.args.grid)
        self.say(f"{count} samples: {self.args.grid}")

    def say(self, text: str) -> None:
        if self.main:
            print(text, flush=True)


def ops(reader: readers.Reader, args: argparse.Namespace) -> list[Op]:
    """The ops on the images. Raises ValueError for --crop celeba if the images are not CelebA's aligned faces."""
    if args.crop == "middle":
        middle = [Resize(args.size), CenterCrop(args.size)]
        return [*middle, RandomHorizontalFlip(), Normalize((0.5,) * 3, (0.5,) * 3)]
    others = np.flatnonzero((reader.info.height != FACE_HEIGHT) | (reader.info.width != FACE_WIDTH))
    if len(others):
        first = int(others[0])
        raise ValueError(
            f"{args.dataset}: --crop celeba is for images of {FACE_WIDTH} x {FACE_HEIGHT} pixels, and "
            f"{reader.keys[first]} has {reader.info.width[first]} x {reader.info.height[first]}: use --crop middle"
        )
    return celeba(args.size)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="a packed set, or its address")
    parser.add_argument("--split", help="default: the only split, or train")
    parser.add_argument("--crop", choices=("celeba", "middle"), default="celeba", help="default: %(default)s")
    parser.add_argument("--size", type=int, default=64, help="side of the images in pixels (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="images per rank (%(default)s)")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a small network for quick tests")
    parser.add_argument("--checkpoint", type=Path, default=Path("ddpm.pt"))
    parser.add_argument("--save-every", type=int, default=1000, metavar="STEPS")
    parser.add_argument("--stop-after", type=int, default=0, metavar="STEPS", help="save and exit, without samples")
    parser.add_argument("--losses", type=Path, metavar="FILE", help="append a line with step and loss for each step")
    parser.add_argument("--samples", type=int, default=64, help="images to draw at the end (%(default)s)")
    parser.add_argument("--grid", type=Path, default=Path("ddpm.png"), help="file of the drawn images (%(default)s)")
    args = parser.parse_args(arguments)
    multiple = (TINY if args.tiny else Settings()).multiple
    if args.size < 1 or args.size % multiple:
        parser.error(f"--size is {args.size}, expected a multiple of {multiple}")
    if args.seed < 0 or args.samples < 0 or args.save_every < 1:
        parser.error("--seed and --samples are 0 or more, --save-every is 1 or more")
    for name in ("checkpoint", "losses", "grid"):  # checked before training, not after days
        path = getattr(args, name)
        if path is not None and not path.parent.is_dir():
            parser.error(f"--{name}: there is no folder {path.parent}")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        Run(args, device).train()  # ends before the group, whose threads DDP would join while it holds the GIL
    except (readers.PackerError, ValueError) as error:
        sys.exit(f"train_ddpm.py: {error}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
