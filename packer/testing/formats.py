"""The test suite of formats. A subclass names the format and overrides the hooks where it differs.

The law: the ranges reported by a writer's `finish` are those that `locate` finds in the file, and reading a range gives
the payload. Damage to the file causes a FormatError; damage that the format cannot detect must be harmless.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import pytest
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import packer
from cache.errors import FormatError
from packer.formats import format_named, format_of_file
from packer.formats.base import Format, Located, LocateOptions, PackedSample, ShardSpec, ShardWriter, WrittenShard
from packer.testing.samples import make_jpeg
from readers.headers import ImageHeader, parse_header
from readers.table import ABSENT, NO_LABEL

JPEG = make_jpeg(1)
HEADER = parse_header(JPEG)
IMAGE = {"image": "image"}
FIELDS = {"image": "image", "mask": "file", "json": "json"}
FLUSH_BYTES = 4 << 20  # more than writers buffer
GIB = 1 << 30

KEYS = [
    "plain", "a/b/c", "-dash", "a:b", "*?", "100%", "%41", "%", "a.b", "a.b.c/d.e", ".hidden", "a/.hidden", "..x",
    "a/..b", "__x__", "__x", "___", "a/__x__", "__a__/b", "~", "~a", "日本語", "é", "é", "😀", "a\\b", "quote'\"",
    "%%%", "a=b,c@d(e)[f]{g}+h~i", "a/", "a.b/",
]  # fmt: skip
KEYS += ["a b", " lead", "trail ", "tab\tx", "new\nline", "\x7f", "\u2028", "\x85", "\u00a0", "two  blanks"]
KEYS += ["k" * 300, "\u00fc" * 150, "folder/" + "k" * 120, "f.o/" * 40 + "x", "k" * 76, "k" * 77]
LOOKALIKES = ["a b", "a%20b", "a%2520b", "a\u00a0b", "a.b", "a%2Eb", "a%2eb", "__x__", "%5F_x__", "A.B", "~a", "%7Ea"]


def sample(
    key: str,
    image: bytes | None = b"image",
    *,
    label: int = NO_LABEL,
    name: str = "",
    mask: bytes | None = None,
    mask_name: str = "",
    json: bytes | None = None,
    header: ImageHeader | None = None,
) -> PackedSample:
    """A sample with the fields of FIELDS."""
    return PackedSample(key, label, (image, mask, json), (name, mask_name, ""), header)


def two_samples() -> list[PackedSample]:
    """Two samples for a small shard; the second lacks mask and json."""
    first = sample("d/a", JPEG, label=0, name="d/a.JPEG", mask=b"mask", mask_name="m.png", json=b"{}", header=HEADER)
    return [first, sample("d/b", b"\x80two", label=1, name="d/b.jpg", header=HEADER)]


class TooLongError(BaseException):
    """A test took too long. Not an Exception, so that no handler mistakes it for an error in the file."""


@contextmanager
def bounded(cpu_seconds: float = 10) -> Iterator[None]:
    """Raise TooLongError if the body takes more CPU time, or waits too long: no input may make packer run forever.

    CPU time is limited because elapsed time varies with the load of the machine. A body that waits, for a FIFO say,
    takes none, so elapsed time has a separate, large limit.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        waits = number == signal.SIGALRM
        raise TooLongError(f"not done after {_WAIT_SECONDS} s" if waits else f"more than {cpu_seconds} s of CPU time")

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, cpu_seconds), (signal.SIGALRM, signal.ITIMER_REAL, _WAIT_SECONDS))
    with ExitStack() as restored:
        for number, timer, seconds in timers:
            restored.callback(signal.signal, number, signal.signal(number, stop))
            restored.callback(signal.setitimer, timer, 0)
            signal.setitimer(timer, seconds)
        yield


def read_range(path: Path, place: tuple[int, int]) -> bytes:
    """Read the bytes of a range, as any other program would."""
    with open(path, "rb") as file:
        return os.pread(file.fileno(), place[1], place[0])


def new_folder(parent: Path, name: object) -> Path:
    folder = parent / str(name)
    folder.mkdir()
    return folder


def expected_names(packed: PackedSample, fields: Mapping[str, str]) -> dict[str, str]:
    return {field: name for field, name in zip(fields, packed.names, strict=True) if name}


