"""Print the dependencies of the project and of the named extras, each at its lowest version: "numpy==1.24".

Reads pyproject.toml as text; each requirement there is "name>=version".
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

__all__ = ["lowest"]

_REQUIREMENT = re.compile(r'"([A-Za-z0-9_.-]+)>=([0-9.]+)(?!.*Windows)[^"]*"')


def lowest(text: str, extras: list[str]) -> list[str]:
    """The requirements of a pyproject.toml. Raises ValueError for an unknown extra."""
    pins = []
    for name in ("dependencies", *extras):
        listed = re.search(rf"^{name} = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
        if listed is None:
            raise ValueError(f"pyproject.toml has no extra {name}")
        pins += [f"{package}=={version}" for package, version in _REQUIREMENT.findall(listed[1])]
    return list(dict.fromkeys(pins))


if __name__ == "__main__":
    print("\n".join(lowest(Path(__file__).parents[1].joinpath("pyproject.toml").read_text(), sys.argv[1:])))
