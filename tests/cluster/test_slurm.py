"""The batch scripts of examples/slurm, and other commands in jobs, on a real Slurm cluster; see two_nodes.py.

Run by `make test-slurm`, as root. The tests take minutes: Slurm enforces time limits to within a minute.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import make_jpeg
from jobs import running
from two_nodes import FREEZER, NODES, Cluster

import packer

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parents[2]
SAMPLES = 36  # images to train on
TINY = "--model small --size 16 --batch-size 2 --val-split train"


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with running("linuxproc") as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """The cluster. After each test it has no job and no process of a job left, and the disks of the nodes are
    emptied."""
    yield shared
    shared.run("scancel", "--user=root")
    shared.wait(lambda: not shared.run("squeue", "--noheader"), 60, "all jobs to end")
    shared.wait(lambda: not shared.processes(), 60, "processes to end", shared.processes)
    for node in NODES:
        shared.on(node, "find", shared.local, "-mindepth", "1", "-delete")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small set on the disk that all nodes share."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("source") / "set"
    make_tree(tree)
    packer.convert(tree, to="tar", output=out, run=packer.Run(workers=1), shards=packer.Shards(samples=1))
    return out


def make_tree(tree: Path) -> None:
    for number in range(SAMPLES):
        path = tree / "train" / "abc"[number % 3] / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_jpeg(number))


def assert_clean(cluster: Cluster) -> None:
    left = {node: cluster.left(node) for node in NODES}
    assert [
        path for paths in left.values() for path in paths if Path(path).name not in (".packer-staged", "lock")
    ] == []


def staged(cluster: Cluster) -> list[str]:
    """The complete copies on both nodes."""
    return [path for node in NODES for path in cluster.left(node) if path.endswith("/dataset.json")]


def traced(cluster: Cluster, name: str) -> list[tuple[int, int]]:
    """(epoch, sample) of every step of every rank."""
    lines = [line.split() for path in cluster.work.glob(f"{name}.*") for line in path.read_text().splitlines()]
    return [(int(epoch), int(sample)) for epoch, sample in lines]


def every_sample(epochs: int) -> list[tuple[int, int]]:
    return list(itertools.product(range(epochs), range(SAMPLES)))


def submitted(cluster: Cluster, script: str, *options: str, **environ: object) -> str:
    """Submit a script of examples/slurm, unchanged; returns the job id."""
    return cluster.submit(*options, f"examples/slurm/{script}", environ={k: str(v) for k, v in environ.items()})


def steps_of(cluster: Cluster, name: str, samples: int, job: str) -> None:
    """Wait until this many samples were trained on."""
    cluster.wait(lambda: len(traced(cluster, name)) >= samples, 300, "training", lambda: cluster.output(job))


def test_the_cpus_of_a_task(cluster: Cluster) -> None:
    """The machine has fewer CPUs than the nodes claim, so the mask is made up."""
    script = cluster.work / "cpus.py"
    script.write_text(
        "import os; os.sched_getaffinity = lambda pid: range(32); import cache; print(cache.usable_cpus())"
    )
    job = cluster.submit("-N1", "-n4", "--exclusive", f"--wrap=python {script}; srun python {script}")
    assert cluster.ended(job, 60) == "COMPLETED"
    outputs = {
        "eight each": cluster.run("srun", "-N1", "-n4", "-c8", "python", script),
        "one each": cluster.run("srun", "-N1", "-n4", "python", script),
        "the script and four tasks": cluster.output(job),
    }
    assert {name: out.split() for name, out in outputs.items()} == {
        "eight each": ["8"] * 4,
        "one each": ["1"] * 4,
        "the script and four tasks": ["32"] + ["8"] * 4,
    }


NODE_PARTS = """
import json, os, sys
import readers
from readers.order import NodeLocal
from readers.torch import EpochSampler
reader = readers.open(os.environ["PACKER_STAGED"], "train", fallback=sys.argv[1])
samples = [int(i) for i in EpochSampler(NodeLocal(len(reader), nodes=2))]
for i in samples:
    reader.read(i)
