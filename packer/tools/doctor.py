"""The checks of `packer doctor`: packages, limits, shared memory, storage and GPUs.

Optional packages are imported in separate processes, because an installed package may still fail to import, and a
broken one may crash the process that imports it.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from cache.errors import DISTRIBUTION, CacheDirectoryError, PlatformError, install_command
from cache.files import Folder
from cache.filesystem import cache_budget, filesystem_type, free_space, is_local
from cache.messages import human_bytes, listed, quoted, shortened
from cache.node import available_memory_bytes, detect_ranks, usable_cpus
from cache.staging.session import candidates
from cache.system import resource
from packer import __version__
from packer.output import Result
from readers.coefficients import unsupported_reason
from readers.coefficients.compiled import BUILD_BY_CLANG, load_codec
from readers.headers import SUFFIX
from readers.headers.pillow import PLUGINS, missing_plugin

__all__ = ["Check", "Health", "examine"]

_OURS = ("packer", "readers", "cache")
_NOT_SHOWN = {
    "test",
    "testing",
    "site",
    "dev",
    "all",
    "s3",
    "dali-cuda12",
    "dali-cuda13",
}  # tools for development, and aliases
_SECONDS = 60.0
_FEW_FILES, _SMALL_SHM_BYTES = 1024, 128 << 20
# The import statements of distributions whose module has another name; others are imported by name, with underscores.
_IMPORTS = {
    "amdsmi": "import amdsmi as m",
    "mpi4py": "import mpi4py as m; m.rc.initialize = False; from mpi4py import MPI; MPI.Get_library_version()",
    "nvidia-dali-cuda120": "import nvidia.dali as m",
    "nvidia-dali-cuda130": "import nvidia.dali as m",
    "nvidia-ml-py": "import pynvml as m",
    "pillow-jxl-plugin": "import pillow_jxl as m",
    "pyyaml": "import yaml as m",
}
# For distributions named by an extra, the distributions accepted instead.
_OTHERS = {"nvidia-dali-cuda120": "nvidia-dali-cuda130"}
# The GPUs that torch sees, and the features that work there, found by the probes that a loader makes when it opens.
_GPUS = """
import json, torch
n = torch.cuda.device_count() if torch.cuda.is_available() else 0
found = {"built_for": torch.version.cuda or torch.version.hip, "hip": bool(torch.version.hip)}
found["names"] = [torch.cuda.get_device_name(i) for i in range(n)]
if n:
    from readers.augment.fused import triton_fault
    from readers.decode.batch import decoders_here
    device = torch.device("cuda", torch.cuda.current_device())
    found |= {"decoders": decoders_here(device), "triton": triton_fault(device)}
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. state: "ok", "note" (works, with a limitation) or "problem".

    advice: the thing to do; "" if there is nothing to do.
    """

    about: str
    state: str
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Health(Result):
    """All checks, in display order."""

    checks: tuple[Check, ...]

    @property
    def problems(self) -> int:
        """Number of checks that found a problem."""
        return sum(check.state == "problem" for check in self.checks)


def examine(directory: str | os.PathLike[str] | None = None) -> Health:
    """Examine this environment.

    directory: the output directory for sets. A temporary directory is made there and removed; None examines the current
    directory and writes nothing.
    """
    storage = () if sys.platform == "win32" else _storage(directory)
    return Health((*_install(), *_limits(), *storage, *_extras()))


def _install() -> Iterator[Check]:
    where = Path(__file__).parents[2]
    yield Check("packer", "ok", f"{__version__} at {where}; Python {platform.python_version()} at {sys.executable}")
    if sys.platform != "linux":
        works = f"{sys.platform}: local sets can be read; packing, staging and caches need Linux"
        yield Check("system", "note", works, "for the rest, use WSL 2 on Windows, a container on macOS")
    owners = importlib.metadata.packages_distributions()
    project = Path("pyproject.toml")
    is_checkout = project.is_file() and f'name = "{DISTRIBUTION}"' in project.read_text(errors="replace")
    if is_checkout and not Path.cwd().is_relative_to(where):
        source = "this directory is a checkout of packer: a script here imports its source, not the installed package"
        yield Check("directory", "note", source, "run scripts from another directory, or pip install -e .")
    for name in _OURS:
        others = sorted({owner for owner in owners.get(name, ()) if owner != DISTRIBUTION})
        if others:
            both = f"the distribution {listed(others)} also has a package called {name}: one has overwritten the other"
            remove = f"pip uninstall {' '.join(map(quoted, others))}"
            yield Check(name, "problem", both, f"{remove}, then pip install --force-reinstall {DISTRIBUTION}")
        for local in () if is_checkout else (Path(f"{name}.py"), Path(name, "__init__.py")):
            if local.is_file() and not local.resolve().is_relative_to(where):
                hides = f"a script run in this directory would import its {local}, and not packer's"
                yield Check(name, "problem", hides, "rename it, or run from another directory")


def _limits() -> Iterator[Check]:
    ranks, cpus, all_cpus = detect_ranks(), usable_cpus(), os.cpu_count() or 1
    job = f", rank {ranks.rank} of {ranks.world_size} by {ranks.launcher}" if ranks.launcher else ""
    yield Check("CPUs", "ok", f"{cpus} of {all_cpus} may be used (affinity, control group, batch system){job}")
    yield Check("memory", "ok", f"{human_bytes(available_memory_bytes())} are free for this process")
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few, more = soft <= _FEW_FILES, min(hard, 65536) if hard > 0 else 65536
    advice = f"ulimit -n {more}" if more > soft else "ask the administrator of this machine: it is also the hard limit"
    if few:
        yield Check("open files", "note", f"{soft:,} at a time", f"raise it for sets of many shards: {advice}")
    else:
        yield Check("open files", "ok", f"{soft:,} at a time")
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size != resource.RLIM_INFINITY:
        most = f"at most {human_bytes(size)} a file"
        yield Check("file size", "note", most, "ulimit -f unlimited, or smaller shards")


def _storage(directory: str | os.PathLike[str] | None) -> Iterator[Check]:
    try:
        budget = cache_budget()
        size = budget.size_bytes or 0
        state = "problem" if size < _SMALL_SHM_BYTES else "note" if budget.is_cramped else "ok"
        advice = "" if state == "ok" else "in a container: --shm-size=8g or --ipc=host"
        room = f"{human_bytes(size)}, room for a cache of {human_bytes(budget.bytes)}"
        yield Check("/dev/shm", state, room, advice)
    except PlatformError as error:
        yield Check("/dev/shm", "note", str(error))
    except CacheDirectoryError as error:
        yield Check("/dev/shm", "problem", str(error), "mount a tmpfs there: caches and worker processes need it")
    usable, seen = 0, set[Path]()
    for place, named_by in candidates(None):
        if place in seen or not (place.is_dir() or named_by.startswith("$")):  # a default of other machines
            continue
        seen.add(place)
        kind, refused = "", ""
        try:
            kind = filesystem_type(place)
            if not place.is_dir():
                refused = "no such directory"
            elif not is_local(kind):
                refused = f"a {kind} filesystem, which is not local to this node"
            elif not os.access(place, os.W_OK | os.X_OK):
                refused = "not writable"
            room = refused or f"{kind}, {human_bytes(free_space(place, kind).bytes)} free"
        except OSError as error:
            refused = room = error.strerror or str(error)
        usable += not refused
        yield Check("staging", "note" if refused else "ok", f"{place} ({named_by}): {room}")
    if not usable:
        yield Check("staging", "problem", "no usable directory on this node", "packer stage SET --target DIR")
    yield from _output(Path(os.getcwd() if directory is None else directory), write=directory is not None)


def _output(place: Path, write: bool) -> Iterator[Check]:
    about = str(place)
    try:
        kind = filesystem_type(place)
        free = free_space(place, kind)
        whose = "this node's own" if is_local(kind) else "shared by nodes"
        yield Check(about, "ok", f"{kind or 'unknown filesystem'}, {whose}, {human_bytes(free.bytes)} free")
        if free.inodes < 1000:
            few = f"room for {free.inodes} more files"
            yield Check(about, "problem", few, "remove files, or ask for a larger quota")
        if not write:
            return
        with tempfile.TemporaryDirectory(prefix=".packer-doctor-", dir=place) as made, Folder(Path(made)) as folder:
            lock = folder.lock("lock")
            if not lock.supported:
                advice = "make sure that no two commands write the same set (Lustre: mount with -o flock)"
                yield Check(about, "note", "it has no file locks", advice)
            lock.release()
    except OSError as error:
        yield Check(
            about, "problem", error.strerror or str(error), "choose an existing directory with write permission"
        )


def _extras() -> Iterator[Check]:
    try:
        names = importlib.metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
        requirements = [Requirement(line) for line in importlib.metadata.requires(DISTRIBUTION) or []]
    except importlib.metadata.PackageNotFoundError:
        yield Check("extras", "problem", f"{DISTRIBUTION} is not installed", "pip install . in its checkout")
        return
    core = [requirement for requirement in requirements if requirement.marker is None]
    by_extra = {
        extra: [
            requirement
            for requirement in requirements
            if requirement not in core and requirement.marker and requirement.marker.evaluate({"extra": extra})
        ]
        for extra in sorted(set(names) - _NOT_SHOWN)
    }
    packages = sorted({requirement.name for needs in by_extra.values() for requirement in needs})
    with ThreadPoolExecutor(max(1, usable_cpus())) as pool:
        versions = dict(zip(packages, pool.map(_imported, packages), strict=True))
    for extra, needs in by_extra.items():
        if needs:
            yield _extra(extra, needs, versions)
    if isinstance(versions.get("torch"), str):
        yield from _gpus()
    yield _codec()
    missing = {media.upper(): missing_plugin(media) for media in PLUGINS}
    read = listed([media.upper() for media in SUFFIX if not missing.get(media.upper())], 20)
    lacking = [f"{media}:  {advice}" for media, advice in missing.items() if advice]
    yield Check("image formats", "note" if lacking else "ok", f"decodes {read}", "; ".join(lacking))


def _codec() -> Check:
    """Check that this package has its compiled JPEG codec, at full speed."""
    about = "JPEG codec"
    if reason := unsupported_reason():
        return Check(about, "note", f"libjpeg decodes JPEGs, and caches cannot keep coefficients: {reason}")
    codec = load_codec()
    text = f"compiled by {codec.COMPILER}; this CPU uses its variant {codec.choose()}"
    if codec.COMPILER == "GCC":
        advice = f"in a checkout:  {BUILD_BY_CLANG}"
        return Check(about, "note", f"{text}; Clang makes it up to a fifth faster", advice)
    return Check(about, "ok", text)


def _extra(extra: str, needs: list[Requirement], versions: dict[str, str | Exception | None]) -> Check:
    about, install = f"[{extra}]", install_command(extra)
    known = {requirement.name: versions[requirement.name] for requirement in needs}
    broken = [f"{name}: {version}" for name, version in known.items() if isinstance(version, Exception)]
    missing = [name for name, version in known.items() if version is None]
    if broken:
        return Check(about, "problem", f"installed, but cannot be imported: {'; '.join(broken)}", install)
    if missing:
        return Check(about, "note", f"not installed: {', '.join(missing)}", install)
    old = [f"{requirement.name} {known[requirement.name]} (needs {requirement.specifier})" for requirement in needs
           if not requirement.specifier.contains(str(known[requirement.name]), prereleases=True)]  # fmt: skip
    if old:
        return Check(about, "problem", f"too old: {', '.join(old)}", install)
    return Check(about, "ok", ", ".join(f"{name} {version}" for name, version in known.items()))


def _imported(name: str) -> str | Exception | None:
    """The version of an optional distribution; None if it is not installed, an error if it cannot be imported."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return _imported(_OTHERS[name]) if name in _OTHERS else None
    done = _run(_IMPORTS.get(name, f"import {name.replace('-', '_')} as m"))
    return done if isinstance(done, Exception) else version


