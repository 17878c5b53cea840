"""Lightning: a data module over packed sets.

    data = PackerDataModule("imagenet-hdf5", 256, augment=[RandomResizedCrop(224), RandomHorizontalFlip()])
    trainer.fit(model, data)                           # or ckpt_path=…, also from the middle of an epoch
    Trainer(callbacks=[MetricsCallback()])             # logs the metrics of the training loader

Lightning saves the state of an ImageLoader in its checkpoints and restores it; docs/frameworks.md says what can be
resumed. The ranks are detected at the start of a loop, after Lightning has started the processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import readers
from cache.errors import MissingExtraError, UnknownNameError
from readers.augment.ops import Op
from readers.caching import cached
from readers.loader import ImageLoader
from readers.metrics import Meter, images_of
from readers.options import Ranks
from readers.reader import Reader

try:
    from lightning.pytorch import Callback, LightningDataModule
except ImportError:
    try:
        from pytorch_lightning import Callback, LightningDataModule
    except ImportError as error:
        raise MissingExtraError("lightning", "lightning", "PackerDataModule") from error

_VALIDATION = ("val", "valid", "validation", "dev")


class PackerDataModule(LightningDataModule):  # type: ignore[misc]
    """The splits of one packed set as loaders for training, validation and testing.

    dataset: the directory of the set, or its address.
    batch_size: samples per batch on each rank.
    augment, eval_augment: ops for training, and for validation and testing, such as [Resize(256), CenterCrop(224)].
    train_split, val_split, test_split: names of splits. By default these are "train", the first existing one of val,
        valid, validation and dev, and "test". Validation and testing have no loader if their default split is missing.
    stage: options of `readers.stage`, for example {} or {"target": "/local"}: copy the set to each node first.
    cache: options of `readers.cached`, for example {} or {"keep": "recoded:256@90"}: keep samples in the memory of the
        node.
    eval_options: options of `ImageLoader` for validation and testing.
    loader: other options of `ImageLoader`, for all splits: seed, fields, threads, decode, …

    All ranks have the same number of batches. In training, samples that do not fill a step are dropped. In validation
    and testing, the last step is padded with repeats (Ranks(tail="pad"), as by Lightning's sampler). With
    Ranks(tail="exact") in `eval_options` no sample is repeated, but some ranks can have fewer batches; a collective
    operation in each validation step then hangs.

    `setup` and the methods for loaders raise the errors of `readers.open`, `stage`, `cached` and `ImageLoader`, for
    example UnknownNameError for a missing split that was named, or for a missing "train".
    """

    def __init__(
        self,
        dataset: str | os.PathLike[str],
        batch_size: int,
        *,
        augment: Sequence[Op] = (),
        eval_augment: Sequence[Op] = (),
        train_split: str | None = None,
        val_split: str | None = None,
        test_split: str | None = None,
        stage: dict[str, Any] | None = None,
        cache: dict[str, Any] | None = None,
        eval_options: dict[str, Any] | None = None,
        **loader: Any,
    ) -> None:
        super().__init__()
        self.dataset, self.batch_size = dataset, batch_size
        self._ops = {"train": augment, "val": eval_augment, "test": eval_augment}
        self._splits = {"train": train_split, "val": val_split, "test": test_split}
        self._stage, self._cache, self._options = stage, cache, loader
        self._eval_options = {"shuffle": False, "ranks": Ranks(tail="pad"), **(eval_options or {})}
        self._readers: dict[str, Reader | None] = {}
        self._open = ExitStack()

    def setup(self, stage: str) -> None:
        """Open the splits, on every rank; the ranks of a node share a staged copy and a cache."""
        if self._readers:
            return
        place = self.dataset
        if self._stage is not None:
            place = self._open.enter_context(readers.stage(self.dataset, **self._stage))
        self._readers = {use: self._reader(place, use) for use in self._splits}

    def _reader(self, place: str | os.PathLike[str], use: str) -> Reader | None:
        chosen = self._splits[use]
        names = [chosen] if chosen else list(_VALIDATION) if use == "val" else [use]
        for name in names:
            try:
                reader = self._open.enter_context(readers.open(place, name))
            except UnknownNameError:
                if chosen or use == "train":
                    raise
                continue
            return reader if self._cache is None else self._open.enter_context(cached(reader, **self._cache))
        return None

    def reader(self, use: str = "train") -> Reader | None:
        """The reader for "train", "val" or "test", after `setup`; None for a missing split."""
        return self._readers.get(use)

    def _loader(self, use: str, **options: Any) -> ImageLoader | list[Any]:
        reader = self._readers.get(use)
        if reader is None:
            return []
        return ImageLoader(reader, self.batch_size, augment=self._ops[use], **{**self._options, **options})

    def train_dataloader(self) -> ImageLoader | list[Any]:
        return self._loader("train")

    def val_dataloader(self) -> ImageLoader | list[Any]:
        return self._loader("val", **self._eval_options)

    def test_dataloader(self) -> ImageLoader | list[Any]:
        return self._loader("test", **self._eval_options)

    def predict_dataloader(self) -> ImageLoader | list[Any]:
        return self._loader("test", **self._eval_options)

    def teardown(self, stage: str) -> None:
        """Close the readers, and release staged copies and caches."""
        self._readers = {}
        self._open.close()


class MetricsCallback(Callback):  # type: ignore[misc]
    """Logs the metrics of the training loader (`ImageLoader.metrics`) with the loggers of the Trainer.

    Every `log_every_n_steps` steps, it logs the metrics of the time since the last log, for any loader (see
    `readers.metrics.Meter`). Loggers write on the first rank only, so these are the metrics of that rank;
    `readers.metrics.write_every` and `serve` export those of every rank. The callback neither communicates between
    ranks nor waits for a GPU.

    prefix: put before each name; with several loaders, the name of the loader follows it.
    """

    def __init__(self, prefix: str = "packer/") -> None:
        self.prefix = prefix
        self._meters: dict[str, Meter] = {}
        self._logged = 0

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """Start the meters of the loaders of this epoch; new loaders get new meters."""
        dataloader = trainer.train_dataloader
        loaders = (
            {f"{name}/": part for name, part in dataloader.items()}
            if isinstance(dataloader, Mapping)
            else {"": dataloader}
        )
        if list(loaders.values()) != [meter.loader for meter in self._meters.values()]:
            self._meters = {f"{self.prefix}{name}": Meter(loader) for name, loader in loaders.items()}
            self._logged = trainer.global_step
        for meter in self._meters.values():
            meter.ask()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        parts = batch if isinstance(trainer.train_dataloader, Mapping) else {"": batch}
        for meter, part in zip(self._meters.values(), parts.values(), strict=False):
            meter.took(images_of(part))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step, every = trainer.global_step, trainer.log_every_n_steps
        if every and step // every > self._logged // every:
            figures = {k: v for prefix, by in self._meters.items() for k, v in by.metrics(prefix=prefix).items()}
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=step - 1)  # Lightning logs values of this step under step - 1
            self._logged = step
        for meter in self._meters.values():
            meter.ask()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        for meter in self._meters.values():
            meter.end()

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Pause the meters during validation, so that it is not counted as waiting for data."""
        self.on_train_epoch_end(trainer, module)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        for meter in self._meters.values():
            meter.ask()
