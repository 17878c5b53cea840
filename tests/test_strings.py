"""String columns behave like lists of strings, and columns with wrong offsets raise DatasetError."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache.errors import DatasetError
from readers.table import Strings

TEXTS = st.lists(st.text(max_size=12), max_size=30)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(texts=TEXTS, data=st.data())
def test_string_columns_behave_like_lists(texts: list[str], data: st.DataObject) -> None:
    column = Strings.of(texts)
    assert len(column) == len(texts) and list(column) == texts and column == texts
    assert column.blob.tobytes() == "".join(texts).encode() and column.offsets.dtype == np.uint64
    part = data.draw(st.slices(len(texts)))
    assert column[part] == texts[part]
    for i in range(-len(texts), len(texts)):
        assert column[i] == texts[i]
    for i in (len(texts), -len(texts) - 1):
        with pytest.raises(IndexError, match=f"index {i} is outside the {len(texts)} items"):
            column[i]
    assert list(reversed(column)) == texts[::-1]
    if texts:
        picked = data.draw(st.lists(st.integers(0, len(texts) - 1)))
        assert column.take(np.array(picked, np.int64)) == [texts[i] for i in picked]
        assert texts[0] in column and column.index(texts[-1]) == texts.index(texts[-1])
    other = data.draw(TEXTS)
    assert (column == Strings.of(other)) == (texts == other) == (column == other)
    assert column != "".join(texts)


def test_string_columns_longer_than_a_block() -> None:
    texts = [str(i) for i in range(70_000)]
    column = Strings.of(texts)
    assert list(column) == texts and column[69_999] == "69999"


def test_offsets_that_are_wrong() -> None:
    blob = np.frombuffer(b"abcdef", np.uint8)

    def column(*offsets: int) -> Strings:
        return Strings(blob, np.array(offsets, np.uint64))

    for offsets in ((), (0, 5), (1, 6), (0, 7), (0, 2**64 - 1)):
        with pytest.raises(DatasetError, match="offset"):
            column(*offsets)
    falling = column(0, 4, 2, 6)
    with pytest.raises(DatasetError, match="fall instead of rising"):
        list(falling)
    with pytest.raises(DatasetError, match="string 1 has the offsets 4 to 2"):
        falling[1]
    with pytest.raises(DatasetError, match="string 0 has the offsets 0 to 99"):
        column(0, 99, 6)[0]
    with pytest.raises(UnicodeEncodeError):
        Strings.of(["\ud800"])
