"""A campaign of imread_benchmark by its own commands; then its medians as rows. The environment is described by its
function for the current one, because `environment provision` installs its lock file, which has no row of ours."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

from imread_benchmark.environments.descriptor import capture_current_environment, write_environment_descriptor

HERE = Path(__file__).resolve().parent


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
        call("plan", "instantiate", HERE / "plan.yaml", "--package-descriptor", package, "--output-dir", work)
        call("platform", "capture", "--output", "platform.json", "--machine-type", "local", "--location", "local")
        lock = {"lock_path": venv / "suite" / "uv.lock", "project_path": venv / "suite" / "pyproject.toml"}
        environment = capture_current_environment(**lock, dependency_group="mainstream", runner_revision=revision)
        write_environment_descriptor(work / "environment.json", environment)
        described = ("--environment-descriptor", "environment.json", "--platform-descriptor", "platform.json")
        to = ("--artifact-root", "artifacts", "--attempts-root", "attempts", "--runner-revision", revision)
        call("campaign", "run", work / "images.yaml", "--package-descriptor", package, *described, *to)
        times = defaultdict(list)
        for run in (work / "artifacts" / "runs").iterdir():
            decoder = json.loads((run / "config.json").read_text())["decoder_id"]
            for line in (run / "samples.jsonl").read_text().splitlines():
                sample = json.loads(line)
                times[decoder].append(1e6 * sample["elapsed_seconds"] / sample["items_processed"])
    base = median(times["simplejpeg"])
    for decoder, each in sorted(times.items(), key=lambda row: median(row[1])):
        print(
            f"{decoder:20} {median(each):7.0f} us an image ({min(each):.0f}-{max(each):.0f}) {median(each) / base:5.2f}"
        )
    for decoder in ("packer", "packer-coefficients"):
        ours = median(times[decoder])
        print(
            f"| imread_benchmark, us an image | {decoder} / simplejpeg | {ours:.0f} | {base:.0f} | {ours / base:.2f} |"
        )


if __name__ == "__main__":
    main()
