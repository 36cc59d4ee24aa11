"""Writes recipes as TOML text, which `load` reads back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from afterdrop.recipes.recipe import Recipe
from afterdrop.train.checks import ConfigError


def to_toml(recipe: Recipe) -> str:
    """The TOML text of a recipe; settings that are None are omitted, because None is the default.

    Example:
        >>> from afterdrop import recipes
        >>> print(to_toml(recipes.load("digits-mlp")).splitlines()[1])
        seed = 1
    """
    content = recipe.config.to_dict()
    lines = [f"description = {_value(recipe.description)}", f"seed = {content.pop('seed')}"]
    tables: dict[str, Mapping[str, Any]] = {**content, "source": recipe.source}
    for name, table in tables.items():
        lines += ["", f"[{name}]"]
        lines += [f"{_key(k)} = {_value(v)}" for k, v in table.items() if v is not None]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if name.replace("_", "").isalnum() else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    raise ConfigError(f"{value!r} cannot be written as TOML; use text, numbers and lists of them")
