"""`split_column`: the values of a column become the splits, in every source with named columns."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import make_jpeg
from set_cases import convert
from suites.programs import run_packer
from test_sources_libraries import sample_of, write_mds

import packer
import readers
from cache.errors import SourceError

FOLDS = ["fold1", "fold0", "fold1", "fold2", "fold0"]
IMAGES = [make_jpeg(number, (16, 16)) for number in range(5)]


def table(root: Path, suffix: str) -> Path:
    rows = [{"path": f"{i}.jpg", "label": i % 2, "fold": fold} for i, fold in enumerate(FOLDS)]
    for row, image in zip(rows, IMAGES, strict=True):
        (root / str(row["path"])).write_bytes(image)
    path = root / f"table{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


def hub(root: Path, as_class: bool) -> Path:
    """Two files of two splits, which the column overrides."""
    features = {"fold": {"_type": "ClassLabel", "names": ["fold0", "fold1", "fold2"]}} if as_class else {}
    for name, part in (("train", slice(0, 3)), ("test", slice(3, 5))):
        content = pa.table({
            "image": [{"bytes": image, "path": None} for image in IMAGES[part]],
            "label": [i % 2 for i in range(5)][part],
            "fold": [int(fold[-1]) if as_class else fold for fold in FOLDS[part]],
        })  # fmt: skip
        (root / "data").mkdir(exist_ok=True)
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        pq.write_table(content.replace_schema_metadata(metadata), root / "data" / f"{name}-00000-of-00001.parquet")
    return root


def mds(root: Path) -> Path:
    columns = {"image": "jpeg", "label": "int", "fold": "str"}
    samples = [
        sample_of([image, (i % 2).to_bytes(8, "little"), fold.encode()], columns)
        for i, (image, fold) in enumerate(zip(IMAGES, FOLDS, strict=True))
    ]
    return write_mds(root / "mds", [samples[:2], samples[2:]], columns)


def image_folder(root: Path) -> Path:
    """The layout of imagefolder in datasets: metadata.csv next to the images."""
    table(root, ".csv").unlink()
    rows = "".join(f"{i}.jpg,{i % 2},{fold}\n" for i, fold in enumerate(FOLDS))
    (root / "metadata.csv").write_text(f"file_name,label,fold\n{rows}")
    return root


SOURCES: dict[str, Callable[[Path], Path]] = {
    **{suffix: partial(table, suffix=suffix) for suffix in (".csv", ".tsv", ".jsonl", ".parquet")},
    "hub of names": partial(hub, as_class=False),
    "hub of classes": partial(hub, as_class=True),
    "mds": mds,
    "imagefolder": image_folder,
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_values_become_splits(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    (tmp_path / "src").mkdir()
    source = packer.open_source(make(tmp_path / "src"), split_column="fold")
    made = convert(source, tmp_path / "out")
    assert made.splits == {"fold1": 2, "fold0": 2, "fold2": 1}
    for split in made.splits:
        with readers.open(tmp_path / "out", split) as reader:
            rows = [i for i, fold in enumerate(FOLDS) if fold == split]
            assert [bytes(reader.read(i)) for i in range(len(reader))] == [IMAGES[i] for i in rows]
            assert reader.labels.tolist() == [i % 2 for i in rows]
            assert "json" not in reader.fields
    again = packer.open_source(source.root, split_column="fold")  # type: ignore[attr-defined]
    assert convert(again, tmp_path / "one", split="fold0").splits == {"fold0": 2}


def test_split_columns_by_the_command_line_and_invalid_splits(tmp_path: Path) -> None:
    source = table(tmp_path, ".csv")
    ended = run_packer("convert", source, "--to", "tar", "-o", tmp_path / "out", "--split-column", "fold", "--json")
    assert json.loads(ended.stdout)["splits"] == {"fold1": 2, "fold0": 2, "fold2": 1}, ended.stderr
    with pytest.raises(SourceError, match="no column 'folds'"):
        convert(packer.open_source(source, split_column="folds"), tmp_path / "no")
    source.write_text(source.read_text().replace("1,fold2", "1,../x"))
    with pytest.raises(SourceError, match=r"table\.csv: line 5: column 'fold': .*\.\./x"):
        convert(packer.open_source(source, split_column="fold"), tmp_path / "no")
    with pytest.raises(SourceError, match=r"line 5: column 'fold': '' cannot be the name of a split"):
        source.write_text(source.read_text().replace("1,../x", "1,"))
        convert(packer.open_source(source, split_column="fold"), tmp_path / "no")
    with pytest.raises(SourceError, match=r"no column 'label2' of names .*splits could be in label, fold"):
        packer.open_source(hub(tmp_path, False), split_column="label2").list(None)
    with pytest.raises(SourceError, match="split_column can be given for a Hugging Face"):
        (tmp_path / "tree" / "a").mkdir(parents=True)
        packer.open_source(tmp_path / "tree", split_column="fold")
