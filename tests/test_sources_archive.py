"""Archives of image trees, made by GNU tar, zip and by hand: regular ones with the suite of sources, unusual, and
hostile ones."""

from __future__ import annotations

import gzip
import lzma
import os
import pickle
import re
import resource
import shutil
import struct
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import zstandard
from conftest import by_subject, files_of, tree_of
from suites.containers import COMPRESS, tar_of, write, zip_of
from suites.layouts import PICTURES, pack_error, refusal
from suites.programs import run_packer

import packer
import readers
from cache.errors import SourceError
from packer.sources.base import SourceListing
from packer.testing.sources import content_of

LONG = "a-long-folder-name-" * 7  # over the 100 bytes of a tar header's name
needs_tar = pytest.mark.skipif(shutil.which("tar") is None, reason="no tar command here")
ONE, TWO = ("a/1.jpg", PICTURES[0]), ("b/2.jpg", PICTURES[1])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with splits, classes, a nested folder, a long name and a stray text file."""
    names = ["train/b/2.jpg", "train/a/1.jpg", "train/a/sub/0.jpg", "train/a/3.jpeg", f"train/b/{LONG}.jpg"]
    names += ["val/a/x y.jpg", "val/b/ü.jpg"]
    return tree_of(tmp_path / "flowers", {**dict(zip(names, PICTURES, strict=False)), "train/b/notes.txt": b"text"})


def make_archive(tree: Path, suffix: str) -> Path:
    """An archive of a tree, whose members are in another order."""
    members = [(f"flowers/{name}", data) for name, data in reversed(files_of(tree).items())]
    data = zip_of(*members) if suffix == "zip" else COMPRESS[suffix](tar_of(*members))
    return write(tree.parent / f"flowers.{suffix}", data)


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def pack(source: Any, out: Path, to: str = "hdf5", **options: Any) -> Path:
    return packer.convert(source, to, out, **by_subject(options, workers=1)).output


def content(source: Path) -> dict[str, Any]:
    """All samples of a source by split and key, without the order of the source."""
    splits = content_of(packer.open_source(source)).splits
    return {split: {key: rest for key, *rest in samples} for split, samples in splits.items()}


def listed(path: Path, split: str | None = None) -> SourceListing:
    return packer.open_source(path).list(split)


@pytest.mark.parametrize("suffix", [*COMPRESS, "zip"])
def test_samples_come_in_the_order_of_the_archive(tree: Path, suffix: str) -> None:
    archive = make_archive(tree, suffix)
    listing = listed(archive)
    assert listing.splits["train"].keys == ["b/notes", f"b/{LONG}", "b/2", "a/sub/0", "a/3", "a/1"]
    assert listing.shuffles == (suffix in ("tar", "zip"))
    assert content(archive) == content(tree)


def test_a_compressed_archive_is_unpacked_once_for_all_shards_of_a_process(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = packer.open_source(make_archive(tree, "tar.gz"))
    opened = []

    class Counted(gzip.GzipFile):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            opened.append(options)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(gzip, "GzipFile", Counted)
    pack(source, tmp_path / "out", "tar", samples_per_shard=1)
    # to recognise a tar without labels, to list it, and to pack it; train is after val, so packing starts over
    before = len(opened)
    assert before <= 4
    data = pickle.dumps(source)
    assert len(data) < 1000
    for part in source.list(None).splits.values():
        for place in part.places:  # each with a new source, as in tasks
            with pickle.loads(data).open() as reader:
                reader.head(place)
    assert len(opened) - before <= 4
    with pytest.raises(SourceError, match="cannot be read in shuffled order"):
        pack(source, tmp_path / "other", shuffle=1)


@needs_tar
@pytest.mark.parametrize(
    ("form", "compress"),
    [("ustar", ""), ("v7", ""), ("oldgnu", ""), ("gnu", "--gzip"), ("pax", "--zstd")],
)
def test_gnu_tar(tree: Path, tmp_path: Path, form: str, compress: str) -> None:
    if compress == "--zstd" and shutil.which("zstd") is None:
        pytest.skip("no zstd command here")
    if form in ("v7", "ustar"):  # formats that cannot store such a name
        (tree / f"train/b/{LONG}.jpg").unlink()
    os.link(tree / "train/a/1.jpg", tree / "train/b/hard.jpg")
    (tree / "train/b/soft.jpg").symlink_to("../a/sub/0.jpg")
    archive = tmp_path / "made.tar"
    command = ["tar", f"--format={form}", "--sort=name", "-cf", str(archive), "-C", str(tree), *compress.split(), "."]
    subprocess.run(command, check=True, timeout=300)
    expected = content(tree)
    assert len(expected["train"]) >= 6
    assert content(archive) == expected


def test_links(tmp_path: Path) -> None:
    far = "f" * 60 + "/" + "g" * 60
    archive = write(
        tmp_path / "x.tar",
        tar_of(
            ("a/1.jpg", PICTURES[0]),
            (f"a/{far}.jpg", PICTURES[1]),
            special("b/hard.jpg", tarfile.LNKTYPE, "a/1.jpg"),
            special("b/soft.jpg", tarfile.SYMTYPE, "./../a/1.jpg"),
            special("b/chain.jpg", tarfile.SYMTYPE, "soft.jpg"),
            special("b/far.jpg", tarfile.SYMTYPE, f"../a/{far}.jpg"),
            special("b/folder.jpg", tarfile.SYMTYPE, "../a"),
            special("b/dangling.jpg", tarfile.SYMTYPE, "nowhere.jpg"),
            special("b/out.jpg", tarfile.SYMTYPE, "../../etc/passwd"),
            special("b/absolute.jpg", tarfile.LNKTYPE, "/etc/passwd"),
            special("b/round.jpg", tarfile.SYMTYPE, "about.jpg"),
            special("b/about.jpg", tarfile.SYMTYPE, "round.jpg"),
            special("b/self.jpg", tarfile.SYMTYPE, "self.jpg"),
        ),
    )
    assert dict(listed(archive).left_out) == {
        "b/folder.jpg": "a link to the folder 'a'",
        "b/dangling.jpg": "a link to 'b/nowhere.jpg', which is not in the archive",
        "b/out.jpg": "a link out of the archive, to '../etc/passwd'",
        "b/absolute.jpg": "a link out of the archive, to '/etc/passwd'",
        "b/round.jpg": "a link that leads back to itself",
        "b/about.jpg": "a link that leads back to itself",
        "b/self.jpg": "a link that leads back to itself",
    }
    near, distant = [("a/1", "b/hard", "b/soft", "b/chain"), (f"a/{far}", "b/far")]
    expected = dict.fromkeys(near, PICTURES[0]) | dict.fromkeys(distant, PICTURES[1])
    for path in (archive, write(tmp_path / "y.tar.xz", lzma.compress(archive.read_bytes()))):
        assert {key: image for key, (_, (image,)) in content(path)["train"].items()} == expected


def test_hostile_and_odd_members_of_a_tar(tmp_path: Path) -> None:
    archive = write(
        tmp_path / "x.tar",
        tar_of(
            special("./", tarfile.DIRTYPE),
            ("./a//1.jpg", PICTURES[0]),
            ("./b/c\\d.jpg", PICTURES[1]),
            ("/abs/1.jpg", PICTURES[1]),
            ("../up.jpg", PICTURES[1]),
            ("a/../../up.jpg", PICTURES[1]),
            ("a/.hidden.jpg", PICTURES[1]),
            (".git/x.jpg", PICTURES[1]),
            ("__MACOSX/a/1.jpg", b"resource fork"),
            special("a/pipe.jpg", tarfile.FIFOTYPE),
            special("a/null.jpg", tarfile.CHRTYPE),
            special("label", b"V"),
        ),
    )
    listing = listed(archive)
    assert listing.splits["train"].keys == ["a/1", "b/c\\d"]
    assert dict(listing.left_out) == {
        "/abs/1.jpg": "an absolute name",
        "../up.jpg": "a name that leads out of the archive",
        "a/../../up.jpg": "a name that leads out of the archive",
        "a/.hidden.jpg": "hidden",
        ".git/x.jpg": "hidden",
        "__MACOSX/a/1.jpg": "metadata of macOS",
        "a/pipe.jpg": "a named pipe",
        "a/null.jpg": "a device",
        "label": "not a file (tar type 'V')",
    }
    for members, message in (
        ([("/x.jpg", PICTURES[0])], "no files found; 1 left out, such as '/x.jpg': an absolute name"),
        ([("a/\udcff.jpg", PICTURES[0])], "not UTF-8; rename it"),
        ([("a/1.jpg", PICTURES[0]), ("./a/1.jpg", PICTURES[0])], "two members are called 'a/1.jpg'"),
        ([], "no files found"),
    ):
        assert message in refusal(write(tmp_path / "y.tar", tar_of(*members)))


@pytest.mark.parametrize(
    ("names", "keys", "classes"),
    [
        (["top/a/1.jpg", "top/b/1.jpg"], ["a/1", "b/1"], ("a", "b")),
        (["top/a/1.jpg", "top/b/1.jpg", "README.txt"], ["a/1", "b/1"], ("a", "b")),
        (["top/1.jpg", "top/2.jpg"], ["top/1", "top/2"], ("top",)),
        (["images/1.jpg", "images/2.jpg"], ["1", "2"], ()),
        (["val2017/1.jpg", "val2017/2.jpg"], ["1", "2"], ()),
        (["train/a/1.jpg"], ["a/1"], ("a",)),
        (["top/train/a/1.jpg"], ["a/1"], ("a",)),
        (["a/1.jpg", "b/1.jpg"], ["a/1", "b/1"], ("a", "b")),
        (["1.jpg", "a/1.jpg"], ["1", "a/1"], ("a",)),
        (["top/a/1", "top/b/1"], ["a/1", "b/1"], ("a", "b")),
    ],
)
def test_one_enclosing_folder(tmp_path: Path, names: list[str], keys: list[str], classes: tuple[str, ...]) -> None:
    archive = write(tmp_path / "x.tar", tar_of(*((name, PICTURES[0]) for name in names)))
    listing = listed(archive)
    assert (listing.splits["train"].keys, listing.classes) == (keys, classes)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_truncated_tars(tmp_path: Path, suffix: str) -> None:
    plain = tar_of(ONE, TWO, end=False)
    whole = COMPRESS[suffix](plain + bytes(1024))
    path = tmp_path / f"x.{suffix}"
    assert len(listed(write(path, whole)).splits["train"]) == 2
    # The last member is followed by zeros and a checksum; a zstd stream may end anywhere in them undetected.
    last = len(plain) if suffix == "tar" else len(whole) * 9 // 10 if suffix == "tar.zst" else len(whole) - 1
    for cut in (1, 11, 511, 513, 1024, last // 3, last // 2, last - 600, last - 1, last):
        with pytest.raises(SourceError, match=r"truncated|not a tar"):
            listed(write(path, whole[:cut]))
    with pytest.raises(SourceError, match=r"truncated|no files found"):
        listed(write(path, b""))


def test_a_wrong_gzip_checksum_is_named(tmp_path: Path) -> None:
    gz = bytearray(COMPRESS["tar.gz"](tar_of(ONE)))
    gz[-8] ^= 1
    error = refusal(write(tmp_path / "x.tar.gz", bytes(gz)))
    assert re.search(r"truncated or corrupt gzip data, \d+ bytes into its content: CRC", error)


def test_bytes_after_an_archive(tree: Path, tmp_path: Path) -> None:
    first, second = tar_of(("a/1.jpg", PICTURES[0]), ("b/1.jpg", PICTURES[0])), tar_of(("a/2.jpg", PICTURES[1]))
    for suffix in ("tar", "tar.gz"):
        joined = listed(write(tmp_path / f"x.{suffix}", COMPRESS[suffix](first + second)))
        assert [*joined.splits["train"].keys] == ["a/1", "b/1", "a/2"] and joined.warnings == []
        assert "two members are called 'a/1.jpg'" in refusal(
            write(tmp_path / f"x.{suffix}", COMPRESS[suffix](first + first))
        )
        listing = listed(write(tmp_path / f"x.{suffix}", COMPRESS[suffix](first + b"something else".ljust(512, b"."))))
        assert len(listing.splits["train"]) == 2
        assert listing.warnings == [
            f"{tmp_path}/x.{suffix}: the bytes after the end of the archive, from byte 10,240 on, are ignored"
        ]
    # concatenated gzip members, as from pigz -i and parallel packers, are one stream
    parts = b"".join(gzip.compress(first[i : i + 700]) for i in range(0, len(first), 700))
    assert not listed(write(tmp_path / "y.tgz", parts)).warnings


def test_concatenated_archives_are_read_where_they_are_shards(tree: Path, tmp_path: Path) -> None:
    parts = [tar_of((f"{n}.jpg", PICTURES[n]), (f"{n}.cls", b"%d" % n)) for n in range(3)]
    (tmp_path / "shards").mkdir()
    write(tmp_path / "shards/0.tar", b"".join(parts))
    shards = [
        path
        for split in ("train", "val")
        for path in sorted(pack(tree, tmp_path / split, "tar", split=split).glob("*.tar"))
    ]
    write(tmp_path / "shards/1.tar", b"".join(path.read_bytes() for path in shards))
    assert len(listed(tmp_path / "shards").splits["train"]) == 3 + len(files_of(tree)) - 1
    assert packer.index(tmp_path / "shards/0.tar", output=tmp_path / "adopted", workers=1).samples == 3


def test_links_and_folders_do_not_multiply(tmp_path: Path) -> None:
    count = 20_000
    members = [special(f"l{n}.jpg", tarfile.SYMTYPE, "nowhere") for n in range(count)]
    data = tar_of(*((f"f{n}/x.txt", b"") for n in range(count)), ("a/1.jpg", PICTURES[0]), *members)
    path = write(tmp_path / "x.tar", data)
    done = run_packer(
        *("convert", path, "--to", "tar", "-o", tmp_path / "out", "--workers", 1),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (30, 30)),
    )
    assert done.returncode == 0 and "20,000 a link to 'nowhere'" in done.stdout, done.stderr


def test_captions_in_an_archive_are_fields_as_in_a_folder_of_archives(tmp_path: Path) -> None:
    files = [(f"{n:05d}.{kind}", data) for n in range(3) for kind, data in
             (("jpg", PICTURES[n]), ("json", b'{"width": 40}'), ("txt", b"a cat"))]  # fmt: skip
    files.append(("00003.jpg", PICTURES[3]))
    for suffix in ("tar", "tar.gz"):
        (tmp_path / suffix).mkdir()
        path = write(tmp_path / suffix / f"00000.{suffix}", COMPRESS[suffix](tar_of(*files)))
        archive, folder = content_of(packer.open_source(path)), content_of(packer.open_source(tmp_path / suffix))
        assert archive == folder and archive.fields == ("image", "json", "txt")
        assert archive.splits["train"][0][2][1:] == (b'{"width": 40}', b"a cat")
    assert packer.open_source(path, layout="tree").list(None).fields == {"image": "image"}


def test_a_decompression_bomb_is_refused(tmp_path: Path) -> None:
    header = tar_of(special("a/zeros.jpg", tarfile.REGTYPE), end=False)
    sized = bytearray(header)
    sized[124:136] = b"%011o\0" % (3 << 29)
    sized[148:156] = b"%06o\0 " % (sum(sized) - sum(sized[148:156]) + 8 * 32)
    packing = zstandard.ZstdCompressor().compressobj()
    zeros = bytes(16 << 20)
    data = packing.compress(bytes(sized)) + b"".join(packing.compress(zeros) for _ in range(96)) + packing.flush()
    error = refusal(write(tmp_path / "x.tar.zst", data))
    assert "unpack to more than 1000 times as many: a decompression bomb" in error


def test_a_tree_with_files_called_cls_is_not_a_webdataset_shard(tmp_path: Path) -> None:
    path = write(tmp_path / "y.tar", tar_of(ONE, ("a/latex.cls", b"a class of LaTeX")))
    assert len(listed(path).splits["train"]) == 2


def entries(data: bytes) -> list[int]:
    """The position of the entries of a zip's central directory."""
    places, place = [], data.find(b"PK\1\2")
    while place >= 0:
        places.append(place)
        place = data.find(b"PK\1\2", place + 4)
    return places


