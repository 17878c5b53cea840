"""The README.md of a set: what it is and how to read it, with its own names in every example.

It follows from dataset.json alone, so that it can be written again after each change without reading a sample.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from cache.messages import human_bytes, plural
from readers.layout import CLASSES_FILE, DATASET_FILE, EDITS, SUMS_FILE, AdoptedKeys, DatasetInfo, SplitInfo

__all__ = ["readme"]

_KINDS = {
    "image": "an encoded image (JPEG, PNG, …)",
    "mask": "a PNG or the like, one channel: numbers of classes or instances",
    "boxes": ".npy, float32 [k, 4]: x0, y0, x1, y1 in pixels",
    "points": ".npy, float32 [..., 2]: x, y in pixels",
    "array": ".npy",
    "target": ".npy: the label, where that is not the number of a class",
    "pixels": "uint8 [height, width, 3]: raw pixels, red, green, blue",
    "text": "text in UTF-8",
    "json": "JSON in UTF-8",
    "file": "bytes of any kind",
}
_WHERE = {
    "hdf5": "data set `{name}/data`, with `{name}/offset` and `{name}/length`",
    "tar": "member `KEY.{name}.SUFFIX`",
    "tfrecord": "feature `{name}/encoded`",
}
_WHERE_FIRST = {"tar": "member `KEY.jpg`, `KEY.png`, … by what it is", "tfrecord": "feature `image/encoded`"}
_WHERE_JSON = {"tar": "member `KEY.json`", "tfrecord": "feature `json`"}
_EXTENSIONS = '("jpg", "png", "webp", "gif", "bmp", "tif")'
_IMPORTS = ["import json", "from pathlib import Path", ""]
_CONTENT = f'json.loads(Path("{DATASET_FILE}").read_text(encoding="utf-8"))'
_MOST_SHARDS, _MOST_SOURCE = 3, 500
_RUN = re.compile("`+")


def readme(info: DatasetInfo) -> str:
    """The text, in Markdown."""
    parts = [_head(info), _splits(info), _fields(info), _labels(info), _changed(info), _check(info), _packer(info)]
    if info.splits:
        parts.append(_numpy(info))
        if _is_packed(info) and "image" in info.fields and not info.edited and not info.separate:
            parts += _EXAMPLES.get(info.format, lambda info: [])(info)
    return "\n".join(part for part in parts if part)


def _is_packed(info: DatasetInfo) -> bool:
    """Whether packer wrote the shards, so that it is known what they call things."""
    return "by" in info.made and info.adopted == AdoptedKeys()


def _text(text: str) -> str:
    """A literal of Python."""
    return json.dumps(text, ensure_ascii=False)


def _head(info: DatasetInfo) -> str:
    samples = sum(split.samples for split in info.splits.values())
    shards = {shard.path for split in info.splits.values() for shard in split.shards}
    by = str(info.made.get("by", info.made.get("indexed_by", "packer")))
    source = f", from {_code(str(info.made['source']))}" if "source" in info.made else ""
    return (
        f"# {plural(samples, 'image')} in {plural(len(shards), f'{info.format} shard')}\n\nBy {_plain(by)}{source}.\n"
    )


def _splits(info: DatasetInfo) -> str:
    rows = [("split", "samples", "shards", "bytes")]
    for name, split in info.splits.items():
        size = human_bytes(sum(shard.bytes for shard in split.shards))
        rows.append((_cell(name), f"{split.samples:,}", f"{len(split.shards):,}", size))
    return _table(rows)


def _fields(info: DatasetInfo) -> str:
    rows = [("field", "what it is", "in the shards")]
    for number, (name, kind) in enumerate(info.fields.items()):
        where = _WHERE_JSON.get(info.format) if kind == "json" and name == "json" else None
        if number == 0 and name == "image":
            where = _WHERE_FIRST.get(info.format)
        if kind == "pixels":
            where = f"data set `{name}`, [samples, height, width, 3]"
        where = where or _WHERE.get(info.format, "").format(name=name)
        known = where if _is_packed(info) else ""
        own = " (in shards of its own)" if name in info.separate else ""
        rows.append((_cell(name), _KINDS[kind], f"{known}{own}"))
    return _table(rows)


def _labels(info: DatasetInfo) -> str:
    if not info.classes:
        return ""
    offset = f" The shards store label + {info.label_offset}." if info.label_offset else ""
    return (
        f"Labels are numbers from 0; line 1 of {CLASSES_FILE} is the name of label 0, and there are "
        f"{plural(len(info.classes), 'class')}.{offset} A backslash there begins an escape of Python's, as \\n.\n"
    )


def _changed(info: DatasetInfo) -> str:
    said = [EDITS[name] for name in info.edited]
    if not said:
        return ""
    return (
        f"**This set was changed after it was packed: {'; '.join(said)}.** Who reads the shards themselves sees what "
        f"was packed. The index (below) is right; `packer reshard` makes shards that agree with it.\n"
    )


def _check(info: DatasetInfo) -> str:
    if SUMS_FILE not in info.documents:
        return ""
    return (
        f"## Is it whole?\n\n{_block('bash', [f'sha256sum --check --quiet {SUMS_FILE}'])}\n"
        f"Of a part of the files: `--ignore-missing`. `packer verify .` also compares every sample with the index.\n"
    )


def _packer(info: DatasetInfo) -> str:
    split = next(iter(info.splits), "train")
    lines = [
        "import readers",
        "",
        f'with readers.open(".", {_text(split)}) as reader:',
        "    sample = reader[0]",
        '    print(len(reader), sample.key, sample.label, len(sample.fields["image"]))',
    ]
    if "image" not in info.fields:
        lines[-1] = "    print(len(reader), sample.key, sample.label, list(sample.fields))"
    return f"## With packer\n\n{_block('python', lines)}"


def _numpy(info: DatasetInfo) -> str:
    """By the index, which is right for every format and after every change."""
    split, field = next(iter(info.splits)), next(iter(info.fields))
    shard_column = f"{field}.shard" if field in info.separate else "shard"
    lines = [
        *_IMPORTS,
        "import numpy as np",
        "",
        f'split = {_CONTENT}["splits"][{_text(split)}]',
        'column = {name: np.load(f"{split[\'index\']}/{name}", mmap_mode="r") for name in split["columns"]}',
        "i = 0  # the number of a sample",
        f'shard = split["shards"][column["{shard_column}.npy"][i]]["path"]',
        'with open(shard, "rb") as file:',
        f'    file.seek(int(column["{field}.offset.npy"][i]))',
        f'    data = file.read(int(column["{field}.length.npy"][i]))',
        'key = bytes(column["key.npy"][slice(*column["key.offset.npy"][i : i + 2])]).decode()',
        'print(key, int(column["label.npy"][i]), len(data))',
    ]
    text = (
        f"Each sample is a run of bytes in a shard, and the index, a folder of columns of NumPy, says which. A sample "
        f"without this field has the offset {2**64 - 1}, one without a label has {-1}.\n"
    )
    return f"## With NumPy alone\n\n{text}\n{_block('python', lines)}"


# --- formats --------------------------------------------------------------------------------------------------------
def _hdf5(info: DatasetInfo) -> Iterator[str]:
    split, field = _first(info), next(iter(info.fields))
    lines = [
        "import h5py",
        "",
        f"with h5py.File({_text(split.shards[0].path)}) as file:",
        f'    for key, label, start, length in zip(file["key"].asstr(), file["label"], file["{field}/offset"], '
        f'file["{field}/length"]):',
        f'        data = file["{field}/data"][int(start) : int(start + length)].tobytes()',
        f"        print(key, {_without_offset('label', info)}, len(data))",
    ]
    if info.fields[field] == "pixels":
        lines[3:] = [
            f'    for key, label, pixels in zip(file["key"].asstr(), file["label"], file["{field}"]):',
            f"        print(key, {_without_offset('label', info)}, pixels.shape)",
        ]
    yield f"## With h5py\n\nData sets are contiguous.\n\n{_block('python', lines)}"


def _tar(info: DatasetInfo) -> Iterator[str]:
    split = _first(info)
    label = _without_offset('int(sample["cls"])', info)
    lines = [
        *_json(split),
        "import webdataset",
        "",
        f"shards = {_shards(info, split)}",
        "for sample in webdataset.WebDataset(shards, shardshuffle=False):",
        f'    data = next((sample[name] for name in {_EXTENSIONS} if name in sample), b"")',
        f'    label = {label} if "cls" in sample else None',
        '    print(sample["__key__"], label, len(data))',
    ]
    yield f"## With webdataset\n\n{_block('python', lines)}"
    parts = {re.sub(r"\W", "_", name): part for name, part in info.splits.items()}
    listed = ", ".join(f"{_text(name)}: {_shards(info, part)}" for name, part in parts.items())
    names, first, number = [], next(iter(parts)), _without_offset('sample["cls"]', info)
    if info.classes:
        names.append(f'names = Path("{CLASSES_FILE}").read_text(encoding="utf-8").splitlines()')
        number = f"names[{number}]"
    lines = [
        *(_json(*parts.values()) or (_IMPORTS[1:] if names else [])),
        "from datasets import load_dataset",
        "",
        f"files = {{{listed}}}",
        f'images = load_dataset("webdataset", data_files=files, split={_text(first)}, streaming=True)',
        *names,
        "for sample in images:",
        f'    print(sample["__key__"], "cls" in sample and {number}, list(sample))',
    ]
    yield f"## With datasets (Hugging Face)\n\n{_block('python', lines)}"


def _tfrecord(info: DatasetInfo) -> Iterator[str]:
    split = _first(info)
    label = _without_offset('int(example["image/class/label"])', info)
    lines = [
        *_json(split),
        "import tensorflow as tf",
        "",
        f"shards = {_shards(info, split)}",
        'features = {"image/encoded": tf.io.FixedLenFeature([], tf.string, ""),',
        '            "image/class/label": tf.io.FixedLenFeature([], tf.int64, -1)}',
        "for record in tf.data.TFRecordDataset(shards):",
        "    example = tf.io.parse_single_example(record, features)",
        f'    print({label}, len(example["image/encoded"].numpy()))',
    ]
    yield f"## With TensorFlow\n\n{_block('python', lines)}"
    lines = [
        "from tfrecord.reader import tfrecord_loader",
        "",
        f"for example in tfrecord_loader({_text(split.shards[0].path)}, None):",
        '    print(example.get("image/class/label"), sorted(example), len(example["image/encoded"]))',
    ]
    yield f"## With the package tfrecord\n\n{_block('python', lines)}"


_EXAMPLES = {"hdf5": _hdf5, "tar": _tar, "tfrecord": _tfrecord}


def _first(info: DatasetInfo) -> SplitInfo:
    return next(iter(info.splits.values()))


def _json(*splits: SplitInfo) -> list[str]:
    """The import that `_shards` needs."""
    return _IMPORTS if any(len(split.shards) > _MOST_SHARDS for split in splits) else []


def _shards(info: DatasetInfo, split: SplitInfo) -> str:
    """An expression for the paths of a split's shards; where there are many, it reads dataset.json."""
    if not _json(split):
        return "[" + ", ".join(_text(shard.path) for shard in split.shards) + "]"
    name = next(name for name, part in info.splits.items() if part is split)
    return f'[shard["path"] for shard in {_CONTENT}["splits"][{_text(name)}]["shards"]]'


def _without_offset(label: str, info: DatasetInfo) -> str:
    return f"{label} - {info.label_offset}" if info.label_offset else label


# --- Markdown -------------------------------------------------------------------------------------------------------
def _table(rows: Sequence[Sequence[str]]) -> str:
    """rows: of cells; the first row has the names of the columns."""
    head, *rest = (f"| {' | '.join(row)} |\n" for row in rows)
    return "".join([head, f"|{'---|' * len(rows[0])}\n", *rest])


def _block(language: str, lines: Sequence[str]) -> str:
    text = "\n".join(lines)
    fence = "`" * max(3, 1 + max((len(run) for run in _RUN.findall(text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}\n"


def _code(text: str) -> str:
    """Text from elsewhere as code, on one line."""
    text = json.dumps(text[:_MOST_SOURCE], ensure_ascii=False)[1:-1]
    text = "".join(c if c.isprintable() else " " for c in text)
    fence = "`" * (1 + max((len(run) for run in _RUN.findall(text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def _cell(text: str) -> str:
    return _code(text).replace("|", "\\|")


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9 .+_-]", "", text[:_MOST_SOURCE])
