"""Diffusion on images of several shapes: all images of a step have one shape, and little is cropped.

    python examples/train_buckets.py images-hdf5 --area 65536 --multiple 32

The shapes have about the same area, as in SDXL (Podell et al., 2023); all ranks have the same shape in a step.
train_ddpm.py is a complete diffusion model, for one shape.
"""

import argparse

import torch
from torch import nn

import readers
from readers.augment import AspectBuckets, Normalize, RandomHorizontalFlip, ResizeToBucket
from readers.loader import ImageLoader
from readers.order import Bucketed


def network(width: int = 32) -> nn.Module:
    """A network that predicts the noise in images [n, 3, h, w]; its input has the noise level as a fourth channel."""
    layers = [nn.Conv2d(4, width, 3, 1, 1), *(nn.Conv2d(width, width, 3, 1, 1) for _ in range(2))]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.SiLU())), nn.Conv2d(width, 3, 3, 1, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("set", help="a packed set of images of any shapes")
    parser.add_argument("--area", type=int, default=64 * 64, help="largest number of pixels of an image")
    parser.add_argument("--multiple", type=int, default=16, help="sides are multiples of this number")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    reader = readers.open(options.set, split="train")
    buckets = AspectBuckets.of_area(options.area, multiple=options.multiple)
    order = Bucketed(buckets.of(reader.info), batch_size=16, seed=1, tail="pad")
    ops = [ResizeToBucket(buckets), RandomHorizontalFlip(), Normalize((0.5,) * 3, (0.5,) * 3)]
    loader = ImageLoader(reader, 16, order=order, augment=ops, fields=["image"])
    optimizer = torch.optim.AdamW((model := network()).parameters(), 2e-3)
    for epoch in range(options.epochs):
        shapes, losses = set(), []
        for (images,) in loader:  # float32 [16, 3, h, w] in -1..1
            shapes.add(tuple(images.shape[2:]))
            noise, share = torch.randn_like(images), torch.rand(len(images), 1, 1, 1)
            noisy = (1 - share) * images + share * noise
            predicted = model(torch.cat((noisy, share.expand_as(images[:, :1])), 1))
            loss = nn.functional.mse_loss(predicted, noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}, shapes {sorted(shapes)}")


if __name__ == "__main__":
    main()
