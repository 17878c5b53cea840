"""Packing options by subject, and the keywords of release 0.1 that they replace."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from conftest import files_of

import packer


@pytest.mark.parametrize("name", ["convert", "writer", "append", "reshard", "add_field"])
def test_packing_functions_have_at_most_twelve_parameters(name: str) -> None:
    assert len(inspect.signature(getattr(packer, name)).parameters) <= 12


def test_the_old_keywords_make_the_same_set_and_warn(tree: Path, tmp_path: Path) -> None:
    shards, run = packer.Shards(size="20KiB", shuffle=3), packer.Run(workers=1)
    choose, images = packer.Choose("val", fractions={"a": 0.5, "b": 0.5}, seed=2), packer.Images(check="decode")
    packer.convert(tree, "tar", tmp_path / "new", choose=choose, images=images, shards=shards, run=run)
    dealt: dict[str, Any] = {"split": "val", "split_fractions": {"a": 0.5, "b": 0.5}, "seed": 2}
    with pytest.warns(
        DeprecationWarning, match=r"takes .*packer\.Shards\(size=…, shuffle=…\).*Images\(check=…\)"
    ) as warned:
        packer.convert(tree, "tar", tmp_path / "old", **dealt, shard_size="20KiB", shuffle=3, workers=1, check="decode")
    assert [warning.filename for warning in warned] == [__file__]
    assert files_of(tmp_path / "new") == files_of(tmp_path / "old")
    with pytest.warns(DeprecationWarning, match=r"Choose\(classes"):
        assert packer.convert(tree, "tar", tmp_path / "one", classes=["cat"], run=run).classes == 1


def test_an_unsupported_option_is_refused(pack: Any, tree: Path, tmp_path: Path) -> None:
    for wrong in ({"shards": packer.Shards(shuffle=1)}, {"run": packer.Run(task=(0, 2))}):
        with pytest.raises(ValueError, match=r"=…\) does not apply here; expected size|workers, engine"):
            packer.append(pack(tree), tree, **wrong)
    with pytest.raises(TypeError, match="give samples in shards=, not next to it"):
        packer.convert(tree, "tar", tmp_path / "out", shards=packer.Shards(), samples_per_shard=3)
    with pytest.raises(TypeError, match="unexpected keyword"):
        packer.convert(tree, "tar", tmp_path / "out", shard=3)
