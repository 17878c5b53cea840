"""The Trainer of transformers over an ImageLoader, with exact resuming by the state of the loader.

    loader = ImageLoader(reader, 32, fields={"pixel_values": "image", "labels": "label"}, …)
    trainer = LoaderTrainer(model, arguments, train_loader=loader)
    trainer.train()                                    # or resume_from_checkpoint=True

On a resume, the Trainer normally loads all batches of the epoch again to skip the used ones. With this module, the
state of the loader is part of each checkpoint (trainer_state.json, "stateful_callbacks"), and training continues with
the next batch.

The Trainer computes its position in an epoch from the number of updates. So a run that resumes in the middle of an
epoch must use the same number of samples per update as before. On half of the ranks, use batches of twice the size, or
twice the `gradient_accumulation_steps` if they divide the number of batches. If the positions of the Trainer and the
loader differ, TrainerError is raised.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from cache.errors import MissingExtraError, TrainerError
from readers.loader import ImageLoader
from readers.metrics import Meter

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise MissingExtraError("transformers", "transformers", "LoaderTrainer") from error

_NAME = "packer loader"


def last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The path of the last complete checkpoint of a Trainer in a folder, or None.

    A killed run can leave an incomplete checkpoint. trainer_state.json is written last; without it, a Trainer would
    load the weights, but begin with step 0.
    """
    checkpoints = Path(folder).glob("checkpoint-*[0-9]")
    numbered = sorted((int(path.name.rpartition("-")[2]), path) for path in checkpoints)
    return next((str(path) for _, path in reversed(numbered) if _is_whole(path)), None)


def _is_whole(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


class LoaderCallback(TrainerCallback):  # type: ignore[misc]
    """Saves the position of a loader in each checkpoint, and resumes from it. Part of `LoaderTrainer`."""

    def __init__(self, loader: ImageLoader) -> None:
        self._loader = loader

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.stateful_callbacks[_NAME] = {"args": {}, "attributes": {"state": self._loader.state_dict()}}

    on_epoch_end = on_step_end

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Load the state of the loader from the checkpoint.

        Raises TrainerError if it is missing in the middle of an epoch, or if the position of the Trainer differs.
        """
        loader, together = self._loader, args.gradient_accumulation_steps
        updates = max(1, -(-len(loader) // together))
        epoch, done = divmod(state.global_step, updates)
        if not state.global_step:
            return
        saved = state.stateful_callbacks.get(_NAME)
        if saved is not None:
            loader.load_state_dict(saved["attributes"]["state"])
        elif not done:
            loader.set_epoch(epoch)
        else:
            raise TrainerError(
                f"the checkpoint of step {state.global_step} has no state of a loader, so the next batch is unknown; "
                f"continue with the data set and sampler that it was made with, or from an epoch's end"
            )
        position = (loader.epoch, len(loader) - loader.left)
        if position != (epoch, min(done * together, len(loader))):
            raise TrainerError(
                f"the checkpoint's loader has {loader.left} batches left of epoch {position[0]}, but the Trainer "
                f"counts {done} of {updates} updates of epoch {epoch}: the batch size, the number of ranks or "
                f"gradient_accumulation_steps has changed; keep the samples of an update, or resume from an epoch's end"
            )


class MetricsCallback(TrainerCallback):  # type: ignore[misc]
    """Logs the metrics of the training loader (`ImageLoader.metrics`) by `trainer.log`, each time the loss is logged.

        trainer.add_callback(MetricsCallback(trainer))

    The metrics are those of the time since the last log. Only the first rank logs, so they are the metrics of that
    rank; `readers.metrics.write_every` and `serve` export those of every rank. The callback neither communicates
    between ranks nor waits for a GPU.

    prefix: put before each name.
    """

    def __init__(self, trainer: Any, prefix: str = "packer/") -> None:
        self._trainer, self.prefix, self._meter = trainer, prefix, Meter(())

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        self._meter = Meter(getattr(self._trainer, "train_loader", train_dataloader))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called after the batches of an update were loaded."""
        self._meter.took(args.train_batch_size * args.gradient_accumulation_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._meter.ask()

    on_epoch_begin = on_step_end

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._meter.end()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restart the meter after evaluation and saving, so that they are not counted as waiting for data."""
        self._meter.end()
        self._meter.ask()

    on_save = on_evaluate

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and "loss" in (logs or {}):
            self._trainer.log(self._meter.metrics(prefix=self.prefix))


class LoaderTrainer(Trainer):  # type: ignore[misc]
    """A Trainer that trains on `train_loader`; the other arguments are those of Trainer.

    The batch size is that of the loader. Batches must be dictionaries, so pass the loader a mapping as `fields`.
    """

    def __init__(self, *args: Any, train_loader: ImageLoader, **options: Any) -> None:
        super().__init__(*args, **options)
        self.train_loader = train_loader
        self.args.ignore_data_skip = True  # the loader's state determines the next batch
        self.args.per_device_train_batch_size = train_loader.batch_size
        self._train_batch_size = train_loader.batch_size
        self.add_callback(LoaderCallback(train_loader))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """As `Trainer.train`; True resumes from the last complete checkpoint.

        Raises TrainerError for an incomplete checkpoint.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = (
                last_checkpoint(self.args.output_dir) or True
            )  # without a checkpoint, Trainer raises an error for True
        elif resume_from_checkpoint and not _is_whole(Path(resume_from_checkpoint)):
            raise TrainerError(
                f"{resume_from_checkpoint} is not a complete checkpoint: it has no readable trainer_state.json, which "
                f"is written last, so the Trainer would begin with step 0; resume_from_checkpoint=True takes the last "
                f"complete one"
            )
        return super().train(resume_from_checkpoint, *args, **options)

    def get_train_dataloader(self) -> Any:
        return self.train_loader
