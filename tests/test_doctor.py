"""`packer doctor` finds the faults of an environment, `packer completion` completes, and the help lists tasks."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from suites.programs import run_packer, run_python

from packer.cli.group import cli
from packer.tools import doctor


def by_subject(document: Any) -> dict[str, list[Any]]:
    """The checks of a JSON document, by subject."""
    checks: dict[str, list[Any]] = {}
    for check in document["checks"]:
        checks.setdefault(check["about"], []).append(check)
    return checks


def health(directory: Path) -> dict[str, list[Any]]:
    return by_subject(json.loads(json.dumps(doctor.examine(directory).to_dict())))


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What processes print that import an optional package; "gpu": what torch reports about GPUs. One package is
    importable."""
    run, outputs = doctor._run, {"gpu": {"built_for": "13.0", "hip": False, "names": []}}

    def answer(code: str) -> Any:
        return json.dumps(outputs["gpu"]) if code == doctor._GPUS else run(code) if "psutil" in code else ""

    monkeypatch.setattr(doctor, "_run", answer)
    return outputs


def test_a_working_environment(imports: dict[str, Any], tmp_path: Path) -> None:
    checks = health(tmp_path)
    for about in ("packer", "CPUs", "memory", "open files", "/dev/shm", "staging", str(tmp_path), "[torch]", "GPU"):
        assert about in checks and all(check["state"] != "problem" for check in checks[about]), checks[about]
    assert checks["[torch]"][0]["found"].startswith(f"torch {importlib.metadata.version('torch')}")
    assert list(tmp_path.iterdir()) == []


def test_broken_packages_are_problems(tmp_path: Path) -> None:
    """In a process without a working extra; as in the command, the current directory is not on the module path."""
    optional = ("torch", "pyarrow", "triton", "matplotlib", "obstore", "nvidia", "mpi4py")
    for module in (*optional, "lightning", "transformers", "accelerate", "distributed", "scipy"):
        (tmp_path / f"{module}.py").write_text("raise ImportError('a double that is broken')\n")
    place = tmp_path / "here"
    place.mkdir()
    (place / "cache.py").touch()
    other = tmp_path / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "top_level.txt").write_text("readers\n")
    code = "import sys; sys.path.remove(''); from packer.cli import main; main()"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = run_python("-c", code, "doctor", "--json", cwd=place, env=env)
    assert done.returncode == 1, done.stdout + done.stderr
    checks = by_subject(json.loads(done.stdout))
    assert "cache.py" in checks["cache"][0]["found"] and checks["cache"][0]["state"] == "problem"
    assert "the distribution other also has a package called readers" in checks["readers"][0]["found"]
    assert "pip uninstall other" in checks["readers"][0]["advice"]
    broken = checks["[parquet]"][0]
    assert broken["state"] == "problem" and "pyarrow: ImportError: a double that is broken" in broken["found"]
    assert "GPU" not in checks or checks["GPU"][0]["state"] == "problem"


