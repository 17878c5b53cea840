"""timm over `TimmReader`: its data set, loader and augmentations, as in its training script.

timm needs torchvision, which cannot be imported with the CPU build of torch: `make test-decoders` runs this.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_jpeg, pack_few, tree_of

import readers
from cache.errors import BadSampleError
from readers.decode import decode_image
from readers.frameworks.timm import TimmReader, create_dataset

COUNT = 12


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_few(tmp_path_factory.mktemp("timm"), COUNT, (48, 40))


@pytest.fixture
def timm() -> Any:
    try:
        import timm.data
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision for another torch
        if os.environ.get("PACKER_TEST_DECODERS") == "required":
            raise
        pytest.skip(f"timm cannot be imported: {error} (make test-decoders has it)")
    return timm.data


def test_the_interface_that_timm_expects_of_a_reader(reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timms = TimmReader(reader)
    file, label = timms[4]
    assert (file.read(), label, len(timms)) == (bytes(reader.read(4)), int(reader.labels[4]), COUNT)
    assert timms.filename(4) == reader.name(4) and timms.filename(4, basename=True) == reader.name(4).split("/")[-1]
    assert len(timms.filenames()) == COUNT and timms.class_to_idx == {"class0": 0, "class1": 1, "class2": 2}

    def fail(index: int) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(reader, "read", fail)
    with pytest.raises(BadSampleError, match="Input/output error"):
        timms[4]


def test_a_data_set_has_our_images_and_names(timm: Any, reader: Any) -> None:
    dataset = timm.ImageDataset("", reader=TimmReader(reader))
    for i in range(COUNT):
        image, label = dataset[i]
        assert (np.asarray(image) == decode_image(reader.read(i))).all() and label == int(reader.labels[i])
    assert dataset.filenames() == [reader.name(i) for i in range(COUNT)]
    encoded, _ = timm.ImageDataset("", reader=TimmReader(reader), load_bytes=True)[4]
    assert encoded == bytes(reader.read(4))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_of_the_training_script(timm: Any, reader: Any, workers: int) -> None:
    """With the options of the script: augmentation, erasing, mixup in the collate function."""
    mixup = timm.FastCollateMixup(mixup_alpha=0.2, num_classes=3)
    loader = timm.create_loader(
        timm.ImageDataset("", reader=TimmReader(reader)),
        input_size=(3, 32, 32),
        batch_size=4,
        is_training=True,
        no_aug=False,
        re_prob=0.25,
        auto_augment="rand-m9-mstd0.5",
        interpolation="random",
        num_workers=workers,
        collate_fn=mixup,
        use_prefetcher=True,
        device=torch.device("cpu"),
        persistent_workers=False,
    )
    batches = list(loader)
    assert [tuple(images.shape) for images, _ in batches] == [(4, 3, 32, 32)] * (COUNT // 4)
    assert all(images.dtype == torch.float32 and bool(images.isfinite().all()) for images, _ in batches)
    shares = torch.cat([labels for _, labels in batches])
    assert shares.shape == (COUNT, 3) and torch.allclose(shares.sum(1), torch.ones(COUNT), atol=1e-3)


def test_timm_scripts_accept_a_packed_set(timm: Any, packed: Path, tmp_path: Path) -> None:
    """With the arguments of train.py and validate.py; timm handles any other name."""
    options = {"is_training": True, "class_map": "", "download": False, "batch_size": 4, "seed": 1, "repeats": 0}
    dataset = create_dataset("packer", root=str(packed), split="train", input_img_mode="L", **options)
    assert len(dataset) == COUNT and dataset[0][0].mode == "L"
    with pytest.raises(readers.UnknownNameError, match="no split 'val'"):
        create_dataset("packer", root=str(packed), split="val")
    with pytest.raises(ValueError, match="needs root="):
        create_dataset("packer")
    folder = tree_of(tmp_path, {"train/a/1.jpg": make_jpeg(1)})
    assert len(create_dataset("", root=str(folder), split="train")) == 1


def test_an_evaluation_sees_every_sample_once(timm: Any, reader: Any) -> None:
    dataset = timm.ImageDataset("", reader=TimmReader(reader))
    loader = timm.create_loader(
        dataset, (3, 32, 32), 5, is_training=False, use_prefetcher=False, num_workers=0, persistent_workers=False
    )
    assert torch.cat([labels for _, labels in loader]).tolist() == reader.labels.tolist()


def test_a_sample_that_cannot_be_decoded_is_replaced_by_timm(timm: Any, tmp_path: Path) -> None:
    """timm takes the following sample, and logs that; a sample that cannot be read ends the run."""
    files = {f"a/{i}.jpg": make_jpeg(i, (48, 40)) for i in range(4)} | {"a/1.jpg": make_jpeg(1, (48, 40))[:300]}
    opened = readers.open_folder(tree_of(tmp_path / "images", files))
    image, _ = timm.ImageDataset("", reader=TimmReader(opened))[1]
    assert (np.asarray(image) == decode_image(files["a/2.jpg"])).all()