@pytest.mark.skipif(shutil.which("zip") is None, reason="no zip command here")
def test_zip_command(tree: Path, tmp_path: Path) -> None:
    (tree / "train/b/soft.jpg").symlink_to("../a/1.jpg")
    subprocess.run(["zip", "-q", "-r", "-y", "../made.zip", "."], check=True, cwd=tree, timeout=300)
    listing = listed(tmp_path / "made.zip")
    assert listing.left_out == [("train/b/soft.jpg", "a symbolic link")]
    (tree / "train/b/soft.jpg").unlink()
    assert content(tmp_path / "made.zip") == content(tree)


def test_hostile_names_of_a_zip(tmp_path: Path) -> None:
    names = ["/abs.jpg", "../up.jpg", "a/../../up.jpg", "b\\c.jpg", "C:/x.jpg", ".hid/x.jpg", "__MACOSX/a/._1.jpg"]
    data = zip_of(("a/1.jpg", PICTURES[0]), ("b/1.jpg", PICTURES[0]), *((name, b"x") for name in names))
    archive = write(tmp_path / "x.zip", data)
    listing = listed(archive)
    assert len(listing.splits["train"]) == 2
    assert dict(listing.left_out) == {
        "/abs.jpg": "an absolute name",
        "../up.jpg": "a name that leads out of the archive",
        "a/../../up.jpg": "a name that leads out of the archive",
        "b\\c.jpg": "a backslash in its name",
        "C:/x.jpg": "an absolute name",
        ".hid/x.jpg": "hidden",
        "__MACOSX/a/._1.jpg": "metadata of macOS",
    }
    with pytest.warns(UserWarning, match="Duplicate name"):
        data = zip_of(("a/1.jpg", PICTURES[0]), ("a/1.jpg", PICTURES[1]))
    assert "two members are called 'a/1.jpg'" in refusal(write(tmp_path / "y.zip", data))
    assert "no files found" in refusal(write(tmp_path / "y.zip", zip_of()))


