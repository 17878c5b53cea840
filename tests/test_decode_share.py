"""Decoding divided between a device and the CPU: the division affects only which images go where, and "auto" finds the
best share. Times come from clocks that only planted work advances; the device is a double."""

from __future__ import annotations

import math
import random
import time
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tree_of
from gpu_doubles import Double, install
from loader_options import grouped
from test_device_decode import jpeg, png, turned
from test_loader_device import compare
from test_loader_timers import Clock

import packer
import readers
from cache.errors import BadSampleError
from readers import Decode
from readers.augment import RandomHorizontalFlip, RandomResizedCrop, cpu
from readers.decode.batch import PROBE, routes
from readers.decode.device import DecodeStream, Share, Spent
from readers.headers import parse_any
from readers.loader import ImageLoader

CROP = [RandomResizedCrop(50, (0.5, 1.0)), RandomHorizontalFlip()]
FIELDS = ("image", "label", "key", "index")
COUNT = 96
OPTIONS: dict[str, Any] = {"augment": CROP, "seed": 3, "tail": "exact", "fields": FIELDS, "decoder": "torchcodec"}
SHARES, REFUSED = (0, 0.25, 1, "auto"), (0, 6, 30, 31)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """96 images, five in six of which a device decodes."""
    root = tmp_path_factory.mktemp("photos") / "images"
    kinds: list[Callable[[int], bytes]] = [
        lambda i: jpeg(i),
        lambda i: jpeg(i, (70, 90)),
        lambda i: turned(i, 6),
        lambda i: jpeg(i, mode="L"),
        lambda i: jpeg(i, (64, 64)),
        lambda i: png(i),
    ]
    images = {f"class{i % 3}/{i:03d}.{'png' if i % 6 == 5 else 'jpg'}": kinds[i % 6](i) for i in range(COUNT)}
    packer.convert(tree_of(root, images), to="tar", output=root.parent / "set", shards=packer.Shards(samples=40))
    return root.parent / "set"


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    return install(monkeypatch, "torchcodec")


def listen(monkeypatch: pytest.MonkeyPatch, double: Double, does: Callable[[bytes], object]) -> None:
    """Call `does` with each image that the device decodes."""
    decode_one = double.decode_one

    def decode(data: bytes) -> torch.Tensor:
        does(data)
        return decode_one(data)

    monkeypatch.setattr(double, "decode_one", decode)


# --- the choice of images -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("share", "step"), [(0, 1), (0.03, 1), (1 / 3, 1), (0.9, 2), (0.25, 8), (1, 8)])
def test_the_cpu_gets_its_share_of_any_consecutive_positions(share: float, step: int) -> None:
    """step: an order whose positions belong to nodes gives a rank every second or every eighth position, less
    evenly."""
    chosen = Share(share).choose(7, 2, step * np.arange(20_000))
    for count in (16, 256, 1000):
        counts = np.convolve(chosen, np.ones(count), "valid")
        assert np.abs(counts - share * count).max() <= (3 if step == 1 else 6)
    assert chosen.mean() == pytest.approx(share, abs=1e-3)


def test_the_choice_depends_on_seed_epoch_and_position_alone() -> None:
    positions = np.arange(5000)
    chosen = Share(0.25).choose(7, 2, positions)
    assert np.array_equal(chosen[::-1], Share(0.25, threads=9).choose(7, 2, positions[::-1]))
    assert np.array_equal(chosen[900:], Share(0.25).choose(7, 2, positions[900:]))
    for seed, epoch in ((8, 2), (7, 3)):
        assert not np.array_equal(chosen, Share(0.25).choose(seed, epoch, positions))
    assert not (chosen & ~Share(0.3).choose(7, 2, positions)).any(), "a larger share removed images"


@pytest.mark.parametrize("share", [-0.1, 1.5, math.nan, "0.5", True, None, [0.5]])
def test_invalid_shares(reader: readers.Reader, double: Double, share: Any) -> None:
    with pytest.raises(ValueError, match=r"^cpu_share is 'auto' or a number from 0 to 1, not "):
        ImageLoader(reader, 4, **grouped({"decode": Decode(cpu_share=share), **OPTIONS}))


