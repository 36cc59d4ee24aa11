"""Finding a user's own model and data by import path, such as `pkg.module:load_model`."""

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from afterdrop.data import batches, load_images
from afterdrop.errors import DataError


def resolve(path: str, what: str) -> Any:
    """The object at `module:name`; the current folder is searched as well.

    Raises:
        DataError: If there is no such module or name; says which.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise DataError(
            f"{what}={path!r} must be an import path such as pkg.module:load_{what}, where "
            "load_... is a function without arguments"
        )
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise DataError(f"{what}={path!r}: {error}; run from the folder that holds it") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise DataError(f"{what}={path!r}: module {module} has no {name!r}")
        found = getattr(found, part)
    return found


def resolve_model(path: str) -> nn.Module:
    """A model: a module, or what a function without arguments returns."""
    found = resolve(path, "model")
    model = found() if callable(found) and not isinstance(found, nn.Module) else found
    if not isinstance(model, nn.Module):
        raise DataError(f"model={path!r} gave {type(model).__name__}, not a torch.nn.Module")
    return model


def resolve_batches(path: str, split: str) -> Iterable[Any]:
    """Batches: an iterable, what a function returns, or a split of `builtin:digits`."""
    if path.startswith("builtin:"):
        chosen = getattr(load_images(path), split, None)
        if chosen is None:
            raise DataError(f"{path} has the splits train, valid and test, not {split!r}")
        return batches(chosen.images, chosen.labels, 128)
    found = resolve(path, "data")
    return found() if callable(found) else found
