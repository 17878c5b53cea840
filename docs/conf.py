"""The site of docs/: make site builds it into build/site. docs/site has the generators of pages from the code."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "site")]

import packer  # noqa: E402

project = "packer"
author = "The packer developers"
copyright = "the packer developers, Apache-2.0"
version = release = packer.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "sphinx_reredirects"]
extensions += ["commands", "interface", "links"]
root_doc = "index"
exclude_patterns = ["site", "extending", "seeds", "reference/examples.md"]
redirects = {  # pages of earlier releases
    **dict.fromkeys(("advise", "diagnosis", "monitor", "simulate"), "bottleneck.html"),
    "coefficients": "cache.html#coefficients-of-jpegs",
    "neighbours": "staging.html#nodes-that-read-from-each-other",
    "recipes": "howto.html#training-scripts",
    "reference/examples": "../howto.html#training-scripts",
    "rocal": "dali.html",
    "tasks": "howto.html",
}
suppress_warnings = ["misc.highlighting_failure"]  # … in Python

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

default_role = "literal"
smartquotes = False  # --option, "name"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
maximum_signature_line_length = 90
python_use_unqualified_type_names = True
add_module_names = False

html_theme = "furo"
html_title = f"packer {packer.__version__}"
html_favicon = "images/favicon.svg"
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
html_theme_options = {
    "top_of_page_buttons": ["view"],
    "light_css_variables": {"color-brand-primary": "#0b6e4f", "color-brand-content": "#0b6e4f"},
    "dark_css_variables": {"color-brand-primary": "#4fd1a1", "color-brand-content": "#4fd1a1"},
}
linkcheck_anchors = False
linkcheck_timeout = 20
