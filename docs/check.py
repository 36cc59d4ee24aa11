"""Checks the Markdown documentation: links lead to files, and the names and files it uses exist.

    python docs/check.py

A code name is anything like `Scores.fit` or `family.bounds.gap_factor` in back quotes whose first
part is a public name of afterdrop or one of its packages. A file is anything like
`evaluation/api.py` in back quotes: it is looked up in the package and in the repository.
"""

import importlib
import inspect
import re
import sys
from pathlib import Path

import afterdrop as ad

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "afterdrop"
PACKAGES = {path.parent.name for path in PACKAGE.glob("*/*.py")}
OWNERS = {"afterdrop": ad, "ad": ad} | {
    name: value for name, value in vars(ad).items() if inspect.isclass(value)
}
SUFFIXES = {"css", "html", "json", "jsonl", "md", "pdf", "py", "safetensors", "toml", "txt"}


def pages() -> list[Path]:
    """The pages of the documentation."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
    return [*top, *sorted((ROOT / "docs").glob("**/*.md"))]


def broken_links(path: Path) -> list[str]:
    """Relative links that lead nowhere."""
    targets = re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8"))
    local = [t for t in targets if "://" not in t]
    return [f"{path.name}: {t} does not exist" for t in local if not (path.parent / t).exists()]


def unknown_names(path: Path) -> list[str]:
    """Names in back quotes that the code does not have."""
    found = re.findall(r"`([A-Za-z_]+(?:\.[A-Za-z_]+)+)", path.read_text(encoding="utf-8"))
    return [f"{path.name}: {name} does not exist" for name in found if not _exists(name)]


def missing_files(path: Path) -> list[str]:
    """Python files in back quotes that exist neither in the package nor in the repository."""
    found = re.findall(r"`([\w./-]+/[\w.-]+\.py)`", path.read_text(encoding="utf-8"))
    return [
        f"{path.name}: {name} does not exist"
        for name in found
        if not any((folder / name).is_file() for folder in (PACKAGE, ROOT))
    ]


def _exists(name: str) -> bool:
    first, *rest = name.split(".")
    if rest[-1] in SUFFIXES:  # a file, such as report.html
        return True
    if first == "afterdrop" and rest[0] in PACKAGES:
        first, *rest = rest
    if first in PACKAGES:
        return _has_package_name(first, rest)
    return first not in OWNERS or _has(OWNERS[first], rest)


def _has_package_name(package: str, rest: list[str]) -> bool:
    for cut in range(len(rest), -1, -1):
        try:
            owner = importlib.import_module(".".join(["afterdrop", package, *rest[:cut]]))
        except ModuleNotFoundError:
            continue
        return _has(owner, rest[cut:])
    return False


def _has(owner: object, names: list[str]) -> bool:
    for name in names:
        fields = getattr(owner, "__dataclass_fields__", {})
        if not hasattr(owner, name) and name not in fields:
            return False
        owner = getattr(owner, name, None)
    return True


def main() -> int:
    """Prints what is wrong and returns the exit status."""
    checks = (broken_links, unknown_names, missing_files)
    faults = [fault for page in pages() for check in checks for fault in check(page)]
    print("\n".join(faults) if faults else f"{len(pages())} pages checked")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
