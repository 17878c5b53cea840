"""A loop with Hugging Face accelerate, continued on any number of processes with the next batch.

packer convert imagenette2 --to hdf5 -o SET
accelerate launch --num-processes 2 examples/train_accelerate.py SET
"""

import argparse
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy

import readers
from readers.augment import RandomHorizontalFlip, RandomResizedCrop
from readers.loader import Decode, ImageLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("set")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"), help="folder of the checkpoints")
    for name, value in {"epochs": 3, "batch-size": 64, "size": 64, "save-every": 50}.items():
        parser.add_argument(f"--{name}", type=int, default=value)  # batch-size: samples of a step, all ranks together
    options = parser.parse_args()
    accelerator, ops = Accelerator(), [RandomResizedCrop(options.size), RandomHorizontalFlip()]
    reader, share = readers.open(options.set, split="train"), options.batch_size // accelerator.num_processes
    loader = ImageLoader(reader, share, augment=ops, decode=Decode(dtype=torch.float32), device=accelerator.device)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
    network.append(nn.Linear(256, len(reader.classes)))
    optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
    model, optimizer = accelerator.prepare(network, optimizer)
    accelerator.register_for_checkpointing(loader)  # not prepare: the loader already divides samples between processes
    if step := max((int(path.name) for path in options.folder.glob("*") if path.name.isdecimal()), default=0):
        accelerator.load_state(options.folder / str(step))
    for epoch in range(loader.epoch, options.epochs):  # each loop is the next epoch
        for images, labels in loader:
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            if step % options.save_every == 0:
                accelerator.save_state(options.folder / f"{step}.part")
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:  # gets its name only when complete
                    shutil.move(options.folder / f"{step}.part", options.folder / str(step))
                    shutil.rmtree(options.folder / str(step - 2 * options.save_every), ignore_errors=True)
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")
    del model  # before the process group, whose threads it would join while it holds the GIL that they may need
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main()
