"""Files of a set for users without packer: README.md, SHA256SUMS and classes.txt. packer's readers need none of them.

    README.md     what the set is, and how to read it with other libraries (`readme`). packer's part is between two
                  comments; text that users write before and after it is kept
    SHA256SUMS    for  sha256sum -c : of every shard, every file of an index, dataset.json and classes.txt
    classes.txt   the class names, one per line, in the order of the labels

All three follow from dataset.json, which has the SHA-256 of each shard and column, so no shard is read to rewrite them.
dataset.json is the commit point. In a new set these files are written before it. When dataset.json is replaced,
SHA256SUMS, and classes.txt if the classes change, are removed before and written last, so neither ever describes
another state of the set. If a command is killed in between, the next one finishes the work.

dataset.json lists them ("documents"). A file of the same name that packer did not write is left alone, and not listed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from string import Template

from cache.files import Folder, read_regular
from cache.messages import human_bytes, plural, printable, quoted
from readers.layout import (
    CLASSES_FILE,
    DATASET_FILE,
    EDITS,
    MAX_JSON_BYTES,
    README_FILE,
    SUMS_FILE,
    AdoptedKeys,
    ColumnFile,
    DatasetInfo,
    ShardInfo,
    SplitInfo,
    parse_dataset_info,
)

__all__ = [
    "class_lines",
    "differences",
    "has_checksums",
    "read_document",
    "readme",
    "remove_documents",
    "repair_documents",
    "write_dataset_info",
]

_BEGIN = b"<!-- packer begin: this part is written again when the set changes; what is before and behind it stays -->\n"
_END = b"<!-- packer end -->\n"
_MAX_README_BYTES = 16 << 20
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"  # the line ends of str.splitlines
_ESCAPES = {ord(end): ascii(end)[1:-1] for end in _LINE_ENDS} | {ord("\\"): "\\\\", 0: "\\x00"}


def write_dataset_info(
    place: Folder, info: DatasetInfo, *, scratch: Folder, note: Callable[[str], None] | None = None
) -> DatasetInfo:
    """Write dataset.json into `place`, which makes it a set, and the documents; returns the written DatasetInfo.

    scratch: a folder on the same filesystem for temporary files.
    note: called if a set was changed but its documents cannot be written; without it, that is an error.
    """
    new = replace(info, documents=tuple(name for name in _names_of(info) if _is_ours(place, name, info)))
    text = new.to_json().encode("utf-8")
    if place.kind(DATASET_FILE):
        for name in dict.fromkeys((*info.documents, *new.documents)):
            if name != README_FILE and (name == SUMS_FILE or not _is_current(place, name, new)):
                _remove(place, name)
        place.write(DATASET_FILE, text, scratch=scratch)
        try:
            _write(place, new, text, scratch)
        except OSError as error:
            if note is None:
                raise
            note(
                f"warning: the set was changed, but {error}; free space, and  "
                f"packer prune {quoted(place.path)}  writes it"
            )
    else:
        _write(place, new, text, scratch)
        place.write(DATASET_FILE, text, scratch=scratch)
    return new


def repair_documents(place: Folder, *, scratch: Folder) -> None:
    """Finish the work of a killed command: write the listed documents that are missing or not up to date.

    Raises DatasetError.
    """
    text = place.read(DATASET_FILE, MAX_JSON_BYTES)
    info = parse_dataset_info(text, place.path / DATASET_FILE)
    _write(place, replace(info, documents=tuple(n for n in info.documents if _is_ours(place, n, info))), text, scratch)


def remove_documents(place: Folder, names: Iterable[str]) -> None:
    """Remove these documents of a set that is about to be removed, except what users have added to its README."""
    for name in names:
        _remove(place, name)


def has_checksums(info: DatasetInfo) -> bool:
    """Whether the SHA-256 of every shard and of every file of the indexes is known."""
    return all(split.columns for split in info.splits.values()) and all(file.sha256 for _, file in _files(info))


def class_lines(classes: tuple[str, ...]) -> bytes:
    r"""The content of classes.txt. Backslashes, line separators and other control characters are escaped as in Python
    ("\\", "\n", "\x1b"), so that there is one line per class, and a terminal shows it literally."""
    return "".join(f"{printable(name.translate(_ESCAPES))}\n" for name in classes).encode("utf-8", "backslashreplace")


def differences(
    read: Callable[[str], bytes | None], text: bytes, info: DatasetInfo, title: object
) -> Iterator[tuple[str, str]]:
    """(file, problem) for SHA256SUMS and classes.txt of a set, if they exist and disagree with dataset.json.

    read: returns the content of a file of the set, None if it does not exist; may raise OSError.
    text: the text of dataset.json, read as `info`. title: of the set.
    """
    for name in (name for name in (CLASSES_FILE, SUMS_FILE) if name in info.documents):
        try:
            content = read(name)
        except OSError as error:
            yield name, f"cannot be read: {error}"
            continue
        if content is None:
            continue
        if name == CLASSES_FILE:
            if content != class_lines(info.classes):
                yield name, f"does not have the classes of dataset.json; {_advice(title)}"
            continue
        listed = _parse_sums(content)
        for path, digest in _sums(info, text).items():
            if path not in listed:
                yield path, f"SHA256SUMS does not list it; {_advice(title)}"
            elif listed[path] != digest:
                origin = "the file has" if path == DATASET_FILE else "dataset.json says"
                yield path, f"SHA256SUMS says the SHA-256 {listed[path]}, {origin} {digest}; {_advice(title)}"


def read_document(root: Path, name: str) -> bytes | None:
    """The content of a file of a set in a directory, None if it does not exist. Raises OSError."""
    try:
        return read_regular(root / name, MAX_JSON_BYTES)
    except FileNotFoundError:
        return None


def _advice(title: object) -> str:
    return f"was a file changed by hand, or a command killed?  packer prune {quoted(title)}  writes SHA256SUMS again"


# --- names and ownership of documents -------------------------------------------------------------------------------
def _names_of(info: DatasetInfo) -> list[str]:
    """The documents in the order in which they are written: SHA256SUMS last."""
    names = {README_FILE: True, CLASSES_FILE: bool(info.classes), SUMS_FILE: has_checksums(info)}
    return [name for name, is_wanted in names.items() if is_wanted]


def _is_ours(place: Folder, name: str, info: DatasetInfo) -> bool:
    """Whether packer may write a file of this name: it does not exist, or packer wrote it (also in a killed run)."""
    kind = place.kind(name)
    if not kind:
        return True
    if kind != "file":
        return False
    try:
        content = place.read(name, _MAX_README_BYTES if name == README_FILE else MAX_JSON_BYTES)
    except OSError:
        return False
    if name == README_FILE:
        return _around(content) is not None
    if name == SUMS_FILE:
        return name in info.documents or DATASET_FILE in _parse_sums(content)
    return name in info.documents or content == class_lines(info.classes)


def _is_current(place: Folder, name: str, info: DatasetInfo) -> bool:
    """Whether classes.txt, if it is the document, has the classes of `info`."""
    return name in _names_of(info) and _is_ours(place, name, replace(info, documents=()))


def _around(content: bytes) -> tuple[bytes, bytes] | None:
    """The text before and after packer's part of a README; None if it has no such part."""
    before, begin, rest = content.partition(_BEGIN)
    _, end, behind = rest.partition(_END)
    return (before, behind) if begin and end else None


