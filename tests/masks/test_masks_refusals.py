"""Models that find_sites refuses, and what it keeps in eval mode."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import afterdrop as ad
from afterdrop.errors import SiteError
from afterdrop.masks.rows import Rows
from afterdrop.masks.uniforms import Plan
from oracles.zoo import AWD, LockedDropout, mlp

B = 4


class Wrapped(nn.Module):
    """A module under test, named `odd`, between a linear layer and ordinary dropout."""

    def __init__(self, odd, dropout=True):
        super().__init__()
        self.first, self.odd = nn.Linear(5, 6), odd
        self.drop, self.out = nn.Dropout(0.5 if dropout else 0.0), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.drop(self.odd(self.first(x))))


class When(nn.Module):
    """Applies a function in training."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x) if self.training else x


class GaussianNoise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x) if self.training else x


class Jitter(nn.Module):
    def forward(self, x):
        return x * torch.empty_like(x).uniform_(0.9, 1.1) if self.training else x


class LayerDrop(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.inner, self.draw = nn.Linear(6, 6), draw

    def forward(self, x):
        if self.training and self.draw() < 0.5:
            return x
        return self.inner(x)


class SpecAugment(nn.Module):
    def forward(self, x):
        if self.training:
            start = np.random.randint(0, x.shape[-1])
            x = x.clone()
            x[:, start : start + 2] = 0
        return x


class Always(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


NOISE = {
    "rrelu": lambda: nn.RReLU(),
    "gaussian": GaussianNoise,
    "jitter": Jitter,
    "layerdrop torch": lambda: LayerDrop(lambda: torch.rand([])),
    "layerdrop one": lambda: LayerDrop(lambda: torch.rand(1).item()),
    "layerdrop python": lambda: LayerDrop(random.random),
    "layerdrop numpy": lambda: LayerDrop(np.random.rand),
    "specaugment": SpecAugment,
    "normal": lambda: When(lambda x: x + torch.normal(0.0, 1.0, x.shape)),
    "shuffle": lambda: When(lambda x: x[:, torch.randperm(x.shape[1])]),
}


@pytest.mark.parametrize("kind", NOISE)
def test_other_training_noise_stays_off_and_is_listed(kind):
    model, x = Wrapped(NOISE[kind]()), torch.randn(B, 5)
    found = ad.find_sites(model, x)
    assert len(found) == 1
    assert "odd" in dict(found.off)
    assert "odd" in str(found)
    y = torch.randint(3, (B,))
    options = {"grid": ad.Grid((0,), (1,)), "num_samples": 4}
    with pytest.warns(UserWarning, match=r"stays off because it is not dropout: odd.*draws"):
        a = ad.evaluate(model, [(x, y)], **options)
    b = ad.evaluate(model, [(x, y)], noise="odd", **options)  # meant, so nothing is said
    assert torch.equal(a.values(ad.GMC).whole, b.values(ad.GMC).whole)


@pytest.mark.parametrize("kind", NOISE)
def test_dry_run_leaves_every_global_generator_alone(kind):
    model, x = Wrapped(NOISE[kind]()), torch.randn(B, 5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1:3]
    ad.find_sites(model, x)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1:3]
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert (before[2][0] == after[2][0]).all() and before[2][1] == after[2][1]


MASKS = {
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.5) * 2,
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)) * 2,
    "rand": lambda x: x * (torch.rand(x.shape) > 0.5) * 2,
    "rand_like": lambda x: x * (torch.rand_like(x) < 0.5) * 2,
    "uniform_": lambda x: x * (torch.empty_like(x).uniform_() < 0.5) * 2,
}


@pytest.mark.parametrize("kind", MASKS)
def test_undeclared_masks_name_the_module_and_the_remedy(kind):
    with pytest.raises(SiteError, match=r"odd.*rates="):
        ad.find_sites(Wrapped(When(MASKS[kind])), torch.randn(B, 5))


@pytest.mark.parametrize("kind", MASKS)
def test_undeclared_masks_are_found_with_one_example(kind):
    with pytest.raises(SiteError, match=r"odd.*rates="):
        ad.find_sites(Wrapped(When(MASKS[kind])), torch.randn(1, 5))


