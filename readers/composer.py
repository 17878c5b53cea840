"""Composer (MosaicML) over an ImageLoader, resumed by the loader's own state.

    loader = ImageLoader(reader, 32, augment=…)
    trainer = Trainer(model=model, train_dataloader=loader, callbacks=LoaderCallback(loader), autoresume=True, …)

By itself Composer comes to the batch that follows by loading all batches of the epoch before it again, and asks only
the data set of a DataLoader for a state. A callback has a state in each checkpoint: with this one it is the loader's,
and training continues with the batch that follows, on any number of ranks and with any batch size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cache.errors import MissingExtraError, TrainerError
from readers.loader import ImageLoader

try:
    from composer import Callback
except ImportError as error:
    raise MissingExtraError("composer", "composer", "LoaderCallback") from error

__all__ = ["LoaderCallback"]


class LoaderCallback(Callback):  # type: ignore[misc]
    """Saves the position of the training's loader with each checkpoint, and continues there."""

    def __init__(self, loader: ImageLoader) -> None:
        self._loader, self._found = loader, False

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self._loader.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises what `ImageLoader.load_state_dict` raises."""
        self._loader.load_state_dict(state["loader"])
        self._found = True

    def after_load(self, state: Any, logger: Any) -> None:
        """Let Composer begin with the loader's next batch. Raises TrainerError where that is of another epoch."""
        if not self._found:
            return  # a new run, or a checkpoint without our state, whose batches Composer loads again to skip them
        epoch = int(state.timestamp.epoch)
        if int(state.timestamp.batch_in_epoch) and self._loader.epoch == epoch + 1:
            self._loader.set_epoch(epoch)  # saved with the last batch of an epoch that Composer has yet to end
        if self._loader.epoch != epoch:
            raise TrainerError(
                f"the checkpoint's loader is in epoch {self._loader.epoch}, but Composer is in epoch {epoch}: the "
                f"checkpoint was made with another loader than that of the training; give LoaderCallback that one"
            )
        state.dataset_resumption["train"] = True
