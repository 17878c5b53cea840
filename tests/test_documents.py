"""README.md, SHA256SUMS and classes.txt: every example runs, every checksum is correct, and no foreign file is lost."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import make_jpeg, tree_of
from remote_suite import address  # noqa: F401
from set_cases import content, pack_tree, unlisted, wrong
from suites.programs import run_packer

import packer
import readers
from cache.remote import Remote
from packer.testing.children import crashes_at
from readers.layout import DOCUMENTS, read_dataset_info

COUNTS = {"train": {"cat": 3, "dog": 3}, "val": {"dog": 2}}
BEGIN, END = "<!-- packer begin", "<!-- packer end -->\n"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return pack_tree(tmp_path / "set", "tar", COUNTS)


@pytest.fixture
def packed(target: Path) -> Path:
    """The packed set for the fixture `address`."""
    return target


def sha256sum(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["sha256sum", "--check", "--quiet", "--strict", *options, "SHA256SUMS"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)


def blocks(root: Path, language: str) -> list[str]:
    text = (root / "README.md").read_text(encoding="utf-8")
    fences = re.findall(rf"^(`{{3,}}){language}\n(.*?)^\1$", text, re.MULTILINE | re.DOTALL)
    return [code for _, code in fences]


def printed(code: str) -> list[str]:
    """The output of an example."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {})
    return out.getvalue().splitlines()


