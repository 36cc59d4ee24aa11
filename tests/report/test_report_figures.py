"""Figures show the values of the Scores, restated from per-target values."""

import html
import io
import itertools
import math
import subprocess
import sys

import matplotlib
import matplotlib.figure
import numpy as np
import pytest
import torch
from cases import own_scores
from torch import nn

import afterdrop as ad
from afterdrop.report import figures
from afterdrop.report.figure_svg import inline_svg
from afterdrop.report.frequency_figures import frequency_bands


def texts(ax):
    return [text.get_text() for text in ax.texts]


def data(line):
    return np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)


@pytest.fixture(scope="module")
def members(scores):
    return [ad.DET, scores.fit(ad.DET).member, ad.AMC, scores.fit(ad.Member(0.5, 0.6)).member]


def test_the_map_holds_every_member_once_and_stars_the_best(scores):
    found = texts(figures.family_map(scores))
    values = {member: scores.xe(member).value for member in scores.members}
    best = min(values.values())
    wanted = [f"★ {v:.4f}" if v == best else f"{v:.4f}" for v in values.values()]
    assert sorted(found) == sorted(wanted)


def test_the_tuned_map_shows_each_optimum_and_its_temperature(scores):
    found = " ".join(texts(figures.family_map(scores, tuned=True)))
    for member in scores.members:
        best = scores.fit(member).member
        assert f"{scores.xe(best).value:.4f}" in found
        assert f"T {best.temperature:.2f}" in found


def test_the_map_frames_the_chosen_member(scores):
    frames = [p for p in figures.family_map(scores, chosen=ad.AMC).patches if not p.get_fill()]
    assert len(frames) == 1
    center = frames[0].get_x() + frames[0].get_width() / 2
    assert center == pytest.approx(2.5) and frames[0].get_y() == pytest.approx(3.04)


def test_temperature_curves_are_paired_differences_with_the_minimum_marked(scores):
    ax = figures.temperature_curves(scores, [ad.DET, ad.AMC], labels=["a", "b"])
    for member, curve, mark in ((ad.DET, *ax.lines[:2]), (ad.AMC, *ax.lines[2:4])):
        for t, y in zip(*data(curve)):
            per_target = scores.values(member.at_temperature(float(t))).whole
            wanted = (per_target - scores.values(ad.DET).whole).mean().item()
            assert y == pytest.approx(wanted, abs=1e-9)
        assert data(mark)[1].item() == data(curve)[1].min()
        best = scores.fit(member).member.temperature
        assert data(mark)[0].item() == pytest.approx(best, rel=0.03)


def test_reliability_points_are_the_bins_of_equally_many_targets(scores, members):
    ax = figures.reliability_diagram(scores, members, num_bins=3)
    for member, container in zip(members, ax.containers):
        order = scores.confidence(member).argsort(stable=True)
        x, y = data(container.lines[0])
        for place, rows in enumerate(order.split(40)):
            assert x[place] == pytest.approx(scores.confidence(member)[rows].mean().item())
            assert y[place] == pytest.approx(scores.correct(member)[rows].double().mean().item())


def test_bins_of_nearly_certain_predictions_halve_towards_the_doubtful():
    net = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(1, 2))
    net.load_state_dict({"1.weight": torch.tensor([[-9.0], [9.0]]), "1.bias": torch.zeros(2)})
    generator = torch.Generator().manual_seed(1)
    inputs, noise = torch.randn(2, 640, 1, generator=generator)
    scores = ad.evaluate(net, [(inputs, (inputs + noise / 5 > 0).long()[:, 0])], num_samples=2)
    confidence, correct = scores.confidence(ad.DET), scores.correct(ad.DET)
    assert confidence.median() > 0.99
    (points,) = figures.reliability_diagram(scores, [ad.DET]).containers
    x, y = data(points.lines[0])
    for place, rows in enumerate(confidence.argsort(stable=True).split([40, 40, 80, 160, 320])):
        assert x[place] == pytest.approx(confidence[rows].mean().item())
        assert y[place] == pytest.approx(correct[rows].double().mean().item())
    assert len(x) == 5 and x[0] < 0.8


def test_risk_ends_at_the_share_of_errors(scores, members):
    ax = figures.risk_coverage_curves(scores, members)
    for member, line in zip(members, ax.lines):
        x, y = data(line)
        assert x[-1] == 100
        assert y[-1] == pytest.approx(100 * (1 - scores.accuracy(member).value), abs=1e-4)
        assert (np.diff(x) > 0).all()


