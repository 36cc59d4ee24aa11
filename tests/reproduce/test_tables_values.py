"""The numbers of the tables, restated as plain means over targets of the Scores."""

import math

import pytest
import torch
from table_sources import make_source

from afterdrop.data import load_text
from afterdrop.errors import DataError, FileError
from afterdrop.family.member import AMC, DET, Member
from afterdrop.reproduce.tables import published
from afterdrop.reproduce.tables.frequency_bands import PAPER_BANDS, parse_band, suitable_bands
from afterdrop.reproduce.tables.table1_multiplier import multiplier_table
from afterdrop.reproduce.tables.table2_members import members_table
from afterdrop.reproduce.tables.table3_frequency import frequency_table
from afterdrop.reproduce.tables.table4_temperature import temperature_table
from afterdrop.reproduce.tables.table5_mask_sharing import kind_of, mask_sharing_table
from afterdrop.reproduce.tables.table_input import TableInput

COUNTS = torch.tensor([30_000, 6_000, 600, 600, 400, 90, 90, 10, 10, 0])


def line(row, name, nth=0):
    return [found for found in row.lines if found.name == name][nth].values


def test_table_1_has_every_alpha_and_paired_steps(ptb):
    table = multiplier_table([ptb])
    scores = ptb.scores["train"]
    alphas = [row.label.rsplit("; ", 1)[1] for row in table.rows]
    assert alphas == ["alpha = 0", "alpha = 0.5", "alpha = 1"]
    row = table.rows[2]
    for at, multiplier in enumerate((0, 0.5, 0.8, 0.9, 1)):
        expected = scores.values(Member(1, multiplier)).whole.mean().item()
        assert line(row, "ours")[at] == pytest.approx(expected)
    step = scores.values(AMC).whole - scores.values(Member(1, 0.9)).whole
    assert line(row, "− left column")[4] == pytest.approx(step.mean().item())
    assert line(row, "− left column")[0] is None
    assert line(table.rows[0], "paper") == [2.731, 2.777, 2.826, 2.849, 2.878]
    assert not [found for found in table.rows[1].lines if found.name == "paper"]


def test_table_2_compares_with_published_values_and_marks_misprints(mnist):
    table = members_table([mnist])
    row, scores = table.rows[0], mnist.scores["valid"]
    half = list(published.members("nine")).index(Member(0.5, 0.8))
    ours = scores.xe(Member(0.5, 0.8)).value
    assert line(row, "ours")[half] == ours
    assert line(row, "ours − DET")[half] == pytest.approx(ours - scores.xe(DET).value)
    assert line(row, "paper")[half] == 0.92
    assert line(row, "paper − DET")[half] == pytest.approx(0.092 - 0.070)
    assert line(row, "ours − paper")[half] == pytest.approx(ours - 0.092)
    paper = next(found for found in row.lines if found.name == "paper")
    assert paper.text(half) == "0.920†" and paper.text(0) == "0.070"
    assert any("misprint" in note and "0.092" in note for note in table.notes)
    assert line(row, "ours")[-1] == min(scores.xe(m).value for m in scores.members)


def test_table_2_averages_runs_that_differ_in_their_seed_only(mnist):
    other = make_source(
        "mnist-mlp", "mnist-2", unit="image", changes={"seed": 2}, weights=1, splits=("valid",)
    )
    wider = make_source(
        "mnist-mlp", "wide", unit="image", changes={"model.hidden_sizes": [9]}, splits=("valid",)
    )
    table = members_table([mnist, other, wider])
    assert len(table.rows) == 4
    values = [source.scores["valid"].xe(AMC).value for source in (mnist, other)]
    mean = table.rows[2]
    assert mean.label == "mean over 2 seeds (mnist-1, mnist-2)"
    assert line(mean, "mean")[9] == pytest.approx(sum(values) / 2)
    assert line(mean, "± (seeds)")[9] == pytest.approx(abs(values[0] - values[1]) / 2)


def test_table_3_is_the_mean_over_the_targets_of_each_band(ptb, monkeypatch):
    monkeypatch.setattr(TableInput, "counts", lambda self, folder: COUNTS)
    table = frequency_table([ptb])
    assert len(table.rows) == len(PAPER_BANDS)
    scores = ptb.scores["valid"]
    at = COUNTS[scores.targets]
    rare = at < 500
    row = next(r for r in table.rows if ": < 500," in r.label)
    expected = [scores.values(m).whole[rare].mean().item() for m in published.members("arithmetic")]
    assert line(row, "ours")[5:8] == pytest.approx(expected)
    assert line(row, "ours")[9] == pytest.approx(expected[2] - expected[0])
    assert line(row, "paper")[5:] == pytest.approx([6.49, 6.39, 6.39, -0.10, -0.10])
    assert f"{int(rare.sum())} valid" in row.label and "29,058" in row.label
    common = next(r for r in table.rows if ": > 500," in r.label)
    total = sum(int(mask.sum()) * line(r, "ours")[5] for mask, r in ((rare, row), (~rare, common)))
    assert total / len(at) == pytest.approx(scores.xe(DET).value)  # the two bands cover all targets


def test_table_3_splits_the_gain_into_rare_and_other_targets(ptb, monkeypatch):
    monkeypatch.setattr(TableInput, "counts", lambda self, folder: COUNTS)
    table = frequency_table([ptb])
    scores = ptb.scores["valid"]
    rare = COUNTS[scores.targets] < 500
    gap = scores.values(AMC).whole - scores.values(DET).whole
    note = next(text for text in table.notes if text.startswith("ptb-1, valid: "))
    assert f"{100 * rare.double().mean():.0f} % of the targets are < 500" in note
    assert f"AMC ×1 − DET is {gap.mean():+.4f}" in note
    for part in (gap * rare, gap * ~rare):
        assert f"{part.mean():+.4f} ± " in note
    others = frequency_table([ptb], [parse_band("> 500")]).notes  # no band of rare targets
    assert not any("of the targets are" in text for text in others)


