"""The strict decoder: what JSON may hold, and what a record declares."""

import dataclasses
import json
import math
import re
from typing import Any, Literal, NotRequired, TypedDict

import pytest

from afterdrop.typed_records import parse_json, read_record, require_plain


@dataclasses.dataclass(frozen=True)
class Inner:
    size: int
    kind: Literal["one", "two"] = "one"


@dataclasses.dataclass(frozen=True)
class Outer:
    rate: float
    names: tuple[str, ...]
    pair: tuple[int, bool]
    inner: Inner | None
    by_name: dict[str, Inner]
    curve: dict[int, float]


class Note(TypedDict):
    number: int
    where: NotRequired[list[str]]


RECORD: dict[str, Any] = {
    "rate": 0.5,
    "names": ["a", "ü"],
    "pair": [1, True],
    "inner": {"size": 3, "kind": "two"},
    "by_name": {"x": {"size": 1, "kind": "one"}},
    "curve": {"0": 2.5, "10": 1},
}


def test_a_record_is_read_back_as_it_was():
    record = read_record(Outer, parse_json(json.dumps(RECORD)))
    assert record.inner == Inner(3, "two") and record.by_name == {"x": Inner(1)}
    assert record.pair == (1, True) and record.curve == {0: 2.5, 10: 1}
    assert read_record(Outer, json.loads(json.dumps(dataclasses.asdict(record)))) == record


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rate", "x", "rate='x' is not a number"),
        ("rate", True, "rate=True is not a number"),
        ("names", "a", "names='a' is not a list"),
        ("names", [1], "names[0]=1 is not a string"),
        ("pair", [1], "pair has 1 entries; it needs 2"),
        ("pair", [1.0, True], "pair[0]=1.0 is not an integer"),
        ("inner", {"size": 1}, "inner.kind is missing"),
        ("inner", {"size": 1, "kind": "three"}, "inner.kind='three' is not one of one, two"),
        ("inner", {"size": 1, "kind": ["one"]}, "inner.kind=['one'] is not one of one, two"),
        ("by_name", {"x": 1}, "by_name.x=1 is not an object"),
        ("curve", {"one": 1.0}, "curve has the name 'one', which is not a number"),
        ("curve", [1.0], "curve=[1.0] is not an object"),
        ("more", 1, "more is not known"),
    ],
)
def test_what_a_record_does_not_declare_is_refused_by_name(name, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_record(Outer, {**RECORD, name: value})


def test_a_typed_dictionary_may_hold_more_than_it_declares():
    assert read_record(Note, {"number": 1, "else": None}) == {"number": 1, "else": None}
    for record, message in (
        ({}, "number is missing"),
        ({"number": "1"}, "number='1' is not an integer"),
        ({"number": 1, "where": "here"}, "where='here' is not a list"),
        ([], "Note=\\[\\] is not an object"),
    ):
        with pytest.raises(ValueError, match=message):
            read_record(Note, record)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe", "utf-8"),
        (b"[" * 100_000, "64 levels deep"),
        (b'{"a":' * 100_000, "64 levels deep"),
        (b"[" * 70 + b"]" * 70, "64 levels deep"),
        (b"1" * 5000, "digits"),
        (str(2**63).encode(), "an integer of 64 bits does not fit 64"),
        (b'["\\ud800"]', "lone surrogate"),
        (b'{"\\udc00": 1}', "lone surrogate"),
        (b'{"a": 1, "a": 2}', "a name twice"),
        (b"{} {}", "Extra data"),
    ],
)
def test_text_that_no_reader_should_get_is_refused(content, message):
    with pytest.raises(ValueError, match=message):
        parse_json(content)


def test_what_our_own_writers_write_is_accepted():
    content = {"a": [math.inf, -(2**63), 2**63 - 1, "😀", None, {"b": [[]]}]}
    assert parse_json(json.dumps(content)) == content
    assert math.isnan(parse_json("NaN"))


def test_values_of_other_formats_have_the_same_limits():
    require_plain({"a": [1, (2.0, "x")]})
    with pytest.raises(ValueError, match="does not fit 64"):
        require_plain({"a": [10**400]})