def test_bars_stack_to_each_members_objective(scores):
    ax = figures.bounds_stacked(scores)
    bound, jensen, normaliser = ax.containers
    shown = [ad.DET, *(ad.Member(a, m) for m in (0.3, 0.6, 1) for a in (0, 0.5, 1))]
    assert len(bound) == len(shown)
    for member, *bars in zip(shown, bound, jensen, normaliser):
        found = scores.bounds(member)
        assert bars[1].get_height() == pytest.approx(found.jensen_gap, abs=1e-9)
        assert bars[2].get_height() == pytest.approx(found.normaliser_gap, abs=1e-9)
        top = bars[2].get_y() + bars[2].get_height()
        assert top == pytest.approx(-scores.xe(member).value, abs=1e-5)


def test_the_gap_lies_within_the_theory_and_shrinks_with_the_multiplier(scores):
    ax = figures.tightness(scores)
    for line, band in zip(ax.lines, ax.collections):
        x, y = data(line)
        assert (np.diff(x) > 0).all() and (np.diff(y) > 0).all()
        outline = band.get_paths()[0].vertices
        for variance, gap in zip(x, y):
            edge = outline[np.isclose(outline[:, 0], variance), 1]
            assert edge.min() <= gap <= edge.max()


def test_dropout_that_changes_nothing_gives_an_empty_figure_of_gaps():
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    nn.init.zeros_(net[2].weight)
    scores = ad.evaluate(net, [(torch.randn(12, 4), torch.randint(3, (12,)))], num_samples=4)
    assert figures.tightness(scores).get_xscale() == "linear"
    assert inline_svg(figures.tightness(scores), "gaps", "the gaps")


def test_the_curve_over_samples_is_raw_and_corrected(scores):
    ax = figures.sample_curves(scores, multiplier=0.6, alphas=[1.0])
    curve = scores.curve(ad.Member(1, 0.6))
    values = [estimate.value for _, estimate in curve]
    raw, corrected = ax.lines[0], ax.lines[1]
    assert data(raw)[0].tolist() == [k for k, _ in curve] == [2, 4, 8, 16]
    limit = curve[-1][1].corrected
    assert data(raw)[1] == pytest.approx([v - limit for v in values])
    wanted = [2 * b - a - limit for a, b in itertools.pairwise(values)]
    assert data(corrected)[1] == pytest.approx(wanted)


def test_gains_by_frequency_are_paired_means_of_the_targets_in_a_band(scores):
    counts = torch.tensor([5, 50, 500, 5, 0])
    ax = figures.gain_by_frequency(scores, [ad.AMC], counts)
    gains = scores.values(ad.DET).whole - scores.values(ad.AMC).whole
    at = counts[scores.targets]
    wanted = [gains[at == count].mean().item() for count in (0, 5, 50, 500)]
    assert data(ax.containers[0].lines[0])[1] == pytest.approx(wanted)
    names = [tick.get_text() for tick in ax.get_xticklabels()]
    assert names == ["never", "1 to 10", "11 to 100", "over 100"]


def test_cross_entropy_by_frequency_is_the_mean_of_the_targets_in_a_band(scores):
    counts = torch.tensor([5, 50, 500, 5, 0])
    ax = figures.xe_by_frequency(scores, [ad.AMC], counts, bands=[(0, 100), (4, 5)])
    at = counts[scores.targets]
    xe = scores.values(ad.AMC).whole
    wanted = [xe[(at > 0) & (at <= 100)].mean().item(), xe[at == 5].mean().item()]
    assert data(ax.containers[0].lines[0])[1] == pytest.approx(wanted)


def test_paired_differences_over_one_band_of_everything_are_the_difference(scores):
    everything = torch.ones(5, dtype=torch.int64)
    (_, count, found), *_ = scores.by_frequency(ad.AMC, everything, [(0, 1)], against=ad.DET)
    assert count == scores.num_targets and found == scores.difference(ad.AMC, ad.DET)


def test_an_empty_band_is_left_out_and_none_at_all_is_an_error(scores):
    counts = torch.full((5,), 50)
    ax = figures.gain_by_frequency(scores, [ad.AMC], counts, bands=[(0, 10), (10, 100)])
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["11 to 100"]
    with pytest.raises(ad.AfterdropError, match="bands"):
        figures.gain_by_frequency(scores, [ad.AMC], counts, bands=[(0, 10)])


def test_bands_cover_every_count_once():
    for counts in ([0], [1], [10], [11], [100, 0], [99999, 3]):
        bands = frequency_bands(torch.tensor(counts))
        assert all(sum(low < n <= high for low, high in bands) == 1 for n in counts)


