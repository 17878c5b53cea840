"""Links that work in a repository and on the site: pages outside of docs get a copy, folders lose their link.

MyST copies linked files that are not pages, to be opened or downloaded. The records of docs/seeds are not on the site:
links to them become text. After the build every link of every page is checked; a dead link is a warning.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from sphinx.application import Sphinx
from sphinx.util import logging

__all__ = ["setup"]

# Pages outside of docs, and what they are called on the site.
COPIES = {
    "CHANGELOG.md": "reference/changelog.md",
    "benchmarks/README.md": "reference/benchmarks.md",
    "examples/slurm/README.md": "reference/slurm.md",
}
_CODE_OR_LINK = re.compile(
    r"^ *```.*?^ *```|(?<!!)\[(?P<label>(?:[^\[\]`]|`[^`]*`|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)|`[^`]*`", re.M | re.S
)


def rewritten(text: str, at: Path, root: Path, to: Path) -> str:
    """A page's text with links rewritten from the folder `at` to the folder `to`."""

    def link(found: re.Match[str]) -> str:
        if found["target"] is None:
            return found[0]  # code
        label, (target, mark, anchor) = found["label"], found["target"].partition("#")
        if "://" in target or not target or target.startswith("mailto:"):
            return found[0]
        path = Path(os.path.normpath(at / target))
        inside = path.relative_to(root).as_posix() if path.is_relative_to(root) else ""
        if inside == "README.md":
            path = root / "docs/index.md"
        elif inside == "examples/README.md":
            path, mark, anchor = root / "docs/howto.md", "#", "training-scripts"
        elif inside.startswith("docs/seeds"):
            return label
        elif inside in COPIES:
            path = root / "docs" / COPIES[inside]
        elif path.is_dir():
            if not (path / "README.md").exists():
                return label if "`" in label else f"`{label}`"
            return link(_CODE_OR_LINK.match(f"[{label}]({target}/README.md)"))  # type: ignore[arg-type]
        return link_to(label, path, mark, anchor)

    def link_to(label: str, path: Path, mark: str, anchor: str) -> str:
        if (inside := path.relative_to(root).as_posix()) in COPIES:
            path = root / "docs" / COPIES[inside]
        return f"[{label}]({Path(os.path.relpath(path, to)).as_posix()}{mark}{anchor})"

    return _CODE_OR_LINK.sub(link, text)


def _copy(app: Sphinx) -> None:
    docs = Path(app.srcdir)
    root = docs.parent
    (docs / "reference").mkdir(exist_ok=True)
    for source, name in COPIES.items():
        text = (root / source).read_text(encoding="utf-8")
        text = rewritten(text, (root / source).parent, root, (docs / name).parent)
        if not (docs / name).exists() or (docs / name).read_text(encoding="utf-8") != text:
            (docs / name).write_text(text, encoding="utf-8")


def _read(app: Sphinx, name: str, content: list[str]) -> None:
    docs = Path(app.srcdir)
    page = docs / f"{name}.md"
    if page.exists() and not name.startswith("reference/"):
        content[0] = rewritten(content[0], page.parent, docs.parent, page.parent)


def _follow(app: Sphinx, failure: Exception | None) -> None:
    """Warn of links and pictures without a target on the site."""
    if failure or app.builder.name != "html":
        return
    texts = {path: path.read_text(encoding="utf-8") for path in Path(app.outdir).rglob("*.html")}
    places = {path: {*re.findall(r'\bid="([^"]+)"', text)} for path, text in texts.items()}
    for page, text in texts.items():
        for file, anchor in {*re.findall(r'(?:href|src)="([^":#?]*)(?:\?[^"#]*)?(?:#([^":]*))?"', text)}:
            path = Path(os.path.normpath(page.parent / unquote(file))) if file else page
            if not path.exists() or (anchor and unquote(anchor) not in places.get(path, {unquote(anchor)})):
                name = page.relative_to(app.outdir)
                logging.getLogger(__name__).warning("%s: a dead link: %s#%s", name, file, anchor)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", _copy)
    app.connect("source-read", _read)
    app.connect("build-finished", _follow)
    return {"parallel_read_safe": True}
