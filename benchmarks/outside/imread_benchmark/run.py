"""Run a campaign of imread_benchmark by its commands, and print its medians as rows. imread_benchmark describes the
current environment, because its `environment provision` would install a lock file without packer's row.

PROTOCOL=loader-supply: a DataLoader without workers and with two workers supplies the images, instead of the loop of
decode-memory. DECODERS=packer,simplejpeg measures only these; simplejpeg must be one of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

import yaml
from imread_benchmark.environments.descriptor import capture_current_environment, write_environment_descriptor

HERE = Path(__file__).resolve().parent
WORKERS = {"prefetch_factor": 1, "persistent_workers": True, "multiprocessing_start_method": "spawn"}
LOADERS = [{"workers": [0], "batch_size": 1}, {"workers": [2], "batch_size": 1, **WORKERS}]


def main() -> None:
    venv, images = (Path(argument).absolute() for argument in sys.argv[1:3])
    revision = subprocess.check_output(["git", "-C", str(venv / "suite"), "rev-parse", "HEAD"], text=True).strip()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)

        def call(*arguments: str | Path) -> dict[str, str]:
            command = [str(venv / "bin" / "imread-benchmark"), *map(str, arguments)]
            return dict(json.loads(subprocess.check_output(command, cwd=work)))

        source = ("--output-root", work / "data", "--provenance-source", "local")
        package = call("dataset", "package", "--name", "images", "--workload", f"images={images}", *source)[
            "descriptor"
        ]
        plan = yaml.safe_load((HERE / "plan.yaml").read_text())
        if (protocol := os.environ.get("PROTOCOL", "decode-memory")) == "loader-supply":
            plan["matrix"]["protocols"] = {protocol: {"worker_profiles": LOADERS}}
            del plan["matrix"]["decoders"]["packer-coefficients"]
        decoders = plan["matrix"]["decoders"]
        names = os.environ.get("DECODERS", ",".join(decoders)).split(",")
        plan["matrix"]["decoders"] = {name: decoders[name] for name in names}
        (work / "plan.yaml").write_text(yaml.safe_dump(plan))
        call("plan", "instantiate", work / "plan.yaml", "--package-descriptor", package, "--output-dir", work)
        call("platform", "capture", "--output", "platform.json", "--machine-type", "local", "--location", "local")
        lock = {"lock_path": venv / "suite" / "uv.lock", "project_path": venv / "suite" / "pyproject.toml"}
        environment = capture_current_environment(**lock, dependency_group="mainstream", runner_revision=revision)
        write_environment_descriptor(work / "environment.json", environment)
        described = ("--environment-descriptor", "environment.json", "--platform-descriptor", "platform.json")
        to = ("--artifact-root", "artifacts", "--attempts-root", "attempts", "--runner-revision", revision)
        call("campaign", "run", work / "images.yaml", "--package-descriptor", package, *described, *to)
        times = defaultdict(list)
        for run in (work / "artifacts" / "runs").iterdir():
            config = json.loads((run / "config.json").read_text())
            case = "" if config["num_workers"] is None else f", {config['num_workers']} workers"
            for line in (run / "samples.jsonl").read_text().splitlines():
                sample = json.loads(line)
                times[config["decoder_id"], case].append(1e6 * sample["elapsed_seconds"] / sample["items_processed"])
    for (decoder, case), each in sorted(times.items(), key=lambda row: (row[0][1], median(row[1]))):
        ratio = median(each) / (base := median(times["simplejpeg", case]))
        label = f"{decoder}{case}"
        print(f"{label:20} {median(each):7.0f} us an image ({min(each):.0f}-{max(each):.0f}) {ratio:5.2f}")
        if decoder.startswith("packer"):
            row = f"{median(each):.0f} | {base:.0f} | {ratio:.2f}"
            print(f"| imread_benchmark, us an image | {decoder} / simplejpeg{case} | {row} |")


if __name__ == "__main__":
    main()
