"""Settings of the documentation's site, which `scripts/site` builds from the Markdown pages and the docstrings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

import leyden

HERE = Path(__file__).parent

project = "Leyden"
version = release = leyden.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
highlight_language = "none"
smartquotes_action = "D"  # Dashes, such as those after the names of arguments. Quotes stay as they are.
nitpicky = True
# Only public names have pages: not those of other libraries, nor those of modules inside Leyden's packages.
nitpick_ignore_regex = [(r"py:.*", r"(?!leyden\.).*|leyden\.\w+\.\w+\..*")]
show_warning_types = True

# The anchors that a code host gives to headings, so that a link to one works there and here.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
toc_object_entries_show_parents = "hide"
default_role = "code"  # Docstrings write code in single backticks.
python_maximum_signature_line_length = 100

copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "shibuya"
html_title = "Leyden"
html_favicon = html_logo = "pictures/jar.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_theme_options = {"show_ai_links": False, "accent_color": "blue"}

ENTRIES = re.findall(r"^   ([\w.]+)$", (HERE / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
# Functions such as `merge` share their names with commands.
PAGES = {name.rpartition(".")[2]: f"leyden.{name}" for name in ENTRIES if re.search(r"[A-Z]|_", name)}


class LinksToNames(SphinxTransform):
    """Links code such as `Trainer` or `Trainer.fit`, in pages and docstrings, to the API page of the name."""

    default_priority = 5

    def apply(self, **kwargs: Any) -> None:
        for literal in list(self.document.findall(nodes.literal)):
            # A member is linked only after the name of its class.
            found = re.fullmatch(r"(\w+|[A-Z]\w+\.\w+)(?:\(\))?", literal.astext())
            name, _, member = found[1].partition(".") if found else ("", "", "")
            page = PAGES.get(name)
            inside = isinstance(literal.parent, (nodes.title, nodes.reference, pending_xref))
            if page is None or inside or self.env.docname == f"api/{page}":
                continue
            target = f"{page}.{member}" if member else page
            link = pending_xref("", refdomain="py", reftype="obj", reftarget=target, refdoc=self.env.docname)
            literal.replace_self(link)
            link += literal


def write_llms_txt(app: Sphinx, error: Exception | None) -> None:
    """Writes llms.txt: a list of the pages' sources, in the order of the navigation, for language models."""
    if error is not None or app.builder.name != "html":
        return
    lines = []
    for page in app.env.toctree_includes["index"]:
        lines.append(f"- [{app.env.titles[page].astext()}](_sources/{page}.md.txt)")
    text = f"# Leyden\n\n> {leyden.__doc__}\n\n" + "\n".join(lines) + "\n"
    (Path(app.outdir) / "llms.txt").write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> None:
    app.add_transform(LinksToNames)
    app.connect("build-finished", write_llms_txt)
