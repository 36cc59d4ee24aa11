"""Models that change themselves or keep state: restored, or refused with the remedy."""

from collections import deque

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import afterdrop as ad
from afterdrop.errors import SiteError


class Redrawing(nn.Module):
    """Redraws a buffer of its child after some calls in train mode, as performers do."""

    def __init__(self, interval=7):
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.outside = nn.Linear(6, 16), nn.Linear(16, 3)
        self.dropout = nn.Dropout(0.3)
        self.features = nn.Module()
        self.features.register_buffer("projection", torch.randn(16, 16))
        self.updater = nn.Module()
        self.updater.register_buffer("calls", torch.tensor(0))
        self.interval = interval

    def forward(self, x):
        if self.updater.training:
            if self.updater.calls >= self.interval:
                self.features.projection.copy_(torch.randn(16, 16))
                self.updater.calls.zero_()
            self.updater.calls += 1
        return self.outside(self.dropout(self.inside(x).relu() @ self.features.projection))


class Counting(nn.Module):
    """Counts its calls in a plain attribute, and keeps the last output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.last = self.net(x)
        return self.last


class Stateful(nn.Module):
    """Keeps its recurrent state in an attribute between calls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.lstm = nn.Embedding(9, 8), nn.LSTM(8, 8, batch_first=True)
        self.dropout, self.head = nn.Dropout(0.4), nn.Linear(8, 9)
        self.state = None

    def forget(self):
        self.state = None

    def forward(self, tokens):
        if self.state is not None and self.state[0].shape[1] != len(tokens):
            self.state = None
        hidden, state = self.lstm(self.embed(tokens), self.state)
        self.state = tuple(tensor.detach() for tensor in state)
        return self.head(self.dropout(hidden))


class WeightDropped(nn.Module):
    """Sets a dropped copy of a parameter on its child in each forward, as fastai does."""

    def __init__(self, rate=0.4):
        super().__init__()
        torch.manual_seed(0)
        self.rate = rate
        self.inner = nn.Linear(6, 3)
        self.raw = nn.Parameter(self.inner.weight.detach().clone())
        del self.inner._parameters["weight"]
        self.set_weight()

    def set_weight(self):
        weight = F.dropout(self.raw, self.rate, self.training)
        if not self.training:
            weight = self.raw.clone()
        self.inner.weight = weight

    def forward(self, x):
        self.set_weight()
        return self.inner(x)


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)


def test_a_module_that_redraws_buffers_of_others_stays_off():
    model, (x, y) = Redrawing().eval(), data()
    before, wanted = {k: v.clone() for k, v in model.state_dict().items()}, model(x)
    sites = ad.find_sites(model, x)
    assert ("updater", "changes its buffers in training") in sites.off
    scores = ad.evaluate(model, [(x, y)] * 4, num_samples=10)
    assert scores.values(ad.AMC).whole.isfinite().all()
    predict = ad.Predictor(model, ad.AMC, num_samples=10)
    assert torch.equal(predict(x), predict(x))
    assert torch.equal(model(x), wanted)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_attributes_that_a_forward_sets_are_restored():
    model, (x, y) = Counting().eval(), data()
    model(x)
    last = model.last
    ad.find_sites(model, x)
    ad.evaluate(model, [(x, y)], num_samples=4)
    ad.Predictor(model, ad.AMC, num_samples=4)(x)
    ad.Predictor(model, ad.DET)(x)
    assert model.calls == 1 and model.last is last


def test_state_between_calls_is_refused_with_the_remedy():
    model, tokens = Stateful().eval(), torch.randint(9, (4, 5))
    with pytest.raises(SiteError, match=r"keeps state between calls \(\(root\)\.state\).*reset="):
        ad.evaluate(model, [(tokens, tokens)], num_samples=4)


def test_reset_makes_a_model_forget_before_each_pass():
    model, tokens = Stateful().eval(), torch.randint(9, (4, 5))
    targets = tokens.roll(-1, 1)
    model.forget()
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).item()
    model(tokens)  # state is left over
    scores = ad.evaluate(model, [(tokens, targets)] * 2, num_samples=20, reset=lambda m: m.forget())
    assert scores.xe(ad.DET).value == pytest.approx(expected, abs=1e-6)
    predict = ad.select(scores).predictor(model, reset=lambda m: m.forget())
    assert torch.equal(predict(tokens), predict(tokens))
    sites = ad.find_sites(model, tokens, reset=Stateful.forget)
    assert len(sites) == 1


def test_dropout_of_a_parameter_is_not_the_parameter():
    model, (x, y) = WeightDropped().eval(), data()
    wanted = model(x)
    ad.find_sites(model, x)
    assert "weight" not in model.inner._parameters
    scores = ad.evaluate(model, [(x, y)], num_samples=4)
    assert scores.values(ad.AMC).whole.isfinite().all()
    assert torch.equal(model(x), wanted)


