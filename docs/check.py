"""Checks the Markdown documentation: relative links lead to files, and code names exist.

    python docs/check.py

A code name is anything like `Scores.fit` or `family.bounds.gap_factor` in back quotes whose first
part is a public name of afterdrop or one of its packages.
"""

import importlib
import re
import sys
from pathlib import Path

import afterdrop as ad
from afterdrop.evaluation.scores.scores import Scores
from afterdrop.family.estimates import Estimate

ROOT = Path(__file__).resolve().parent.parent
OWNERS = {
    "Scores": Scores,
    "Estimate": Estimate,
    "Bounds": ad.Bounds,
    "Member": ad.Member,
    "afterdrop": ad,
}


def broken_links(path: Path) -> list[str]:
    """Relative links that lead nowhere."""
    targets = re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8"))
    local = [t for t in targets if "://" not in t]
    return [f"{path.name}: {t} does not exist" for t in local if not (path.parent / t).exists()]


def unknown_names(path: Path) -> list[str]:
    """Names in back quotes that the code does not have."""
    found = re.findall(r"`([A-Za-z_]+(?:\.[A-Za-z_]+)+)", path.read_text(encoding="utf-8"))
    return [f"{path.name}: {name} does not exist" for name in found if not _exists(name)]


def _exists(name: str) -> bool:
    first, *rest = name.split(".")
    packages = (
        "family",
        "masks",
        "evaluation",
        "selection",
        "train",
        "data",
        "models",
        "report",
        "reproduce",
        "runs",
        "tune",
        "kernels",
        "recipes",
    )
    if first in packages:
        for cut in range(len(rest), 0, -1):
            try:
                owner = importlib.import_module(".".join(["afterdrop", first, *rest[:cut]]))
            except ModuleNotFoundError:
                continue
            return _has(owner, rest[cut:])
        return False
    return first not in OWNERS or _has(OWNERS[first], rest)


def _has(owner: object, names: list[str]) -> bool:
    for name in names:
        fields = getattr(owner, "__dataclass_fields__", {})
        if not hasattr(owner, name) and name not in fields:
            return False
        owner = getattr(owner, name, None)
    return True


def main() -> int:
    """Prints what is wrong; returns the exit status."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    wrong = [line for page in pages for line in (*broken_links(page), *unknown_names(page))]
    print("\n".join(wrong) if wrong else f"{len(pages)} pages checked")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
