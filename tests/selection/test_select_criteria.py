"""Choosing by another criterion, what a choice does on other data, and choices of ensembles."""

import numpy as np
import pytest
import torch
from select_cases import overconfident

import afterdrop as ad
from afterdrop.errors import MemberError, ScoresError, SplitError
from afterdrop.selection.criteria import Criterion

GRID = ad.Grid((0.0, 0.5, 1.0))


def members(n=300, k=5, seed=0, scale=1.0, split="valid", lucky=0.0, single=None):
    """Scores of an ensemble, overconfident at a large scale."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, 4, n)
    logits = 1.2 * np.eye(4)[targets] + rng.normal(size=(k, n, 4))
    logits[1] += lucky * np.eye(4)[targets]
    return ad.evaluate_samples(
        logits * scale,
        targets,
        grid=GRID,
        split=split,
        temperatures=(1 / 16, 16.0),
        single=single,
    )


@pytest.fixture(scope="module")
def scores():
    return members(scale=2.0)


@pytest.mark.parametrize(
    ("by", "metric", "sign"),
    [("brier", "brier", 1), ("accuracy", "accuracy", -1), ("ece", "ece", 1), ("xe", "xe", 1)],
)
def test_the_choice_is_the_best_by_its_criterion(scores, by, metric, sign):
    choice = ad.select(scores, by=by, resamples=20)
    losses = [c.xe for c in choice.ranking]
    assert losses == sorted(losses)
    for candidate in choice.ranking:
        own = getattr(scores, metric)(candidate.member)
        expected = own.value if sign > 0 else 1 - own.value
        assert candidate.xe == pytest.approx(expected, abs=1e-9)
    found = getattr(scores, metric)
    gain = sign * (found(ad.DET).value - found(choice.member).value)
    assert choice.gain.value == pytest.approx(gain, abs=1e-9)
    assert choice.by == by and choice.crossfit is not None
    assert choice.crossfit.value <= choice.gain.value + 1e-9


def test_errors_of_differences_are_paired(scores):
    choice = ad.select(scores, by="brier", folds=0, resamples=0)
    first, second = choice.ranking[:2]

    def brier(member):
        p = (-scores.values(member).whole).exp()
        return 1 - 2 * p + scores.curve_of(member).log_square(member.temperature).exp()

    paired = brier(second.member) - brier(first.member)
    expected = paired.std(correction=1).item() / len(paired) ** 0.5
    assert second.difference.data_error == pytest.approx(expected, rel=1e-6)


def test_temperatures_are_fitted_to_the_criterion(scores):
    for by in ("brier", "ece"):
        criterion = Criterion.of(by)
        member = scores.members[-1]
        fitted = criterion.fit(scores, member, 5).member
        best = criterion.values(scores, fitted, 5).whole.mean()
        for temperature in (0.3, 0.8, 1.0, 1.4, 2.5, scores.fit(member).member.temperature):
            other = criterion.values(scores, member.at_temperature(temperature), 5).whole.mean()
            assert best <= other + 2e-3  # between two temperatures of the grid


def test_a_function_is_a_criterion(scores):
    def rare(found, member):
        """Cross entropy of class 3 alone."""
        return found.values(member).whole * (found.targets == 3)

    choice = ad.select(scores, by=rare, folds=0, resamples=0)
    assert choice.by == "rare" and "of rare over" in choice.headline()
    best = min((rare(scores, c.member).mean().item(), i) for i, c in enumerate(choice.ranking))
    assert best[1] == 0
    same = ad.select(scores, by=lambda s, m: s.values(m).whole, folds=0, resamples=0)
    assert same.member.alpha == ad.select(scores, folds=0, resamples=0).member.alpha
    with pytest.raises(MemberError, match="one loss for each of the 300 targets"):
        ad.select(scores, by=lambda s, m: torch.ones(3))


def test_criteria_that_do_not_fit_are_refused(scores):
    with pytest.raises(MemberError, match=r"by='crps' needs predictions of numbers.*by='brier'"):
        ad.select(scores, by="crps")
    with pytest.raises(
        MemberError, match="by='loss' must be one of xe, brier, accuracy, ece, crps"
    ):
        ad.select(scores, by="loss")
    model, x, y = overconfident()
    masks = ad.evaluate(model, [(x, y)], grid=ad.Grid((0, 1), (0, 1)), num_samples=8)
    with pytest.raises(MemberError, match="evaluate with num_samples=4"):
        ad.select(masks, by="brier", num_samples=4)
    with pytest.raises(MemberError, match="num_samples=3: an ensemble predicts with the 5"):
        ad.select(scores, num_samples=3)


def test_what_is_not_a_criterion_or_other_data_is_refused(scores):
    def undefined(scores, member):
        return scores.values(member).whole.log() * float("nan")

    for by, message in [
        (["xe"], r"by=\['xe'\] must be one of"),
        (undefined, "by=undefined returned NaN for 300 of the 300 targets"),
        (lambda scores, member: None, "returned NoneType .*one loss for each target"),
    ]:
        with pytest.raises(MemberError, match=message):
            ad.select(scores, by=by)
    with pytest.raises(MemberError, match=r"also is Scores; give .*also=\{'noisy': scores\}"):
        ad.select(scores, also=scores)


def test_other_data_are_a_column_that_does_not_choose(scores):
    single = scores.protocol.ensemble.best
    other = members(seed=1, scale=2.5, split="shifted", single=single)
    choice = ad.select(scores, also={"shifted": other}, resamples=0)
    alone = ad.select(scores, resamples=0)
    assert choice.member == alone.member and choice.gain == alone.gain
    for candidate in choice.ranking:
        assert candidate.also == pytest.approx([other.xe(candidate.member).value])
    expected = other.difference(ad.DET, choice.member)
    assert choice.also[0].gain.value == pytest.approx(expected.value)
    assert choice.also[0].gain.error == pytest.approx(expected.data_error)
    assert not choice.also[0].worse
    head = next(line for line in str(choice).splitlines() if line.startswith("member"))
    assert head.endswith("shifted")
    shown = f"{expected.value:.4f} ± {expected.data_error:.4f}"
    assert f"On shifted: gain of {shown} nats." in str(choice)


def test_a_choice_that_harms_elsewhere_warns(scores, tmp_path):
    """There, all members but the one that is the best here are confidently wrong."""
    best = scores.protocol.ensemble.best
    targets = np.arange(300) % 4
    logits = np.repeat(6 * np.eye(4)[(targets + 1) % 4][None], 5, 0)
    logits[best] = np.arange(1, 301)[:, None] / 60 * np.eye(4)[targets]
    far = ad.evaluate_samples(logits, targets, grid=GRID, temperatures=(1 / 16, 16.0))
    with pytest.warns(UserWarning, match="worse than the deterministic model at T = 1 on 'far'"):
        choice = ad.select(scores, also={"far": far}, resamples=0)
    assert choice.also[0].worse
    assert "worse than the best member alone" in str(choice)
    choice.save(tmp_path / "choice.json")
    assert ad.Choice.load(tmp_path / "choice.json") == choice


def test_other_data_of_other_weights_or_of_test_are_refused(scores):
    model, x, y = overconfident()
    masks = ad.evaluate(model, [(x, y)], grid=ad.Grid((0, 1), (0, 1)), num_samples=8)
    with pytest.raises(ScoresError, match=r"also\['x'\] are scores of other weights"):
        ad.select(scores, also={"x": masks})
    single = scores.protocol.ensemble.best
    with pytest.raises(ScoresError, match=f"evaluate the other data with single={single}"):
        ad.select(scores, also={"x": members(single=(single + 1) % 5)})
    with pytest.raises(SplitError, match="test split"):
        ad.select(scores, also={"x": members(split="test")})
    with pytest.raises(MemberError, match="x is dict; give what evaluate returned"):
        ad.select(scores, also={"x": {}})


def test_a_choice_of_an_ensemble_says_what_it_gains(scores):
    choice = ad.select(scores, resamples=0)
    found, ensemble = choice.ensemble, scores.protocol.ensemble
    chosen = scores.xe(choice.member).value
    assert found.over_best.value == pytest.approx(min(ensemble.single_xe) - chosen, abs=1e-6)
    assert found.over_mean.value == pytest.approx(np.mean(ensemble.single_xe) - chosen, abs=1e-6)
    assert found.over_plain.value == pytest.approx(scores.xe(ad.AMC).value - chosen, abs=1e-9)
    assert found.over_best == choice.gain
    numbers = [k for k, _ in found.curve]
    assert numbers == [1, 4, 5]
    values = [xe for _, xe in found.curve]
    assert values[0] > values[1] > values[2] > found.limit
    assert values[0] == pytest.approx(np.mean(ensemble.single_xe), abs=1e-6)
    text = str(choice)
    assert f"over the best member alone (sample {ensemble.best}) at T = 1" in text
    assert "over the mean member alone" in text and "over the plain mean" in text
    assert "by the number of members" in text and "dropout" not in text


def test_a_member_that_is_better_alone_is_chosen_alone():
    choice = ad.select(members(lucky=9.0), resamples=0)
    assert choice.member.deterministic
    assert "Chosen (best, for 5 samples): sample 1 alone" in str(choice)


@pytest.mark.parametrize(
    ("by", "likelihood", "heads"), [("crps", "gaussian", 2), ("brier", "multilabel", 3)]
)
def test_numbers_and_labels_have_their_criteria(by, likelihood, heads):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.4))
    net.append(torch.nn.Linear(16, heads))
    x = torch.randn(80, 4)
    labels = (x[:, :3] + torch.randn(80, 3) > 0).long()
    targets = labels if likelihood == "multilabel" else x.sum(-1) + torch.randn(80)

    def head(output):
        return (output[:, 0], output[:, 1].exp()) if likelihood == "gaussian" else output

    scores = ad.evaluate(
        net, [(x, targets)], grid=GRID, num_samples=8, likelihood=likelihood, logits=head
    )
    choice = ad.select(scores, by=by, folds=0, resamples=0)
    for candidate in choice.ranking:
        expected = getattr(scores, by)(candidate.member).value
        assert candidate.xe == pytest.approx(expected, rel=1e-6)
    assert choice.ranking[0].xe == min(candidate.xe for candidate in choice.ranking)


@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0, 1000.0])
def test_crps_chooses_a_noise_variance_at_any_scale_of_the_targets(scale):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.ReLU(), torch.nn.Dropout(0.5))
    net.extend([torch.nn.Linear(16, 1), torch.nn.Flatten(0)])
    x = torch.randn(60, 3)
    scores = ad.evaluate(
        net, [(x, scale * x.sum(-1))], grid=GRID, likelihood="squared_error", num_samples=4
    )
    choice = ad.select(scores, by="crps", resamples=10)
    for candidate in choice.ranking:
        assert candidate.xe == pytest.approx(scores.crps(candidate.member).value, rel=1e-6)
        by_xe = scores.crps(scores.fit(candidate.member).member).value
        assert not candidate.tuned or candidate.xe <= by_xe * (1 + 1e-9)


@pytest.mark.parametrize("likelihood", ["squared_error", "gaussian", "categorical"])
def test_temperatures_of_a_criterion_lie_in_a_bracket_that_was_asked_for(likelihood):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.4), torch.nn.Linear(8, 2))
    x = torch.randn(40, 4)
    heads = {
        "squared_error": lambda out: out[:, 0],
        "gaussian": lambda out: (out[:, 0], out[:, 1].exp()),
        "categorical": lambda out: out,
    }
    targets = torch.randint(2, (40,)) if likelihood == "categorical" else torch.randn(40)
    scores = ad.evaluate(
        net,
        [(x, targets)],
        grid=ad.Grid((0, 1), (0, 1)),
        num_samples=4,
        likelihood=likelihood,
        logits=heads[likelihood],
        temperatures=(0.7, 2.1),
    )
    by = "brier" if likelihood == "categorical" else "crps"
    assert ad.select(scores, by=by, folds=0, resamples=0).by == by
