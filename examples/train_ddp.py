"""Data-parallel training: every rank's loader reads its share of each step; validation is exact.

    torchrun --nproc-per-node 4 examples/train_ddp.py images-hdf5 --checkpoint run.pt

A run continues from its checkpoint on another number of ranks, without a lost or repeated sample in the epoch.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import readers
from readers.augment import classification
from readers.loader import ImageLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("set", help="a packed set with the splits train and val")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", type=Path, default=Path("run.pt"))
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    reader, held_out = readers.open(options.set, split="train"), readers.open(options.set, split="val")
    loader = ImageLoader(reader, 16, augment=classification(64), seed=1, device=device)  # 16 per rank
    check = ImageLoader(held_out, 16, augment=classification(64, train=False), shuffle=False, device=device)
    torch.manual_seed(1)
    seen = (nn.Conv2d(3, 32, 5, 2), nn.ReLU(), nn.Conv2d(32, 64, 5, 2), nn.ReLU(), nn.AdaptiveMaxPool2d(1))
    model = nn.Sequential(*seen, nn.Flatten(), nn.Linear(64, len(reader.classes))).to(device)
    optimizer = torch.optim.AdamW((parallel := DistributedDataParallel(model)).parameters(), 3e-3)
    saved = {"model": model, "optimizer": optimizer, "loader": loader}
    if options.checkpoint.exists():
        for name, state in torch.load(options.checkpoint, map_location=device, weights_only=True).items():
            saved[name].load_state_dict(state)
    for epoch in range(loader.epoch, options.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(parallel(images), labels).backward()
            optimizer.step()
        counts = torch.zeros(2, device=device)
        with torch.no_grad():
            for images, labels in check:  # each sample on one rank: batch sizes differ, and may be 0
                counts += torch.stack([(model(images).argmax(1) == labels).sum(), (labels >= 0).sum()])
        dist.all_reduce(counts)
        if dist.get_rank() == 0:  # the state of the loader is the same on every rank
            torch.save({name: part.state_dict() for name, part in saved.items()}, options.checkpoint)
            print(f"epoch {epoch}: {counts[0]:.0f} of {counts[1]:.0f} right on {dist.get_world_size()} ranks")
    del parallel  # before the group, whose threads it would otherwise join while it holds the GIL that they may need
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
