"""The file of a choice: read back as it was, and refused where it is damaged or foreign."""

import json
import re

import pytest
from choices import CHOICES, net, same, scores_of

import afterdrop as ad
from afterdrop.errors import FileError
from afterdrop.files import sealed


@pytest.mark.parametrize("kind", CHOICES)
def test_a_choice_is_read_back_as_it_was(kind, tmp_path):
    choice = CHOICES[kind]()
    choice.save(tmp_path / "choice.json")
    loaded = ad.Choice.load(tmp_path / "choice.json")
    assert same(loaded, choice)
    assert str(loaded) == str(choice)
    loaded.save(tmp_path / "again.json")
    written = (tmp_path / "choice.json").read_bytes()
    assert written == (tmp_path / "again.json").read_bytes()


def test_the_comparison_sees_differences():
    a, b = (ad.select(scores_of(net(), seed=seed)) for seed in (0, 1))
    assert same(a, a) and not same(a, b)
    assert same(float("nan"), float("nan")) and not same(float("nan"), 0.0)
    assert not same((1,), [1]) and not same(1, 1.0)


def test_a_folder_stands_for_its_choice(tmp_path):
    choice = ad.select(scores_of(net()))
    choice.save(tmp_path)
    assert same(ad.Choice.load(tmp_path), choice)
    assert same(ad.Run.open(tmp_path).choice, choice)
    with pytest.raises(FileError, match=r"cannot read .*nowhere"):
        ad.Choice.load(tmp_path / "nowhere")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "choice.json"
    ad.select(scores_of(net())).save(path)
    return path


def refused(path, record, match):
    path.write_text(json.dumps(sealed(record)))
    with pytest.raises(FileError, match=match):
        ad.Choice.load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "not an afterdrop-choice file"),
        ('{"kind": "afterdrop-run", "version": 1}', "not an afterdrop-choice file"),
        ('{"kind": "afterdrop-choice", "version": 99}', "schema version 99"),
        ('{"kind": "afterdrop-choice", "version": 2}', "has no digest"),
    ],
)
def test_a_foreign_file_is_refused(file, text, message):
    file.write_text(text)
    with pytest.raises(FileError, match=f"{re.escape(str(file))}.*{message}"):
        ad.Choice.load(file)


def test_a_truncated_file_is_refused(file):
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(FileError, match="is it complete"):
        ad.Choice.load(file)


def test_a_missing_or_additional_field_is_refused_by_name(file):
    whole = json.loads(file.read_text())
    for name in whole.keys() - {"kind", "version", "digest"}:
        refused(file, {k: v for k, v in whole.items() if k != name}, f"is damaged.*{name}")
    refused(file, {**whole, "more": 1}, "is damaged.*more")
    for part in ("member", "request", "gain", "deterministic"):
        for name in whole[part]:
            some = {k: v for k, v in whole[part].items() if k != name}
            refused(file, {**whole, part: some}, f"is damaged.*{name}")
        refused(file, {**whole, part: {**whole[part], "more": 1}}, "is damaged.*more")


@pytest.mark.parametrize("value", [None, 3, "word", [], [1], {}, [[]], {"a": 1}])
def test_a_field_of_another_kind_is_refused(file, value):
    whole = json.loads(file.read_text())
    accepted = {
        "num_samples": [3],
        "temperature_share": [3],
        "fingerprint": ["word"],
        "ranking": [[]],
        "recurrence": [[]],
        "crossfit": [None],
        "agreement": [None, 3],
        "left_off": [[]],
        "by": ["word"],
        "unit": ["word"],
        "also": [[]],
        "ensemble": [None],
        "pilot": [None, []],
    }
    for name in whole.keys() - {"kind", "version", "digest"}:
        if value not in accepted.get(name, []):
            refused(file, {**whole, name: value}, "is damaged.*choose again with select")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("member", "alpha"), 2),
        (("member", "temper"), "all"),
        (("request", "plan", "num_samples"), 7),
        (("request", "plan", "scheme"), "other"),
        (("request", "grid", "multipliers"), [3.0]),
        (("request", "temperatures"), [2.0, 1.0]),
        (("request", "batch_dim"), "first"),
        (("request", "split"), 1),
        (("request", "stream"), {"window": 0}),
        (("prefer",), "dearest"),
        (("num_samples",), 3),
        (("optimistic",), "yes"),
        (("temperatures",), ["low", "high"]),
        (("gain", "value"), "much"),
        (("ranking", 0, "xe"), "low"),
        (("ranking", 0, "difference"), {"value": 1.0}),
        (("recurrence", 0, 2), "often"),
    ],
)
def test_a_value_that_no_choice_has_is_refused(file, place, value):
    record = json.loads(file.read_text())
    inside = record
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    refused(file, record, "is damaged")
