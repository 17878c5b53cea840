"""A plain loop with torch.distributed.checkpoint, as in torchtitan; a restarted run continues, on any number of ranks.

torchrun --nproc-per-node 2 examples/train_distributed.py SET
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import readers
from readers.augment import RandomHorizontalFlip, RandomResizedCrop
from readers.loader import Decode, ImageLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("set")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    for name, value in {"epochs": 3, "batch-size": 64, "size": 64, "save-every": 50}.items():
        parser.add_argument(f"--{name}", type=int, default=value)  # batch-size: samples of a step, all ranks together
    options = parser.parse_args()
    dist.init_process_group("gloo")  # and a second group, for threads that save during training
    ranks, ops = dist.new_group(backend="gloo"), [RandomResizedCrop(options.size), RandomHorizontalFlip()]
    reader, share, saving = readers.open(options.set, split="train"), options.batch_size // dist.get_world_size(), None
    loader = ImageLoader(reader, share, augment=ops, decode=Decode(dtype=torch.float32))
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 16, 3, 2, 1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten()]
    network = torch.nn.Sequential(*layers, torch.nn.Linear(256, len(reader.classes)))
    model = torch.nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    if step := max((int(last.parent.name) for last in options.folder.glob("*/.metadata")), default=0):
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "loader": loader}
        dcp.load(state, checkpoint_id=options.folder / str(step))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state["optimizer"])
    for _ in range(loader.epoch, options.epochs):  # each loop is the next epoch
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (step := step + 1) % options.save_every == 0:
                if saving is not None:
                    saving.result()
                weights, moments = get_state_dict(model, optimizer)
                state = {"model": weights, "optimizer": moments, "loader": loader}
                saving = dcp.async_save(state, checkpoint_id=options.folder / str(step), process_group=ranks)
    if saving is not None:
        saving.result()
    del model  # before the group, whose threads it would otherwise join while it holds the GIL that they may need
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