def test_gains_by_class(scores):
    ax = figures.gain_by_class(scores, ad.AMC, list("abcde"), torch.tensor([1, 5, 3, 4, 2]))
    assert [t.get_text()[0] for t in ax.get_yticklabels()] == list("aecdb")
    gains = scores.values(ad.DET).whole - scores.values(ad.AMC).whole
    targets = scores.targets
    wanted = [gains[targets == c].mean().item() for c in (0, 4, 2, 3, 1)]
    assert data(ax.containers[0].lines[0])[0] == pytest.approx(wanted)


def test_training_curves_leave_gaps_where_there_is_no_number():
    lines = [
        {"step": 10 * i, "loss": None if i == 0 else 1 / i, "xe": math.nan if i == 2 else 2.0,
         "xe_optimal": math.inf, "learning_rate": 1.0 if i < 3 else 0.1}
        for i in range(6)
    ]  # fmt: skip
    ax = figures.training_curves(lines)
    loss, xe = data(ax.lines[0])[1], data(ax.lines[1])[1]
    assert math.isnan(loss[0]) and loss[5] == 1 / 5
    assert math.isnan(xe[2]) and np.isnan(data(ax.lines[2])[1]).all()
    assert data(ax.lines[3])[0].tolist() == [30, 30]


def regression_scores():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    grid = ad.Grid((0, 1), (0, 1))
    data = [(torch.randn(16, 4), torch.randn(16))]
    return ad.evaluate(net, data, grid=grid, num_samples=4, likelihood="squared_error")


def test_figures_draw_into_given_axes(scores, members):
    counts = torch.tensor([5, 50, 500, 5, 0])
    calls = {
        figures.family_map: (scores,),
        figures.temperature_curves: (scores, members),
        figures.reliability_diagram: (scores, members),
        figures.risk_coverage_curves: (scores, members),
        figures.bounds_stacked: (scores,),
        figures.tightness: (scores,),
        figures.sample_curves: (scores,),
        figures.gain_by_frequency: (scores, members, counts),
        figures.xe_by_frequency: (scores, members, counts),
        figures.gain_by_class: (scores, ad.AMC, list("abcde")),
        figures.quantile_diagram: (regression_scores(), [ad.DET]),
        figures.training_curves: ([{"step": 0, "xe": 1.0}, {"step": 1, "xe": 0.5}],),
        figures.validation_curves: ({"a": [{"step": 0, "xe": 1.0}, {"step": 1, "xe": 0.5}]},),
    }
    assert {call.__name__ for call in calls} == set(figures.__all__)
    for call, arguments in calls.items():
        ax = matplotlib.figure.Figure().add_subplot()
        assert call(*arguments, ax=ax) is ax
        assert ax.get_xlabel() and ax.get_ylabel()
        ax.figure.savefig(io.BytesIO(), format="svg")


def test_several_scores_need_as_many_members():
    one, other = own_scores(), own_scores(seed=1)
    ax = figures.temperature_curves([one, other], [ad.AMC, ad.DET], labels=["one", "other"])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["one", "other"]
    with pytest.raises(ad.AfterdropError, match="2 scores, 1 members"):
        figures.reliability_diagram([one, other], [ad.AMC])


def test_names_are_never_read_as_mathematics(scores):
    def drawn(ax):
        buffer = io.BytesIO()
        with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
            ax.figure.savefig(buffer, format="svg")
        return html.unescape(buffer.getvalue().decode())

    names = ["$\\frac{", "a $b$", "<i>", "x" * 200, "\\"]
    svg = drawn(figures.gain_by_class(scores, ad.AMC, names))
    assert all(f">{name}<" in svg for name in ("$\\frac{", "a $b$", "<i>", "\\"))
    assert "x" * 22 + "…" in svg and "x" * 30 not in svg
    ax = figures.reliability_diagram(scores, [ad.DET], labels=["$\\undefined{"])
    assert "$\\undefined{" in drawn(ax)


@pytest.mark.subprocess
def test_without_matplotlib_only_the_modules_that_draw_need_it():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import afterdrop, afterdrop.cli, afterdrop.report, afterdrop.reproduce\n"
        "try:\n    import afterdrop.report.figures\n"
        "except afterdrop.AfterdropError as error: print(error)\n"
        "sys.exit(afterdrop.cli.main(['report', 'nowhere']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'afterdrop[report]'" in done.stdout
    assert done.returncode == 2 and "pip install 'afterdrop[report]'" in done.stderr