def test_the_checkout_of_packer_is_no_problem_where_it_is_installed_elsewhere(
    imports: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "packer-vision"\n')
    (tmp_path / "cache.py").touch()
    monkeypatch.chdir(tmp_path)
    checks = health(tmp_path)
    assert "cache" not in checks and checks["directory"][0]["state"] == "note"
    assert "a checkout of packer" in checks["directory"][0]["found"]


@pytest.mark.parametrize(("hard", "advice"), [(4096, "ulimit -n 4096"), (256, "it is also the hard limit")])
def test_limits_come_with_advice(
    hard: int, advice: str, imports: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (256, hard))
    done = CliRunner().invoke(cli, ["doctor", str(tmp_path)])
    assert re.search(r"open files +note +256 at a time", done.output) and advice in " ".join(done.output.split())


CODEC = (
    "torchcodec is installed but cannot be loaded together with torch 2.13: libcudart.so.13: "
    "cannot open shared object file"
)
VISION = "decoding on cuda needs torchvision >= 0.20: run  pip install 'packer-vision[torchvision]'"


@pytest.mark.parametrize(
    ("decoders", "state", "words"),
    [
        ({"torchcodec": "", "torchvision": VISION, "engine": "yes"}, "ok", "torchcodec decodes, with the JPEG engine"),
        ({"torchcodec": CODEC, "torchvision": "", "engine": ""}, "ok", "torchvision decodes, whether with"),
        ({"torchcodec": "", "torchvision": "", "engine": "no"}, "note", "the CPU decodes: nvJPEG finds no JPEG engine"),
        ({"torchcodec": CODEC, "torchvision": VISION, "engine": ""}, "note", f"the CPU decodes: {CODEC}; {VISION}"),
    ],
)
def test_gpu_decoders_are_listed_with_reasons(
    decoders: dict[str, str], state: str, words: str, imports: dict[str, Any], tmp_path: Path
) -> None:
    """As the probes of a loader find them."""
    imports["gpu"] |= {"names": ["NVIDIA H100"], "decoders": decoders, "triton": "no C compiler"}
    checks = health(tmp_path)
    (gpu,), (jpeg,), (nvcuvid,), (triton,) = (
        checks[about] for about in ("GPU", "JPEG on the GPU", "libnvcuvid", "Triton")
    )
    assert (gpu["state"], gpu["found"]) == ("ok", "1: NVIDIA H100 (torch for 13.0)")
    assert jpeg["state"] == state and jpeg["found"].startswith(words)
    assert nvcuvid["state"] == "ok" or "video" in nvcuvid["advice"]
    assert triton["state"] == "note" and triton["found"].endswith("no C compiler")


def test_the_gpu_checks_of_doctor_run(tmp_path: Path) -> None:
    """With a double of torch.cuda: the decoders and Triton report why they do not work."""
    (tmp_path / "sitecustomize.py").write_text(
        "import contextlib, torch\n"
        "torch.cuda.device = contextlib.nullcontext\n"
        "torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1\n"
        "torch.cuda.get_device_name, torch.cuda.current_device = lambda number: 'a double', lambda: 0\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(doctor.__file__).parent.parent)])
    done = run_python("-c", doctor._GPUS, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["names"] == ["a double"] and facts["triton"] and facts["decoders"]["torchcodec"]


def test_dali_for_either_cuda_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "nvidia-dali-cuda130":
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.4.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(doctor, "_run", lambda code: "" if code == "import nvidia.dali as m" else ImportError(code))
    assert doctor._imported("nvidia-dali-cuda120") == "2.4.0" and doctor._imported("mpi4py") is None


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_completion_is_installed_and_completes(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_DATA_HOME": str(tmp_path), "SHELL": "/bin/bash"}
    assert run_packer("completion", env=env).returncode == 0
    script = tmp_path / "bash-completion/completions/packer"
    (tmp_path / "packer").write_text(f'#!/bin/sh\nexec {sys.executable} -m packer "$@"\n')
    (tmp_path / "packer").chmod(0o755)

    def completed(*words: str) -> set[str]:
        line = f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
        code = line + '_packer_completion packer; printf "%s\\n" "${COMPREPLY[@]}"'
        search = {**env, "PATH": f"{tmp_path}:{env['PATH']}"}
        done = subprocess.run(["bash", "-c", code], env=search, capture_output=True, text=True)
        return set(done.stdout.split())

    assert completed("packer", "con") == {"convert"}
    assert completed("packer", "convert", "--to", "h") == {"hdf5"}
    typed = {"COMP_WORDS": f"packer inspect {tmp_path}", "COMP_CWORD": "2", "_PACKER_COMPLETE": "bash_complete"}
    assert run_packer(env={**env, **typed}).stdout.strip() == f"file,{tmp_path}", "bash completes names of files itself"


def test_a_shell_without_completion_is_refused() -> None:
    done = run_packer("completion", env={**os.environ, "SHELL": "/bin/tcsh"})
    assert done.returncode == 2 and "$SHELL is tcsh; name one of bash, fish, zsh" in done.stderr
