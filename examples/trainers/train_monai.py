"""MONAI's transforms and network over a packed set, continued exactly.

    python train_monai.py SET --steps 6 --checkpoint run.pt      # the same command continues, in mid-epoch

MONAI's dictionary transforms accept the items of `ImageDataset`, too. In a continued run MONAI's random transforms draw
other random numbers, because torch seeds them again; ops of `readers.augment` draw the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from monai.data import DataLoader
from monai.networks.nets import DenseNet
from monai.transforms import ScaleIntensity

import readers
from readers.augment import RandomHorizontalFlip, RandomResizedCrop
from readers.order import Shuffled
from readers.torch import EpochSampler, ImageDataset

BATCH = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("set"), parser.add_argument("--steps", type=int), parser.add_argument("--checkpoint", type=Path)
    args = parser.parse_args()
    reader = readers.open(args.set)
    fields = {"image": "image", "label": "label", "index": "index"}
    dataset = ImageDataset(reader, [RandomResizedCrop(32), RandomHorizontalFlip()], fields=fields)
    sampler = EpochSampler(Shuffled(len(reader), seed=1), dataset)
    loader, scale = DataLoader(dataset, batch_size=BATCH, sampler=sampler, num_workers=1), ScaleIntensity()
    torch.manual_seed(1)
    model = DenseNet(2, 3, len(reader.classes), init_features=8, growth_rate=4, block_config=(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if args.checkpoint.exists():
        state = torch.load(args.checkpoint)
        model.load_state_dict(state["model"]), sampler.load_state_dict(state["data"])
    done, steps = 0, args.steps
    while steps:
        done = 0
        for batch in loader:
            loss = torch.nn.functional.cross_entropy(model(scale(batch["image"].float())), batch["label"])
            optimizer.zero_grad(), loss.backward(), optimizer.step()
            print("trained on", batch["index"].tolist(), f"loss {loss.item():.6f}")
            done, steps = done + len(batch["index"]), steps - 1
            if not steps:
                break
    state = {"model": model.state_dict(), "data": sampler.state_after(done)}  # the loader has read ahead
    torch.save(state, args.checkpoint)


if __name__ == "__main__":
    main()
