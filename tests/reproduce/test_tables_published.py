"""The values of published.toml, checked against other statements of the paper."""

import math
import tomllib
from importlib import resources

import pytest

from afterdrop.family.member import AMC, DET, GMC, Member
from afterdrop.reproduce.tables import published

CONTENT = tomllib.loads(
    resources.files("afterdrop.reproduce.tables").joinpath("published.toml").read_text("utf-8")
)


@pytest.mark.parametrize("row", CONTENT["row"], ids=lambda r: f"{r['table']}-{r['data']}")
def test_every_row_has_a_figure_for_each_member_and_a_source(row):
    assert len(row["xe"]) == len(CONTENT["members"][row["members"]])
    assert str(row["table"]) in CONTENT["sources"]
    for misprint in row.get("misprints", ()):
        assert 0 <= misprint["at"] < len(row["xe"]) and misprint["why"]


def test_perplexities_agree_with_the_abstract():
    def test_of(data, member, tuned=False):
        found = published.value(4, data, "test", member, tuned=tuned)
        return round(math.exp(found.xe), 1)

    assert test_of("ptb", Member(1, 0.8)) == 55.3
    assert (test_of("wikitext-2", DET), test_of("wikitext-2", Member(1, 0.8))) == (65.9, 63.7)
    assert test_of("ptb", DET, tuned=True) == 56.0


def test_table_1_is_monotone_as_its_caption_says():
    row = next(r for r in CONTENT["row"] if r["table"] == 1)
    assert row["xe"] == sorted(row["xe"])


def test_tables_2_and_4_agree_on_wikitext_but_for_the_misprints():
    for member in published.members("nine"):
        two = published.value(2, "wikitext-2", "valid", member)
        four = published.value(4, "wikitext-2", "valid", member)
        assert abs(two.meant - four.xe) <= 0.0011
        assert bool(two.misprint) == (abs(two.xe - four.xe) > 0.0011)


def test_bands_above_and_below_500_make_up_ptb_validation():
    both = [published.targets("ptb", "valid", band) for band in ("> 500", "< 500")]
    assert sum(both) == 73_760


def test_an_optimal_temperature_is_worse_only_where_it_is_marked():
    for data in ("ptb", "wikitext-2"):
        for member in published.members("nine"):
            plain = published.value(4, data, "valid", member)
            tuned = published.value(4, data, "valid", member, tuned=True)
            assert (tuned.xe > plain.xe) == bool(tuned.misprint)


def test_unpublished_values_are_none():
    assert published.value(2, "ptb-char", "valid", DET) is None
    assert published.value(2, "ptb", "valid", Member(0, 0.5)) is None
    assert published.value(1, "ptb", "train", AMC) is None
    assert published.value(1, "ptb", "train", GMC).xe == 2.878
    step = {"masks": "step", "tuned": True}
    assert published.value(5, "ptb", "valid", DET, parameters=9_974_361, **step).xe == 4.098
    assert published.value(5, "ptb", "valid", DET, parameters=1_000_000, **step) is None
