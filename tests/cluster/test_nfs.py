"""NFS 4.2 with two clients: staging from the export while sets are replaced, and converting to it by tasks. See
nfs.py."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from conversions import OPTIONS, Conversion
from nfs import Client, server
from services import wait

import packer
from packer.testing.samples import files_of

pytestmark = pytest.mark.cluster

TASKS = 2


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with server(tmp_path_factory.mktemp("nfs")) as export:
        yield export


@pytest.fixture(scope="module")
def clients(export: Path) -> Iterator[dict[str, Client]]:
    with Client("a", export.parent) as a, Client("b", export.parent) as b:
        yield {"a": a, "b": b}


def test_two_clients_stage(clients: dict[str, Client], export: Path, source: Path) -> None:
    """Both clients stage at the same time, with checksums; the second run reuses the copy."""
    shutil.copytree(source, export / "set")
    for number in range(2):
        jobs = {
            name: client.start(f"packer stage {client.mount}/set --target /dev/shm --verify")
            for name, client in clients.items()
        }
        for name, job in jobs.items():
            status, output = clients[name].ended(job)
            assert status == 0, output
            assert ("0 B in 0 files copied" in output) == (number > 0), output


def test_a_set_is_replaced_while_a_client_knows_the_old_one(
    clients: dict[str, Client], export: Path, tree: Path, tmp_path: Path
) -> None:
    """The server replaces the set behind the client's attribute cache: the client's copy is the old set or the new one,
    or an error says what changed. After the lifetime of the cache it is the new set."""
    sets = [tmp_path / "even", tmp_path / "odd"]
    for number, made in enumerate(sets):
        packer.convert(tree, "tar", made, run=packer.Run(workers=1), shards=packer.Shards(samples=4, shuffle=number))
    client, place = clients["a"], export / "changing"
    shutil.copytree(sets[0], place)
    client.run(f"packer stage {client.mount}/changing --target /dev/shm/0 --verify")
    command = f"packer stage {client.mount}/changing --target /dev/shm/%s --verify --cleanup atexit -- "
    for number in range(1, 7):
        shutil.copytree(sets[number % 2], export / "next")
        place.rename(export / "old")
        (export / "next").rename(place)
        shutil.rmtree(export / "old")
        status, output = client.ended(client.start(command % number + "sh -c 'packer verify $PACKER_STAGED'"))
        assert status == 0 or ("Traceback" not in output and "changing" in output), output
    compare = command % "last" + f"sh -c 'cmp $PACKER_STAGED/dataset.json {sets[0]}/dataset.json'"
    wait(lambda: client.ended(client.start(compare))[0] == 0, "the client to see the new set")


def test_two_clients_convert_to_one_folder(clients: dict[str, Client], export: Path, conversion: Conversion) -> None:
    for number in range(2):
        out = f"shared-{number}"
        jobs = {name: client.start(_task(client, out, task)) for task, (name, client) in enumerate(clients.items())}
        for name, job in jobs.items():
            status, output = clients[name].ended(job)
            assert status == 0, f"{name}: {output}"
        last = clients["ab"[number % 2]]
        last.run(f"packer commit {last.mount}/{out}")
        assert files_of(export / out) == conversion.files


def test_the_same_task_on_both_clients_at_once(
    clients: dict[str, Client], export: Path, conversion: Conversion
) -> None:
    for task in range(TASKS):
        jobs = {name: client.start(_task(client, "twice", task)) for name, client in clients.items()}
        results = {name: clients[name].ended(job) for name, job in jobs.items()}
        assert all(status == 0 for status, _ in results.values()), results
    clients["b"].run(f"packer commit {clients['b'].mount}/twice")
    assert files_of(export / "twice") == conversion.files


def test_a_client_is_switched_off_in_its_task(export: Path, conversion: Conversion) -> None:
    """The other client does the task once the server has released the locks."""
    with Client("c", export.parent) as lost, Client("d", export.parent) as other:
        out = export / "lost"
        lost.start(_task(lost, "lost", 0))
        wait(lambda: conversion.shards(out) >= 3, "three shards", 120)
        lost.switch_off()
        for task in range(TASKS):
            other.run(_task(other, "lost", task))
        commit = f"packer commit {other.mount}/lost"
        wait(lambda: other.ended(other.start(commit))[0] == 0, "a commit, once the server has given up the locks", 120)
        assert files_of(out) == conversion.files


@pytest.fixture(scope="module")
def conversion(export: Path) -> Conversion:
    """The images are in the export: file times on hostfs are coarse, and times are part of a plan."""
    (export / "images").mkdir()
    return Conversion(export / "images")


def _task(client: Client, out: str, task: int) -> str:
    options = f"{' '.join(OPTIONS)} --workers 1 --task {task}/{TASKS}"
    return f"packer convert {client.mount}/images/tree -o {client.mount}/{out} {options}"
