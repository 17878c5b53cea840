"""Classification on one CPU or GPU, with validation, and checkpoints from which a run continues in mid-epoch.

    packer convert images --to hdf5
    python examples/train_classifier.py images-hdf5 --checkpoint run.pt

train_ddp.py does the same on many GPUs; train_imagenette.py adds signals, and checkpoints that survive a kill.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import readers
from readers.augment import classification
from readers.loader import ImageLoader


def network(classes: int, width: int = 16) -> nn.Module:
    sides = [(3, width), (width, 2 * width), (2 * width, 4 * width)]
    body = [part for a, b in sides for part in (nn.Conv2d(a, b, 3, 2), nn.BatchNorm2d(b), nn.ReLU())]
    return nn.Sequential(*body, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("set", help="a packed set with the splits train and val")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", type=Path, default=Path("run.pt"))
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reader, held_out = readers.open(options.set, split="train"), readers.open(options.set, split="val")
    loader = ImageLoader(reader, 32, augment=classification(64), seed=1, device=device)
    check = ImageLoader(held_out, 32, augment=classification(64, train=False), shuffle=False, device=device)
    optimizer = torch.optim.AdamW((model := network(len(reader.classes)).to(device)).parameters(), 3e-3)
    saved = {"model": model, "optimizer": optimizer, "loader": loader}  # the loader is saved like the model
    if options.checkpoint.exists():
        for name, state in torch.load(options.checkpoint, weights_only=True).items():
            saved[name].load_state_dict(state)
    for epoch in range(loader.epoch, options.epochs):
        model.train()
        for images, labels in loader:  # float32 [32, 3, 64, 64], int64 [32]
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if loader.left % 10 == 0:  # remaining batches of this epoch
                torch.save({name: part.state_dict() for name, part in saved.items()}, options.checkpoint)
        model.eval()
        with torch.no_grad():
            right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in check)
        print(f"epoch {epoch}: loss {loss.item():.3f}, {right} of {len(held_out)} right")


if __name__ == "__main__":
    main()