class WeightAndInputDropped(WeightDropped):
    """Also draws a mask of its own, so that its rates must be declared."""

    input_rate = 0.3

    def forward(self, x):
        if self.training:
            x = x * torch.empty_like(x).bernoulli_(1 - self.input_rate) / (1 - self.input_rate)
        return super().forward(x)


def test_dropout_of_a_parameter_at_a_declared_rate_of_zero_is_not_the_parameter():
    model, (x, y) = WeightAndInputDropped().eval(), data()

    def reset(model):
        model.inner.weight = model.raw.clone()

    options = {"num_samples": 4, "grid": ad.Grid((1,), (0.5, 1)), "reset": reset}
    declared = ad.evaluate(model, [(x, y)], rates=("input_rate", "rate"), **options)
    assert "weight" not in model.inner._parameters
    plain = ad.evaluate(model, [(x, y)], rates=("input_rate",), **options)
    assert torch.equal(declared.values(ad.AMC).whole, plain.values(ad.AMC).whole)


class DrawsInEval(nn.Module):
    """Draws a random number in eval mode; what it does with it is up to `use`."""

    def __init__(self, use):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.use = use

    def forward(self, x):
        number = torch.rand([])
        return self.net(x) + (number if self.use else 0)


def test_a_draw_that_changes_nothing_is_not_in_the_way():
    model, (x, y) = DrawsInEval(use=False).eval(), data()
    scores = ad.evaluate(model, [(x, y)], num_samples=4)
    assert scores.values(ad.AMC).whole.isfinite().all()


def test_a_draw_that_changes_the_output_in_eval_mode_is_refused():
    model, (x, y) = DrawsInEval(use=True).eval(), data()
    with pytest.raises(SiteError, match="eval mode"):
        ad.evaluate(model, [(x, y)], num_samples=4)


class Warming(nn.Module):
    """Keeps its state in containers and a plain tensor, and changes them in place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.state = {"scale": 1.0, "n": 0, "nested": ([0], deque([0, 1], maxlen=2))}
        self.calls, self.seen, self.total = [], {0}, torch.zeros(2)

    def forward(self, x):
        if self.training:
            self.state["n"] += 1
            self.state["nested"][0].append(1)
            self.state["nested"][1].append(2)
            self.calls.append(1)
            self.seen.add(len(self.seen))
            self.total += 1
            if self.state["n"] >= 10:
                self.state["scale"] = 2.0
            if len(self.calls) + len(self.seen) + len(self.state["nested"][0]) > 25:
                self.state["scale"] = 3.0
            if self.total[0] > 9:
                self.state["scale"] = 4.0
        return self.net(x) * self.state["scale"]


def test_containers_and_tensors_that_a_forward_changes_in_place_are_restored():
    model, (x, y) = Warming().eval(), data()
    state, wanted = model.state, model(x)
    expected = F.cross_entropy(wanted, y).item()
    ad.find_sites(model, x)
    scores = ad.evaluate(model, [(x, y)] * 10, num_samples=20)
    assert scores.xe(ad.DET).value == pytest.approx(expected, abs=1e-6)
    ad.Predictor(model, ad.AMC, num_samples=20)(x)
    assert model.state is state and torch.equal(model(x), wanted)
    assert state == {"scale": 1.0, "n": 0, "nested": ([0], deque([0, 1], maxlen=2))}
    assert model.calls == [] and model.seen == {0} and model.total.tolist() == [0, 0]


def test_the_modules_of_an_lstm_get_their_weights_back():
    """torch's LSTM keeps a list of its weights, and replaces its entries when one is set."""

    class WeightDroppedLstm(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.lstm, self.head = nn.LSTM(6, 5), nn.Linear(5, 3)
            self.raw = nn.Parameter(self.lstm.weight_hh_l0.detach().clone())
            del self.lstm._parameters["weight_hh_l0"]
            self.lstm.weight_hh_l0 = self.raw.detach().clone()

        def forward(self, x):
            self.lstm.weight_hh_l0 = F.dropout(self.raw.clone(), 0.5, self.training)
            return self.head(self.lstm(x)[0])

    model, (x, y) = WeightDroppedLstm().eval(), data()
    before = list(model.lstm._flat_weights)
    ad.evaluate(model, [(x[None], y[None])], num_samples=4, batch_dim=1)
    assert all(a is b for a, b in zip(model.lstm._flat_weights, before, strict=True))


class Averaging(nn.Module):
    """Keeps an average of its activations, as its training needs."""

    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x):
        h = self.linear(x)
        if self.training:
            self.average.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return self.drop(h - self.average)


@pytest.mark.parametrize("assign", [False, True])
def test_buffers_that_were_set_without_counting_are_restored_to_what_was_set(assign):
    model, x = Averaging(), torch.randn(3, 4)
    ad.find_sites(model, x)
    if assign:
        model.average.data = torch.ones(4)
    else:
        model.average.data.copy_(torch.ones(4))  # as code that averages weights does
    ad.find_sites(model, x)
    assert torch.equal(model.average, torch.ones(4))
