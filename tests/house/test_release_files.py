"""Files that repeat facts of pyproject.toml say the same: citation, conda recipe."""

import re
import tomllib

import yaml
from package_source import ROOT

import afterdrop as ad

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(name):
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_version_is_the_same_everywhere():
    page = (ROOT / "docs" / "cite.md").read_text(encoding="utf-8")
    assert read("CITATION.cff")["version"] == ad.__version__
    assert read("conda/recipe.yaml")["context"]["version"] == ad.__version__
    assert re.findall(r"version = \{(.*)\}", page) == [ad.__version__]


def test_the_conda_recipe_needs_what_the_package_needs():
    recipe = read("conda/recipe.yaml")
    names = {"torch": "pytorch"}  # of PyPI and of conda-forge
    split = [re.fullmatch(r"([\w-]+)(.*)", line) for line in PROJECT["dependencies"]]
    wanted = {f"{names.get(match[1], match[1])} {match[2]}" for match in split if match}
    python, *others = recipe["requirements"]["run"]
    assert set(others) == wanted
    lowest = recipe["context"]["python_min"]
    assert python.replace("${{ python_min }}", lowest) == f"python {PROJECT['requires-python']}"
    assert recipe["about"]["summary"] == PROJECT["description"]
    assert recipe["about"]["license"] == PROJECT["license"] == read("CITATION.cff")["license"]
    entries = [f"{name} = {place}" for name, place in PROJECT["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == entries
