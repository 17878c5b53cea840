"""Misconfigured machines, by Linux mount namespaces, for tests that run a separate program there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

__all__ = ["run_with_dev_shm"]

_DEVICES = "null zero full random urandom"
_HIDE = f"""
mount --make-rprivate / && mount -t tmpfs none "$1" || exit 77
for name in {_DEVICES}; do touch "$1/$name" && mount --bind "/dev/$name" "$1/$name" || exit 77; done
if [ -n "$2" ]; then mkdir "$1/shm" && mount -t tmpfs -o "$2" none "$1/shm" || exit 77; fi
mount --rbind "$1" /dev || exit 77
shift 2
exec "$@"
"""


def run_with_dev_shm(options: str, folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    """Run a command where /dev/shm is a tmpfs with these mount options, or does not exist ("")."""
    folder.mkdir()
    words = ["unshare", "-m", "bash", "-c", _HIDE, "hide", folder, options, *command]
    try:
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=120, check=False)
    except OSError as error:
        pytest.skip(f"no mount namespaces: {error}")
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip(f"no mount namespaces: {done.stderr.strip()}")
    return done
