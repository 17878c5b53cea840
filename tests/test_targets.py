"""Labels that are not class numbers: floats, vectors and several names, from every source to the batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import make_jpeg
from test_sources_libraries import sample_of, write_mds
from torch.utils.data import DataLoader

import packer
import readers
from cache.errors import BadSampleError, SourceError
from readers.augment import CenterCrop
from readers.loader import ImageLoader
from readers.torch import ImageDataset

IMAGES = [make_jpeg(number, (16, 16)) for number in range(4)]
SCORES, NAMES = [0.7, 1.5, 2.0, -0.25], [["red", "round"], [], ["round"], ["blue"]]
HOTS = [[0, 1, 1], [0, 0, 0], [0, 0, 1], [1, 0, 0]]
VECTORS = [[0.5, 1.0], [2.0, 3.5], [0.0, 1.0], [-1.0, 0.25]]


def table(root: Path, suffix: str, values: list[Any], column: str = "score") -> Path:
    root.mkdir(exist_ok=True)
    for i, image in enumerate(IMAGES):
        (root / f"{i}.jpg").write_bytes(image)
    rows = [{"path": f"{i}.jpg", column: value} for i, value in enumerate(values)]
    path = root / f"table{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        texts = [
            f"{row['path']}\t{json.dumps(row[column]) if isinstance(row[column], list) else row[column]}"
            for row in rows
        ]
        path.write_text(f"path\t{column}\n" + "\n".join(texts) + "\n")
    return path


def hub(root: Path, values: list[Any], feature: Any = None) -> Path:
    root.mkdir(exist_ok=True)
    content = pa.table({"image": [{"bytes": image, "path": None} for image in IMAGES], "score": values})
    features = {"score": feature} if feature else {}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(content.replace_schema_metadata(metadata), root / "train.parquet", row_group_size=2)
    return root


def mds(root: Path, encoding: str, dtype: str, values: list[Any]) -> Path:
    columns = {"image": "jpeg", "score": encoding}
    samples = [sample_of([i, np.array(v, dtype).tobytes()], columns) for i, v in zip(IMAGES, values, strict=True)]
    return write_mds(root, [samples[:2], samples[2:]], columns)


def labelled(source: Path) -> Any:
    return packer.open_source(source, label_column="score")


class Program:
    """A data set of (image, label), as in torch."""

    def __init__(self, values: list[Any], classes: tuple[str, ...] = ()) -> None:
        self.values, self.classes = values, classes

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        return IMAGES[number], self.values[number]


CASES: dict[str, tuple[Any, Any]] = {
    "csv of floats": (lambda root: labelled(table(root, ".tsv", SCORES)), SCORES),
    "parquet of floats": (lambda root: labelled(table(root, ".parquet", SCORES)), SCORES),
    "a usual name": (lambda root: packer.open_source(table(root, ".tsv", SCORES, "target")), SCORES),
    "csv of 0 and 1": (lambda root: labelled(table(root, ".tsv", HOTS)), HOTS),
    "csv of names": (lambda root: labelled(table(root, ".tsv", NAMES)), HOTS),
    "parquet of vectors": (lambda root: labelled(table(root, ".parquet", VECTORS)), VECTORS),
    "jsonl of whole vectors": (lambda root: labelled(table(root, ".jsonl", [[3, 4]] * 4)), np.array([[3, 4]] * 4)),
    "hub of vectors": (lambda root: labelled(hub(root, VECTORS)), VECTORS),
    "hub of classes": (
        lambda root: labelled(
            hub(
                root,
                [[1, 2], [], [2], [0]],
                {"_type": "Sequence", "feature": {"_type": "ClassLabel", "names": ["blue", "red", "round"]}},
            )
        ),
        HOTS,
    ),
    "mds of vectors": (lambda root: labelled(mds(root, "ndarray:float32:2", "<f4", VECTORS)), VECTORS),
    "a program's floats": (lambda root: Program(SCORES), SCORES),
    "a program's tensors": (lambda root: Program([torch.tensor(v) for v in VECTORS]), VECTORS),
    "a program's names": (lambda root: Program(NAMES, ("blue", "red", "round")), HOTS),
    "samples one by one": (
        lambda root: ({"image": i, "label": v} for i, v in zip(IMAGES, SCORES, strict=True)),
        SCORES,
    ),
}


@pytest.mark.parametrize(("make", "expected"), CASES.values(), ids=CASES)
def test_labels_reach_the_batches_unchanged(tmp_path: Path, make: Any, expected: Any) -> None:
    truth = torch.tensor(np.asarray(expected, None if isinstance(expected, np.ndarray) else np.float32))
    made = packer.convert(make(tmp_path / "src"), "tar", tmp_path / "out", run=packer.Run(workers=1))
    info = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert [*info["fields"].values()].count("target") == 1 and packer.verify(tmp_path / "out", deep=True).ok
    assert info["classes"] == (["blue", "red", "round"] if expected is HOTS and made.classes else [])
    with readers.open(tmp_path / "out") as reader:
        dataset = ImageDataset(reader, [CenterCrop(8)])
        for loader in (DataLoader(dataset, 4), DataLoader(dataset, 4, collate_fn=dataset.collate)):
            ((images, labels),) = loader
            assert images.shape == (4, 3, 8, 8)
            assert labels.dtype == truth.dtype and torch.equal(labels, truth)
        ((_, labels),) = ImageLoader(reader, 4, augment=[CenterCrop(8)], shuffle=False)
        assert labels.dtype == truth.dtype and torch.equal(labels, truth)
        assert torch.equal(torch.tensor(dataset.targets, dtype=truth.dtype), truth)
        (batch,) = ImageLoader(reader, 4, fields={"labels": "label"}, shuffle=False)
        assert torch.equal(batch["labels"], truth)
        half = ImageDataset(reader, fields=("label",), target_transform=lambda value: value / 2)
        assert torch.equal(half[0][0], truth[0] / 2)


@pytest.mark.parametrize("to", ["hdf5", "tar"])
def test_a_writer_accepts_such_labels(tmp_path: Path, to: str) -> None:
    with packer.writer(tmp_path / "out", to=to) as out:
        for number, (image, score) in enumerate(zip(IMAGES, SCORES, strict=True)):
            out.write(str(number), image=image, label=score)
        with pytest.raises(BadSampleError, match=r"float32 \[2\], expected float32 \[\]"):
            out.write("4", image=IMAGES[0], label=[0.5, 1.5])
        with pytest.raises(BadSampleError, match="has no label, but others have"):
            out.write("5", image=IMAGES[0])
    with readers.open(tmp_path / "out") as reader:
        assert reader.kinds["target"] == "target" and reader.labels.tolist() == [-1] * 4
        assert [ImageDataset(reader, fields=("label",))[i][0].item() for i in range(4)] == pytest.approx(SCORES)
    packer.extract(tmp_path / "out", tmp_path / "files")
    assert [float(np.load(tmp_path / "files" / f"{i}.target.npy")) for i in range(4)] == pytest.approx(SCORES)


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ([0.5, "", "NA", 1.25], {"label_column": "score"}, [0.5, np.nan, np.nan, 1.25]),
        (["1", "0.5", "3", "4"], {"fields": {"age:target": "score"}}, [1, 0.5, 3, 4]),
    ],
    ids=["no number is an explicit nan", "a field may be called a target"],
)
def test_valid_labels(tmp_path: Path, values: list[Any], options: Any, expected: list[float]) -> None:
    source = packer.open_source(table(tmp_path / "src", ".tsv", values), **options)
    packer.convert(source, "tar", tmp_path / "out", run=packer.Run(workers=1))
    with readers.open(tmp_path / "out") as reader:
        ((labels,),) = ImageLoader(reader, 4, fields=("label",), shuffle=False)
        assert np.array_equal(labels.numpy(), np.array(expected, np.float32), equal_nan=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["1", "0.5", "3", "4"], "the label '0.5' is not a whole number; .*--field NAME:target=COLUMN"),
        ([[1, 2], [1, 2, 3], [0, 1], [1, 1]], "line 3: the label has 3 numbers, that of line 2 has 2"),
        ([[1, 2], "", [0, 1], [1, 1]], "line 3: the label '' is not a list"),
        ([["a"], [1], ["b"], []], "some labels are lists of names, others of numbers"),
        ([[{}], [1], [1], [1]], "line 2: .* is not a list of numbers, or of names"),
    ],
)
def test_invalid_labels(tmp_path: Path, values: list[Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        packer.convert(labelled(table(tmp_path / "src", ".tsv", values)), "tar", tmp_path / "out")


def test_labels_that_differ_between_shards_are_refused(tmp_path: Path) -> None:
    source = labelled(hub(tmp_path / "src", [[0.5], [1.5], [0.5, 1.0], [2.0, 3.0]]))
    with pytest.raises(SourceError, match=r"the labels \(score\) in .* are float32 \[2\], those in .* float32 \[1\]"):
        packer.convert(source, "tar", tmp_path / "out", shards=packer.Shards(samples=2), run=packer.Run(workers=1))
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_pipelines_of_class_numbers_refuse_other_labels(tmp_path: Path) -> None:
    dali = pytest.importorskip("readers.dali")
    packer.convert(Program(SCORES), "tar", tmp_path / "out", run=packer.Run(workers=1))
    with (
        readers.open(tmp_path / "out") as reader,
        pytest.raises(ValueError, match="labels of this set are in its field"),
    ):
        dali.Source(reader, 2)