@pytest.mark.parametrize(("share", "decoder"), [(0.25, "auto"), ("auto", "cpu")])
def test_a_share_is_refused_where_the_cpu_decodes_everything(reader: readers.Reader, share: Any, decoder: Any) -> None:
    with pytest.raises(ValueError, match=rf"^cpu_share='?{share}'? is .* device='cpu' and decoder='{decoder}'"):
        ImageLoader(reader, 4, augment=CROP, decode=Decode(decoder=decoder, cpu_share=share))
    assert ImageLoader(reader, 4, augment=CROP, decode=Decode(decoder=decoder, cpu_share=0)).decoder == "cpu"


# --- unchanged batches --------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:the device cpu failed on .* of the first:UserWarning")
@pytest.mark.parametrize(("share", "refused"), [*((share, ()) for share in SHARES), (0, REFUSED), ("auto", REFUSED)])
def test_the_same_batches_for_each_share(
    reader: readers.Reader, double: Double, share: Any, refused: tuple[int, ...]
) -> None:
    """Also where the device refuses images; the other images stay with their decoders."""
    double.refuse = {bytes(reader.read(i)) for i in refused}
    loader = ImageLoader(reader, 12, **grouped({"decode": Decode(cpu_share=share), "threads": 3, **OPTIONS}))
    compare(list(loader), list(ImageLoader(reader, 12, **grouped({**OPTIONS, "decoder": "cpu"}))), 0)
    able, stats = int(routes(reader.info).sum()), loader.stats()
    failed = able - stats.device_images - stats.shared_images
    assert failed == len(refused) if share == 0 else 0 <= failed <= len(refused)
    assert stats.made == COUNT and able == 80
    if not refused:
        assert len(double.calls) <= len(loader) and sum(double.calls) == stats.device_images
        assert stats.shared_images == 0 if share == 0 else stats.device_images == 0 if share == 1 else True