# --- their content --------------------------------------------------------------------------------------------------
def _files(info: DatasetInfo) -> Iterator[tuple[str, ShardInfo | ColumnFile]]:
    """Shards and columns by path."""
    for split in info.splits.values():
        yield from ((shard.path, shard) for shard in split.shards)
        yield from ((f"{split.index}/{name}", column) for name, column in split.columns.items())


def _sums(info: DatasetInfo, text: bytes) -> dict[str, str]:
    """SHA-256 by path, sorted."""
    sums = {path: file.sha256 for path, file in _files(info)}
    sums[DATASET_FILE] = hashlib.sha256(text).hexdigest()
    if CLASSES_FILE in info.documents:
        sums[CLASSES_FILE] = hashlib.sha256(class_lines(info.classes)).hexdigest()
    return dict(sorted(sums.items()))


def _sums_text(sums: Mapping[str, str]) -> bytes:
    """The format of sha256sum of GNU coreutils: names with a backslash or a line feed are escaped and marked."""
    lines = []
    for path, digest in sums.items():
        escaped = path.replace("\\", "\\\\").replace("\n", "\\n")
        lines.append(f"{'' if escaped == path else chr(92)}{digest}  {escaped}\n")
    return "".join(lines).encode("utf-8")


def _parse_sums(content: bytes) -> dict[str, str]:
    """SHA-256 by path, from the readable lines."""
    sums = {}
    for line in content.decode("utf-8", "replace").split("\n"):
        digest, _, path = line.partition("  ")
        if digest.startswith("\\"):
            digest, path = digest[1:], path.replace("\\\\", "\0").replace("\\n", "\n").replace("\0", "\\")
        if len(digest) == 64 and path:
            sums[path.removeprefix("./")] = digest.lower()
    return sums


