"""num_samples="auto": a pilot decides, and the main evaluation is what it decided."""

import dataclasses
import math

import pytest
import torch
from torch import nn

import afterdrop as ad
from afterdrop.errors import DataError, FileError, ScoresError
from afterdrop.evaluation import adaptive_evaluation, pilot_decision
from afterdrop.evaluation.loop import Execution
from afterdrop.evaluation.pilot_decision import Decision, decide
from afterdrop.evaluation.request import Adaptive
from afterdrop.evaluation.text_evaluation import run_text
from afterdrop.masks.uniforms import Plan
from afterdrop.models import LanguageModel, LanguageModelConfig
from afterdrop.ranks import Ranks
from afterdrop.selection import family_table

GRID = ad.Grid((0, 0.5, 1), (0, 0.25, 0.5, 0.75, 1))
AUTO = {"grid": GRID, "num_samples": "auto"}


def fitted(rate):
    """A network that was trained on 60 examples, with another dropout rate, and other data."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 3))
    x = torch.randn(612, 6)
    y = (x[:, :3] + 0.7 * torch.randn(612, 3)).argmax(-1)
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(150):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x[:60]), y[:60]).backward()
        optimiser.step()
    net[2].p = rate
    return net, list(zip(x[100:].split(32), y[100:].split(32)))


@pytest.fixture(scope="module")
def world():
    """Dropout of all but one unit in fifty: at its full rate the network is beaten."""
    return fitted(0.98)


@pytest.fixture(scope="module")
def scores(world):
    return ad.evaluate(*world, **AUTO)


def same(one, other):
    assert one.protocol.grid == other.protocol.grid and one.protocol.plan == other.protocol.plan
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name


def passes(scores):
    share = scores.pilot.num_targets / scores.num_targets
    pilot = len(scores.pilot.protocol.grid.stochastic) * scores.pilot.num_samples * share
    return pilot + len(scores.protocol.grid.stochastic) * scores.num_samples


def test_both_stages_are_plain_evaluations_of_what_was_decided(world, scores):
    model, batches = world
    grid, samples = scores.protocol.grid, scores.num_samples
    same(scores, ad.evaluate(model, batches, grid=grid, num_samples=samples))
    same(scores.pilot, ad.evaluate(model, batches[::8], grid=GRID, num_samples=16))
    share = scores.pilot.num_targets / scores.num_targets
    decided = decide(scores.pilot, scores.request.adaptive, share)
    assert decided == Decision(grid.multipliers, samples)


def test_multipliers_that_are_beaten_are_dropped_but_for_the_reference(scores):
    beaten, reference = 0.25, 1.0
    pilot = scores.pilot
    best = min((pilot.fit(m, 100).member for m in pilot.members), key=lambda m: pilot.xe(m).at(100))
    for multiplier in (beaten, reference):
        for alpha in GRID.alphas:
            member = pilot.fit(ad.Member(alpha, multiplier), 100).member
            difference = pilot.difference(member, best, 100)
            assert difference.value > 2 * difference.error
    assert beaten in scores.only_in_pilot and reference in scores.protocol.grid.multipliers
    assert passes(scores) <= 100
    choice = ad.select(scores, folds=0, resamples=0)
    dropped = {c.member.multiplier: c.difference for c in choice.pilot}
    assert set(dropped) == set(scores.only_in_pilot)
    assert dropped[beaten].value > 2 * dropped[beaten].error


def test_without_multiplier_one_there_is_no_reference(world):
    model, batches = world
    grid = ad.Grid((0, 1), (0, 0.5, 0.9))
    pilot = ad.evaluate(model, batches[::8], grid=grid, num_samples=16)
    assert decide(pilot, Adaptive(), 0.125).multipliers[-1] < 1


def test_an_iterator_is_read_once_and_its_first_batches_are_the_pilot(world):
    model, batches = world
    found = ad.evaluate(model, iter(batches), **AUTO)
    same(found.pilot, ad.evaluate(model, batches[:8], grid=GRID, num_samples=16))
    assert found.num_targets == 512

    class Loader:
        def __len__(self):
            return len(batches)

        def __iter__(self):
            return iter(batches)

    sized = ad.evaluate(model, Loader(), **AUTO)
    same(sized.pilot, ad.evaluate(model, batches[:2], grid=GRID, num_samples=16))


def test_one_batch_is_pilot_and_data_within_the_passes(world):
    model, batches = world
    x, y = (torch.cat(part) for part in zip(*batches))
    for data in ([(x, y)], iter([(x, y)])):
        found = ad.evaluate(model, data, num_samples="auto")
        assert found.pilot.num_targets == found.num_targets == 512
        assert found.pilot.num_samples == 4 and passes(found) <= 100


def test_a_pilot_is_the_default_where_a_member_is_chosen(world, scores):
    model, batches = world
    same(scores, ad.evaluate(model, batches, grid=GRID))
    few = batches[:2]
    for options in ({"split": "test"}, {"split": "noisy"}):
        other = ad.evaluate(model, few, grid=GRID, **options)
        assert (other.pilot, other.num_samples, other.protocol.grid) == (None, 100, GRID)
    only = ad.evaluate(model, few, grid=ad.Grid((0, 1), (0,)))
    assert only.pilot is None and only.request.adaptive is None
    assert ad.evaluate([model, model], few).num_samples == 2
    with pytest.raises(DataError, match="num_samples='Auto' must be an even number, or 'auto'"):
        ad.evaluate(model, few, num_samples="Auto")


def test_what_only_the_pilot_evaluated_is_refused_with_the_remedy(scores):
    with pytest.raises(ScoresError, match=r"scores\.pilot.*num_samples=100 evaluates every"):
        scores.xe(ad.Member(1, 0.25))
    assert math.isfinite(scores.xe(ad.AMC).value)  # which is always there
    with pytest.raises(ScoresError, match="evaluate with a grid that contains it"):
        scores.xe(ad.Member(0.3, 1.0))


def test_other_losses_than_xe_choose_for_the_samples_that_were_evaluated(scores):
    choice = ad.select(scores, by="brier", folds=0, resamples=0)
    assert choice.num_samples == scores.num_samples
    assert {c.member.multiplier for c in choice.pilot} == set(scores.only_in_pilot)


def test_other_data_need_the_chosen_multiplier(world, scores):
    model, batches = world
    options = {"split": "noisy", "num_samples": 16}
    data = [(x + torch.randn_like(x), y) for x, y in batches]
    other = ad.evaluate(model, data, grid=ad.Grid((0, 0.5, 1), (0, 0.25)), **options)
    with pytest.raises(ScoresError, match=r"also\['noisy'\] lacks .* grid=scores.request.grid"):
        ad.select(scores, also={"noisy": other}, folds=0, resamples=0)
    other = ad.evaluate(model, data, grid=scores.request.grid, **options)
    choice = ad.select(scores, also={"noisy": other}, folds=0, resamples=0)
    assert math.isfinite(choice.also[0].gain.value)


def test_the_choice_is_made_for_the_samples_of_the_predictor(world, scores):
    choice = ad.select(scores, folds=0, resamples=0)
    assert choice.num_samples == scores.predictor_samples == 100 > scores.num_samples
    assert choice.test_request("test").adaptive is None
    assert choice.predictor(world[0]).request.plan.num_samples == 100
    assert ad.select(scores, num_samples=20, folds=0, resamples=0).num_samples == 20


def test_choices_and_tables_show_what_only_the_pilot_evaluated(scores, tmp_path):
    choice = ad.select(scores, folds=0, resamples=0)
    assert "Multipliers of the pilot only" in str(choice)
    choice.save(tmp_path)
    assert ad.Choice.load(tmp_path) == choice
    table = family_table(scores, tuned=True)
    assert f"pilot only, K = 16, {scores.pilot.num_targets} targets:" in table
    rows = [line.split()[0] for line in table.splitlines()]
    assert rows.count("0.25") == 1 and rows.index("0.25") > rows.index("pilot")


def test_files_and_merged_parts_keep_the_pilot(world, scores, tmp_path):
    scores.save(tmp_path / "scores")
    again = ad.Scores.load(tmp_path / "scores")
    same(scores, again)
    same(scores.pilot, again.pilot)
    assert again.request.adaptive == scores.request.adaptive
    assert again.only_in_pilot == scores.only_in_pilot
    model, batches = world
    parts = [
        ad.evaluate(model, data, grid=grid, num_samples=samples, first_example=512).tensors
        for data, grid, samples in (
            (batches, scores.protocol.grid, scores.num_samples),
            (batches[::8], GRID, 16),
        )
    ]
    later = ad.Scores(scores.protocol, parts[0], ad.Scores(scores.pilot.protocol, parts[1]))
    merged = ad.Scores.merge([scores, later])
    assert (merged.num_targets, merged.pilot.num_targets) == (1024, 128)


def test_an_interrupted_main_evaluation_resumes_without_another_pilot(world, scores, tmp_path):
    model, batches = world
    folder, seen = tmp_path / "parts", []

    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x):
            seen.append(len(x))
            if len(seen) == stop:
                raise KeyboardInterrupt
            return self.net(x)

    own, stop = Failing(), 0
    whole = ad.evaluate(own, batches, **AUTO)
    calls = len(seen)
    seen.clear()
    stop = calls - 4
    with pytest.raises(KeyboardInterrupt):
        ad.evaluate(own, batches, **AUTO, resume=folder)
    assert len(list((folder / "pilot").glob("part-*.safetensors"))) == 1
    seen.clear()
    stop = 0
    found = ad.evaluate(own, batches, **AUTO, resume=folder)
    same(found, whole)
    same(found.pilot, whole.pilot)
    assert len(seen) < calls / 2
    found.save(tmp_path / "scores.safetensors")
    assert not folder.exists()


def test_a_damaged_pilot_is_evaluated_again(world, tmp_path):
    model, batches = world
    whole = ad.evaluate(model, batches, **AUTO, resume=tmp_path / "parts")
    (part,) = (tmp_path / "parts" / "pilot").glob("part-*.safetensors")
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    with pytest.warns(UserWarning, match="pilot/part-.*evaluated again"):
        found = ad.evaluate(model, batches, **AUTO, resume=tmp_path / "parts")
    same(found, whole)
    same(found.pilot, whole.pilot)


class Scaled(nn.Module):
    """A model with a setting that is neither a weight nor saved."""

    def __init__(self, net, scale=1.0):
        super().__init__()
        self.net, self.scale = net, scale

    def forward(self, x):
        return self.net(self.scale * getattr(x, "features", x))


class Labelled:
    """A batch that is an object of its own."""

    def __init__(self, x, y):
        self.features, self.y = x, y

    def to(self, device):
        return self


def stop_after_the_pilot(monkeypatch, evaluate):
    def stop(*of_the_pilot):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(adaptive_evaluation, "decide", stop)
        evaluate()


@pytest.mark.parametrize(
    "kind",
    [lambda x, y: (x, y), lambda x, y: {"x": x, "labels": y}, Labelled],
    ids=["pairs", "mappings", "objects"],
)
def test_the_pilot_of_other_data_is_refused(world, tmp_path, monkeypatch, kind):
    model, batches = Scaled(world[0]), world[1]
    folder = tmp_path / "parts"
    own = AUTO | {"temperatures": (0.5, 2)}
    options = own | {"resume": folder}
    data = [kind(x, y) for x, y in batches]
    stop_after_the_pilot(monkeypatch, lambda: ad.evaluate(model, data, **options))
    other = [kind(x + 1, y) for x, y in batches]
    with pytest.raises(FileError, match=r"pilot.*remove that folder"):
        ad.evaluate(model, other, **options)
    found = ad.evaluate(model, data, **options)
    same(found, ad.evaluate(model, data, **own))
    found.save(tmp_path / "scores.safetensors")
    assert not folder.exists()


def test_the_pilot_of_another_model_with_the_same_weights_is_refused(world, tmp_path, monkeypatch):
    model, batches = world
    options = AUTO | {"resume": tmp_path / "parts", "temperatures": (0.5, 2)}
    stop_after_the_pilot(monkeypatch, lambda: ad.evaluate(Scaled(model), batches, **options))
    with pytest.raises(FileError, match="other outputs than the one of the parts"):
        ad.evaluate(Scaled(model, 3.0), batches, **options)


def language_model():
    torch.manual_seed(0)
    config = LanguageModelConfig(vocabulary=11, hidden_sizes=(6,), output_dropout=0.4)
    return LanguageModel(config), torch.randint(1, 11, (400,))


@pytest.mark.parametrize("carry", ["deterministic", "sampled"])
def test_a_text_has_its_first_windows_as_the_pilot(carry):
    model, text = language_model()
    options = {"grid": GRID, "window": 5, "lines": False, "carry": carry}
    options["temperatures"] = (0.25, 4.0)  # else chosen from the first batch, which differs
    found = ad.evaluate_text(model, text, 0, num_samples="auto", **options)
    plain = ad.evaluate_text(model, text, 0, **options)
    assert (plain.pilot is None) == (carry == "sampled")  # the default
    assert 50 <= found.pilot.num_targets <= 60
    grid, samples = found.protocol.grid, found.num_samples
    plain = ad.evaluate_text(model, text, 0, num_samples=samples, **{**options, "grid": grid})
    for name, tensor in plain.tensors.items():
        torch.testing.assert_close(found.tensors[name], tensor, rtol=1e-4, atol=1e-5)


def test_ranks_cannot_share_a_sampled_carry():
    model, text = language_model()
    found = ad.evaluate_text(model, text, 0, num_samples="auto", grid=GRID, lines=False)
    stream = dataclasses.replace(found.request.stream, carry="sampled")
    request = dataclasses.replace(found.request, stream=stream)
    with pytest.raises(DataError, match="give a number of samples"):
        run_text(model, text, 0, request, Execution(ranks=Ranks(0, 2)), lines=False)


def test_refinement_adds_a_multiplier_between_grid_points():
    pilot = ad.evaluate(*fitted(0.7), grid=ad.Grid((0, 1), (0, 0.5, 1)), num_samples=16)
    loose, tight = (
        decide(pilot, Adaptive(mask_share=share, beaten_by=1e9), 0.1) for share in (1e6, 1e-6)
    )
    assert loose == Decision((0.0, 0.5, 1.0), 16)
    (between,) = set(tight.multipliers) - {0.0, 0.5, 1.0}
    assert 0 < between < 1 and tight.num_samples > 16


def test_where_passes_do_not_suffice_the_leader_and_the_vertex_are_left(scores, monkeypatch):
    gaps, thinned = [], pilot_decision._thinned

    def counted(left, leader, spacing):
        gaps.append(spacing)
        return thinned(left, leader, spacing)

    monkeypatch.setattr(pilot_decision, "_thinned", counted)
    found = decide(scores.pilot, Adaptive(), 0.125)
    assert found == Decision((0.0, 0.54, 0.75, 1.0), scores.num_samples)
    assert gaps[-1] == math.inf and len(gaps) < 10


@pytest.mark.parametrize("share", [0.13, 0.2, 0.26])
def test_an_odd_number_of_samples_is_rounded_down_within_the_passes(scores, share):
    found = decide(scores.pilot, Adaptive(mask_share=1e-6), share)
    pilot = share * 16 * len(scores.pilot.protocol.grid.stochastic)
    assert pilot + (len(found.multipliers) - 1) * found.num_samples <= 100


def test_a_looser_tolerance_never_takes_more_samples(scores):
    decided = [decide(scores.pilot, Adaptive(mask_share=s), 0.125) for s in (0.01, 0.1, 1.0)]
    counts = [d.num_samples for d in decided]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] == 16


class Masked(nn.Module):
    """Some classes become impossible where a unit is dropped."""

    def __init__(self, net):
        super().__init__()
        self.net, self.dropout = net, nn.Dropout(0.5)

    def forward(self, x):
        dropped = self.dropout(torch.ones_like(x[:, :1])) == 0
        return self.net(x).masked_fill(dropped & (torch.arange(3) == 0), -math.inf)


def test_members_with_impossible_targets_do_not_stop_a_pilot(world):
    model, batches = world
    found = ad.evaluate(Masked(model), batches, num_samples="auto")
    assert math.isinf(found.pilot.xe(ad.GMC).value)
    assert math.isfinite(ad.select(found, folds=0, resamples=0).gain.value)


def test_one_example_decides_nothing(world):
    model, batches = world
    x, y = batches[0]
    pilot = ad.evaluate(model, [(x[:1], y[:1])], grid=GRID, num_samples=16)
    decided = decide(pilot, Adaptive(), 1.0)
    assert decided == Decision(GRID.multipliers, 100)


def test_samples_fit_the_blocks_and_the_scheme(world):
    found = ad.evaluate(*world, **AUTO, blocks=8, masks="antithetic")
    assert found.num_samples % 16 == 0 and found.pilot.num_samples == 16
    assert found.predictor_samples == 96
    Plan(found.num_samples, 0, "antithetic", 8)


@pytest.mark.parametrize("name", ["mask_share", "beaten_by"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_rules_that_make_no_sense_are_refused(world, name, value):
    with pytest.raises(DataError, match=name):
        ad.evaluate(*world, **AUTO, **{name: value})
