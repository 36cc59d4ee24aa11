import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import afterdrop as ad
from afterdrop.errors import DataError, MemberError, SiteError
from afterdrop.masks.rows import Rows
from afterdrop.masks.uniforms import Plan
from oracles import family as oracle
from oracles.zoo import AWD, ConvNet, Packed, mlp

MEMBERS = [
    ad.Member(alpha, multiplier, temperature, temper)
    for alpha in (0.0, 0.05, 0.5, 1.0)
    for multiplier in (0.4, 1.0)
    for temperature, temper in ((1.0, "mean"), (0.7, "mean"), (1.6, "sample"))
]


def brute_force(model, x, plan, member):
    sites = ad.find_sites(model, x)
    control, out = sites.control(model), []
    with torch.no_grad(), control.prepared(member.multiplier):
        for k in range(plan.num_samples):
            zeros = torch.zeros(len(x), dtype=torch.int64)
            rows = Rows(plan, (member.multiplier,), range(k, k + 1), zeros)
            out.append(control.forward(rows, x).double().numpy())
    lp = oracle.log_softmax(np.stack(out))
    return oracle.member_log_probs(lp, member.alpha, member.temperature, member.temper)


@pytest.mark.parametrize("member", MEMBERS)
def test_predictions_are_those_of_the_definition(member):
    model, x = mlp(5, 20, 4), torch.randn(6, 5)
    got = ad.Predictor(model, member, num_samples=8, seed=3)(x)
    expected = brute_force(model, x, Plan(8, 3), member)
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-5)
    torch.testing.assert_close(got.exp().sum(-1), torch.ones(6))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_the_deterministic_member_is_eval_mode_in_one_pass(temperature):
    model, x = ConvNet().train(), torch.randn(6, 1, 8, 8)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    got = ad.Predictor(model, ad.DET.at_temperature(temperature))(x)
    assert len(calls) == 1
    assert model.training
    with torch.no_grad():
        expected = (model.eval()(x) / temperature).log_softmax(-1)
    torch.testing.assert_close(got, expected)


def test_the_deterministic_member_needs_no_dropout():
    model, x = nn.Linear(5, 3), torch.randn(6, 5)
    assert ad.Predictor(model, ad.DET)(x).shape == (6, 3)
    with pytest.raises(SiteError, match="no dropout"):
        ad.Predictor(model, ad.AMC)(x)


@pytest.mark.parametrize("masks", ["lhs", "iid", "antithetic"])
def test_same_seed_same_output_and_other_seed_other_output(masks):
    model, x = mlp(5, 20, 4), torch.randn(6, 5)
    a, b, c = (ad.Predictor(model, ad.AMC, 8, seed, masks=masks)(x) for seed in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.allclose(a, c)
    again = ad.Predictor(model, ad.AMC, 8, 0, masks=masks)
    again(x)
    assert torch.equal(again(x), a)


def test_the_global_seed_does_not_matter():
    model, x = mlp(), torch.randn(6, 5)
    predict = ad.Predictor(model, ad.AMC, 8)
    torch.manual_seed(1)
    a = predict(x)
    torch.manual_seed(2)
    assert torch.equal(a, predict(x))


@pytest.mark.parametrize("memory", [None, 2**20])
def test_an_example_gets_the_same_prediction_in_any_batch(memory):
    model, x = ConvNet(), torch.randn(9, 1, 8, 8)
    whole = ad.Predictor(model, ad.AMC, 16)(x)
    predict = ad.Predictor(model, ad.AMC, 16, memory=memory)
    for size in (1, 4, 9):
        parts = torch.cat([predict(part) for part in x.split(size)])
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(predict(x.flip(0)).flip(0), whole, rtol=0, atol=1e-5)


def test_equal_examples_get_equal_predictions():
    x = torch.randn(1, 5).expand(7, 5).contiguous()
    out = ad.Predictor(mlp(), ad.AMC, 8)(x)
    torch.testing.assert_close(out, out[:1].expand_as(out))


def test_keyword_inputs_sequences_and_own_masks():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, *, features, scale=1.0):
            return self.inner(features) * scale

    predict = ad.Predictor(Named(), ad.AMC, 4, class_dim=-1)
    assert predict(features=torch.randn(6, 2, 5)).shape == (6, 2, 3)
    own = {"rates": AWD.RATES, "batch_dim": 1, "class_dim": -1}
    predict = ad.Predictor(AWD(), ad.Member(0.5, 0.5), 4, **own)
    assert predict(torch.randint(13, (5, 3))).shape == (5, 3, 13)
    packed = ad.Predictor(Packed(), ad.AMC, 4)
    assert packed(torch.randint(11, (3, 5)), torch.tensor([5, 2, 3])).shape == (3, 3)


def test_time_major_predictions_do_not_depend_on_memory():
    model, tokens = AWD(), torch.randint(13, (5, 6))
    options = {"rates": AWD.RATES, "batch_dim": 1, "class_dim": -1}
    a = ad.Predictor(model, ad.AMC, 4, **options)(tokens)
    b = ad.Predictor(model, ad.AMC, 4, memory=2**20, **options)(tokens)
    torch.testing.assert_close(a, b)