_WAIT_SECONDS = 600.0
_PAYLOADS = st.one_of(st.none(), st.binary(max_size=700))
_KEY_CHARACTERS = st.characters(exclude_characters="\0", exclude_categories=("Cs",))
_KEYS = st.one_of(
    st.text(st.sampled_from("ab./_%~ -é"), min_size=1, max_size=8),
    st.text(_KEY_CHARACTERS, min_size=1, max_size=110),
)
_SUFFIXES = st.sampled_from(["", ".jpg", ".JPEG", ".png", ".json", ".a.b", ".cls", ".tar.gz", ".__name__"])


@st.composite
def any_samples(draw: st.DrawFn) -> list[PackedSample]:
    """Samples with distinct keys. Payloads that are present and not json may have the name of a file."""
    samples = []
    for key in draw(st.lists(_KEYS, unique=True, max_size=4)):
        image, mask, json = draw(_PAYLOADS), draw(_PAYLOADS), draw(_PAYLOADS)
        name = draw(st.one_of(st.just(""), _SUFFIXES.map(key.__add__), _KEYS)) if image is not None else ""
        mask_name = (
            draw(st.one_of(st.just(""), _SUFFIXES.map(f"{key}.mask".__add__), _KEYS)) if mask is not None else ""
        )
        label = draw(st.one_of(st.just(NO_LABEL), st.integers(0, 2**62)))
        header = (
            draw(st.sampled_from([None, HEADER, ImageHeader("webp", 1, 2, 4, 0, 1)])) if image is not None else None
        )
        samples.append(
            sample(key, image, label=label, name=name, mask=mask, mask_name=mask_name, json=json, header=header)
        )
    return samples


