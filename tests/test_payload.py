"""The payload of a step: what is found in batches, and which fields a step uses, without breaking the step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional

from readers.diagnosis import Payload
from readers.diagnosis.payload import inspect_payload
from readers.diagnosis.payload_facts import KINDS, find_facts

N = 8
RANDOM = torch.Generator().manual_seed(1)
PIXELS = torch.randint(0, 256, (N, 3, 32, 32), generator=RANDOM)
LABELS = torch.randint(0, 900, (N,), generator=RANDOM)
MASK = torch.randint(0, 2, (N, 16, 16), generator=RANDOM)
NOISE = torch.rand((N, 3, 32, 32), generator=RANDOM)
MEAN, DEVIATION = (torch.tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
NORMALIZED = (PIXELS / 255 - MEAN) / DEVIATION


class Pair(NamedTuple):
    image: Any
    label: Any


def kinds(payload: Payload) -> dict[str, list[str]]:
    return {field.path: [fact.kind for fact in field.facts] for field in payload.fields}


def saves(values: Any, dtype: str = "") -> dict[str, float]:
    """Kinds of the facts of a field, and the share of its bytes that each saves."""
    (field,) = inspect_payload([values]).fields
    return {fact.kind: round(fact.saves / field.bytes, 3) for fact in field.facts}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (PIXELS / 255, {"uint8": 0.75}),
        (PIXELS.float(), {"uint8": 0.75}),
        (NORMALIZED, {"uint8": 0.75}),
        (NORMALIZED.permute(0, 2, 3, 1), {"uint8": 0.75}),
        (NORMALIZED.double(), {"uint8": 0.875}),
        ((PIXELS / 255 - 0.5) / 0.5, {"uint8": 0.75}),
        (NOISE, {}),
        (NORMALIZED * 0.7 + 0.3 * NORMALIZED.flip(0), {}),  # two images mixed are on no grid
        (PIXELS.to(torch.uint8), {}),
        (LABELS, {"narrow": 0.75}),
        (LABELS - 70_000, {"narrow": 0.5}),
        (NOISE.double(), {"narrow": 0.5}),
        (functional.one_hot(LABELS % 10, 10).float(), {"one-hot": 0.975, "sparse": 0.8}),
        (functional.one_hot(MASK, 4).permute(0, 3, 1, 2), {"one-hot": 0.969, "bits": 0.984}),
        (MASK.bool(), {"bits": 0.875}),
        (MASK.float() * 255, {"bits": 0.969}),
        (torch.zeros(N, 50), {"constant": 1.0}),
        (NOISE * (NOISE > 0.95), {"sparse": 0.9}),
        (functional.pad(NOISE, (0, 32)), {"padded": 0.5}),
        (functional.pad(NOISE, (16, 16)), {}),  # a margin on both sides is part of the picture
        (np.random.default_rng(1).random((N, 4)), {"narrow": 0.5}),
        (torch.zeros(0, 3), {}),
        (torch.tensor(1.5), {}),
        (torch.tensor([[1 + 2j]]), {}),
        (NOISE[0].to_sparse(), {}),
        (torch.nested.nested_tensor([NOISE[0, 0], NOISE[0, 0, :5]], layout=torch.jagged), {}),
        (torch.full((N, 3), float("nan")), {}),
    ],
)  # fmt: skip
def test_facts_say_what_could_be_smaller(values: Any, expected: dict[str, float]) -> None:
    found = {} if not inspect_payload([values]).fields[0].bytes else saves(values)
    assert found.keys() == expected.keys(), found
    assert all(abs(found[kind] - share) < 0.05 for kind, share in expected.items()), found


def test_a_grid_gives_the_values_back() -> None:
    (fact,) = (fact for fact in inspect_payload([NORMALIZED]).fields[0].facts if fact.kind == "uint8")
    offset, step = (torch.tensor(values)[:, None, None] for values in zip(*fact.grid, strict=True))
    levels = (NORMALIZED - offset) / step
    assert torch.allclose(levels, PIXELS.float(), atol=0.01) and len(fact.grid) == 3


def test_fields_are_named_and_counted() -> None:
    batch = {"views": [NOISE, NOISE.clone()], "target": Pair(LABELS, {"mask": MASK}), 3: np.ones(N), "key": ["a"] * N}
    payload = inspect_payload([batch, {**batch, "views": [NOISE[:, :, :20], NOISE[:, :, :24]]}])
    found = {field.path: (field.dtype, field.shape) for field in payload.fields}
    assert found == {
        "views[0]": ("float32", (N, 3, None, 32)),
        "views[1]": ("float32", (N, 3, None, 32)),
        "target.image": ("int64", (N,)),
        "target.label.mask": ("int64", (N, 16, 16)),
        "[3]": ("float64", (N,)),
    }
    assert payload.bytes == sum(field.bytes for field in payload.fields) and payload.batches == 2
    assert payload.fields[0].bytes == NOISE.nbytes * 26 // 32
    assert {kind for facts in kinds(payload).values() for kind in facts} <= set(KINDS)
    assert inspect_payload([b"text"]).notes and inspect_payload([NOISE]).fields[0].path == ""
    assert kinds(inspect_payload([(LABELS, LABELS.clone())])) == {"[0]": ["narrow"], "[1]": ["duplicate", "narrow"]}
    assert kinds(inspect_payload([(LABELS, LABELS.clone()), (LABELS, LABELS + 1)]))["[1]"] == ["narrow"]


class Odd:
    """An array that does not compare and index as NumPy's do."""

    dtype, shape = np.dtype("float32"), (4, 2)

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        return np.ones((4, 2), np.float32)

    def __getitem__(self, index: Any) -> Any:
        return self

    def __eq__(self, other: object) -> bool:
        raise TypeError("no")

    __hash__ = None  # type: ignore[assignment]