def test_undeclared_row_masks_are_found_with_one_example():
    rows = When(lambda x: x * (torch.rand(len(x), 1) > 0.5) * 2)
    with pytest.raises(SiteError, match="odd"):
        ad.find_sites(Wrapped(rows), torch.randn(B, 5))
    with pytest.raises(SiteError, match="odd"):
        ad.find_sites(Wrapped(rows), torch.randn(1, 5))


@pytest.mark.parametrize("model", [mlp(rate=0.0), nn.Linear(5, 3), nn.Sequential(nn.Linear(5, 3))])
def test_a_model_without_dropout_is_refused(model):
    with pytest.raises(SiteError, match="no dropout"):
        ad.find_sites(model, torch.randn(B, 5))


def test_a_model_with_noise_only_is_refused_by_the_modules_name():
    with pytest.raises(SiteError, match=r"no dropout.*odd draws"):
        ad.find_sites(Wrapped(GaussianNoise(), dropout=False), torch.randn(B, 5))


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("dropout", [True, False])
def test_scripted_dropout_is_refused_by_name(dropout):
    scripted = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)))
    with pytest.raises(SiteError, match=r"cannot be controlled.*odd.*eager module"):
        ad.find_sites(Wrapped(scripted, dropout), torch.randn(B, 5))


def test_noise_in_eval_mode_is_refused_by_name():
    with pytest.raises(SiteError, match=r"remain in eval mode: odd"):
        ad.find_sites(Wrapped(Always(lambda x: x + torch.randn_like(x))), torch.randn(B, 5))


def test_dropout_that_is_always_on_is_refused_by_name():
    with pytest.raises(SiteError, match=r"even in eval mode: odd.*self\.training"):
        ad.find_sites(Wrapped(Always(lambda x: F.dropout(x, 0.5))), torch.randn(B, 5))


def test_dropping_everything_is_refused_with_the_sites_name():
    data = [(torch.randn(B, 5), torch.randint(3, (B,)))]
    with pytest.raises(SiteError, match=r"odd has rate 1: multiplier 1 x 1 drops everything"):
        ad.evaluate(Wrapped(nn.Dropout(1.0)), data, grid=ad.Grid((0,), (0.5, 1)), num_samples=4)


def test_rate_one_is_allowed_below_multiplier_one():
    data = [(torch.randn(B, 5), torch.randint(3, (B,)))]
    scores = ad.evaluate(mlp(rate=1.0), data, grid=ad.Grid((0,), (0.5,)), num_samples=4)
    assert scores.xe(ad.Member(0, 0.5)).value > 0


class Own(nn.Module):
    """Draws its own masks at the rate in an attribute."""

    def __init__(self, function, rate=0.4):
        super().__init__()
        self.function, self.rate = function, rate

    def forward(self, x):
        return self.function(x, self.rate) if self.training else x


IDIOMS = {
    "bernoulli_": lambda x, p: x * torch.empty_like(x).bernoulli_(1 - p) / (1 - p),
    "new_full bernoulli": lambda x, p: x * torch.bernoulli(x.new_full(x.shape, 1 - p)) / (1 - p),
    "rand >= p": lambda x, p: x * (torch.rand_like(x) >= p) / (1 - p),
    "rand > p": lambda x, p: x * (torch.rand_like(x) > p) / (1 - p),
    "rand < keep": lambda x, p: x * (torch.rand(x.shape) < 1 - p) / (1 - p),
    "rand <= keep": lambda x, p: x * (torch.rand(x.shape) <= 1 - p) / (1 - p),
    "floor": lambda x, p: x * (1 - p + torch.rand(x.shape)).floor() / (1 - p),
    "masked_fill": lambda x, p: x.masked_fill(torch.rand_like(x) < p, 0.0) / (1 - p),
    "uniform_": lambda x, p: x * (torch.empty_like(x).uniform_(0, 1) >= p) / (1 - p),
}


@pytest.mark.parametrize("idiom", IDIOMS)
def test_declared_masks_in_every_common_idiom(idiom):
    model = Wrapped(Own(IDIOMS[idiom]))
    found = ad.find_sites(model, torch.randn(B, 5), rates=("odd.rate",))
    assert found.calls == 2 and found.batched
    data = [(torch.randn(B, 5), torch.randint(3, (B,)))]
    scores = ad.evaluate(
        model, data, grid=ad.Grid((0, 1), (0.5, 1)), num_samples=4, rates=("odd.rate",)
    )
    assert scores.bounds(ad.AMC).variance > 0
    assert model.odd.rate == 0.4


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("odd.nothing", "odd.nothing"),
        ("nowhere.rate", "nowhere.rate"),
        ("odd.function", "odd.function"),
        ("odd", "odd"),
    ],
)
def test_declared_rates_that_do_not_exist_are_named(path, message):
    model = Wrapped(Own(IDIOMS["bernoulli_"]))
    with pytest.raises(SiteError, match=message):
        ad.find_sites(model, torch.randn(B, 5), rates=(path,))


