"""Ensembles of models, adapters and views: the samples of one evaluation, and their predictor."""

import dataclasses
import functools
import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import afterdrop as ad
from afterdrop.errors import DataError, SiteError
from afterdrop.evaluation.ensemble_models import mask_plan
from afterdrop.evaluation.likelihoods.parametric import ParametricLikelihood
from afterdrop.masks.uniforms import Plan
from oracles import family as oracle
from oracles.sampled import sampled_log_probs

GRID = ad.Grid((0.0, 0.5, 1.0))
N, V = 60, 4


def network(seed, rate=0.5):
    torch.manual_seed(seed)
    layers = [nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, V)]
    if rate:
        layers.insert(2, nn.Dropout(rate))
    return nn.Sequential(*layers)


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(9)
    x, y = torch.randn(N, 5) * 2, torch.randint(V, (N,))
    return x, y, [(x[:25], y[:25]), (x[25:], y[25:])]


def log_probs(models, x):
    with torch.no_grad():
        return oracle.log_softmax(np.stack([m.eval()(x).double().numpy() for m in models]))


@pytest.mark.parametrize("rate", [0.5, 0.0])
def test_models_are_samples_with_dropout_off_or_without_any(data, rate):
    x, y, batches = data
    models = [network(seed, rate).train() for seed in range(3)]
    scores = ad.evaluate(models, batches, grid=GRID, temperatures=(0.1, 10.0))
    assert all(module.training for model in models for module in model.modules())
    expected = ad.evaluate_samples(
        log_probs(models, x),
        y,
        grid=GRID,
        temperatures=(0.1, 10.0),
        names=[f"model {i}" for i in range(3)],
    )
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(scores.tensors[name], tensor, atol=1e-4, rtol=0)
    found, wanted = scores.protocol.ensemble, expected.protocol.ensemble
    assert (found.models, found.best) == (wanted.models, wanted.best)


def test_the_predictor_is_the_chosen_mean(data):
    x, y, batches = data
    models = [network(seed) for seed in range(3)]
    scores = ad.evaluate(models, batches, grid=GRID)
    choice = ad.select(scores, resamples=0)
    for member in (choice.member, ad.GMC.at_temperature(0.7), ad.AMC, ad.DET.at_temperature(2.0)):
        chosen = dataclasses.replace(choice, member=member)
        found = chosen.predictor(models)(x)
        xe = nn.functional.nll_loss(found, y).item()
        assert xe == pytest.approx(scores.xe(member).value, abs=1e-5)
        stacked = torch.from_numpy(log_probs(models, x))
        torch.testing.assert_close(chosen.combine(stacked), found, atol=1e-5, rtol=0)
    assert "T =" in repr(choice.predictor(models))


def test_models_are_loaded_one_after_another(data):
    _, _, batches = data
    alive = weakref.WeakSet()
    most = 0

    def load(seed):
        nonlocal most
        gc.collect()
        model = network(seed)
        alive.add(model)
        most = max(most, len(alive))
        return model

    loaders = [functools.partial(load, seed) for seed in range(4)]
    scores = ad.evaluate(loaders, batches, grid=GRID)
    assert most <= 2  # the one before may live until the next is there
    whole = ad.evaluate([network(seed) for seed in range(4)], batches, grid=GRID)
    assert scores.protocol == whole.protocol
    choice = ad.select(scores, resamples=0)
    x = batches[0][0]
    torch.testing.assert_close(
        choice.predictor(loaders)(x), choice.predictor([network(s) for s in range(4)])(x)
    )


def test_samples_are_models_times_masks(data):
    x, y, batches = data
    models = [network(seed).eval() for seed in range(3)]
    grid = ad.Grid((0.0, 1.0), (0, 0.5, 1))
    scores = ad.evaluate(models, batches, grid=grid, num_samples=4, temperatures=(0.1, 10.0))
    assert scores.num_samples == 12 and scores.protocol.plan.blocks == 3
    for multiplier in (0.5, 1.0):
        lp = [
            sampled_log_probs(model, x, mask_plan(Plan(4), source), multiplier)
            for source, model in enumerate(models)
        ]
        for alpha in (0.0, 1.0):
            expected = -oracle.at(oracle.member_log_probs(np.concatenate(lp), alpha), y.numpy())
            member = ad.Member(alpha, multiplier)
            np.testing.assert_allclose(scores.values(member).whole, expected, atol=2e-5)
    alone = [-oracle.at(one, y.numpy()).mean() for one in log_probs(models, x)]
    np.testing.assert_allclose(scores.protocol.ensemble.single_xe, alone, atol=1e-6)
    small = ad.evaluate(
        models, batches, grid=grid, num_samples=4, temperatures=(0.1, 10.0), memory=2**20
    )
    torch.testing.assert_close(small.values(ad.AMC).whole, scores.values(ad.AMC).whole)