def _write(place: Folder, info: DatasetInfo, text: bytes, scratch: Folder) -> None:
    """Write the documents that are missing or not up to date, SHA256SUMS last."""
    is_new = False
    for name in (name for name in _names_of(info) if name in info.documents):
        there = place.read(name, MAX_JSON_BYTES) if place.kind(name) else None
        if name == README_FILE:
            before, behind = (there and _around(there)) or (b"", b"")
            content = before + _BEGIN + readme(info).encode("utf-8", "backslashreplace") + _END + behind
        elif name == CLASSES_FILE:
            content = class_lines(info.classes)
        else:
            content = _sums_text(_sums(info, text))
        if content != there:
            with place.writing(name, scratch=scratch, sync_name=False) as file:
                file.write(content)
            is_new = True
    if is_new:
        place.sync()


def _remove(place: Folder, name: str) -> None:
    """Remove a document; of a README that users have added to, only packer's part."""
    if place.kind(name) != "file":
        return
    if name == README_FILE:
        around = _around(place.read(name, _MAX_README_BYTES))
        if around is None:
            return
        if any(part.strip() for part in around):
            place.write(name, _BEGIN.join((around[0], _END + around[1])))  # for a later set in the same directory
            return
    place.unlink(name)


# --- README.md: follows from dataset.json alone, so no sample is read to rewrite it
# -------------------------------------
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
_WHERE_FIRST = {"tar": "member `KEY.jpg`, `KEY.png`, …, by the image's codec", "tfrecord": "feature `image/encoded`"}
_WHERE_JSON = {"tar": "member `KEY.json`", "tfrecord": "feature `json`"}
_IMPORTS = "import json\nfrom pathlib import Path\n\n"
_CONTENT = f'json.loads(Path("{DATASET_FILE}").read_text(encoding="utf-8"))'
_MOST_SHARDS, _MOST_SOURCE = 3, 500
_RUN = re.compile("`+")


def readme(info: DatasetInfo) -> str:
    """The text of README.md, in Markdown."""
    parts = [_head(info), _splits(info), _fields(info), _labels(info), _changed(info), _check(info), *_examples(info)]
    return "\n".join(part for part in parts if part)


def _is_packed(info: DatasetInfo) -> bool:
    """Whether packer wrote the shards, so that the names in them are known."""
    return "by" in info.made and info.adopted == AdoptedKeys()


def _text(text: str) -> str:
    """The text as a literal of Python."""
    return json.dumps(text, ensure_ascii=False)


def _head(info: DatasetInfo) -> str:
    samples = sum(split.samples for split in info.splits.values())
    shards = {shard.path for split in info.splits.values() for shard in split.shards}
    by = str(info.made.get("by", info.made.get("indexed_by", "packer")))
    source = f", from {_code(str(info.made['source']))}" if "source" in info.made else ""
    count = plural(samples, "image" if "image" in info.fields else "sample")
    made = f"{plural(len(shards), f'{info.format} shard')}\n\nBy {_plain(by)}{source}"
    return f"# {count} in {made}.\n"


def _splits(info: DatasetInfo) -> str:
    rows = [("split", "samples", "shards", "bytes")]
    for name, split in info.splits.items():
        size = human_bytes(sum(shard.bytes for shard in split.shards))
        rows.append((_cell(name), f"{split.samples:,}", f"{len(split.shards):,}", size))
    return _table(rows)


def _fields(info: DatasetInfo) -> str:
    rows = [("field", "content", "in the shards")]
    for number, (name, kind) in enumerate(info.fields.items()):
        where = _WHERE_JSON.get(info.format) if kind == "json" and name == "json" else None
        if number == 0 and name == "image":
            where = _WHERE_FIRST.get(info.format)
        if kind == "pixels":
            where = f"data set `{name}`, [samples, height, width, 3]"
        where = where or _WHERE.get(info.format, "").format(name=name)
        known = where if _is_packed(info) else ""
        own = " (in separate shards)" if name in info.separate else ""
        rows.append((_cell(name), _KINDS[kind], f"{known}{own}"))
    return _table(rows)


