"""What an engine supports, listed field by field: what is not listed is refused.

So an option that is added later can never run silently on kernels that do not know it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], str | None]  # why a value is not supported; None if it is


def any_value(value: Any) -> None:
    """Supports every value."""


def unsupported(options: Any, supported: Mapping[str, Check]) -> str | None:
    """Why some options are not supported; None if all are.

    Args:
        options: A dataclass.
        supported: What is supported of each of its fields.

    Example:
        >>> @dataclasses.dataclass
        ... class Options:
        ...     size: int = 1
        ...     new: bool = False
        >>> unsupported(Options(), {"size": any_value})
        'new=False is not known to the kernels'
    """
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name not in supported:
            return f"{field.name}={value!r} is not known to the kernels"
        if reason := supported[field.name](value):
            return reason
    return None