EXAMPLES = {"hdf5": {"h5py"}, "tar": {"webdataset", "datasets"}, "tfrecord": {"tensorflow", "tfrecord"}}


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset
@pytest.mark.parametrize(("to", "offset", "shards"), [("hdf5", 1, 4), ("tar", 0, 4), ("tar", 1, 1), ("tfrecord", 1, 9)])
def test_the_examples_of_a_readme_run(
    to: str, offset: int, shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = pack_tree(tmp_path / "set", to, COUNTS, samples_per_shard=shards, label_offset=offset)
    assert sha256sum(root).returncode == 0, sha256sum(root)
    monkeypatch.chdir(root)
    with readers.open(root, "train") as reader:
        sizes = [len(reader.read(i)) for i in range(len(reader))]
        keys, labels = list(reader.keys), reader.labels.tolist()
    modules = set()
    for code in blocks(root, "python"):
        module = next(
            name for name in (*EXAMPLES[to], "numpy", "readers") if re.search(rf"(import|from) {name}\b", code)
        )
        modules.add(module)
        try:
            lines = printed(code)
        except ImportError as error:
            assert error.name == module == "tensorflow", error
            continue
        if module == "readers":
            assert lines == [f"6 {keys[0]} {labels[0]} {sizes[0]}"]
        elif module == "numpy":
            assert lines == [f"{keys[0]} {labels[0]} {sizes[0]}"]
        elif module in ("h5py", "webdataset"):
            assert (
                lines
                == [f"{key} {label} {size}" for key, label, size in zip(keys, labels, sizes, strict=True)][: len(lines)]
            )
            assert len(lines) == (4 if to == "hdf5" else 6)
        elif module == "datasets":
            names = [("cat", "dog")[label] for label in labels]
            assert [line.split()[:2] for line in lines] == [[key, name] for key, name in zip(keys, names, strict=True)]
        else:
            assert [line.split()[0] for line in lines] == [f"[{label + offset}]" for label in labels]
    assert modules == {"readers", "numpy", *EXAMPLES[to]}


HOSTILE = ["a\nb", "c\\d", "`x`|", "e\u2028f", "<!-- packer end -->", " ", "\x1b]0;x\x07g\u202e"]


def test_checksums_for_an_existing_set(tree: Path, tmp_path: Path) -> None:
    """The same as packing writes; not for a damaged set, and not over a foreign file."""
    root = tmp_path / "set"
    for checksums in (True, False):
        shards = packer.Shards(samples=20, checksums=checksums)
        packer.convert(tree, "hdf5", root, shards=shards, run=packer.Run(workers=1), overwrite=True)
        if checksums:
            expected = (root / "SHA256SUMS").read_text().splitlines()
    assert not (root / "SHA256SUMS").exists()
    (root / "SHA256SUMS").write_text("mine")
    with pytest.raises(readers.OutputError, match="is in the way, and packer did not write it"):
        packer.verify(root, sums=True)
    assert (root / "SHA256SUMS").read_text() == "mine"
    (root / "SHA256SUMS").unlink()
    assert run_packer("verify", root, "--sums").stdout.endswith("; SHA256SUMS is written\n")
    lines = (root / "SHA256SUMS").read_text().splitlines()
    assert [line for line in lines if line not in expected] == [line for line in lines if "  dataset.json" in line]
    assert sha256sum(root).returncode == 0 and not packer.convert(tree, "hdf5", root, shards=shards).shards_resumed
    shard = next(root.glob("*.h5"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert not packer.verify(root, sums=True).sums and (root / "SHA256SUMS").read_text().splitlines() == lines


def test_hostile_names_stay_on_one_line_and_inside_their_quotes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [{"image": make_jpeg(i), "label": i} for i in range(len(HOSTILE))]
    root = tmp_path / "set"
    packer.convert(iter(samples), "tar", root, classes=HOSTILE, shards=packer.Shards(checksums=True))
    lines = (root / "classes.txt").read_text(encoding="utf-8").splitlines()
    assert lines == ["a\\nb", "c\\\\d", "`x`|", "e\\u2028f", "<!-- packer end -->", " ", "\\x1b]0;x\\x07g\\u202e"]
    shard = "x\n```y\\ <!-- packer end -->.tar"
    (tmp_path / shard).write_bytes((root / "train-000000.tar").read_bytes())
    adopted = packer.index([tmp_path / shard], tmp_path / "out", checksums=True, workers=1).output
    assert sha256sum(adopted).returncode == 0, sha256sum(adopted)
    assert wrong(adopted) == []
    monkeypatch.chdir(root)
    assert printed(blocks(root, "python")[1])
    packer.relabel(root, names={"a\nb": "plain"})
    text = (root / "README.md").read_text(encoding="utf-8")
    assert text.startswith(BEGIN) and text.endswith(END) and text.count(BEGIN) == 1


def test_without_checksums_there_are_none_and_changes_add_none(target: Path, tmp_path: Path) -> None:
    root = pack_tree(tmp_path / "plain", "tar", {"train": {"eel": 2}}, seed=1, checksums=False)
    images = tree_of(tmp_path / "more", {"train/eel/new.jpg": make_jpeg(77)})
    packer.append(root, images, run=packer.Run(workers=1))
    packer.reshard(root, tmp_path / "again", run=packer.Run(workers=1))
    packer.merge([target, root], tmp_path / "both")
    for place in (root, tmp_path / "again", tmp_path / "both"):
        assert not (place / "SHA256SUMS").exists() and (place / "classes.txt").exists() and wrong(place) == []
        shards = [shard for split in read_dataset_info(place).splits.values() for shard in split.shards]
        assert "".join(shard.sha256 for shard in shards) == "" or place.name == "both"
    packer.append(target, root, run=packer.Run(workers=1))
    assert not (target / "SHA256SUMS").exists(), "a shard has a checksum"
    with packer.writer(tmp_path / "written", to="hdf5", shards=packer.Shards()) as out:
        out.write("a", image=make_jpeg(1))
    assert {path.name for path in (tmp_path / "written").iterdir()} & {*DOCUMENTS} == {"README.md"}


def test_a_change_hashes_no_shard_again(target: Path) -> None:
    """A shard is damaged in between: its old checksum stays and reveals the damage."""
    assert not unlisted(target)
    shard = target / "train-000001.tar"
    data = bytearray(shard.read_bytes())
    data[600] ^= 1
    shard.write_bytes(data)
    packer.drop(target, keys=["cat/cat0t0"])
    assert sha256sum(target).stdout == "train-000001.tar: FAILED\n"
    assert any("train-000001.tar" in line for line in wrong(target))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("dataset.json", lambda data: data.replace(b'"cat"', b'"owl"'), r"dataset.json: SHA256SUMS says the SHA-256"),
        ("classes.txt", lambda data: data[::-1], r"classes.txt: does not have the classes of dataset.json"),
        ("SHA256SUMS", lambda data: data[:3] + b"00000000" + data[11:], r"says the SHA-256 ...00000000\w+, "),
        ("train.index/label.npy", lambda data: data[:-1] + b"\1", r"label.npy: .* CRC32C"),
    ],
)
def test_a_file_that_changed_is_named(target: Path, name: str, change: Callable[[bytes], bytes], message: str) -> None:
    (target / name).write_bytes(change((target / name).read_bytes()))
    assert sha256sum(target).returncode == 1
    problems = [str(problem) for problem in packer.verify(target, workers=1).problems]
    assert any(re.search(message, line) for line in problems), problems
    if name != "train.index/label.npy":
        packer.prune(target)
        assert wrong(target) == [] and not unlisted(target)


def test_notes_of_users_in_a_readme_stay(target: Path, tmp_path: Path) -> None:
    text = (target / "README.md").read_text()
    (target / "README.md").write_text(f"# Photos of Ada\n\n{text}\nLicence: CC0\n")
    packer.relabel(target, names={"cat": "tiger"})
    packer.drop(target, where="width == 32")
    changed = (target / "README.md").read_text()
    assert changed.startswith("# Photos of Ada\n\n<!--") and changed.endswith("\nLicence: CC0\n")
    assert "This set was changed after it was packed" in changed and changed.count(BEGIN) == 1
    shards, run = packer.Shards(checksums=True), packer.Run(workers=1)
    packer.convert(tmp_path / "set-images", "hdf5", target, shards=shards, run=run, overwrite=True)
    replaced = (target / "README.md").read_text()
    assert replaced.startswith("# Photos of Ada\n\n") and "h5py" in replaced and "Licence" in replaced
    (target / "README.md").write_text("mine alone")
    packer.prune(target)
    packer.relabel(target, names={"cat": "lynx"})
    assert (target / "README.md").read_text() == "mine alone" and not unlisted(target)


def test_foreign_files_beside_adopted_shards_are_left_unchanged(tmp_path: Path) -> None:
    packed = pack_tree(tmp_path / "packed", "tar", {"train": {"cat": 2}})
    root = tmp_path / "theirs"
    root.mkdir()
    (packed / "train-000000.tar").rename(root / "train-000000.tar")
    foreign = {name: f"theirs: {name}\n".encode() for name in DOCUMENTS}
    tree_of(root, foreign)
    for _ in range(2):
        packer.index([root], workers=1)
        packer.relabel(root, names={"cat": "lynx"} if "cat" in read_dataset_info(root).classes else {"lynx": "cat"})
        assert {name: (root / name).read_bytes() for name in DOCUMENTS} == foreign
        assert read_dataset_info(root).documents == () and wrong(root) == []
        packer.reshard(root, run=packer.Run(workers=1))


def test_overwriting_and_starting_over_leave_no_old_document(tmp_path: Path) -> None:
    """Killed at any step, then replaced by another command: the documents belong to the set that exists."""
    first = tree_of(tmp_path / "first", {"a/1.jpg": make_jpeg(1), "b/2.jpg": make_jpeg(2)})
    second = tree_of(tmp_path / "second", {"c/1.jpg": make_jpeg(3)})
    out = tmp_path / "out"
    options: dict[str, Any] = {"shards": packer.Shards(checksums=True), "run": packer.Run(workers=1), "overwrite": True}
    crashed, step = True, 5
    while crashed:
        crashed = crashes_at(step, lambda: packer.convert(first, "tar", out, **options))
        if (out / "dataset.json").exists():
            assert wrong(out) == [] and sha256sum(out).returncode == 0
        packer.convert(second, "tar", out, **options)
        assert not unlisted(out) and (out / "classes.txt").read_text() == "c\n", step
        step += 9
    assert step > 30


def test_an_upload_has_the_documents_and_a_copy_from_there_is_checked(
    target: Path,
    tmp_path: Path,
    address: str,  # noqa: F811
) -> None:
    address += "-again"
    packer.upload(target, address)
    assert packer.upload(target, address).sent == 0
    assert packer.verify(address).ok
    with readers.stage(address, target=tmp_path / "node", any_filesystem=True) as staged:
        names = {path.name for path in staged.iterdir()}
        assert not names & {*DOCUMENTS}, "readers need a document"
        (staged / "SHA256SUMS").write_bytes((target / "SHA256SUMS").read_bytes())
        (staged / "classes.txt").write_bytes((target / "classes.txt").read_bytes())
        assert sha256sum(staged).returncode == 0
    remote = Remote(address)
    remote.store.put(
        "SHA256SUMS", (target / "SHA256SUMS").read_bytes().replace(b"  dataset.json", b"  other.json"), crc32c=0
    )
    (problem,) = packer.verify(address).problems
    assert "dataset.json: SHA256SUMS does not list it" in str(problem)
    (target / "classes.txt").write_text("x\n")
    with pytest.raises(readers.OutputError, match=r"classes.txt: does not have the classes"):
        packer.upload(target, address)


def test_datasets_reads_our_tars_and_extracted_trees(target: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    expected = {key.partition("/")[2]: record for key, record in content(target).items() if key.startswith("train/")}
    files = {name: sorted(map(str, target.glob(f"{name}-*.tar"))) for name in ("train", "val")}
    options: dict[str, Any] = {"cache_dir": str(tmp_path / "cache")}
    loaded = datasets.load_dataset("webdataset", data_files=files, **options)
    names = (target / "classes.txt").read_text().splitlines()
    train = loaded["train"].cast_column("cls", datasets.ClassLabel(names=names))
    assert (len(loaded["train"]), len(loaded["val"]), train.features["cls"].names) == (6, 2, ["cat", "dog"])
    raw = train.cast_column("jpg", datasets.Image(decode=False))
    for sample in raw:
        record = expected[sample["__key__"]]
        assert sample["jpg"]["bytes"] == record.fields["image"] and names[sample["cls"]] == record.label
    assert train[0]["jpg"].size == (32, 24)
    packer.extract(target, tmp_path / "tree")
    tree = datasets.load_dataset("imagefolder", data_dir=str(tmp_path / "tree"), **options)
    assert tree["train"].features["label"].names == ["cat", "dog"]
    assert sorted(tree["train"]["label"]) == [0, 0, 0, 1, 1, 1] and len(tree["validation"]) == 2


def test_verify_writes_the_documents_of_a_set_of_an_earlier_version(target: Path) -> None:
    info = json.loads((target / "dataset.json").read_text())
    del info["documents"]
    for split in info["splits"].values():
        for file in (*split["shards"], *split["columns"].values()):
            del file["sha256"]
    (target / "dataset.json").write_text(json.dumps(info))
    for name in DOCUMENTS:
        (target / name).unlink()
    packer.prune(target)
    assert not (target / "README.md").exists(), "the set was changed"
    packer.index([target], workers=1)
    assert packer.verify(target, sums=True).sums
    assert not unlisted(target) and wrong(target) == []
    before = {path.name: hashlib.sha256(path.read_bytes()).digest() for path in target.iterdir() if path.is_file()}
    packer.index([target], workers=1)
    assert before == {p.name: hashlib.sha256(p.read_bytes()).digest() for p in target.iterdir() if p.is_file()}