def test_predictors_are_modules():
    model = mlp()
    predict = ad.Predictor(model, ad.AMC, 4)
    assert isinstance(predict, nn.Module)
    assert {id(p) for p in predict.parameters()} == {id(p) for p in model.parameters()}
    out = predict(torch.randn(2, 5))
    assert not out.requires_grad
    predict.double()
    assert predict(torch.randn(2, 5).double()).isfinite().all()


def test_chosen_members_predict_what_was_scored():
    torch.manual_seed(0)
    model, x = mlp(5, 40, 4).eval(), torch.randn(400, 5) * 2
    with torch.no_grad():
        y = torch.distributions.Categorical(logits=model(x)).sample()
        model[3].weight.mul_(6)
    scores = ad.evaluate(model, [(x, y)], grid=ad.Grid((0, 0.5, 1), (0, 0.5, 1)), num_samples=50)
    choice = ad.select(scores, folds=0, resamples=0)
    lp = ad.Predictor(model, choice.member, num_samples=50)(x)
    xe = -lp.gather(-1, y[:, None]).mean().item()
    expected = scores.xe(choice.member)
    # The predictor shares its masks between examples: its own mask error is larger.
    assert xe == pytest.approx(expected.value, abs=0.05)


def test_choices_can_be_saved_and_used_elsewhere(tmp_path):
    model, x = mlp(), torch.randn(3, 5)
    data = [(torch.randn(20, 5), torch.randint(3, (20,)))]
    choice = ad.select(ad.evaluate(model, data, num_samples=8, seed=5, masks="iid"))
    choice = dataclasses.replace(choice, member=ad.Member(0.25, 0.7, 1.234567890123, "sample"))
    choice.save(tmp_path)
    loaded = ad.Choice.load(tmp_path)
    assert loaded.member == choice.member and loaded.request == choice.request
    expected = ad.Predictor(model, choice.member, 8, 5, masks="iid")(x)
    assert torch.equal(loaded.predictor(model)(x), expected)
    assert str(loaded) == str(ad.Choice.load(tmp_path / "choice.json"))


def test_a_choice_is_not_used_with_other_weights():
    model, x = mlp(), torch.randn(3, 5)
    data = [(torch.randn(20, 5), torch.randint(3, (20,)))]
    choice = ad.select(ad.evaluate(model, data, num_samples=4))
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    with pytest.raises(DataError, match="weights"):
        choice.predictor(model)
    assert choice.predictor(model, any_weights=True)(x).shape == (3, 3)


@pytest.mark.parametrize("name", ["1", "3"])  # one replaces a site, one is added
def test_a_model_with_other_modules_than_before_is_refused(name):
    model, x = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)), torch.randn(6, 5)
    predict = ad.Predictor(model, ad.GMC, num_samples=4)
    expected = predict(x)
    before = model[1]
    model.add_module(name, nn.Dropout(0.5))
    with pytest.raises(SiteError, match="added, replaced or removed"):
        predict(x)
    if name == "1":
        model[1] = before
    else:
        del model[3]
    assert torch.equal(predict(x), expected)


@pytest.mark.parametrize("member", [None, "AMC", 1.0, {"alpha": 1}])
def test_what_is_no_member_is_refused(member):
    with pytest.raises(MemberError, match="member="):
        ad.Predictor(mlp(), member)


def test_odd_numbers_of_samples_are_refused():
    with pytest.raises(DataError, match="num_samples=7"):
        ad.Predictor(mlp(), ad.AMC, 7)
    assert ad.Predictor(mlp(), ad.AMC, 1)(torch.randn(2, 5)).shape == (2, 3)


def test_inputs_that_cannot_be_predicted_are_refused():
    with pytest.raises(DataError, match="NaN"):
        ad.Predictor(mlp(), ad.AMC, 4)(torch.full((2, 5), torch.nan))
    with pytest.raises(DataError, match="NaN"):
        ad.Predictor(mlp(), ad.DET)(torch.full((2, 5), torch.nan))
    with pytest.raises(SiteError, match="multiplier"):
        ad.Predictor(mlp(rate=1.0), ad.AMC, 4)(torch.randn(2, 5))


def test_a_batch_without_examples_has_deterministic_predictions_only():
    assert ad.Predictor(mlp(), ad.DET)(torch.randn(0, 5)).shape == (0, 3)
    predict = ad.Predictor(mlp(), ad.AMC, 4)
    for _ in range(2):  # before and after the first prediction
        with pytest.raises(DataError, match="the input has no examples"):
            predict(torch.randn(0, 5))
        assert predict(torch.randn(2, 5)).shape == (2, 3)


