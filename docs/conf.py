# SPDX-License-Identifier: Apache-2.0
"""Configuration of Sphinx, which turns the pages of docs/ into a site.

``./deploy/docs`` builds the site. ``python -m deploy.site.reference``, run in Kilonova's
environment, generates the tables, which replace the placeholders ``<!-- table: NAME -->``.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
PLACEHOLDER = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)

project = "Kilonova"
author = "the authors of Kilonova"
copyright = "the authors of Kilonova, Apache License 2.0"  # noqa: A001 - Sphinx's name
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "index"
html_theme = "alabaster"
html_theme_options = {
    "description": "A compute control plane that speaks the OpenStack Compute API",
    "page_width": "1200px",
    "sidebar_width": "240px",
    "body_max_width": "none",
}
html_static_path, html_css_files = ["_static"], ["site.css"]
html_show_sourcelink = False
html_copy_source = False
myst_heading_anchors = 4
nitpicky = True


def setup(app: Sphinx) -> None:
    """Make Sphinx replace each ``<!-- table: NAME -->`` in a page with the generated table.

    Sphinx calls this function at the start. Blocks in the language ``mermaid`` are shown as text.
    """
    made: dict[str, str] = {}

    def ask(app: Sphinx) -> None:
        command = [ROOT / ".venv/bin/python", "-m", "deploy.site.reference"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
        made.update(json.loads(done.stdout))

    def fill(app: Sphinx, page: str, source: list[str]) -> None:
        source[0] = PLACEHOLDER.sub(lambda match: made[match[1]], source[0])

    app.connect("builder-inited", ask)
    app.connect("source-read", fill)
    app.add_lexer("mermaid", TextLexer)
