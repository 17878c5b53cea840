"""A list of addresses: images are fetched from a web server with latency and packed into tar shards.

    python benchmarks/urls.py --images DIR --work DIR [--count 2000] [--latency 20-50] [--threads 32] [--rounds 3] …

A separate process serves the images of DIR, JPEGs in class folders; it waits --latency milliseconds before each answer
and keeps connections open. Every contender fetches the same addresses with --threads threads, without a rate limit, and
writes tar shards below --work, which are removed. CPU time counts the contender and its processes, not the server, with
which it shares the CPUs. Packages of a peer may be in a folder: PYTHONPATH=DIR.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import tarfile
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Benchmark, Contender, contender, main
from machine import cpu_seconds, files_below
from remote_server import served
from report import Column

__all__ = ["BENCHMARK"]

OURS, SCRIPT, PEER = "ours: packer.convert", "a script: urllib3, threads, tarfile", "img2dataset"
PER_SHARD = 1000


@dataclass
class Job:
    """The arguments of a contender: a text file of addresses, the output, and the number of threads."""

    table: Path
    to: Path
    threads: int


@contender(
    OURS,
    imports="packer.conversion.run packer.sources.url_list urllib3",
    note="headers checked, CRC32C, index, fsync; retries, deadlines",
)
def convert(job: Job) -> None:
    import packer

    source = packer.open_source(job.table, private=True, host_rate=1e6, threads=job.threads)
    packer.convert(source, to="tar", output=job.to, shards=packer.Shards(samples=PER_SHARD))


@contender(SCRIPT, imports="urllib3", note="bytes as they come, names only; no check, no retry, no fsync")
def script(job: Job) -> None:
    import urllib3

    http = urllib3.PoolManager(maxsize=job.threads)
    urls = job.table.read_text().split()

    def fetch(url: str) -> bytes:
        return http.request("GET", url, retries=False).data

    with ThreadPoolExecutor(job.threads) as pool:
        under_way = deque(pool.submit(fetch, url) for url in urls[: 4 * job.threads])
        for start in range(0, len(urls), PER_SHARD):
            with tarfile.open(job.to / f"{start:06d}.tar", "w") as tar:
                for number in range(start, min(start + PER_SHARD, len(urls))):
                    data = under_way.popleft().result()
                    if number + 4 * job.threads < len(urls):
                        under_way.append(pool.submit(fetch, urls[number + 4 * job.threads]))
                    member = tarfile.TarInfo(f"{number:09d}.jpg")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


@contender(
    PEER,
    imports="img2dataset",
    note="one process, disable_all_reencoding, no hash, no EXIF; a connection for each image",
)
def img2dataset(job: Job) -> None:
    from img2dataset import download

    download(
        str(job.table), output_folder=str(job.to), output_format="webdataset", input_format="txt", processes_count=1,
        thread_count=job.threads, number_sample_per_shard=PER_SHARD, disable_all_reencoding=True, extract_exif=False,
        compute_hash=None,
    )  # fmt: skip


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one contender: seconds, images/s, CPU time per image, images in its shards."""
    work = Path(arguments.work) / "urls-benchmark"
    shutil.rmtree(work, ignore_errors=True)
    (work / "out").mkdir(parents=True)
    root = arguments.images.resolve()
    paths = [Path(path).relative_to(root).as_posix() for path in files_below(root)]
    with served(root, arguments.latency) as (address, _):
        urls = [f"{address}/{paths[i % len(paths)]}?{i}" for i in range(arguments.count)]
        table = work / "list.txt"
        table.write_text("\n".join(urls))
        job = Job(table, work / "out", arguments.threads)
        started, cpu = time.perf_counter(), cpu_seconds()
        chosen.function(job)
        seconds, cpu = time.perf_counter() - started, cpu_seconds() - cpu
    fetched = sum(_members(path) for path in files_below(job.to) if path.endswith(".tar"))
    shutil.rmtree(work)
    if fetched != arguments.count:
        raise RuntimeError(f"{fetched} of {arguments.count} images are in the shards")
    return {"s": seconds, "images_s": fetched / seconds, "cpu_us": 1e6 * cpu / fetched}


def _members(path: str) -> int:
    with tarfile.open(path) as tar:
        return sum(name.endswith((".jpg", ".jpeg")) for name in tar.getnames())


BENCHMARK = Benchmark(
    title="Lists of addresses into tar shards",
    columns=(
        Column("s", "s", "{:.2f}"),
        Column("images_s", "images/s (min–max)"),
        Column("cpu_us", "CPU µs an image", "{:.0f}"),
    ),
    key="images_s",
    limits=(("images_s", SCRIPT), ("images_s", PEER)),
    measure=measure,
)


if __name__ == "__main__":
    main(
        BENCHMARK,
        __doc__,
        images="the folder of JPEGs to serve",
        work="folder for the outputs",
        count=(2000, "addresses"),
        latency=("20-50", "milliseconds before each answer"),
        threads=(min(32, 16 * (os.cpu_count() or 1)), "that fetch"),
    )