def _gpus() -> Iterator[Check]:
    done = _run(_GPUS)
    if isinstance(done, Exception):
        yield Check("GPU", "problem", f"torch cannot list GPUs: {done}")
        return
    facts = json.loads(done.strip().splitlines()[-1])
    names, built_for = facts["names"], facts["built_for"]
    if names:
        yield Check("GPU", "ok", f"{len(names)}: {listed(sorted(set(names)))} (torch for {built_for})")
        yield from _gpu_work(facts)
        return
    present = Path("/proc/driver/nvidia/version").exists() or Path("/dev/kfd").exists()
    if present and not built_for:
        yield Check("GPU", "problem", "a GPU exists, but torch is built for CPUs", "install torch for CUDA or ROCm")
    elif present:
        yield Check("GPU", "problem", f"a driver exists, but torch ({built_for}) sees no device", "see nvidia-smi")
    else:
        yield Check("GPU", "note", "none on this node")


def _gpu_work(report: Mapping[str, Any]) -> Iterator[Check]:
    """Whether ImageLoader(device="cuda") decodes and resizes on the GPU or the CPU, with the reasons.

    report: the output of `_GPUS`.
    """
    decoders = dict(report["decoders"])
    engine = decoders.pop("engine")
    working = [name for name, fault in decoders.items() if not fault]
    about = "JPEG on the GPU"
    if not working:
        yield Check(about, "note", f"the CPU decodes: {'; '.join(filter(None, decoders.values()))}")
    elif engine == "no":
        slow = f"nvJPEG finds no JPEG engine, without which {working[0]} may be slower than the CPU"
        advice = "A100, H100 and later GPUs have an engine; in a container it needs libnvcuvid, as below"
        yield Check(about, "note", f"the CPU decodes: {slow}", advice)
    else:
        has = "with the JPEG engine" if engine else "whether with a JPEG engine is unknown"
        yield Check(about, "ok", f"{working[0]} decodes, {has}")
    if not report["hip"]:
        try:
            ctypes.CDLL("libnvcuvid.so.1")
            yield Check("libnvcuvid", "ok", "can be loaded; nvJPEG needs it for the JPEG engine")
        except OSError as error:
            advice = "in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility,video, or all"
            yield Check("libnvcuvid", "note", f"nvJPEG needs it for the JPEG engine: {error}", advice)
    if fault := report["triton"]:
        yield Check("Triton", "note", f"torch crops and resizes instead, image by image: {fault}")
    else:
        yield Check("Triton", "ok", "a kernel was compiled and has run")


def _run(code: str) -> str | Exception:
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return TimeoutError(f"no answer in {_SECONDS:.0f} s")
    if done.returncode == 0:
        return done.stdout
    lines = done.stderr.strip().splitlines() or [f"the process ended with status {done.returncode}"]
    return ImportError(shortened(lines[-1], 200))
