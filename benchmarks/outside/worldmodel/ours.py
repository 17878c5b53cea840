"""stable-worldmodel's compare_h5_lance.py with rows of packed sets, local and from a server with 20 ms of latency."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from stable_worldmodel.data import Dataset, HDF5Dataset, LanceDataset

sys.path[:0] = [f"{sys.prefix}/worldmodel/scripts/benchmark", str(Path(__file__).parents[2])]


def main(images: Path, folder: Path, steps: int = 10) -> None:
    import compare_h5_lance as bench
    from remote_server import served
    from sets import make
    from windows import COLUMNS, Windows

    bucket = folder / "bucket"
    make(images, bucket)
    shutil.copytree(
        bucket / "swm.lance", folder / "swm.lance", copy_function=os.link
    )  # the script requests it without the bucket
    common = {"num_steps": 4, "frameskip": 5, "keys_to_load": ["pixels", *COLUMNS]}
    peer, packed = HDF5Dataset(path=bucket / "swm.h5", **common), Windows(bucket / "raw", [], **common)
    for clip, own in zip(map(peer.__getitem__, (0, 70)), packed.__getitems__([0, 70]), strict=True):
        assert clip.keys() == own.keys() and all(clip[name].equal(own[name]) for name in clip)
    rates: dict[str, float] = {}
    peer, measure = bench._make_dataset, bench._bench_one

    def made(config: Any, cached: list[str], common: dict[str, Any]) -> Dataset:
        options = {"path": config.path, "keys_to_cache": cached, **common}
        if config.format == "packer":
            return Windows(**options)
        if config.source == "local":
            return peer(config, cached, common)
        if config.format == "hdf5":  # the script's own call turns s3:// into s3:/
            return HDF5Dataset(storage_options=bench._hdf5_storage_opts(config), **options)
        return LanceDataset(connect_kwargs={"storage_options": bench._lance_storage_opts(config)}, **options)

    def kept(label: str, *arguments: Any) -> tuple[float, float]:
        result = measure(label, *arguments)
        name, _, source, cache = label.split()
        rates[f"{name} {source} {cache}"] = result[0]
        return result

    bench._make_dataset, bench._bench_one = made, kept
    with served(folder, 20) as (address, _):
        os.environ |= dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "x")
        os.environ |= {"AWS_ENDPOINT_URL": address, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-2"}
        sets = [
            ("HDF5", "hdf5", "swm.h5"),
            ("raw", "packer", "raw"),
            ("Lance", "lance", "swm.lance"),
            ("JPEG", "packer", "jpeg"),
        ]
        keys = {"keys_to_load": ["pixels", *COLUMNS], "keys_to_cache": [*COLUMNS]}
        rows = [
            {"name": name, "format": form, "source": source, "path": f"{root}/{path}", **keys}
            for source, root in (("local", bucket), ("s3", "s3://bucket"))
            for name, form, path in sets
        ]
        numbers = {"num_steps": 4, "frameskip": 5, "batch_size": 64, "num_workers": 2, "warmup": 1, "steps": steps}
        bench.main.__wrapped__(OmegaConf.create({"benchmark": numbers, "datasets": rows}))
    pairs = (("HDF5", "raw"), ("Lance", "JPEG"))
    for source, cache, (other, own) in itertools.product(("local", "s3"), ("no-cache", "cached"), pairs):
        peer, packed = (rates.get(f"{name} {source} {cache}", float("nan")) for name in (other, own))
        case = f"{other}, {source}, {cache}"
        print(f"| compare_h5_lance | samples/s, {case} | {packed:.0f} | {peer:.0f} | {packed / peer:.1f} |")


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)  # as the script does
    with tempfile.TemporaryDirectory() as there:
        main(Path(sys.argv[1]).absolute(), Path(there))
