"""The plan of the package: names, imports, the public surface, and files that the docs name."""

import importlib.util
import inspect
from collections import defaultdict

from package_source import PACKAGE, ROOT, TREES, function_imports, imported, is_optional

import afterdrop as ad
from afterdrop.cli import VERBS

SHARED_STEMS = {"__init__", "checks"}  # the same role in every package


def test_a_file_stem_occurs_once():
    """Verbs of the command line are exempt: a verb may be named like the module that does it."""
    places = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        verb = path.parent.name == "cli" and path.stem in VERBS
        if path.stem not in SHARED_STEMS and not verb:
            places[path.stem].append(path.relative_to(PACKAGE).as_posix())
    twice = {stem: paths for stem, paths in places.items() if len(paths) > 1}
    assert not twice


def test_functions_import_optional_and_device_modules_only():
    found = {
        f"{name}: {module}"
        for name, tree in TREES.items()
        for node in function_imports(tree)
        for module in imported(node)
        if not is_optional(module)
    }
    assert not found


def test_no_package_is_named_like_a_public_function():
    """`import afterdrop.evaluate.scores` would fail where `afterdrop.evaluate` is a function."""
    packages = {path.parent.name for path in PACKAGE.rglob("__init__.py")}
    functions = {name for name, value in public_names().items() if inspect.isfunction(value)}
    assert functions and not functions & packages


def test_the_public_surface_is_small():
    assert len(public_names()) <= 30


def public_names() -> dict[str, object]:
    """What `afterdrop` offers: its names without underscore that are not modules."""
    return {
        name: value
        for name, value in vars(ad).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }


def docs_check():
    """docs/check.py as a module."""
    spec = importlib.util.spec_from_file_location("docs_check", ROOT / "docs" / "check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_files_that_the_docs_name_exist():
    check = docs_check()
    assert not [fault for page in check.pages() for fault in check.missing_files(page)]


def test_the_docs_check_finds_what_is_wrong(tmp_path):
    check, page = docs_check(), tmp_path / "page.md"
    page.write_text(
        "[good](page.md) [bad](nowhere.md) `Scores.fit` `Scores.nothing` `family.member.Member` "
        "`family.nothing` `masks/uniforms.py` `masks/nothing.py` `report.html` `model.train`"
    )
    assert check.broken_links(page) == ["page.md: nowhere.md does not exist"]
    assert check.unknown_names(page) == [
        "page.md: Scores.nothing does not exist",
        "page.md: family.nothing does not exist",
    ]
    assert check.missing_files(page) == ["page.md: masks/nothing.py does not exist"]


def test_every_package_is_checked_in_the_docs():
    folders = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert docs_check().PACKAGES == folders >= {"evaluation", "selection", "runs", "cli"}