class SetAttention(nn.Module):
    """The rows of a batch attend to each other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.drop, self.out = nn.Linear(5, 32), nn.Dropout(0.5), nn.Linear(32, 4)

    def forward(self, x):
        h = self.drop(self.inside(x).relu())
        return 4 * self.out((h @ h.t() / 8).softmax(-1) @ h)


class Graph(nn.Module):
    """Sums over the neighbours of a node; a mask of units that the nodes share, if asked."""

    def __init__(self, shared=False):
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.drop, self.out = nn.Linear(5, 16), nn.Dropout(0.5), nn.Linear(16, 4)
        self.shared = shared

    def forward(self, x, edges):
        h = self.drop(self.inside(x).relu())
        h = h.index_add(0, edges[1], h[edges[0]])
        if self.shared:
            h = h * self.drop(h.new_ones(16))
        return self.out(h)


class Pooled(nn.Module):
    """One output per group of rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.drop, self.out = nn.Linear(5, 16), nn.Dropout(0.5), nn.Linear(16, 4)

    def forward(self, x, groups):
        h = self.drop(self.inside(x).relu())
        return self.out(h.new_zeros(int(groups.max()) + 1, 16).index_add(0, groups, h))


EDGES = torch.randint(9, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("model", "more"),
    [(SetAttention(), ()), (Graph(), (EDGES,)), (Graph(shared=True), (EDGES,))],
    ids=["attention", "graph", "graph with a shared mask"],
)
@pytest.mark.parametrize("member", [ad.AMC, ad.Member(0.5, 0.6)])
def test_where_rows_influence_each_other_a_batch_is_predicted_as_it_was_evaluated(
    model, more, member
):
    x, y = torch.randn(9, 5), torch.randint(4, (9,))
    grid = ad.Grid((0, member.alpha), (0, member.multiplier))
    scores = ad.evaluate(model, [((x, *more), y)], grid=grid, num_samples=8)
    predict = ad.Predictor(model, member, 8)
    for _ in range(2):
        xe = -predict(x, *more).gather(1, y[:, None]).squeeze(1)
        torch.testing.assert_close(xe, scores.values(member).whole.float(), rtol=1e-4, atol=1e-5)


def test_rows_that_are_pooled_have_masks_of_their_own():
    model, x = Pooled(), torch.randn(200, 5)
    groups = torch.arange(200) // 50
    predict = ad.Predictor(model, ad.AMC, 400)
    found = predict(x, groups)
    model.train()
    with torch.no_grad():
        passes = torch.stack([model(x, groups).softmax(-1) for _ in range(2000)])
    spread = passes.std(0) * (1 / 400 + 1 / 2000) ** 0.5
    assert ((found.exp() - passes.mean(0)).abs() < 5 * spread).all()


def test_a_first_batch_of_one_row_does_not_hide_that_rows_influence_each_other():
    model, x = SetAttention(), torch.randn(9, 5)
    predict = ad.Predictor(model, ad.AMC, 8)
    predict(x[:1])
    assert torch.equal(predict(x), ad.Predictor(model, ad.AMC, 8)(x))


def test_masks_per_example_are_a_fixed_function_of_the_input():
    model, x = ConvNet(), torch.randn(9, 1, 8, 8)
    predict = ad.Predictor(model, ad.AMC, 16, per_example=True)
    whole = predict(x)
    for size in (1, 4):
        parts = torch.cat([predict(part) for part in x.split(size)])
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)
    again = ad.Predictor(model, ad.AMC, 16, per_example=True, memory=2**20)
    torch.testing.assert_close(again(x.flip(0)).flip(0), whole, rtol=0, atol=1e-5)
    twice = predict(torch.cat([x, x[:2]]))
    torch.testing.assert_close(twice[9:], twice[:2])
    assert not torch.allclose(whole, ad.Predictor(model, ad.AMC, 16)(x), atol=1e-3)
    other = ad.Predictor(model, ad.AMC, 16, 1, per_example=True)(x)
    assert not torch.allclose(whole, other, atol=1e-3)


def test_masks_per_example_look_at_every_input():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, a, *, b):
            return self.inner(a + b)

    predict = ad.Predictor(Sum(), ad.AMC, 4, per_example=True)
    a = torch.randn(1, 5).expand(3, 5).contiguous()
    b = torch.zeros(3, 5)
    b[2] = -0.0  # equal numbers, but another input
    found = predict(a, b=b)
    torch.testing.assert_close(found[0], found[1])
    assert not torch.allclose(found[0], found[2], atol=1e-3)


def test_the_mean_over_inputs_varies_less_over_seeds_with_masks_per_example():
    torch.manual_seed(0)
    model, x = mlp(5, 40, 4), torch.randn(300, 5)
    spread = {
        per_example: torch.stack(
            [
                ad.Predictor(model, ad.AMC, 4, seed, per_example=per_example)(x)[:, 0].mean()
                for seed in range(12)
            ]
        ).std()
        for per_example in (True, False)
    }
    assert spread[True] < spread[False] / 2  # measured: a quarter


def test_predictors_print_member_samples_and_seed():
    assert "arithmetic" in repr(ad.Predictor(mlp(), ad.AMC, 8, seed=3))
    assert "K = 8, seed = 3" in repr(ad.Predictor(mlp(), ad.AMC, 8, seed=3))
