"""The wheels with the codec: under QEMU, the aarch64 wheel makes the same pixels as the x86-64 wheel.

`make test-arm` builds both and installs a Python for aarch64. IMAGES=FOLDER adds the JPEGs of a folder.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coefficient_cases import SAMPLINGS, made_jpeg
from image_cases import encoded, picture
from jpeg_maker import FLAT, GAPS, LONG, Jpeg, random_blocks

pytestmark = pytest.mark.arm
HERE = Path(__file__).parent


class UnknownVariantError(Exception):
    """Raised for a variant that this CPU does not have."""


MACHINES = {"x86_64": 62, "aarch64": 183}  # e_machine of an ELF file


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files of each wheel."""
    folders = {}
    for machine in MACHINES:
        (wheel,) = Path(os.environ["PACKER_WHEELS"]).glob(f"packer_vision-*-cp311-abi3-*_{machine}.whl")
        folders[machine] = tmp_path_factory.mktemp(machine)
        with zipfile.ZipFile(wheel) as file:
            file.extractall(folders[machine])
    return folders


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    sizes = ((91, 130), (203, 166), (64, 65), (177, 300))
    made = {
        f"{sampling}-{size[0]}": made_jpeg(*size, sampling, 90, noise=seed % 2 == 1, seed=seed)
        for sampling in (*SAMPLINGS, "gray")
        for seed, size in enumerate(sizes)
    }
    made["progressive"] = encoded(picture(120, 90), "JPEG", progressive=True)
    made["turned"] = encoded(picture(120, 90), "JPEG", 6)
    for name, code in (("flat", FLAT), ("long", LONG), ("gaps", GAPS)):
        factors = [(2, 2), (1, 1), (1, 1)]
        made[name] = Jpeg(80, 96, factors, random_blocks(np.random.default_rng(2), 80, 96, factors), code=code).encode()
    for name, data in made.items():
        (folder / f"{name}.jpg").write_bytes(data)
    if "IMAGES" in os.environ:
        for path in sorted(Path(os.environ["IMAGES"]).rglob("*.[jJ][pP]*[gG]")):
            (folder / f"{path.stem}.jpg").write_bytes(path.read_bytes())
    return folder


def digests(python: str, paths: list[Path], images: Path, *variant: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        [python, HERE / "digests.py", images, *variant], env=environment, capture_output=True, text=True, check=False
    )
    if "this CPU has no variant" in done.stderr:
        raise UnknownVariantError(done.stderr)
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def test_each_wheel_has_the_codec_of_its_machine(sites: dict[str, Path]) -> None:
    for machine, folder in sites.items():
        head = (folder / "readers/coefficients/native.abi3.so").read_bytes()[:20]
        assert head[:4] == b"\x7fELF" and int.from_bytes(head[18:20], "little") == MACHINES[machine]


def test_arm_makes_the_same_pixels_as_every_variant_of_this_machine(sites: dict[str, Path], images: Path) -> None:
    arm = Path(os.environ["PACKER_ARM"])
    aarch64 = digests(str(arm / "python"), [sites["aarch64"], arm / "site"], images)
    assert (aarch64["machine"], aarch64["variant"], aarch64["compiler"]) == ("aarch64", "neon", "Clang")
    by_variant = {}
    for variant in ("avx2", "avx2_tables", "sse4", "neon", "plain"):
        with suppress(UnknownVariantError):
            by_variant[variant] = digests(sys.executable, [sites[platform.machine()]], images, variant)["digests"]
    # NumPy requires SSE4.2, so every x86-64 CPU that runs this test has it.
    assert len(aarch64["digests"]) > 1000 and ({"sse4", "plain"} <= by_variant.keys() or platform.machine() != "x86_64")
    for variant, those in by_variant.items():
        differ = [case for case, value in aarch64["digests"].items() if those.get(case) != value]
        assert aarch64["digests"].keys() == those.keys() and not differ, (variant, len(differ), differ[:5])
    print(f"\n{len(aarch64['digests']):,} results on aarch64 are those of {', '.join(by_variant)}")
