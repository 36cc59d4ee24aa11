"""Imports a user's own model and data by path, such as `pkg.module:load_model`."""

import importlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from afterdrop.data import batches, load_images
from afterdrop.errors import AfterdropError, DataError


class UserCodeError(RuntimeError):
    """An OSError in the user's own code, which the command line shows with its traceback."""


@contextmanager
def _user_code(path: str) -> Iterator[None]:
    """Keeps errors of the user's files apart from those of paths on the command line."""
    try:
        yield
    except AfterdropError:
        raise
    except OSError as error:
        raise UserCodeError(f"{path} raised {type(error).__name__}: {error}") from error


def resolve(path: str, what: str) -> Any:
    """Imports the object at `module:name`, also from the current folder.

    Raises:
        DataError: If the module or the name does not exist.
        UserCodeError: If the module raises an OSError.
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
    with _user_code(path):
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


def _made(found: Any, path: str) -> Any:
    """What a function of the user returns; any other object as it is."""
    if not callable(found) or isinstance(found, nn.Module):
        return found
    with _user_code(path):
        return found()


def resolve_model(path: str) -> nn.Module:
    """Imports a model: a module, or a function without arguments that returns one."""
    model = _made(resolve(path, "model"), path)
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
    return _made(resolve(path, "data"), path)