def _labels(info: DatasetInfo) -> str:
    if not info.classes:
        return ""
    offset = f" The shards store label + {info.label_offset}." if info.label_offset else ""
    return (
        f"Labels are numbers from 0; line 1 of {CLASSES_FILE} is the name of label 0, and there are "
        f"{plural(len(info.classes), 'class')}.{offset} A backslash there begins an escape of Python, such as \\n.\n"
    )


def _changed(info: DatasetInfo) -> str:
    edits = [EDITS[name] for name in info.edited]
    if not edits:
        return ""
    return (
        f"**This set was changed after it was packed: {'; '.join(edits)}.** The shards themselves contain the original "
        f"state. The index (below) is right; `packer reshard` makes shards that agree with it.\n"
    )


def _check(info: DatasetInfo) -> str:
    if SUMS_FILE not in info.documents:
        return ""
    return (
        f"## Is it intact?\n\n```bash\nsha256sum --check --quiet {SUMS_FILE}\n```\n\n"
        f"For part of the files: `--ignore-missing`. `packer verify .` also compares every sample with the index.\n"
    )


def _examples(info: DatasetInfo) -> Iterator[str]:
    """Code that reads the set, from the templates in packer/readme."""
    names = ["packer"]
    values = {"split": _text("train"), "what": 'len(sample.fields["image"])'}
    if "image" not in info.fields:
        values["what"] = "list(sample.fields)"
    if info.splits:
        split, part = next(iter(info.splits.items()))
        field, offset = next(iter(info.fields)), f" - {info.label_offset}" if info.label_offset else ""
        parts = {re.sub(r"\W", "_", name): part for name, part in info.splits.items()}
        class_names = (
            f'names = Path("{CLASSES_FILE}").read_text(encoding="utf-8").splitlines()\n' if info.classes else ""
        )
        imports_of_all = _imports(*parts.values())
        values |= {
            "split": _text(split),
            "dataset": _CONTENT,
            "field": field,
            "shard": _text(part.shards[0].path) if part.shards else "",
            "shard_column": f"{field}.shard" if field in info.separate else "shard",
            "shards": _shards(info, part),
            "imports": _imports(part),
            "imports_of_all": imports_of_all or _IMPORTS.removeprefix("import json\n") * bool(class_names),
            "files": ", ".join(f"{_text(name)}: {_shards(info, entry)}" for name, entry in parts.items()),
            "variable": _text(next(iter(parts))),
            "names": class_names,
            "name": f'names[sample["cls"]{offset}]' if class_names else f'sample["cls"]{offset}',
            "offset": offset,
        }
        names.append("numpy")
        if _is_packed(info) and "image" in info.fields and not (info.edited or info.separate):
            names.append("pixels" if info.fields[field] == "pixels" else info.format)
    fence = _fence("".join(values.values()))
    for name in names:
        template = files("packer") / "readme" / f"{name}.md"
        if template.is_file():
            yield Template(template.read_text(encoding="utf-8")).substitute(values, fence=fence)


def _imports(*splits: SplitInfo) -> str:
    """The imports for `_shards`."""
    return _IMPORTS if any(len(split.shards) > _MOST_SHARDS for split in splits) else ""


def _shards(info: DatasetInfo, split: SplitInfo) -> str:
    """An expression for the paths of a split's shards; if there are many, it reads dataset.json."""
    if not _imports(split):
        return "[" + ", ".join(_text(shard.path) for shard in split.shards) + "]"
    name = next(name for name, part in info.splits.items() if part is split)
    return f'[shard["path"] for shard in {_CONTENT}["splits"][{_text(name)}]["shards"]]'


# --- Markdown -------------------------------------------------------------------------------------------------------
def _table(rows: Sequence[Sequence[str]]) -> str:
    """rows: lists of cells; the first row is the header."""
    head, *rest = (f"| {' | '.join(row)} |\n" for row in rows)
    return "".join([head, f"|{'---|' * len(rows[0])}\n", *rest])


def _fence(text: str) -> str:
    """A fence with more backticks than any run of them in `text`."""
    return "`" * max(3, 1 + max((len(run) for run in _RUN.findall(text)), default=0))


def _code(text: str) -> str:
    """Foreign text as code, on one line."""
    text = json.dumps(text[:_MOST_SOURCE], ensure_ascii=False)[1:-1]
    text = "".join(c if c.isprintable() else " " for c in text)
    return f"{_fence(text)} {text} {_fence(text)}" if "`" in text else f"`{text}`"


def _cell(text: str) -> str:
    return _code(text).replace("|", "\\|")


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9 .+_-]", "", text[:_MOST_SOURCE])