class FormatSuite:
    """The tests of a format. Subclasses set `name`, and override hooks where the format differs."""

    name: str
    walks = True  # whether `locate` reads the file sample by sample

    @property
    def format(self) -> Format:
        return format_named(self.name)

    # --- hooks --------------------------------------------------------------------------------------------------
    def beyond_4_gib(self, folder: Path) -> tuple[Path, dict[str, bytes]]:
        """A sparse shard whose last samples start past 4 GiB: its path, and the images of these samples by key."""
        raise NotImplementedError

    def after_cut(self, truth: list[Located], data: bytes, size: int) -> list[Located] | None:
        """The samples that `locate` should find in the first `size` bytes of a shard; None for a FormatError."""
        raise NotImplementedError

    def flips(self, data: bytes) -> Iterable[int]:
        """The positions at which to flip bytes and to truncate a shard: all, or a representative selection."""
        return range(len(data))

    def must_notice(self, path: Path, data: bytes, truth: list[Located]) -> set[int]:
        """The positions of all bytes whose damage `locate` or a payload's checksum must detect."""
        raise NotImplementedError

    # --- tools --------------------------------------------------------------------------------------------------
    def write(
        self,
        folder: Path,
        samples: Sequence[PackedSample],
        fields: Mapping[str, str] = FIELDS,
        label_offset: int = 0,
        classes: tuple[str, ...] = (),
    ) -> tuple[Path, WrittenShard]:
        path = folder / self.format.shard_name("train", 0, 1)
        writer = self.format.open_writer(path, ShardSpec("train", fields, classes, label_offset))
        for packed in samples:
            writer.add(packed)
        return path, writer.finish()

    def locate(self, path: Path, label_offset: int = 0) -> list[Located]:
        return list(self.format.locate(path, LocateOptions(label_offset=label_offset)))

    def check_law(
        self,
        folder: Path,
        samples: Sequence[PackedSample],
        fields: Mapping[str, str] = FIELDS,
        label_offset: int = 0,
        classes: tuple[str, ...] = (),
    ) -> list[Located]:
        """Write samples, locate them and compare everything. Returns the located samples."""
        path, written = self.write(folder, samples, fields, label_offset, classes)
        assert [entry.name for entry in folder.iterdir()] == [path.name], "the writer left other files behind"
        assert written.bytes == path.stat().st_size, "finish() states another size than the file has"
        assert written.crc32c == crc32c(path.read_bytes()), "finish() states another CRC32C than the file has"
        assert format_of_file(path) is self.format, "the shard is not recognised as its own format"
        located = self.locate(path, label_offset)
        assert [sample.key for sample in located] == [packed.key for packed in samples], "keys differ"
        assert [sample.label for sample in located] == [packed.label for packed in samples], "labels differ"
        for i, (packed, sample) in enumerate(zip(samples, located, strict=True)):
            assert sample.names == expected_names(packed, fields), f"file names of {packed.key!r} differ"
            present = {field for field, payload in zip(fields, packed.payloads, strict=True) if payload is not None}
            assert sample.ranges.keys() == present, f"fields of {packed.key!r} differ"
            for field, payload in zip(fields, packed.payloads, strict=True):
                payloads = written.payloads[field]
                stated, length, crc = payloads.offset[i], payloads.length[i], payloads.crc32c[i]
                if payload is None:
                    assert stated == ABSENT, f"{field} of {packed.key!r} is absent, finish() states {stated}"
                    assert (length, crc) == (0, 0), f"{field} of {packed.key!r} is absent, finish() states a payload"
                    continue
                assert (length, crc) == (len(payload), crc32c(payload)), f"finish() misstates {field} of {packed.key!r}"
                assert sample.ranges[field] == (stated, len(payload)), f"{field} of {packed.key!r} is elsewhere"
                assert read_range(path, sample.ranges[field]) == payload, f"{field} of {packed.key!r} reads otherwise"
        return located

    def outcome(self, path: Path, options: LocateOptions | None = None) -> list[Located] | None:
        """The samples that `locate` finds; None for a FormatError. Any other exception fails the test."""
        try:
            return list(self.format.locate(path, options or LocateOptions()))
        except FormatError as error:
            assert str(path) in str(error), f"the message does not say which file: {error}"
            return None

    def refused(self, path: Path, match: str | None = None, options: LocateOptions | None = None) -> None:
        """Check that `locate` raises FormatError in bounded time, with the file and `match` in the message."""
        with bounded(), pytest.raises(FormatError, match=match) as caught:
            list(self.format.locate(path, options or LocateOptions()))
        assert str(path) in str(caught.value), "the message does not say which file"

    # --- the law ------------------------------------------------------------------------------------------------
    def test_zero_samples(self, tmp_path: Path) -> None:
        assert self.check_law(tmp_path, []) == []

    def test_payload_sizes(self, tmp_path: Path) -> None:
        sizes = (0, 1, 511, 512, 513, 1023, 4095, 4096, 4097, 65536)
        payloads = [bytes([65 + i]) * size for i, size in enumerate(sizes)]
        self.check_law(tmp_path, [sample(f"k{len(p)}", p, mask=p[::-1], json=p[:7]) for p in payloads])

    def test_a_single_payload(self, tmp_path: Path) -> None:
        for size in (0, 1, 4095, 4096, 4097):
            self.check_law(new_folder(tmp_path, size), [PackedSample("k", 3, (b"x" * size,), ("",), None)], IMAGE)

    def test_payloads_larger_than_the_buffers(self, tmp_path: Path) -> None:
        large = os.urandom(FLUSH_BYTES + 12345)
        samples = [sample("a", b"1"), sample("b", large, mask=large[::-1]), sample("c", b"3"), sample("d", large[1:])]
        self.check_law(tmp_path, samples)

    def test_more_samples_than_one_gathered_write(self, tmp_path: Path) -> None:
        self.check_law(tmp_path, [sample(f"{i:05d}", b"%d" % i, mask=b"m" * (i % 3)) for i in range(1500)])

    def test_memory_may_change_after_flush(self, tmp_path: Path) -> None:
        """Workers reuse the memory of flushed samples for the next ones."""
        path = tmp_path / self.format.shard_name("train", 0, 1)
        writer = self.format.open_writer(path, ShardSpec("train", FIELDS))
        memory = bytearray(10_000)
        for i in range(5):
            memory[:] = bytes([i + 1]) * len(memory)
            view = memoryview(memory)
            writer.add(PackedSample(f"k{i}", i, (view[:6000], view[6000:9000], view[9000:]), ("", "", ""), None))
            writer.flush()
        memory[:] = bytes(len(memory))
        written = writer.finish()
        for i, entry in enumerate(self.locate(path)):
            payloads = [read_range(path, entry.ranges[field]) for field in FIELDS]
            assert payloads == [bytes([i + 1]) * size for size in (6000, 3000, 1000)], f"sample {i} was overwritten"
        assert written.crc32c == crc32c(path.read_bytes()), "finish() states another CRC32C than the file has"

    def test_absent_and_empty_differ(self, tmp_path: Path) -> None:
        samples = [
            sample("none", None),
            sample("empty", b"", mask=b"", json=b""),
            sample("no image", None, mask=b"m"),
            sample("only json", None, json=b"{}", label=0),
            sample("all", b"i", mask=b"m", json=b"{}", label=2),
        ]
        located = self.check_law(tmp_path, samples)
        assert [sorted(entry.ranges) for entry in located][:3] == [[], ["image", "json", "mask"], ["mask"]]

    def test_further_fields(self, tmp_path: Path) -> None:
        """Several file fields, a json field of another name, and a file field called json."""
        fields = {"image": "image", "left.eye": "file", "meta": "json", "json": "file", "png": "file"}
        full = PackedSample(
            "k", 1, (b"i", b"l", b"{}", b"j", b"p"), ("k.jpg", "x/l.png", "", "k.json", "k.png.webp"), HEADER
        )
        self.check_law(tmp_path, [full, PackedSample("l", 1, (b"i", None, None, None, b""), ("",) * 5, None)], fields)

    def test_file_names(self, tmp_path: Path) -> None:
        names = ("k.jpg", "k.JPEG", "k.jpeg", "k", "other.jpg", "d/k.jpg", "k.x.jpg", "k.json", "z.mask.json", "")
        for number, name in enumerate(names):
            image = sample("k", JPEG, name=name, header=HEADER)
            self.check_law(
                new_folder(tmp_path, number), [image, sample("z", b"raw", name=name, mask=b"", mask_name=name)]
            )

    def test_keys(self, tmp_path: Path) -> None:
        self.check_law(tmp_path, [sample(key, key.encode(), name=f"{key}.jpg", label=1) for key in KEYS])

    def test_samples_with_only_a_key(self, tmp_path: Path) -> None:
        for number, key in enumerate(KEYS):
            self.check_law(new_folder(tmp_path, number), [sample(key, None), sample(key + "2", None)])

    def test_keys_that_look_alike_once_escaped(self, tmp_path: Path) -> None:
        self.check_law(tmp_path, [sample(key, key.encode()) for key in LOOKALIKES])

    @pytest.mark.parametrize("offset", [0, 1, 1000])
    def test_labels(self, tmp_path: Path, offset: int) -> None:
        labels = (NO_LABEL, 0, 1, 2, 999, 2**31, 2**32 + 5, 2**62)
        samples = [sample(f"k{label}", label=label) for label in labels]
        self.check_law(tmp_path, samples, label_offset=offset, classes=("cat", "dog \u00e9", "owl"))

    @settings(deadline=None, suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow])
    @given(samples=any_samples(), offset=st.sampled_from([0, 1]))
    def test_any_samples(self, samples: list[PackedSample], offset: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.check_law(Path(folder), samples, label_offset=offset, classes=("cat",))

    def test_offsets_beyond_4_gib(self, tmp_path: Path) -> None:
        path, images = self.beyond_4_gib(tmp_path)
        try:
            assert path.stat().st_blocks * 512 < GIB, "the test's file is not sparse: the filesystem has no holes"
            located = {entry.key: entry.ranges["image"] for entry in self.locate(path) if "image" in entry.ranges}
            for key, image in images.items():
                assert located[key][0] > 4 * GIB, f"{key!r} does not start past 4 GiB"
                assert read_range(path, located[key]) == image, f"{key!r} reads otherwise"
        finally:
            path.unlink()

    # --- the writer ---------------------------------------------------------------------------------------------
    def open_writer(self, folder: Path) -> ShardWriter:
        return self.format.open_writer(folder / self.format.shard_name("train", 0, 1), ShardSpec("train", FIELDS))

    def test_abort_leaves_nothing(self, tmp_path: Path) -> None:
        writer = self.open_writer(tmp_path)
        writer.add(sample("a", b"x" * 10_000, mask=b"y" * 10_000))
        writer.flush()
        writer.abort()
        assert list(tmp_path.iterdir()) == [], "abort() left files behind"

    def test_an_existing_file_is_not_overwritten(self, tmp_path: Path) -> None:
        path = tmp_path / self.format.shard_name("train", 0, 1)
        path.write_bytes(b"mine")
        with pytest.raises(FileExistsError):
            self.open_writer(tmp_path)
        assert path.read_bytes() == b"mine", "the file that was there has changed"

    def test_shard_names_sort_in_order(self) -> None:
        names = [self.format.shard_name("val", number, 12345) for number in (0, 1, 9, 10, 99, 100, 12344)]
        assert names == sorted(names) and len(set(names)) == len(names)
        assert all(name.startswith("val-") for name in names)

    # --- faults -------------------------------------------------------------------------------------------------
    def test_paths_that_are_no_regular_files(self, tmp_path: Path) -> None:
        missing, folder, pipe = (tmp_path / name for name in ("missing", "folder", "pipe"))
        folder.mkdir()
        os.mkfifo(pipe)
        for path in (missing, folder, pipe):
            self.refused(path, "cannot be opened|not a regular file")
            with bounded(), pytest.raises(FormatError, match=r"cannot be opened|not a regular file"):
                format_of_file(path)

    def test_a_file_that_shrinks_during_a_scan(self, tmp_path: Path) -> None:
        path, _ = self.write(tmp_path, [sample(f"k{i}", bytes(3 << 20)) for i in range(4)])
        walk = iter(self.format.locate(path, LocateOptions()))
        first = next(walk)
        os.truncate(path, first.ranges["image"][0] + (3 << 20) + 600)
        with bounded():
            if self.walks:
                with pytest.raises(FormatError, match=f"{path}: shrank"):
                    list(walk)
            else:
                assert len(list(walk)) == 3, "the tables were read at once, so nothing can be missed"

    def test_truncated(self, tmp_path: Path) -> None:
        path, _ = self.write(tmp_path, two_samples())
        data, truth = path.read_bytes(), self.locate(path)
        wrong = []
        for size in sorted(self.flips(data), reverse=True):
            os.truncate(path, size)
            if self.outcome(path) != self.after_cut(truth, data, size):
                wrong.append(size)
        assert wrong == [], f"cuts of {len(data)} bytes that locate gets wrong"

    def test_flipped_bytes(self, tmp_path: Path) -> None:
        """Flips one bit of every second byte, and all bits of the others."""
        path, _ = self.write(tmp_path, two_samples(), classes=("cat", "dog"))
        data, truth = path.read_bytes(), self.locate(path)
        payloads = [read_range(path, place) for result in truth for place in result.ranges.values()]
        must_notice = self.must_notice(path, data, truth)
        silent = set()
        with open(path, "r+b", buffering=0) as file, bounded(60):
            for i in self.flips(data):
                os.pwrite(file.fileno(), bytes([data[i] ^ (0x01, 0xFF)[i % 2]]), i)
                result = self.outcome(path)
                if result == truth:
                    now = [os.pread(file.fileno(), n, at) for f in result for at, n in f.ranges.values()]
                    if now == payloads:
                        silent.add(i)
                for at, n in (place for f in result or () for place in f.ranges.values()):
                    assert 0 <= at <= at + n <= len(data), f"byte {i} flipped gives the range {at} to {at + n}"
                os.pwrite(file.fileno(), data[i : i + 1], i)
        assert path.read_bytes() == data, "the test did not restore the file"
        assert sorted(silent & must_notice) == [], "flips that neither locate nor a checksum would show"

    def test_verify_finds_every_flip(self, tmp_path: Path) -> None:
        """In payloads always; anywhere in the file with `deep`, by the CRC32C of the whole file."""
        for number in range(2):
            image = tmp_path / "in" / "train" / "cat" / f"{number}.jpg"
            image.parent.mkdir(parents=True, exist_ok=True)
            image.write_bytes(make_jpeg(number))
        packer.convert(tmp_path / "in", to=self.name, output=tmp_path / "out", run=packer.Run(workers=1))
        (path,) = (tmp_path / "out").glob("train-*")
        assert packer.verify(tmp_path / "out", deep=True, workers=1).ok, "the undamaged set does not verify"
        data = path.read_bytes()
        inside = {
            i for result in self.locate(path) for at, n in result.ranges.values() for i in (at, at + n // 2, at + n - 1)
        }
        with open(path, "r+b", buffering=0) as file:
            for i in sorted({0, len(data) - 1, *inside, *range(0, len(data), 331)}):
                os.pwrite(file.fileno(), bytes([data[i] ^ 0x10]), i)
                deep = packer.verify(tmp_path / "out", deep=True, workers=1)
                assert "CRC32C of the whole file" in str(deep.problems[0]), f"byte {i}: {deep.problems}"
                if i in inside:
                    result = packer.verify(tmp_path / "out", workers=1)
                    assert not result.ok, f"byte {i} of a payload flipped, and verify is content"
                    assert any(problem.key for problem in result.problems), "no sample is named"
                os.pwrite(file.fileno(), data[i : i + 1], i)
        assert packer.verify(tmp_path / "out", workers=1).ok, "the test did not restore the file"