def test_utf8_names_of_a_zip_without_the_flag(tmp_path: Path) -> None:
    data = zip_of(("ä/ü.jpg", PICTURES[0]), ("b/1.jpg", PICTURES[0]))
    flags = (entries(data)[0] + 8, data.find(b"PK\3\4") + 6)
    plain = bytearray(data)
    for place in flags:
        plain[place : place + 2] = (struct.unpack_from("<H", plain, place)[0] & ~0x800).to_bytes(2, "little")
    assert listed(write(tmp_path / "x.zip", bytes(plain))).splits["train"].keys == ["ä/ü", "b/1"]


SIZE = len(PICTURES[0])


@pytest.mark.parametrize(
    ("entry", "place", "value", "message"),
    [
        (True, 8, b"\1\0", "is encrypted"),
        (True, 10, b"\x63\0", r"is packed by method 99, expected 0 \(stored\) or 8 \(deflate\)"),
        (True, 10, b"\0\0", "is stored in"),
        (True, 16, b"\0\0\0\0", "is damaged: its CRC-32 is .* expected 00000000"),
        (True, 24, (SIZE - 1).to_bytes(4, "little"), "is damaged: it does not unpack to its"),
        (True, 24, (SIZE + 1).to_bytes(4, "little"), "is damaged: it does not unpack to its"),
        (False, 0, b"XX", "has no local header at byte 0"),
        (False, 60, b"\xff" * 9, "is damaged"),
    ],
)
def test_damaged_members_of_a_zip(tmp_path: Path, entry: bool, place: int, value: bytes, message: str) -> None:
    data = bytearray(zip_of(ONE, TWO))
    place += entries(bytes(data))[0] if entry else 0
    data[place : place + len(value)] = value
    archive = write(tmp_path / "x.zip", bytes(data))
    assert re.search(rf"a/1\.jpg: {message}", pack_error(archive, tmp_path / "a"))
    with readers.open(pack(archive, tmp_path / "b", on_error="skip")) as reader:
        assert list(reader.keys) == ["b/2"]


