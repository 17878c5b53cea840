"""Images and captions: contrastive training of two encoders (Radford et al., 2021, https://arxiv.org/abs/2103.00020).

    packer convert samples.csv --to hdf5 --field caption:text=caption -o SET
    python examples/train_clip.py SET

An image may have several captions, one per line; each step draws one of them. Texts are encoded as pairs of letters.
"""

import argparse
import random

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

import readers
from readers.augment import RandomResizedCrop
from readers.loader import Decode, ImageLoader

PAIRS, LONGEST = 4096, 64


def network(width: int = 64) -> nn.ModuleDict:
    """Encoders of images [n, 3, 64, 64] and texts [n, LONGEST], both to [n, width]."""
    seen = (nn.Conv2d(3, width, 5, 2, 2), nn.ReLU(), nn.Conv2d(width, width, 5, 2, 2), nn.ReLU())
    image = nn.Sequential(*seen, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, width))
    text = nn.Sequential(nn.EmbeddingBag(PAIRS, width, padding_idx=0), nn.ReLU(), nn.Linear(width, width))
    return nn.ModuleDict({"image": image, "text": text})


def as_numbers(captions: list[str]) -> torch.Tensor:
    """One of the captions of each image, int64 [n, LONGEST]."""
    chosen = [random.choice(caption.splitlines() or [""]).encode()[: LONGEST + 1] for caption in captions]
    numbers = [[(64 * t[i] + t[i + 1]) % (PAIRS - 1) + 1 for i in range(len(t) - 1)] for t in chosen]
    return torch.tensor([row + [0] * (LONGEST - len(row)) for row in numbers])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("set", help="a packed set with a field caption")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    reader, ops = readers.open(options.set, split="train"), [RandomResizedCrop(64, scale=(0.6, 1.0))]
    fields, decode = {"images": "image", "texts": "caption"}, Decode(dtype=torch.float32)
    loader = ImageLoader(reader, 32, augment=ops, fields=fields, decode=decode)
    optimizer = torch.optim.AdamW((model := network()).parameters(), 2e-3)
    for epoch in range(options.epochs):
        for batch in loader:  # float32 [n, 3, 64, 64], and a list of str
            texts, pairs = model["text"](as_numbers(batch["texts"])), torch.arange(len(batch["texts"]))
            scores = 10 * normalize(model["image"](batch["images"])) @ normalize(texts).T
            loss = (cross_entropy(scores, pairs) + cross_entropy(scores.T, pairs)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}, {(scores.argmax(1) == pairs).float().mean():.0%} right")


if __name__ == "__main__":
    main()
