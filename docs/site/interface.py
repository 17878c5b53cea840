"""The reference of the Python interface: a page for each module that README.md or docs import, its `__all__` on it.

Writes reference/python.rst and reference/python-MODULE.rst before a build; git ignores them. Docstrings are plain text:
a line "name: …" of a parameter becomes an entry of a list, `code` becomes code, an indented block stays as it is.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from commands import escaped
from sphinx.application import Sphinx

__all__ = ["modules", "setup", "write"]

OURS = ("packer", "readers", "cache")
_IMPORT = re.compile(r"^\s*(?:from|import) ((?:packer|readers|cache)(?:\.\w+)?)\b", re.MULTILINE)


def modules(root: Path) -> list[str]:
    """The modules that code in README.md and docs imports, if they have `__all__`."""
    pages = [root / "README.md", *sorted(root.glob("docs/*.md"))]
    named = {name for page in pages for name in _IMPORT.findall(page.read_text(encoding="utf-8"))}
    return sorted(name for name in named | {*OURS} if _names(name))


def _names(name: str) -> list[str]:
    try:
        return list(importlib.import_module(name).__all__)
    except (ImportError, AttributeError):  # an optional package is not installed, or a name and not a module
        return []


def write(root: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    found = modules(root)
    pages = {"python": ["Python", "======", _tree(found)]}
    placed: dict[Any, str] = {}
    for name in found:
        first = (importlib.import_module(name).__doc__ or "").strip().split("\n\n")[0]
        members = "\n".join(_member(name, member, placed) for member in sorted(_names(name), key=str.lower))
        pages[f"python-{name}"] = [
            name,
            "=" * len(name),
            f".. module:: {name}",
            escaped(" ".join(first.split())),
            members,
        ]
    for name, parts in pages.items():
        text = "\n\n".join([f"{parts[0]}\n{parts[1]}", *parts[2:]])
        path = folder / f"{name}.rst"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def _tree(found: list[str]) -> str:
    return ".. toctree::\n    :maxdepth: 1\n\n" + "".join(f"    python-{name}\n" for name in found)


def _member(module: str, name: str, placed: dict[Any, str]) -> str:
    """The directive of a name: for values and types their text, for names of other modules a reference."""
    value = getattr(importlib.import_module(module), name)
    if inspect.isclass(value) or inspect.isroutine(value):
        if value in placed:
            return f".. py:data:: {module}.{name}\n    :no-index:\n\n    The same as :py:obj:`{placed[value]}`.\n"
        placed[value] = f"{module}.{name}"
    if inspect.isclass(value):
        options = "\n    :members:\n    :show-inheritance:" if issubclass(value, BaseException) else "\n    :members:"
        return f".. autoclass:: {module}.{name}{options}\n"
    if inspect.isroutine(value):
        return f".. autofunction:: {module}.{name}\n"
    return f".. py:data:: {module}.{name}\n\n    {escaped(_shown(value))}\n"


def _shown(value: Any) -> str:
    text = " ".join(str(value if hasattr(value, "__args__") else repr(value)).split())
    return f"`{text}`" if len(text) <= 200 and " at 0x" not in text and "`" not in text else type(value).__name__


def _docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Convert a plain docstring to reStructuredText."""
    try:
        names = {*inspect.signature(obj).parameters}
    except (TypeError, ValueError):
        names = set()
    if lines and re.match(r"\w+\(.*\)( -> .*)?$", lines[0]) and what == "class":
        lines[:] = [] if obj.__doc__ == " ".join(lines).strip() else lines  # a dataclass without words of its own
    made: list[str] = []
    block = listed = False
    for line in lines:
        indented, text = line.startswith("    "), line.strip()
        parameter = re.match(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*): ", text)
        if not text:
            made.append("")
        elif indented and (block or not made or not made[-1]):
            if not block:
                made += ["::", ""]
            block = True
            made.append(line)
        elif parameter and not indented and {part.strip("* ") for part in parameter[1].split(",")} <= names:
            made += ["", f"* ``{parameter[1]}``: {escaped(text[parameter.end() :])}"]
            block, listed = False, True
        elif listed and (indented or made[-1]):
            made.append(f"  {escaped(text)}")
            block = False
        else:
            if text.startswith(("- ", "* ")) and made and made[-1] and not made[-1].startswith("* "):
                made.append("")
            made.append(f"* {escaped(text[2:])}" if text.startswith(("- ", "* ")) else escaped(text))
            listed = text.startswith(("- ", "* "))
            block = False
    lines[:] = [*made, ""]


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", lambda app: write(Path(app.srcdir).parent, Path(app.srcdir) / "reference"))
    app.connect("autodoc-process-docstring", _docstring)
    return {"parallel_read_safe": True}