def test_bombs_in_a_zip(tmp_path: Path) -> None:
    data = bytearray(zip_of(("a/1.jpg", PICTURES[0]), ("a/2.jpg", bytes(1 << 21)), ("b/1.jpg", PICTURES[1])))
    second = entries(bytes(data))[1]
    packed_bytes = struct.unpack_from("<I", data, second + 20)[0]
    struct.pack_into("<I", data, second + 24, 0xFFFFFFF0)
    bomb = write(tmp_path / "x.zip", bytes(data))
    error = pack_error(bomb, tmp_path / "a")
    assert f"a/2.jpg: states 4294967280 bytes, more than {packed_bytes} can unpack" in error
    with readers.open(pack(bomb, tmp_path / "b", on_error="skip")) as reader:
        assert list(reader.keys) == ["a/1", "b/1"]
    third = entries(bytes(data))[2]
    overlapping = data[:]
    struct.pack_into("<I", overlapping, third + 42, 10)
    error = refusal(write(tmp_path / "x.zip", bytes(overlapping)))
    assert "overlap at byte 10: damaged, or a decompression bomb" in error
    struct.pack_into("<I", data, third + 20, 0xFFFFFF00)
    with pytest.raises(SourceError, match=r"'b/1\.jpg' ends at byte \d+, but the archive at \d+"):
        listed(write(tmp_path / "x.zip", bytes(data)))


def test_truncated_zips(tmp_path: Path) -> None:
    whole = zip_of(ONE, TWO)
    for cut in (0, 1, 4, 30, len(whole) // 2, entries(whole)[1], len(whole) - 23, len(whole) - 1):
        assert "x.zip: not a zip archive, or truncated" in refusal(write(tmp_path / "x.zip", whole[:cut]))