def test_table_3_takes_custom_bands_and_reports_empty_ones(ptb, monkeypatch):
    monkeypatch.setattr(TableInput, "counts", lambda self, folder: COUNTS)
    table = frequency_table([ptb], [parse_band("5-20"), parse_band("> 40000")])
    assert [row.label.split(",")[0] for row in table.rows] == ["ptb-1: 5-20", "ptb-1: > 40000"]
    assert line(table.rows[1], "ours") == [None] * 10
    assert "ptb-1: no valid target is in the band > 40000" in table.missing


def test_table_3_serves_classifiers_by_class_frequency(mnist, monkeypatch):
    monkeypatch.setattr(TableInput, "counts", lambda self, folder: COUNTS)
    table = frequency_table([mnist])
    assert [row.label.split(",")[0] for row in table.rows] == ["mnist-1: > 90", "mnist-1: < 91"]


def test_bands_of_other_texts_are_scaled_to_their_size():
    counts = torch.tensor([90_000, 2_958])
    names = [band.name for band in suitable_bands("other", counts, classes=False)]
    assert names == ["> 2500", "> 500", "> 50", "< 50", "< 10", "< 2"]


@pytest.mark.parametrize("text", ["500", "", "> many", "9-5", ">= 3"])
def test_malformed_bands_are_rejected(text):
    with pytest.raises(DataError, match="the band"):
        parse_band(text)


def test_table_4_applies_validation_temperatures_to_the_test_data(ptb):
    table = temperature_table([ptb])
    assert [row.label.rsplit("; ", 1)[1] for row in table.rows] == [
        "perplexity, T = 1",
        "perplexity, optimal T on the mean",
        "perplexity, optimal T on the sample",
    ] * 2
    for at, member in enumerate(published.members("nine")):
        for row, temper in ((table.rows[4], "mean"), (table.rows[5], "sample")):
            tempered = Member(member.alpha, member.multiplier, temper=temper)
            fitted = ptb.scores["valid"].fit(tempered).member
            xe = ptb.scores["test"].values(fitted).whole.mean().item()
            assert line(row, "T")[at] == fitted.temperature
            assert line(row, "ours")[at] == pytest.approx(math.exp(xe))
    row = table.rows[4]
    assert line(row, "paper")[0] == pytest.approx(math.exp(4.026))
    assert line(row, "±")[3] == pytest.approx(
        line(row, "ours")[3]
        * ptb.scores["test"].xe(ptb.scores["valid"].fit(Member(0, 1)).member).error
    )
    valid = next(found for found in table.rows[1].lines if found.name == "paper")
    assert valid.text(8).endswith("†")


MODEL = {"vocabulary": 10, "hidden_sizes": [4], "input_dropout": 0.3, "state_dropout": 0.2}


def masks(name, weights, **settings):
    changes = {f"model.{key}": value for key, value in settings.items()}
    return make_source(
        "ptb-10m-retuned",
        name,
        changes=changes,
        weights=weights,
        model={**MODEL, **settings},
        parameters=9_974_361,
    )


def test_table_5_compares_masks_of_runs_that_differ_in_nothing_else():
    shared = masks("s", 0)
    step = masks("ns", 1, state_sharing="step")
    every = masks("all", 2, input_sharing="sequence", output_sharing="sequence")
    embedding = masks("e", 3, embedding_dropout=0.1)
    kinds = ["shared", "step", "all", "shared + embedding dropout 0.1"]
    assert [kind_of(source) for source in (shared, step, every, embedding)] == kinds
    table = mask_sharing_table([shared, step, every, embedding])
    rows = {row.label.split(":")[0]: row for row in table.rows}
    assert len(rows) == 4
    row = rows["no mask shared (NS)"]
    fits = {source.name: source.scores["valid"].fit(DET).member for source in (shared, step)}
    xe = [s.scores["test"].values(fits[s.name]).whole for s in (step, shared)]
    assert line(row, "ours")[1] == pytest.approx(xe[0].mean().item())
    assert line(row, "− S, same seed")[1] == pytest.approx((xe[0] - xe[1]).mean().item())
    assert line(row, "paper")[:2] == [4.098, 4.071]
    assert line(rows["state masks shared (S)"], "paper")[:2] == [4.084, 4.052]
    assert not [found for found in rows["all masks shared"].lines if found.name == "paper"]


def test_table_5_does_not_compare_runs_that_differ_otherwise():
    one = make_source("pydoc-small", "one", model=MODEL)
    two = make_source(
        "pydoc-small",
        "two",
        changes={"model.state_sharing": "step", "model.hidden_sizes": [7]},
        model={**MODEL, "state_sharing": "step"},
    )
    table = mask_sharing_table([one, two])
    assert not table.rows and "--set model.state_sharing=step" in table.missing[0]


def test_band_sizes_on_ptb_are_those_of_the_paper():
    try:
        text = load_text("ptb")
    except FileError as error:
        pytest.skip(f"needs PTB in the folder that AFTERDROP_DATA names: {error}")
    counts = torch.tensor(text.vocabulary.counts)
    at = counts[text.valid.long()]
    for band in map(parse_band, PAPER_BANDS):
        found = int(((at > band.low) & (at <= band.high)).sum())
        assert found == published.targets("ptb", "valid", band.name), band.name
