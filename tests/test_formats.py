"""Which format a file has, and checksums that are joined from those of parts."""

from __future__ import annotations

import gzip
import time
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st
from suites.containers import block
from suites.containers import record as framed

from cache.checksums import JoinedChecksum, crc32c_combine, crc32c_shift
from cache.errors import FormatError
from packer.formats import format_named, format_of_file, writable_formats
from packer.testing.formats import (
    JPEG,
    TooLongError,
    bounded,
)


# --- which format -------------------------------------------------------------------------------------------------
def test_formats_by_name() -> None:
    assert [format_named(name).name for name in writable_formats()][:3] == ["hdf5", "tfrecord", "tar"]
    with pytest.raises(FormatError, match="no format 'zip'; there are hdf5, tfrecord, tar"):
        format_named("zip")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("x.h5", b"\x89HDF\r\n\x1a\n" + bytes(600), "hdf5"),
        ("anything", b"\x89HDF\r\n\x1a\n" + bytes(600), "hdf5"),
        ("anything", block(b"a.jpg", 0), "tar"),
        ("x.tar", bytes(1024), "tar"),
        ("x.tfrecord", b"", "tfrecord"),
        ("train-00000-of-00001", framed(b""), "tfrecord"),
        ("a.tfrecord-00001-of-00002", framed(b""), "tfrecord"),
    ],
)
def test_format_of_a_file(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert format_of_file(tmp_path / name).name == expected


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("x.jpg", JPEG, "neither an HDF5 file, a TFRecord file"),
        ("x.tar", gzip.compress(block(b"a.jpg", 0), mtime=0), "gzip.* packer convert "),
        ("x.tar", b"short", "neither"),
    ],
)
def test_files_of_no_format(tmp_path: Path, name: str, content: bytes, match: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FormatError, match=match):
        format_of_file(tmp_path / name)
    with pytest.raises(FormatError, match="cannot be opened"):
        format_of_file(tmp_path / "missing")


# --- checksums ----------------------------------------------------------------------------------------------------
@given(st.lists(st.tuples(st.binary(max_size=300), st.booleans()), max_size=40), st.booleans())
def test_a_checksum_joined_from_parts(parts: list[tuple[bytes, bool]], many: bool) -> None:
    joined, crc = JoinedChecksum(), 0
    for data, known in parts * (200 if many else 1):
        crc = crc32c(data, crc)
        joined.add(*((b"", crc32c(data), len(data)) if known else (data,)))
        if not many:
            assert joined.value() == crc
    assert joined.value() == crc == joined.value()


def test_checksums_over_any_length() -> None:
    """Far beyond what a test can checksum: the scalar method is the oracle."""
    lengths = np.array([0, 1, 255, 256, 4096, (1 << 20) + 7, 1 << 33, (1 << 40) - 1, (1 << 63) + 5], np.uint64)
    crcs = np.array([0xDEADBEEF, 1, 1 << 31, 0xFFFFFFFF, 0, 5, 6, 7, 8], np.uint32)
    expected = [crc32c_combine(crc, 0, length) for crc, length in zip(crcs.tolist(), lengths.tolist(), strict=True)]
    assert crc32c_shift(crcs, lengths).tolist() == expected
    assert crc32c_shift(crcs[:0], lengths[:0]).tolist() == []


def test_the_bound_of_hostile_bytes_is_cpu_time() -> None:
    """What other programs take from a busy machine does not count; work that goes on for ever does."""
    with bounded(0.2):
        time.sleep(0.5)
    with pytest.raises(TooLongError, match="CPU time"), bounded(0.2):
        while True:
            pass
