"""Recipes: published training configurations, and small ones of our own, as TOML files."""

from afterdrop.recipes.recipe import Recipe, load, names
from afterdrop.recipes.recipe_toml import to_toml

__all__ = ["Recipe", "load", "names", "to_toml"]
