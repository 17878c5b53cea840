"""The files of a data set on the Hugging Face Hub: which splits they are, and what their columns mean.

    data/train-00000-of-00008.parquet     split and number, as `push_to_hub` names them; also without data/
    small/train-00000-of-00001.parquet    of one data set among several in a repository
    default/train/0000.parquet            as in the branch of converted data sets
    train.parquet                         a file for each split

Features are in the metadata of each file, under the key "huggingface", as JSON; where a file has none, in the header of
README.md, in YAML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cache.errors import BadNameError, SourceError
from cache.files import read_regular
from cache.messages import listed, quoted
from packer.sources.folder_kinds import parquet_files
from packer.sources.lookups import plain_yaml
from packer.sources.shards import split_of_name
from readers.layout import SplitName

__all__ = ["HubFile", "class_names", "features_in", "readme_features", "splits_of"]

_SHARD = re.compile(r"(.+?)-(\d{5})-of-(\d{5})(?:-[0-9a-f]+)?")
_KEYWORDS = ("train", "validation", "valid", "val", "dev", "test")
_MAX_README_BYTES = 16 << 20
_MAX_YAML_BYTES = 4 << 20
_MAX_CLASSES = 1 << 24
_LFS = b"version https://git-lfs"


class HubFile(NamedTuple):
    """A file, its split, and where it is among `of` files of that: 0 where its name does not say."""

    path: Path
    split: str
    number: int = 0
    of: int = 0


def splits_of(root: Path) -> dict[str, list[Path]]:
    """The Parquet files of each split, in order, of a file or a folder.

    Raises SourceError where the folder holds several data sets, or where files of a split are missing.
    """
    if root.is_file():
        return {_of_name(root.stem) or split_of_name(root.name): [root]}
    found: dict[str, list[HubFile]] = {}
    for path in parquet_files(root):
        config, file = _place(root, path)
        found.setdefault(config, []).append(file)
    if not found:
        raise SourceError(f"{root}: no Parquet files")
    if len(found) > 1:
        folders = sorted(str(_folder_of(root, config)) for config in found)
        raise SourceError(
            f"{root}: holds {len(found)} data sets: {listed(sorted(found), 20)}; name the folder of the one that is "
            f"meant, for example  packer convert {quoted(folders[0])}"
        )
    splits: dict[str, list[HubFile]] = {}
    for file in next(iter(found.values())):
        splits.setdefault(file.split, []).append(file)
    return {name: _whole(root, name, files) for name, files in _ordered(splits).items()}


def _ordered(splits: Mapping[str, list[HubFile]]) -> dict[str, list[HubFile]]:
    """train, validation and test first, in this order."""
    rank = {name: number for number, name in enumerate(_KEYWORDS)}
    return {name: splits[name] for name in sorted(splits, key=lambda name: (rank.get(name, len(rank)), name))}


def _place(root: Path, path: Path) -> tuple[str, HubFile]:
    """(the data set that a file belongs to, "" for the only one; the file)."""
    folders = list(path.relative_to(root).parts[:-1])
    if folders[:1] == ["data"]:
        del folders[0]
    match = _SHARD.fullmatch(path.stem)
    if match:
        file = HubFile(path, match[1], int(match[2]), int(match[3]))
    elif path.stem.isdecimal() and folders:
        file = HubFile(path, folders.pop())
    else:
        named = _of_name(path.stem)
        last = _of_name(folders[-1]) if folders and not named else ""
        file = HubFile(path, named or last or "train")
        if last:
            folders.pop()
    try:
        return "/".join(folders), file._replace(split=SplitName(file.split))
    except BadNameError as error:
        raise SourceError(f"{path}: {error}") from error


def _of_name(stem: str) -> str:
    """The split that a name begins with or is: "" for none."""
    words = [word for word in re.split(r"[-_. \d]+", stem.lower()) if word]
    return next((word for word in words if word in _KEYWORDS), "")


def _folder_of(root: Path, config: str) -> Path:
    return root / "data" / config if (root / "data" / config).is_dir() and config else root / config


def _whole(root: Path, split: str, files: Sequence[HubFile]) -> list[Path]:
    """The paths of a split's files. Raises SourceError where some are missing."""
    counts = {file.of for file in files}
    if counts != {0}:
        count = max(counts)
        missing = sorted(set(range(count)) - {file.number for file in files})
        if len(counts) > 1 or len(files) != count or missing:
            such = f", the first of them {split}-{missing[0]:05d}-of-{count:05d}" if missing else ""
            raise SourceError(
                f"{root}: has {len(files)} files of {split}, but their names speak of "
                f"{listed(sorted(map(str, counts)))}{such}; download the rest, or remove those of another version"
            )
    for file in files:
        with open(file.path, "rb") as opened:
            if opened.read(len(_LFS)) == _LFS:
                raise SourceError(f"{file.path}: a pointer of Git LFS and not the file; run  git lfs pull")
    return [file.path for file in files]


