"""The package as source text: its modules, and what each of them imports where."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "afterdrop"

# What a plain installation may lack: extras, platform modules, and Triton without a GPU.
OPTIONAL = {
    "fcntl",
    "greenlet",
    "lightning.pytorch",
    "lm_eval",
    "matplotlib",
    "optuna",
    "psycopg",
    "pytorch_lightning",
    "scipy",
    "sklearn",
    "tensorboard",
    "torch.utils.tensorboard",
    "transformers",
    "triton",
    "tyro",
}


def module_name(path: Path) -> str:
    """The dotted name of a source file."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The modules that an import statement loads; `from package import module` loads the module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0, "relative imports are not used in this package"
    names = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if name in SOURCES else node.module or "" for name in names]


def function_imports(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements inside functions."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    yield node


def load_imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements that run when a module is loaded: not those for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not typing_only and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from load_imports(node)


@functools.cache
def neighbours(name: str) -> tuple[str, ...]:
    """The modules that loading a module loads directly, its parent packages included."""
    parents = [name.rsplit(".", cut)[0] for cut in range(1, name.count(".") + 1)]
    tree = TREES.get(name)
    nodes = [] if tree is None else load_imports(tree)
    return (*parents, *(module for node in nodes for module in imported(node)))


@functools.cache
def is_optional(name: str) -> bool:
    """Whether a module is an optional dependency, or cannot be loaded without one."""
    found, waiting = {name}, [name]
    while waiting:
        new = [module for module in neighbours(waiting.pop()) if module not in found]
        found.update(new)
        waiting.extend(new)
    return bool(found & OPTIONAL)
