"""The name under which this project is installed, and the command that adds one of its extras.

The import names `packer`, `readers` and `cache` belong to other projects on the public package index; the
distribution is called `packer-vision`. Every message that tells somebody to install something gets it from here.
"""

from __future__ import annotations

import shlex
from pathlib import Path

__all__ = ["DISTRIBUTION", "install_command"]

DISTRIBUTION = "packer-vision"


def install_command(*extras: str) -> str:
    """The command that installs these extras: pip install 'packer-vision[remote]'.

    pip takes an installed distribution as it is, from a checkout too, and adds what the extra needs. Where nothing
    is installed, because a checkout is on the path, the command names that checkout and no package index is asked.
    """
    wanted = f"[{','.join(extras)}]"
    checkout = Path(__file__).resolve().parent.parent
    if not _is_installed(checkout) and (checkout / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{checkout}{wanted}')}"
    return f"pip install '{DISTRIBUTION}{wanted}'"


def _is_installed(checkout: Path) -> bool:
    """Metadata that a build left in the checkout itself is no installation."""
    from importlib.metadata import distributions  # slow to import, and seldom needed

    places = [Path(str(found.locate_file(""))).resolve() for found in distributions(name=DISTRIBUTION)]
    return any(place != checkout for place in places)
