"""Sphinx configuration of the documentation site: `make docs` builds it.

The source folder is the repository, so that links between pages, code and results are the same on a
forge and on the site.
"""

import afterdrop

project = "afterdrop"
author = "The afterdrop developers"
html_show_copyright = False
release = version = afterdrop.__version__

root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/results/*.md",
]
exclude_patterns = ["docs/_*", "docs/gallery/*.py", "docs/gallery/*.ipynb"]
default_role = "code"  # single back quotes in docstrings
templates_path = ["_templates"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]

myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing", "config.cache"]
autosummary_generate = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
copybutton_prompt_text = ">>> "

sphinx_gallery_conf = {
    "examples_dirs": "examples",
    "gallery_dirs": "docs/gallery",
    "backreferences_dir": "docs/generated/backreferences",
    "doc_module": ("afterdrop",),
    "filename_pattern": r"/(?!timm_)\w+\.py$",  # timm is not installed: its output is recorded
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "show_memory": False,
    "min_reported_time": 1,
}

html_theme = "furo"
html_title = "afterdrop"
pygments_dark_style = "github-dark"
html_show_sourcelink = False
html_extra_path = ["_site_root"]  # a redirect from / to docs/index.html
