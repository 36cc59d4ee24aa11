"""Dataclasses from what JSON gives back: every field must be there, and of its declared type."""

import contextlib
import dataclasses
import functools
import types
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

_Record = TypeVar("_Record")
_PLAIN: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    str: ((str,), "a string"),
}


def read_record(kind: type[_Record], record: object, where: str = "") -> _Record:
    """A dataclass from the plain values that `dataclasses.asdict` made of it, as JSON keeps them.

    Args:
        kind: The dataclass. Its fields may be other dataclasses, tuples, literals, optional values,
            numbers, strings and truth values.
        record: What JSON gave back.
        where: The name of the record, for messages.

    Raises:
        ValueError: If a field is missing, unknown or of another type; names the field.

    Example:
        >>> from afterdrop.family.member import Member
        >>> read_record(Member, {"alpha": 1, "multiplier": 0.5, "temperature": 1, "temper": "mean"})
        Member(alpha=1, multiplier=0.5, temperature=1)
        >>> read_record(Member, {"alpha": "one"}, "member")
        Traceback (most recent call last):
        ValueError: member.alpha='one' is not a number
    """
    if not isinstance(record, dict):
        raise ValueError(f"{where or kind.__name__}={record!r:.60} is not an object")
    hints = _hints(cast(Any, kind))
    before = f"{where}." if where else ""
    names = [field.name for field in dataclasses.fields(cast(Any, kind))]
    for name in record:
        if name not in names:
            raise ValueError(f"{before}{name} is not known")
    fields = {n: _value(hints[n], record[n], before + n) for n in names if n in record}
    for name in names:
        if name not in record:
            raise ValueError(f"{before}{name} is missing")
    return kind(**fields)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """The declared types of a dataclass, which take long to find."""
    return get_type_hints(kind)


def _value(hint: Any, value: Any, where: str) -> Any:
    """A value of a declared type."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return read_record(cast(Any, hint), value, where)
    if origin is tuple:
        return _tuple(parts, value, where)
    if origin in (Union, types.UnionType):
        return _union(parts, value, where)
    if origin is Literal:
        if value not in parts:
            raise ValueError(f"{where}={value!r:.60} is not one of {', '.join(parts)}")
        return value
    accepted, shown = _PLAIN[hint]
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"{where}={value!r:.60} is not {shown}")
    return value


def _union(parts: tuple[Any, ...], value: Any, where: str) -> Any:
    """A value of the first type that it has, or None where that is one of them."""
    *others, last = (part for part in parts if part is not types.NoneType)
    if value is None and types.NoneType in parts:
        return None
    for part in others:
        with contextlib.suppress(ValueError):
            return _value(part, value, where)
    return _value(last, value, where)


def _tuple(parts: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{where}={value!r:.60} is not a list")
    if parts[-1] is Ellipsis:
        parts = (parts[0],) * len(value)
    if len(parts) != len(value):
        raise ValueError(f"{where} has {len(value)} entries; it needs {len(parts)}")
    return tuple(_value(p, v, f"{where}[{i}]") for i, (p, v) in enumerate(zip(parts, value)))