stats = reader.store.stats()
found = {"slurm": os.environ["SLURM_NODEID"], "torchrun": os.environ["GROUP_RANK"], "samples": samples,
        "source": stats.source}
with open(f"parts.{os.environ['RANK']}", "w") as file:
    json.dump(found, file)
"""


def test_each_node_reads_the_part_that_was_staged_there(cluster: Cluster, source: Path) -> None:
    """Also where torchrun numbers the nodes in reverse, as it does for these names."""
    script = cluster.work / "parts.py"
    script.write_text(NODE_PARTS)
    cluster.run(
        *("srun", "-N2", "--ntasks-per-node=1", "packer", "stage", source, "--target", cluster.local, "--part", "node"),
        *("--cleanup", "atexit", "--", "torchrun", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d"),
        *("--rdzv-id=parts", "--rdzv-endpoint=n9:29500", script, source),
        seconds=300,
    )
    reports = [json.loads((cluster.work / f"parts.{rank}").read_text()) for rank in range(4)]
    assert all(report["slurm"] != report["torchrun"] for report in reports), "torchrun numbers the nodes as Slurm does"
    assert [report["source"] for report in reports] == [0] * 4, "each node read the part of the other"
    assert sorted(sample for report in reports for sample in report["samples"]) == list(range(SAMPLES))
    assert_clean(cluster)


def test_convert_and_train_with_one_task_a_rank(cluster: Cluster) -> None:
    """Four tasks on two nodes: every sample of every epoch once."""
    tree, epochs = cluster.folder / "tree", 3
    make_tree(tree)
    script = cluster.work / "train.sh"
    script.write_text(
        "export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS MASTER_ADDR=n9 MASTER_PORT=29501\n"
        f"exec python examples/train_imagenette.py {cluster.folder}/converted {TINY.replace('2 ', '3 ')}"
        f" --epochs {epochs} --trace four\n"
    )
    wrapped = f"srun -n1 -N1 packer convert {tree} --to hdf5 -o {cluster.folder}/converted && srun bash {script}"
    job = cluster.submit("--nodes=2", "--ntasks-per-node=2", f"--wrap={wrapped}")
    assert cluster.ended(job, 300) == "COMPLETED", cluster.output(job)
    assert sorted(traced(cluster, "four")) == every_sample(epochs), cluster.output(job)


def test_one_node_stages_trains_and_cleans_up(cluster: Cluster, source: Path) -> None:
    """At the normal end of the job, and when it is cancelled in the middle."""
    options = ("--gpus-per-node=1", "--nodelist=n9", "--time=10")
    environ = {"SET": source, "TMPDIR": cluster.local}
    job = submitted(
        cluster, "one_node.sbatch", *options, **environ, TRAIN_OPTIONS=f"{TINY} --epochs 2 --trace one-whole"
    )
    assert cluster.ended(job, 300) == "COMPLETED", cluster.output(job)
    assert sorted(traced(cluster, "one-whole")) == every_sample(2)
    assert_clean(cluster)
    job = submitted(cluster, "one_node.sbatch", *options, **environ, TRAIN_OPTIONS=f"{TINY} --epochs 999 --trace one")
    steps_of(cluster, "one", SAMPLES, job)
    assert cluster.left("n9"), "no copy on the node during training"
    cluster.run("scancel", job)
    assert cluster.ended(job, 60) == "CANCELLED", cluster.output(job)
    assert_clean(cluster)


def test_many_nodes_clean_up_when_the_time_is_up(cluster: Cluster, source: Path) -> None:
    """On the SIGTERM that the script requests two minutes before its limit; the last step is saved."""
    options = f"{TINY} --save-every 1000000 --trace many"
    environ = {"SET": source, "TMPDIR": cluster.local, "TRAIN_OPTIONS": f"{options} --epochs 999"}
    job = submitted(cluster, "many_nodes.sbatch", "--nodes=2", "--gpus-per-node=1", "--time=4", **environ)
    steps_of(cluster, "many", SAMPLES, job)
    assert cluster.ended(job, 300) in ("TIMEOUT", "FAILED"), cluster.output(job)
    assert_clean(cluster)
    checkpoint = torch.load(cluster.work / f"run-{job}.pt", weights_only=True)
    assert checkpoint["step"] * 4 == len(traced(cluster, "many")), "the last step is not the saved one"


def test_time_limits_of_an_array_leave_nothing(source: Path) -> None:
    """Five jobs of two nodes, each with a separate copy on both nodes; Slurm ends all of them without a warning."""
    if not FREEZER.is_dir():
        pytest.skip(f"proctrack/cgroup needs {FREEZER}")
    with running("cgroup") as cluster:
        path = cluster.work / "array.sbatch"
        path.write_text(
            "#!/bin/bash\n"
            f"export TO={cluster.local}/$SLURM_ARRAY_TASK_ID\n"
            f"srun bash -c 'mkdir $TO; exec packer stage {source} --target $TO --cleanup atexit -- sleep 600'\n"
        )
        job = cluster.submit("--array=1-5", "--nodes=2", "--ntasks-per-node=1", "--time=1", path)
        cluster.wait(lambda: len(staged(cluster)) == 10, 60, "ten copies", lambda: cluster.output(job))
        states = [cluster.ended(f"{job}_{number}", 200) for number in range(1, 6)]
        assert states == ["TIMEOUT"] * 5, cluster.output(job)
        assert_clean(cluster)


def test_a_requeued_job_continues_where_it_stopped(cluster: Cluster, source: Path) -> None:
    """The last checkpoint is saved, the copies are reused, and no sample is lost or repeated."""
    epochs = 60
    options = f"{TINY} --epochs {epochs} --save-every 1000000 --trace requeued"
    environ = {"SET": source, "LOCAL": cluster.local, "TRAIN_OPTIONS": options}
    job = submitted(cluster, "requeue.sbatch", "--gpus-per-node=1", "--time=20", **environ)
    steps_of(cluster, "requeued", 4 * SAMPLES, job)
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    cluster.wait(lambda: cluster.state(job) == "PENDING", 60, "the requeue", lambda: cluster.output(job))
    before = len(traced(cluster, "requeued"))
    assert 0 < before < epochs * SAMPLES, "the job was not stopped in the middle"
    assert all(cluster.left(node) for node in NODES), "the copies are gone from the nodes"
    assert cluster.ended(job, 400) == "COMPLETED", cluster.output(job)
    output = cluster.output(job)
    assert "resumed at epoch" in output and "0 B in 0 files copied" in output, output
    assert sorted(traced(cluster, "requeued")) == every_sample(epochs), output
    assert_clean(cluster)


def test_a_node_fails(cluster: Cluster, source: Path) -> None:
    """Slurm requeues the job by itself; the job continues from the last checkpoint, and only the new node copies the
    set."""
    epochs = 60
    options = f"{TINY} --epochs {epochs} --save-every 10 --trace failing"
    environ = {"SET": source, "LOCAL": cluster.local, "TRAIN_OPTIONS": options}
    job = submitted(cluster, "requeue.sbatch", "--gpus-per-node=1", "--time=20", **environ)
    steps_of(cluster, "failing", 2 * SAMPLES, job)
    cluster.switch_off("n10")
    cluster.wait(lambda: cluster.state(job) == "PENDING", 120, "the requeue", lambda: cluster.output(job))
    before = len(traced(cluster, "failing"))
    assert before < epochs * SAMPLES, "the job was not stopped in the middle"
    cluster.switch_on("n10")
    assert cluster.ended(job, 400) == "COMPLETED", cluster.output(job)
    output = cluster.output(job)
    assert "resumed at epoch" in output and "0 B in 0 files copied" in output, output
    assert set(traced(cluster, "failing")) == set(every_sample(epochs)), output
    assert_clean(cluster)
