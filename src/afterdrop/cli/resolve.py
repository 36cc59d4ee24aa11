"""Imports a user's own model and data by path, such as `pkg.module:load_model`."""

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from traceback import walk_tb
from typing import Any

from torch import nn

from afterdrop.data import batches, load_images
from afterdrop.errors import DataError

# Modules whose errors are shown with a traceback. A DataLoader runs the user's code elsewhere.
_OF_THE_USER = {"torch.utils.data"}


def is_of_user_code(error: BaseException) -> bool:
    """Whether an error came through the user's own code, and is not about the command line."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
    return any(f"{name}.".startswith(tuple(f"{m}." for m in _OF_THE_USER)) for name in modules)


def resolve(path: str, what: str) -> Any:
    """Imports the object at `module:name`, also from the current folder.

    Raises:
        DataError: If the module or the name does not exist.
    """
    module, _, name = path.partition(":")
    if not module or not name or not all(part.isidentifier() for part in module.split(".")):
        raise DataError(
            f"{what}={path!r} must be an import path such as pkg.module:load_{what}, where "
            f"load_{what} is a function without arguments"
        )
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    _OF_THE_USER.add(module.partition(".")[0])
    found = _imported(module, f"{what}={path!r}")
    for part in name.split("."):
        if not hasattr(found, part):
            raise DataError(f"{what}={path!r}: module {module} has no {name!r}")
        found = getattr(found, part)
    return found


def _imported(module: str, given: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, and imports another one that does not
        raise DataError(f"{given}: {error}; run the command in its folder") from error


def _made(found: Any) -> Any:
    """What a function of the user returns; any other object as it is."""
    return found() if callable(found) and not isinstance(found, nn.Module) else found


def resolve_model(path: str) -> nn.Module:
    """Imports a model: a module, or a function without arguments that returns one."""
    model = _made(resolve(path, "model"))
    if not isinstance(model, nn.Module):
        raise DataError(f"model={path!r} is a {type(model).__name__}, not a torch.nn.Module")
    return model


def resolve_batches(path: str, split: str) -> Iterable[Any]:
    """Imports batches: an iterable, a function that returns one, or a split of built-in data."""
    if path.startswith("builtin:"):
        chosen = getattr(load_images(path), split, None)
        if chosen is None:
            raise DataError(f"{path} has the splits train, valid and test, not {split!r}")
        return batches(chosen.images, chosen.labels, 128)
    return _made(resolve(path, "data"))
