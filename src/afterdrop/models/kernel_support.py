"""What fast kernels support, as an opt-in table of the fields of some options.

A field that the table does not list is unsupported, whatever its value: a field that is added to
the options later can never run silently on kernels that do not know it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Literal

# What is supported of a field: "any" value, some values, a table of the fields of its value, or a
# function of all options, which says why they are unsupported (None if they are supported).
Rule = Literal["any"] | tuple[Any, ...] | Mapping[str, "Rule"] | Callable[[Any], str | None]
Table = Mapping[str, Rule]


def why_unsupported(options: Any, supported: Table, prefix: str = "") -> str | None:
    """The first field of some options that kernels do not support, in words.

    Args:
        options: A dataclass.
        supported: The rule of each of its fields.
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
    for field in fields(options):
        name, value = f"{prefix}{field.name}", getattr(options, field.name)
        rule = supported.get(field.name)
        reason: str | None = None
        if rule is None:
            reason = f"{name} is a setting that the kernels do not know"
        elif callable(rule):
            reason = rule(options)
        elif isinstance(rule, Mapping) and value is not None:
            reason = why_unsupported(value, rule, f"{name}.")
        elif rule != "any" and value not in rule:
            reason = f"{name} is {value!r}"
        if reason is not None:
            return reason
    return None
