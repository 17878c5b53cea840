"""packer's loader under DLIO's base class: VENV/bin/python -m pytest --noconftest tests/test_yardstick_dlio.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import packer
import readers
from packer.testing.samples import make_jpeg

pytest.importorskip("dlio_benchmark", reason="DLIO is not installed: benchmarks/outside/dlio/install.sh")
pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks/outside/dlio"))


@pytest.mark.parametrize("decode", ["0", "1"])
def test_ranks_share_each_epoch_and_no_sample_is_repeated(
    decode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlio_benchmark.common.enumerations import DatasetType, FormatType
    from dlio_benchmark.utils.config import ConfigArguments
    from dlio_benchmark.utils.utility import DLIOMPI
    from loader import PackerDataLoader, open_items

    (tmp_path / "images").mkdir()
    for number in range(26):
        (tmp_path / f"images/{number:02d}.jpg").write_bytes(make_jpeg(number))
    packer.convert(tmp_path / "images", "hdf5", tmp_path / "set", choose=packer.Choose(split="train"))
    monkeypatch.setenv("PACKER_SET", str(tmp_path / "set"))
    monkeypatch.setenv("PACKER_DECODE", decode)
    of_item = bytes if decode == "0" else lambda image: image.numpy().tobytes()
    known = {of_item(item[0]): number for number, item in enumerate(open_items(DatasetType.TRAIN))}
    assert len(known) == len(readers.open(tmp_path / "set")) == 26

    epochs: list[list[int]] = [[], []]
    for rank in range(2):
        ConfigArguments.reset()
        DLIOMPI.reset()
        DLIOMPI.get_instance().set_parent_values(rank, 2)  # a rank without MPI, as in DLIO's workers
        ConfigArguments.get_instance().batch_size = 4
        loader = PackerDataLoader(FormatType.JPEG, DatasetType.TRAIN, 1)
        loader.read()
        for seen in epochs:
            batches = list(loader.next())
            loader.finalize()
            images = [batch[0] if decode == "1" else [item[0] for item in batch] for batch in batches]
            assert [len(batch) for batch in images] == [4, 4, 4]
            seen += [known[of_item(image)] for batch in images for image in batch]
    assert all(len(set(seen)) == 24 for seen in epochs)
    assert epochs[0] != epochs[1]
    ConfigArguments.reset()
    DLIOMPI.reset()
