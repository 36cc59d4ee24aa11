"""What fast kernels support, as an opt-in table of the fields of a configuration.

A field that the table does not list is unsupported, whatever its value: a field that is added to a
configuration later can never run silently on kernels that do not know it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Literal

Rule = Literal["any"] | tuple[Any, ...] | Callable[[Any], bool]


def why_unsupported(config: Any, supported: Mapping[str, Rule], prefix: str = "") -> str | None:
    """The first field of a configuration that kernels do not support, in words.

    Args:
        config: A dataclass.
        supported: For each of its fields `"any"`, the values that are supported, or a function of
            the whole configuration.
        prefix: Precedes the names of fields, such as `"objective."`.

    Returns:
        None if all fields are supported.

    Example:
        >>> from afterdrop.models import MaskConfig
        >>> why_unsupported(MaskConfig(0.5, "step"), {"rate": "any", "sharing": ("sequence",)})
        "sharing is 'step'"
        >>> why_unsupported(MaskConfig(0.5, "step"), {"rate": "any"})
        'sharing is a setting that the kernels do not know'
    """
    for field in fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        rule = supported.get(field.name)
        if rule is None:
            return f"{name} is a setting that the kernels do not know"
        if rule == "any":
            continue
        if not (rule(config) if callable(rule) else value in rule):
            return f"{name} is {value!r}"
    return None