def test_the_predictor_of_models_times_masks_is_a_fixed_function(data):
    x, y, batches = data
    models = [network(seed).eval() for seed in range(3)]
    scores = ad.evaluate(models, batches, grid=ad.Grid((1.0,), (0, 1)), num_samples=40)
    choice = dataclasses.replace(ad.select(scores, resamples=0), member=ad.AMC)
    predict = choice.predictor(models)
    torch.testing.assert_close(predict(x)[:7], predict(x[:7]), atol=1e-5, rtol=0)
    found = scores.xe(ad.AMC)
    assert nn.functional.nll_loss(predict(x), y).item() == pytest.approx(found.value, abs=0.05)
    with pytest.raises(SiteError, match="dropout"):
        ad.evaluate([network(s, 0.0) for s in range(2)], batches, num_samples=4)


VIEWS = {"plain": lambda x: x, "flipped": lambda x: x.flip(-1)}


def test_views_are_samples(data):
    x, y, batches = data
    models = [network(seed).eval() for seed in range(2)]
    one = ad.evaluate(models[0], batches, grid=GRID, augment=VIEWS)
    both = ad.evaluate(models, batches, grid=GRID, augment=VIEWS)
    own = [log_probs([model], view(x))[0] for model in models for view in VIEWS.values()]
    for scores, lp in ((one, own[:2]), (both, own)):
        expected = -oracle.at(oracle.member_log_probs(np.stack(lp), 0.5), y.numpy())
        member = ad.Member(0.5, 1.0)
        np.testing.assert_allclose(scores.values(member).whole, expected, atol=2e-5)
        choice = dataclasses.replace(ad.select(scores, resamples=0), member=member)
        predict = choice.predictor(models if scores is both else models[0], augment=VIEWS)
        xe = nn.functional.nll_loss(predict(x), y).item()
        assert xe == pytest.approx(expected.mean(), abs=1e-5)
        with pytest.raises(DataError, match="give the same functions"):
            choice.predictor(models, any_weights=True)
    assert one.protocol.ensemble.names == ("plain", "flipped")
    assert both.protocol.ensemble.names[3] == "model 1, flipped"
    assert both.protocol.plan.blocks == 2  # the jackknife leaves out models


class Adapted(nn.Module):
    """Two adapters of one layer, as PEFT has them."""

    def __init__(self):
        super().__init__()
        self.base, self.active = network(0, 0.0), "a"
        self.adapters = nn.ModuleDict({"a": nn.Linear(5, V), "b": nn.Linear(5, V)})

    def set_adapter(self, name):
        if name not in self.adapters:
            raise ValueError(f"Adapter {name} not found.")
        self.active = name
        for key, adapter in self.adapters.items():
            adapter.requires_grad_(key == name)

    def forward(self, x):
        return self.base(x) + self.adapters[self.active](x)


def test_adapters_are_switched_on_one_after_another(data):
    x, y, batches = data
    model = Adapted()
    scores = ad.evaluate(model, batches, grid=GRID, adapters=("a", "b"))
    lp = []
    for name in ("a", "b"):
        model.set_adapter(name)
        lp.append(log_probs([model], x)[0])
    expected = -oracle.at(oracle.member_log_probs(np.stack(lp), 1.0), y.numpy())
    np.testing.assert_allclose(scores.values(ad.AMC).whole, expected, atol=2e-5)
    assert scores.protocol.ensemble.models == ("a", "b")
    choice = dataclasses.replace(ad.select(scores, resamples=0), member=ad.AMC)
    found = nn.functional.nll_loss(choice.predictor(model)(x), y).item()
    assert found == pytest.approx(expected.mean(), abs=1e-5)


def test_a_model_with_adapters_is_left_as_it_was(data):
    x, _, batches = data
    model = Adapted().train()
    model.adapters["b"].weight.requires_grad_(False)

    def state():
        trained = [weight.requires_grad for weight in model.parameters()]
        return model.active, trained, [module.training for module in model.modules()]

    before, output = state(), model(x)
    choice = ad.select(ad.evaluate(model, batches, grid=GRID, adapters=("a", "b")), resamples=0)
    assert state() == before and torch.equal(model(x), output)
    dataclasses.replace(choice, member=ad.AMC).predictor(model)(x)
    assert state() == before
    with pytest.raises(DataError, match="does not shuffle"):
        ad.evaluate(model, Changing(batches), grid=GRID, adapters=("a", "b"))
    assert state() == before


class Changing(list):
    """Batches whose targets differ when they are read again."""

    def __iter__(self):
        yield from super().__iter__()
        self.reverse()


