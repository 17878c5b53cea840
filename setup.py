"""The compiled codec, in addition to pyproject.toml: C sources of this project, built by the first compiler of

    $CC; clang; the package `ziglang`, which is Clang; gcc or cc

Without a compiler, or if it fails, the installation continues without the codec: libjpeg decodes, caches cannot keep
coefficients, and `packer doctor` reports it. PACKER_TARGET, as in `make wheels`, cross-compiles by ziglang; a failure
is then an error.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

_FOLDER = Path("readers/coefficients/_codec")
_FLAGS = ["-std=c11", "-O3", "-g0", "-fPIC", "-fwrapv", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-psabi"]
_SHARED = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
_TARGETS = {  # as ziglang names them, with the oldest glibc; and as wheels do
    "x86_64": ("x86_64-linux-gnu.2.17", "manylinux2014_x86_64"),
    "aarch64": ("aarch64-linux-gnu.2.17", "manylinux2014_aarch64"),
}
_target = os.environ.get("PACKER_TARGET", "")


def _compiler() -> list[str]:
    if _target:
        return [sys.executable, "-m", "ziglang", "cc", "-target", _TARGETS[_target][0], "-mcpu=baseline"]
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    if shutil.which("clang"):
        return ["clang"]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline"]
    return ["gcc" if shutil.which("gcc") else "cc"]


class _BuildCodec(build_ext):
    def build_extension(self, ext: Extension) -> None:
        if sys.platform == "win32":
            raise CompileError("the codec is not built on Windows, where libjpeg decodes")
        command = _compiler()
        flags = [*_FLAGS, *shlex.split(os.environ.get("CFLAGS", ""))]
        compiler: Any = self.compiler
        compiler.set_executables(
            compiler=[*command, *flags], compiler_so=[*command, *flags], linker_so=[*command, *_SHARED]
        )
        super().build_extension(ext)


class _Wheel(bdist_wheel):
    def finalize_options(self) -> None:
        super().finalize_options()
        if _target:
            self.plat_name, self.plat_name_supplied = _TARGETS[_target][1], True


setup(
    cmdclass={"build_ext": _BuildCodec, "bdist_wheel": _Wheel},
    options={
        "bdist_wheel": {"py_limited_api": "cp311"},
        # What one target's compiler made must not pass for another's.
        "build": {"build_base": f"build/{_target}" if _target else "build"},
    },
    ext_modules=[
        Extension(
            "readers.coefficients.native",
            [str(path) for path in sorted(_FOLDER.glob("*.c"))],
            depends=[str(path) for path in sorted(_FOLDER.glob("*.[hi]*"))],
            libraries=["m"],
            py_limited_api=True,
            optional=not _target,
        )
    ],
)
