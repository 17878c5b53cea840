"""torchtitan's data pipeline (Grain) over a packed set: a source of its `RandomAccessDataSource` kind.

    python train_torchtitan.py SET --steps 6 --checkpoint run.pkl      # the same command continues, in mid-epoch

torchtitan orders and resumes samples, on the same number of data-parallel ranks; release 0.3.0 lacks this pipeline.
"""

from __future__ import annotations

import argparse
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.data import Collator, GrainDataLoader, SingleDatasetConfig

import readers
from readers.frameworks.grain import GrainSource


@dataclass(frozen=True)
class PackedSource:
    path: str

    def build(self, *, dataset_iteration_policy: Any) -> GrainSource:
        return GrainSource(readers.open(self.path), fields=("image", "label", "index"))


class Batch(Collator):
    @dataclass(kw_only=True, slots=True)
    class Config(Collator.Config):
        rows: int = 4

    def __init__(self, config: Config, *, context: Any) -> None:
        self.num_rows_per_batch = lambda: config.rows

    def __call__(self, rows: Any) -> Any:
        columns = {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in ("image", "index")}
        return columns, torch.tensor([row["label"] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("set"), parser.add_argument("--steps", type=int), parser.add_argument("--checkpoint", type=Path)
    args = parser.parse_args()
    dataset = SingleDatasetConfig(source=PackedSource(args.set))
    config = GrainDataLoader.Config(dataset=dataset, collator=Batch.Config())
    loader = config.build(dp_world_size=1, dp_rank=0, tokenizer=None, max_context_length=0, num_tokens_per_batch=0)
    if args.checkpoint.exists():
        loader.load_state_dict(pickle.loads(args.checkpoint.read_bytes()))
    for _, (batch, _labels) in zip(range(args.steps), loader, strict=False):
        print("trained on", batch["index"].tolist(), "pixels", int(batch["image"].sum()))  # a step of a model
    args.checkpoint.write_bytes(pickle.dumps(loader.state_dict()))  # torchtitan's checkpointer does this


if __name__ == "__main__":
    main()