def test_an_array_of_another_kind_breaks_nothing() -> None:
    payload = inspect_payload([{"a": Odd(), "b": Odd(), "c": NOISE}])
    assert [field.bytes for field in payload.fields] == [32, 32, NOISE.nbytes] and "b" in payload.notes[0]


def test_large_arrays_are_sampled() -> None:
    rows = np.zeros((4000, 10_000), np.float32)  # of which a whole pass would take a second for each fact
    rows[:, 1:] = np.random.default_rng(1).random((1, 9999), dtype=np.float32)
    assert saves(rows) == {}


# --- what the step uses ----------------------------------------------------------------------------------------------
model = torch.nn.Conv2d(3, 2, 3)
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    traced = torch.jit.trace(lambda x: (x * 2).sum(), (NOISE,))  # type: ignore[no-untyped-call]


def unpack(batch: Any) -> None:
    image, label = batch
    assert image.shape[0] == len(label) == image.size(0) and image.device == label.device and label.dtype
    image.to(torch.float64), image.contiguous(), label.detach()


def with_autocast(batch: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(batch[0]).sum().backward()


def compiled(batch: Any) -> None:
    torch.compile(lambda image: image.sum() * 2, backend="eager")(batch[0])


@pytest.mark.parametrize(
    ("step", "used"),
    [
        (lambda batch: model(batch[0].to("cpu", non_blocking=True)).sum().backward(), (True, False)),
        (lambda batch: traced(batch[0]), (True, False)),
        (compiled, (True, False)),
        (lambda batch: batch[0].numpy().sum(), (True, False)),
        (lambda batch: np.from_dlpack(batch[0]), (True, False)),
        (lambda batch: np.asarray(batch[0]), (True, False)),
        (lambda batch: batch[0].data_ptr(), (True, False)),
        (lambda batch: batch[1].tolist(), (False, True)),
        (lambda batch: [leaf + 1 for leaf in batch], (True, True)),
        (lambda batch: torch.stack([batch[0], batch[0]]), (True, False)),
        (lambda batch: torch.zeros(N, dtype=torch.int64).copy_(batch[1]), (False, True)),
        (unpack, (None, None)),  # a step that uses nothing is one that cannot be watched
        (lambda batch: 1 / 0, (None, None)),
    ],
)  # fmt: skip
def test_fields_that_the_step_never_uses_are_found(step: Callable[[Any], Any], used: tuple[bool | None, ...]) -> None:
    payload = inspect_payload([(NOISE, LABELS)], step)
    assert tuple(field.used for field in payload.fields) == used
    assert ["unused" in facts for facts in kinds(payload).values()] == [each is False for each in used]
    assert bool(payload.notes) == (used == (None, None))


def test_a_cast_by_the_step_is_found() -> None:
    assert kinds(inspect_payload([(NOISE, LABELS)], with_autocast))["[0]"] == ["cast"]
    twice = inspect_payload([(NOISE, LABELS)], lambda batch: (with_autocast(batch), batch[0] + 1))
    assert kinds(twice)["[0]"] == []
    copied = inspect_payload([[NOISE, LABELS]], lambda batch: batch[0].sum(), lambda batch: [x.half() for x in batch])
    assert kinds(copied)["[0]"] == ["cast"] and copied.fields[1].used is False


def test_the_step_gets_a_copy_and_arrays_are_unknown() -> None:
    batch = {"image": NOISE.clone(), "array": np.ones((N, 2))}
    payload = inspect_payload([batch], lambda batch: batch["image"].add_(1))
    assert torch.equal(batch["image"], NOISE) and [field.used for field in payload.fields] == [True, None]


def test_facts_need_values_of_one_kind() -> None:
    assert find_facts("object", 8, [np.array([None, 1])], frozenset()) == []
    assert find_facts("float32", 4, [np.ones((2, 3)), np.ones(2)], frozenset()) == []
