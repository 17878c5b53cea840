"""A classifier of 3-D volumes on a cluster node: staged to its disk, cached in its memory, resumed in mid-epoch.

    packer convert volumes --to hdf5          # volumes/<class>/<name>.npy, float32 [d, h, w], all of one shape
    python examples/train_volumes.py volumes-hdf5 --stage "$TMPDIR" --checkpoint run.pt

After a kill, the same command continues with the next batch. For many GPUs see train_ddp.py.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import readers
from readers.order import Shuffled
from readers.torch import EpochSampler, ImageDataset


def network(classes: int) -> nn.Module:
    """A network from volumes [n, 1, d, h, w] to class scores."""
    layers = [nn.Conv3d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv3d(8, 16, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool3d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, classes))


def normal(volume: torch.Tensor) -> torch.Tensor:
    """Convert a volume [d, h, w] to [1, d, h, w] with mean 0 and standard deviation 1."""
    return ((volume - volume.mean()) / (volume.std() + 1e-6))[None]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("set", help="a packed set whose main field is an array of one shape")
    parser.add_argument("--stage", help="copy the set to this folder on a disk of the node; default: no copy")
    parser.add_argument("--checkpoint", type=Path, default=Path("run.pt"))
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    with readers.stage(options.set, options.stage) if options.stage else nullcontext(options.set) as place:
        train(
            readers.cached(readers.open(place, split="train")), options
        )  # in memory, once for all processes of a node


def train(reader: readers.Reader, options: argparse.Namespace) -> None:
    dataset = ImageDataset(reader, normal)
    sampler = EpochSampler(Shuffled(len(reader), seed=1), dataset)
    optimizer = torch.optim.AdamW((model := network(len(reader.classes))).parameters(), 1e-3)
    parts = {"model": model, "optimizer": optimizer, "sampler": sampler}
    if options.checkpoint.exists():
        for name, state in torch.load(options.checkpoint, weights_only=True).items():
            parts[name].load_state_dict(state)
    loader = DataLoader(dataset, 4, sampler=sampler, num_workers=2)
    for epoch in range(sampler.start.epoch, options.epochs):
        seen = 0
        for volumes, labels in loader:  # float32 [4, 1, d, h, w], int64 [4]
            loss = nn.functional.cross_entropy(model(volumes), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += len(labels)
            saved = {name: part.state_dict() for name, part in parts.items() if part is not sampler}
            torch.save({**saved, "sampler": sampler.state_after(seen)}, options.checkpoint)
        print(f"epoch {epoch}: {seen} volumes, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
