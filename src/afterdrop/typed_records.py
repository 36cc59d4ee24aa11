"""The strict decoder of everything that is read from JSON: text, then values, then types.

    parse_json    bytes → plain values: UTF-8, no lone surrogates, no deep nesting, 64-bit integers,
                  no name twice
    read_record   plain values → a dataclass or a typed dictionary, every field of its declared type

A reader calls both before it uses anything. What they raise is a `ValueError` that names the place
inside the file; the reader adds the name of the file and the remedy.
"""

import collections.abc
import contextlib
import dataclasses
import functools
import json
import types
from collections.abc import Iterable
from typing import (
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

_Record = TypeVar("_Record")
_DEPTH = 64  # our own files have less than ten levels
_PLAIN: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    str: ((str,), "a string"),
}
_MAPPINGS = (dict, collections.abc.Mapping)
_SEQUENCES = (list, collections.abc.Sequence)


def parse_json(content: bytes | str) -> Any:
    """The plain values of a JSON text.

    Raises:
        ValueError: If it is not UTF-8 or not JSON, has a name twice in an object, is nested more
            than 64 levels deep, or has an integer beyond 64 bits or a lone surrogate.

    Example:
        >>> parse_json(b'{"a": [1, 2.5, null]}')
        {'a': [1, 2.5, None]}
        >>> parse_json("[" * 100_000)
        Traceback (most recent call last):
        ValueError: it is nested more than 64 levels deep
    """
    try:
        text = content.decode() if isinstance(content, bytes) else content
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(f"it is nested more than {_DEPTH} levels deep") from None
    require_plain(value)
    return value


def require_plain(value: object) -> None:
    """Requires values that every reader can hold: see `parse_json`; TOML gives the same kinds.

    Raises:
        ValueError: If they are nested too deeply, or an integer or string cannot be used.
    """
    level: list[Any] = [value]
    for _ in range(_DEPTH):
        if not level:
            return
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                below += [*node, *node.values()]
            elif isinstance(node, list | tuple):
                below += node
            else:
                _check_leaf(node)
        level = below
    raise ValueError(f"it is nested more than {_DEPTH} levels deep")


def _check_leaf(value: object) -> None:
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"the string {value!r:.60} has a lone surrogate") from None
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"an integer of {value.bit_length()} bits does not fit 64")


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    pairs = list(pairs)
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("an object has a name twice")
    return made


def read_record(kind: type[_Record], record: object, where: str = "") -> _Record:
    """A dataclass or a typed dictionary from plain values, as JSON and TOML give them.

    Args:
        kind: A dataclass, whose fields must all be there and nothing else, or a `TypedDict`, which
            may hold more than it declares. Fields may be other records, tuples, lists,
            dictionaries, literals, optional values, numbers, strings and truth values.
        record: The plain values.
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
    is_open = is_typeddict(kind)
    for name in record:
        if name not in hints and not is_open:
            raise ValueError(f"{before}{name} is not known")
    fields = {n: _value(hints[n], record[n], before + n) for n in hints if n in record}
    for name in kind.__required_keys__ if is_open else hints:  # type: ignore[attr-defined]
        if name not in record:
            raise ValueError(f"{before}{name} is missing")
    return cast(_Record, {**record, **fields}) if is_open else kind(**fields)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """The declared types of the fields of a record, which take long to find."""
    hints = get_type_hints(kind)
    if is_typeddict(kind):
        return hints
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _value(hint: Any, value: Any, where: str) -> Any:
    """A value of a declared type."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint) or is_typeddict(hint):
        return read_record(cast(Any, hint), value, where)
    if origin is tuple:
        return _tuple(parts, value, where)
    if origin in _SEQUENCES:
        return list(_tuple((parts[0], ...), value, where))
    if origin in _MAPPINGS:
        return _mapping(parts, value, where)
    if origin in (Union, types.UnionType):
        return _union(parts, value, where)
    if origin is Literal:
        if not isinstance(value, str) or value not in parts:
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
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where}={value!r:.60} is not a list")
    if parts[-1] is Ellipsis:
        parts = (parts[0],) * len(value)
    if len(parts) != len(value):
        raise ValueError(f"{where} has {len(value)} entries; it needs {len(parts)}")
    return tuple(_value(p, v, f"{where}[{i}]") for i, (p, v) in enumerate(zip(parts, value)))


def _mapping(parts: tuple[Any, ...], value: Any, where: str) -> dict[Any, Any]:
    """A dictionary; integers as keys are texts in JSON."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}={value!r:.60} is not an object")
    keys = value
    if parts[0] is int:
        keys = {}
        for name, entry in value.items():
            if not (name.isascii() and name.isdecimal() and len(name) < 19):
                raise ValueError(f"{where} has the name {name!r:.60}, which is not a number")
            keys[int(name)] = entry
    return {name: _value(parts[1], entry, f"{where}.{name}") for name, entry in keys.items()}