def test_rates_may_be_a_single_string():
    model = Wrapped(Own(IDIOMS["bernoulli_"]))
    found = ad.find_sites(model, torch.randn(B, 5), rates="odd.rate")
    assert found.calls == 2 and found.rates == ("odd.rate",)


def test_one_of_two_rates_left_undeclared_is_refused_by_name():
    model = nn.Sequential(
        Wrapped(Own(IDIOMS["bernoulli_"])), nn.Linear(3, 6), Own(IDIOMS["rand < keep"])
    )
    with pytest.raises(SiteError, match=r"Undeclared masks may be in: 2\."):
        ad.find_sites(model, torch.randn(B, 5), rates=("0.odd.rate",))


def test_declared_rates_without_masks_are_refused():
    model = Wrapped(nn.Dropout(0.4))
    with pytest.raises(SiteError, match=r"odd\.p"):
        ad.find_sites(model, torch.randn(B, 5), rates=("odd.p",))


def test_noise_that_is_not_a_module_is_refused():
    with pytest.raises(SiteError, match="nothing_there"):
        ad.find_sites(Wrapped(GaussianNoise()), torch.randn(B, 5), noise=("nothing_there",))


def test_masks_declared_as_noise_stay_off():
    model = Wrapped(When(MASKS["rand"]))
    found = ad.find_sites(model, torch.randn(B, 5), noise=("odd",))
    assert len(found) == 1 and "odd" in dict(found.off)


class Buffered(nn.Module):
    """Tracks a mean in a buffer, in place or by assignment."""

    def __init__(self, inplace):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.inplace = inplace

    def forward(self, x):
        if self.training:
            if self.inplace:
                self.mean.mul_(0.9).add_(0.1 * x.mean(0))
            else:
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - self.mean


@pytest.mark.parametrize("inplace", [True, False])
def test_modules_that_change_buffers_stay_in_eval_mode_and_are_restored(inplace):
    model, x = Wrapped(Buffered(inplace)), torch.randn(B, 5)
    buffer = model.odd.mean
    found = ad.find_sites(model, x)
    assert "odd" in dict(found.off)
    assert torch.equal(model.odd.mean, torch.zeros(6))
    assert model.odd.mean is buffer


def test_dropout_in_a_module_that_must_stay_in_eval_mode_is_refused_by_name():
    class Both(nn.Module):
        def forward(self, x):
            if self.training:
                x = F.dropout(x + torch.randn_like(x), 0.5)
            return x

    with pytest.raises(SiteError, match=r"odd is gated on self\.training"):
        ad.find_sites(Wrapped(Both()), torch.randn(B, 5))


def test_dropout_that_a_norm_subclass_skips_in_eval_mode_is_refused_by_name():
    class NormDrop(nn.BatchNorm1d):
        def forward(self, x):
            x = super().forward(x)
            return F.dropout(x, 0.5) if self.training else x

    with pytest.raises(SiteError, match=r"odd is gated on self\.training"):
        ad.find_sites(Wrapped(NormDrop(6)), torch.randn(B, 5))


def test_dropout_that_a_norm_subclass_switches_off_in_eval_mode_is_a_site():
    class NormDrop(nn.BatchNorm1d):
        def forward(self, x):
            return F.dropout(super().forward(x), 0.5, self.training)

    found = ad.find_sites(Wrapped(NormDrop(6)), torch.randn(B, 5))
    assert [site.name for site in found] == ["odd", "drop"]
    assert dict(found.off)["odd"] == "changes its buffers in training"


def test_dropout_switched_off_by_the_model_stays_off_in_a_held_module():
    class Held(nn.Module):
        def forward(self, x):
            if self.training:
                x = x + torch.randn_like(x)
            return F.dropout(x, 0.5, training=False)

    assert ad.find_sites(Wrapped(Held()), torch.randn(B, 5)).calls == 1