def test_adapters_that_cannot_be_switched_to_are_refused(data):
    _, _, batches = data
    model = Adapted()
    with pytest.raises(DataError, match=r"cannot switch to the adapter 'c' .*give names of its"):
        ad.evaluate(model, batches, adapters=("a", "c"))
    with pytest.raises(DataError, match=r"must be a list of names, such as \['a', 'other'\]"):
        ad.evaluate(model, batches, adapters="a")
    model.base.merged = True
    with pytest.raises(DataError, match=r"merged into the weights .*unmerge_adapter\(\)"):
        ad.evaluate(model, batches, adapters=("a", "b"))


def test_ignored_targets_and_sequences_cluster_by_example():
    torch.manual_seed(0)
    models = [nn.Linear(5, V) for _ in range(3)]
    x, y = torch.randn(12, 7, 5), torch.randint(V, (12, 7))
    y[:, -2:] = -100
    scores = ad.evaluate(models, [(x[:5], y[:5]), (x[5:], y[5:])], grid=GRID)
    assert (scores.num_targets, scores.num_examples) == (60, 12)
    lp = log_probs(models, x)[:, :, :5].reshape(3, 60, V)
    expected = -oracle.at(oracle.member_log_probs(lp, 0.0), y[:, :5].flatten().numpy())
    np.testing.assert_allclose(scores.values(ad.GMC).whole, expected, atol=2e-5)
    choice = dataclasses.replace(ad.select(scores, resamples=0), member=ad.GMC)
    found = choice.predictor(models)(x)[:, :5].flatten(0, 1)
    np.testing.assert_allclose(
        -oracle.at(found.numpy(), y[:, :5].flatten().numpy()), expected, atol=2e-5
    )


def test_what_is_no_ensemble_is_refused(data, tmp_path):
    _, _, batches = data
    models = [network(seed) for seed in range(2)]
    shuffled = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*data[:2]), batch_size=20, shuffle=True
    )
    for given, batched, options, message in [
        (models[:1], batches, {}, "at least 2 models or views"),
        ([], batches, {}, "at least 2 models or views"),
        (
            [models[0], "a.pt"],
            batches,
            {},
            "model 1 is the path 'a.pt'; give .* lambda: torch.load",
        ),
        ([models[0], lambda: 3], batches, {}, "loaded as int"),
        (
            [models[0], nn.Linear(5, V + 3)],
            batches,
            {},
            "model 1 gives 7 classes, and the first one 4",
        ),
        (models, batches, {"single": 2}, "single=2 must be the number of a source, 0 to 1"),
        (models[0], batches, {"single": 0}, "single=0 is for ensembles"),
        (models, batches, {"augment": [len]}, "must be functions of the inputs by name, such as"),
        (models, batches, {"augment": {"a": 1}}, "must be functions of the inputs by name"),
        (models, batches, {"class_dim": "a"}, "class_dim='a' must be an integer, or None"),
        (models, batches, {"targets_per_example": "a"}, "targets_per_example='a' must be an"),
        (models, batches, {"likelihood": Nameless()}, "Nameless has no name"),
        (models, [(batches[0][0], torch.full((25,), -100))], {}, "no target counts: all equal"),
        (models, iter(batches), {}, "give a list or a loader"),
        (models, shuffled, {}, "does not shuffle"),
        (models, batches, {"resume": tmp_path}, "evaluate_samples"),
        (models[0], batches, {"adapters": ("a",)}, r"needs a model with set_adapter"),
    ]:
        with pytest.raises(DataError, match=message):
            ad.evaluate(given, batched, **options)
    choice = ad.select(ad.evaluate(models, batches, grid=GRID), resamples=0)
    with pytest.raises(DataError, match="1 models are given, and 2 were evaluated"):
        choice.predictor(models[:1], any_weights=True)
    with pytest.raises(DataError, match="not those that this choice was made for"):
        choice.predictor(models[::-1])
    with pytest.raises(DataError, match="give the 2 samples"):
        choice.combine(torch.zeros(3, 1, V))
    with pytest.raises(DataError, match="samples is list, which is not an array"):
        choice.combine(["a", "b"])


class Nameless(ParametricLikelihood):
    def log_prob(self, parameters, y):
        return y

    def support(self, parameters, temperatures):
        return parameters, parameters, parameters


def test_a_model_that_gives_nan_is_named(data):
    _, _, batches = data
    models = [network(seed) for seed in range(3)]
    models[1][0].weight.data[0, 0] = torch.nan
    with pytest.raises(DataError, match="model 1 gave NaN, infinity or a target without"):
        ad.evaluate(models, batches, grid=GRID)
