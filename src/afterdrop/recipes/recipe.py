"""Reads recipes, training configurations in TOML files with the source of every number.

Each file is a `TrainConfig` with a `description` and a table `[source]`, which says for every
section or single setting where its numbers come from. "lamb" is github.com/deepmind/lamb at
254a0b0, whose experiments folder holds the published values.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TypedDict

from afterdrop.errors import FileError
from afterdrop.files import read_whole
from afterdrop.models.checks import ModelError
from afterdrop.train.checks import ConfigError
from afterdrop.train.config import TrainConfig
from afterdrop.typed_records import read_record, require_plain


@dataclass(frozen=True)
class Recipe:
    """A configuration and the source of its numbers.

    Attributes:
        name: The name of the file.
        description: One line.
        source: Source of the numbers, by section or dotted name.
        config: The configuration.
    """

    name: str
    description: str
    source: Mapping[str, str]
    config: TrainConfig


class _About(TypedDict, total=False):
    """What a recipe has beside the settings of the configuration."""

    description: str
    source: dict[str, str]


def names() -> tuple[str, ...]:
    """The recipes that come with afterdrop.

    Example:
        >>> "ptb-24m" in names()
        True
    """
    files = (item.name for item in resources.files(__package__).iterdir())
    return tuple(sorted(name[:-5] for name in files if name.endswith(".toml")))


def load(name: str | Path) -> Recipe:
    """A recipe by name, or a user's own by the path of its TOML file.

    Args:
        name: One of `names()`, or a path that ends in `.toml`.

    Raises:
        ConfigError: If there is no such recipe, or a setting is wrong.
        FileError: If the user's file cannot be read.

    Example:
        >>> load("ptb-24m-retuned").config.optimiser.learning_rate
        0.003339
    """
    if str(name).endswith(".toml"):
        text = _read(Path(name))
    elif name in names():
        text = resources.files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    else:
        raise ConfigError(
            f"there is no recipe {str(name)!r}; known are {', '.join(names())}. "
            "Give one of them, or the path of a .toml file."
        )
    try:
        content = tomllib.loads(text)
        require_plain(content)
        about = read_record(_About, content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not a valid recipe ({error}); correct the file.") from error
    description, source = about.pop("description", ""), about.pop("source", {})
    try:
        return Recipe(Path(name).stem, description, source, TrainConfig.from_dict({**about}))
    except (ConfigError, ModelError) as error:
        raise ConfigError(f"{name}: {error}") from error


def _read(path: Path) -> str:
    try:
        return read_whole(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"cannot read the recipe {path}: {error}; convert it to UTF-8") from error