def test_a_declared_rate_that_also_feeds_an_operator_is_not_scaled_twice():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rate, self.drop = 0.5, nn.Dropout(0.1)

        def forward(self, x):
            if self.training:
                x = x * x.new_empty(len(x), 1).bernoulli_(1 - self.rate) / (1 - self.rate)
            return self.drop(F.dropout(x, self.rate, self.training))

    model, x = Mixed(), torch.ones(1000, 1)
    sites = ad.find_sites(model, x, rates=("rate",))
    assert [site.rate for site in sites] == [0.5, 0.5, 0.1]
    control = sites.control(model)
    with torch.no_grad(), control.prepared(0.5):
        rows = Rows(Plan(20, 0, "iid"), (0.5,), range(20), torch.arange(1000))
        out = control.forward(rows, x.repeat(20, 1))
    # Two masks keep with probability 1 - 0.5 · 0.5, the third with 0.95: standard error 0.0036.
    assert (out != 0).float().mean().item() == pytest.approx(0.75**2 * 0.95, abs=0.015)


def test_rows_that_influence_each_other_are_not_batched():
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    assert not ad.find_sites(Wrapped(Centred()), torch.randn(B, 5)).batched


def test_norms_without_running_statistics_are_not_batched():
    norm = nn.BatchNorm1d(6, track_running_stats=False)
    assert not ad.find_sites(Wrapped(norm), torch.randn(B, 5)).batched


def test_loops_of_functional_dropout_may_run_longer_than_in_the_dry_run():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = nn.GRUCell(2, 6), nn.Linear(6, 3)

        def forward(self, x):
            h = x.new_zeros(len(x), 6)
            for step in x.unbind(1):
                h = self.cell(F.dropout(step, 0.3, self.training), h)
            return self.out(h)

    data = [(torch.randn(B, n, 2), torch.randint(3, (B,))) for n in (3, 5)]
    scores = ad.evaluate(Loop(), data, grid=ad.Grid((0,), (1,)), num_samples=4)
    assert scores.num_targets == 2 * B
    assert scores.bounds(ad.GMC).variance > 0


def test_dropout_on_a_path_that_the_dry_run_did_not_take_is_refused_by_name():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.late = nn.Dropout(0.5), nn.Dropout(0.3)

        def forward(self, x):
            return self.drop(x) if x.shape[1] == 5 else self.late(x)[:, :5]

    data = [(torch.randn(B, n), torch.randint(3, (B,))) for n in (5, 6)]
    with pytest.raises(SiteError, match=r"late.*evaluate with a first batch that takes every path"):
        ad.evaluate(Branches(), data, grid=ad.Grid((0,), (1,)), num_samples=4)


def test_locked_dropout_of_one_example_is_batched():
    model = nn.Sequential(nn.Linear(5, 6), LockedDropout(0.4), nn.Linear(6, 3))
    found = ad.find_sites(model, torch.randn(7, 1, 5), rates=("1.rate",), batch_dim=1)
    assert found.calls == 1 and found.batched


def test_all_modules_with_undeclared_masks_are_named():
    with pytest.raises(SiteError) as caught:
        ad.find_sites(AWD(), torch.randint(13, (5, B)), batch_dim=1)
    for name in ("words", "lock_in", "layers.0", "between.1", "lock_out"):
        assert name in str(caught.value)


@pytest.mark.parametrize("output", [None, 3.0, torch.ones(4, 3, dtype=torch.long), {}, ()])
def test_a_model_without_logits_is_refused(output):
    class Strange(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            self.drop(x)
            return output

    with pytest.raises(ad.AfterdropError, match="logits"):
        ad.find_sites(Strange(), torch.randn(B, 5))


class ModeArgument(nn.Module):
    """Takes its mode as an argument, as Keras does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x, training=False):
        return F.dropout(self.linear(x), 0.5, training)


def test_a_mode_that_is_an_argument_is_named_in_the_remedy():
    with pytest.raises(SiteError, match=r"wrap it .* model\(x, training=self.training\)"):
        ad.find_sites(ModeArgument(), torch.randn(B, 5))


def test_draws_of_python_are_not_said_to_be_controllable_by_rates():
    y = torch.randint(3, (B,))
    with pytest.warns(UserWarning, match=r"draw by torch.rand to make the skipping of layers"):
        ad.evaluate(
            Wrapped(LayerDrop(random.random)),
            [(torch.randn(B, 5), y)],
            grid=ad.Grid((0,), (1,)),
            num_samples=4,
        )