def test_a_number_gives_the_same_pixels_after_a_resume(
    reader: readers.Reader, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device decodes the same images, also in other batches, with other threads and on more ranks."""
    seen: list[bytes] = []
    listen(monkeypatch, double, seen.append)
    loader = ImageLoader(reader, 8, **grouped({"decode": Decode(cpu_share=0.4), "threads": 3, **OPTIONS}))
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    rest = [image for batch in batches for image in batch[0]]
    by_device, rest_keys = set(seen), {bytes(reader.read(row)) for row in loader.order.indices(0, np.arange(24, COUNT))}
    seen.clear()
    resumed: list[torch.Tensor] = []
    for rank in range(2):
        ranks = {"rank": rank, "world_size": 2}
        other = ImageLoader(reader, 4, **grouped({"decode": Decode(cpu_share=0.4), "threads": 1, **ranks, **OPTIONS}))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other.load_state_dict(state)
        resumed += [image for batch in other for image in batch[0]]
    assert len(resumed) == len(rest) == COUNT - 24
    seen = [data for data in seen if data != PROBE]
    assert set(seen) == by_device & rest_keys and len(seen) == len(set(seen)) > 20


@pytest.mark.parametrize(("share", "name"), [(0, ""), (0.25, ", cpu_share=0.25"), ("auto", ", cpu_share=auto")])
def test_states_name_the_share(reader: readers.Reader, double: Double, share: Any, name: str) -> None:
    loader = ImageLoader(reader, 8, **grouped({"decode": Decode(cpu_share=share), **OPTIONS}))
    state = loader.state_dict()
    assert loader.decoder == state["decoder"] == f"torchcodec/cpu{name}"
    for other in (0, 0.25, "auto"):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            loader.with_options(decode=Decode(decoder="torchcodec", cpu_share=other)).load_state_dict(state)
        began = [f"began with the decoder 'torchcodec/cpu{name}'" in str(warning.message) for warning in warned]
        assert began == ([] if other == share else [True])


def test_an_image_of_the_share_that_the_cpu_cannot_decode_is_a_bad_sample(
    reader: readers.Reader, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode_image = cpu.decode_image
    bad = bytes(reader.read(0))

    def failing(data: Any, *more: Any, **named: Any) -> Any:
        if bytes(data) == bad:
            raise BadSampleError("planted")
        return decode_image(data, *more, **named)

    monkeypatch.setattr(cpu, "decode_image", failing)
    monkeypatch.setattr("readers.coefficients.decode_resized", lambda *_, **__: False)  # not in one pass
    loader = ImageLoader(reader, 12, on_error="substitute", **grouped({"decode": Decode(cpu_share=1), **OPTIONS}))
    with pytest.warns(UserWarning, match="1 bad samples .*planted"):
        assert sum(len(batch[0]) for batch in loader) == COUNT
    assert [sample.index for sample in loader.bad_samples] == [0]


# --- "auto" -------------------------------------------------------------------------------------------------------
class Machine:
    """The cost of batches in nanoseconds: per byte on the device and on a thread, and the remaining work of a batch."""

    def __init__(self, device: float, cpu: float, threads: int = 1, rest: tuple[float, float] = (0, 0)) -> None:
        self.device, self.cpu, self.threads, self.rest = device, cpu, threads, rest
        self.noise = random.Random(1)
        self.spread = 0.0

    def batch(self, share: float, images: int = 256) -> Spent:
        """A batch of images of 40 to 160 kB."""
        sizes = [self.noise.randrange(40_000, 160_000) for _ in range(images)]
        chosen = Share(share).choose(0, self.noise.randrange(1000), np.arange(images))
        by_cpu = sum(size for size, is_cpu in zip(sizes, chosen, strict=True) if is_cpu)
        by_device = sum(sizes) - by_cpu
        shared, decoded = (
            ns * self.noise.uniform(1 - self.spread, 1 + self.spread)
            for ns in (self.cpu * by_cpu, self.device * by_device)
        )
        whole = images / 256
        device, cpu = decoded + whole * self.rest[0], shared + whole * self.rest[1]
        return Spent(images, round(cpu), round(shared), by_cpu, round(device), round(decoded), by_device)

    def apart(self, share: float) -> float:
        """The time by which the device exceeds the threads, relative to the slower of the two."""
        spent = [self.batch(share) for _ in range(50)]
        device, cpu = sum(batch.device for batch in spent), sum(batch.cpu for batch in spent) / self.threads
        return (device - cpu) / max(device, cpu)


def run(share: Share, machine: Machine, batches: int, ahead: int = 6) -> list[float]:
    """The share of each batch. `ahead` batches are planned before the time of the first one is known."""
    planned: deque[float] = deque()
    shares = []
    for _ in range(batches):
        shares.append(share.value)
        planned.append(share.value)
        if len(planned) > ahead:
            share.add(machine.batch(planned.popleft()))
    return shares


MS = 1e6
MACHINES: dict[str, tuple[float, float, int, tuple[float, float]]] = {
    "equal": (10, 10, 1, (0, 0)),
    "a device as fast as 30 threads, with 2": (1, 30, 2, (0, 0)),
    "a slow device": (30, 10, 4, (0, 0)),
    "much else for the threads": (2, 8, 4, (5 * MS, 80 * MS)),
    "much else for the device": (2, 8, 4, (40 * MS, 0)),
}


@pytest.mark.parametrize("ahead", [0, 6, 20])
def test_auto_lets_cpu_and_device_finish_together(ahead: int) -> None:
    for name, machine in MACHINES.items():
        where = Machine(*machine)
        share = Share("auto", where.threads)
        shares = run(share, where, 120, ahead)
        assert abs(where.apart(share.value)) < 0.08, (name, share.value)
        moves = np.sign(np.diff(shares))
        moves = moves[moves != 0]
        assert (moves == moves[0]).all() and len(moves) <= 6, f"{name}: the share oscillates"


@pytest.mark.parametrize("change", [{"device": 8.0}, {"cpu": 2.0}], ids=str)
def test_auto_follows_rates_and_ignores_noise(change: dict[str, float]) -> None:
    machine = Machine(2, 8, 4)
    machine.spread = 0.25
    share = Share("auto", machine.threads)
    settled = np.array(run(share, machine, 600)[100:])
    assert np.ptp(settled) <= 0.08 and np.count_nonzero(np.diff(settled)) <= 20
    machine.spread = 0
    assert abs(machine.apart(float(settled.mean()))) < 0.05
    for name, ns in change.items():
        setattr(machine, name, ns)
    assert abs(machine.apart(share.value)) > 0.3
    run(share, machine, 100)
    assert abs(machine.apart(share.value)) < 0.08


@pytest.mark.parametrize(("device", "cpu", "bound"), [(0.01, 100, 1 / 32), (100, 0.01, 31 / 32)])
def test_auto_leaves_some_images_to_each_decoder(device: float, cpu: float, bound: float) -> None:
    """Otherwise a change of their rates would go unnoticed."""
    share = Share("auto")
    run(share, Machine(device, cpu), 60)
    assert share.value == bound


def test_a_stalled_or_a_small_batch_changes_the_share_little() -> None:
    machine = Machine(2, 8, 4, (5 * MS, 5 * MS))
    share = Share("auto", machine.threads)
    run(share, machine, 100)
    before = share.value
    usual = machine.batch(before)
    share.add(usual._replace(cpu=usual.cpu + 60 * 1000 * MS, device=100 * usual.device))
    assert share.value == pytest.approx(before, abs=0.05)
    for _ in range(10):  # the last batch of an epoch may have three images, which count for less
        share.add(Spent(3, 10, 1, 100, 5_000, 4_000, 100))
        run(share, machine, 10, 0)
    assert share.value == pytest.approx(before, abs=0.05)


@pytest.mark.parametrize("empty", [{"device_bytes": 0, "decoded": 0}, {"shared_bytes": 0, "shared": 0}], ids=str)
def test_the_share_stays_until_both_have_decoded_images(empty: dict[str, int]) -> None:
    share, machine = Share("auto"), Machine(1, 9)
    for _ in range(20):
        share.add(machine.batch(0.5)._replace(**empty))
    assert share.value == Share("auto").value


# --- "auto" in a loader -------------------------------------------------------------------------------------------
def plant(monkeypatch: pytest.MonkeyPatch, double: Double, rates: dict[str, int]) -> None:
    """Plant times of `rates` nanoseconds a pixel, on a clock of each thread that only this work advances."""
    clock, decode_image = Clock(), cpu.decode_image

    def pixels(data: Any) -> int:
        header = parse_any(data)
        return header.height * header.width

    def decode_on_cpu(data: Any, *more: Any, **named: Any) -> Any:
        clock.advance(rates["cpu"] * pixels(data))
        return decode_image(data, *more, **named)

    monkeypatch.setattr(time, "perf_counter_ns", clock)
    monkeypatch.setattr(cpu, "decode_image", decode_on_cpu)
    monkeypatch.setattr("readers.coefficients.decode_resized", lambda *_, **__: False)  # not in one pass
    listen(monkeypatch, double, lambda data: clock.advance(rates["device"] * pixels(data)))


def expected(rates: dict[str, int], threads: int) -> float:
    """The expected share: one image in six is for the CPU alone, and all are of about the same size."""
    device, cpu = rates["device"], rates["cpu"] / threads
    return (device - cpu / 5) / (device + cpu)


def test_a_loader_finds_the_best_share(reader: readers.Reader, double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    rates, threads = {"device": 100, "cpu": 300}, 2
    plant(monkeypatch, double, rates)
    loader = ImageLoader(reader, 24, **grouped({"decode": Decode(cpu_share="auto"), "threads": threads, **OPTIONS}))
    for epoch in range(12):
        assert sum(len(batch[0]) for batch in loader) == COUNT
        stats = loader.stats()
        if not epoch:
            assert stats.cpu_share == 0.25, "one decoder gets no image at the start"
    assert stats.cpu_share == pytest.approx(expected(rates, threads), abs=0.06)
    share = stats.cpu_share
    assert stats.shared_images / (stats.shared_images + stats.device_images) == pytest.approx(share, abs=0.06)
    shown = f"cpu_share {share:.2f} ({stats.shared_images} images by the CPU, {stats.device_images} by the device)"
    assert shown in str(stats) and stats.to_dict()["cpu_share"] == share
    rates["device"] *= 5  # training needs the device as well
    for _ in range(16):
        list(loader)
    assert loader.stats().cpu_share == pytest.approx(expected(rates, threads), abs=0.06)
    other = loader.over(reader, loader.order, threads=1)
    list(other)
    assert other.stats().cpu_share == 0.25, "a measurement of one loader was used for another"


def test_an_asynchronous_device_reports_its_own_time(
    reader: readers.Reader, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"device": 0, "cpu": 100}
    plant(monkeypatch, double, rates)
    worked = [0]

    def work(data: bytes) -> None:
        worked[0] += 300 * parse_any(data).height * parse_any(data).width

    listen(monkeypatch, double, work)
    monkeypatch.setattr(DecodeStream, "tick", lambda self: worked[0])
    monkeypatch.setattr(DecodeStream, "elapsed", staticmethod(lambda start, end: end - start))
    loader = ImageLoader(reader, 24, **grouped({"decode": Decode(cpu_share="auto"), "threads": 1, **OPTIONS}))
    for _ in range(12):
        list(loader)
    assert loader.stats().cpu_share == pytest.approx(expected({"device": 300, "cpu": 100}, 1), abs=0.06)