# --- features -----------------------------------------------------------------------------------------------------
def features_in(metadata: Mapping[bytes, bytes] | None, path: Path) -> dict[str, Any] | None:
    """Column -> feature, as `datasets` writes it into a Parquet file: {"_type": "ClassLabel", "names": […]}."""
    text = (metadata or {}).get(b"huggingface")
    if text is None:
        return None
    try:
        features = json.loads(text)["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SourceError(f"{path}: its features cannot be read: {error!r:.80}") from error
    return dict(features) if isinstance(features, dict) else None


def readme_features(root: Path) -> dict[str, Any] | None:
    """The features in the README.md of a repository, or above a folder of it, in the same form; None for none."""
    folders = [root if root.is_dir() else root.parent]
    folders += [*folders[0].parents][:2]
    path = next((folder / "README.md" for folder in folders if (folder / "README.md").is_file()), None)
    if path is None:
        return None
    try:
        text = read_regular(path, _MAX_README_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: cannot be read: {error}") from error
    match = re.match(r"---\r?\n(.*?)\r?\n---", text, re.DOTALL)
    if match is None or "dataset_info" not in match[1] or len(match[1]) > _MAX_YAML_BYTES:
        return None
    header = plain_yaml(match[1], f"{path}: its header", "parquet", f"reading the names of classes in {path}")
    infos = header.get("dataset_info") if isinstance(header, dict) else None
    infos = infos if isinstance(infos, list) else [infos]
    names = {root.name, "default"} if len(infos) > 1 else set()
    for info in infos:
        if isinstance(info, dict) and (not names or info.get("config_name") in names):
            return {
                str(item["name"]): _feature(item.get("dtype"))
                for item in info.get("features") or ()
                if isinstance(item, dict) and "name" in item
            }
    return None


def _feature(dtype: Any) -> dict[str, Any]:
    """A feature of README.md in the form of those in files."""
    if dtype == "image":
        return {"_type": "Image"}
    if isinstance(dtype, dict) and isinstance(dtype.get("class_label"), dict):
        names = dtype["class_label"].get("names")
        if isinstance(names, dict):
            names = [names[key] for key in sorted(names, key=lambda key: int(key) if str(key).isdecimal() else -1)]
        return {"_type": "ClassLabel", "names": names}
    return {"_type": "Value", "dtype": dtype if isinstance(dtype, str) else ""}


def class_names(feature: Mapping[str, Any], where: object) -> tuple[str, ...]:
    """The names of the classes of a ClassLabel, () where it has only a number of them. Raises SourceError."""
    names = feature.get("names") or ()
    good = isinstance(names, list | tuple) and len(names) <= _MAX_CLASSES
    names = tuple(map(str, names)) if good else ()
    if not good or len(set(names)) < len(names) or any(not name or "\0" in name for name in names):
        raise SourceError(f"{where}: the names of its classes are {feature.get('names')!r:.80}, expected each once")
    return names
