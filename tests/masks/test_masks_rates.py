"""Every dropout site asks one object for its rates."""

import dataclasses

import pytest
import torch
from torch import nn

import afterdrop as ad
from afterdrop.errors import SiteError
from afterdrop.masks.rates import UNSCALED, Multipliers, scaled_attributes
from afterdrop.masks.rows import Rows
from afterdrop.masks.uniforms import Plan
from oracles.zoo import AWD, ConvNet, DropPath, LockedDropout, Residual


def test_there_is_one_rate_per_multiplier():
    multipliers = Multipliers((0.0, 0.3, 1.0))
    assert multipliers.rates("site", 0.7) == (0.0, 0.3 * 0.7, 0.7)
    assert len(multipliers) == 3 and multipliers.largest == 1.0
    assert UNSCALED.rates("site", 0.7) == (0.7,)


@pytest.mark.parametrize("given", [0.5, (0.5,), [0.5], Multipliers((0.5,))])
def test_numbers_and_sequences_are_converted(given):
    assert Multipliers.of(given) == Multipliers((0.5,))


def test_rows_convert_their_multipliers_and_can_be_replaced():
    rows = Rows(Plan(4), (0.5, 1.0), range(2), torch.arange(3))
    assert rows.multipliers == Multipliers((0.5, 1.0)) and len(rows) == 2 * 2 * 3
    other = dataclasses.replace(rows, streams=torch.zeros(3))
    assert other.multipliers == rows.multipliers and other.streams is not None


class Asked(Multipliers):
    """Notes which sites ask for their rates, and gives one of them a rate of its own."""

    def __init__(self, values, special=""):
        super().__init__(values)
        object.__setattr__(self, "sites", [])
        object.__setattr__(self, "special", special)

    def rates(self, site, rate):
        self.sites.append(site)
        return (0.0,) if site == self.special else super().rates(site, rate)


CASES = {
    "convolutional": (ConvNet, lambda: torch.randn(3, 1, 8, 8), (), 0),
    "drop path": (lambda: Residual(DropPath(0.3)), lambda: torch.randn(3, 6), (), 0),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        lambda: torch.randn(3, 2, 8),
        (),
        0,
    ),
    "declared": (AWD, lambda: torch.randint(13, (5, 3)), AWD.RATES, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_every_site_and_every_declared_attribute_asks_for_its_rate(case):
    make, inputs, rates, batch_dim = CASES[case]
    model, x = make(), inputs()
    sites = ad.find_sites(model, x, rates=rates, batch_dim=batch_dim)
    control, multipliers = sites.control(model), Asked((0.5,))
    rows = Rows(Plan(2), multipliers, range(1), torch.arange(3))
    with torch.no_grad(), control.prepared(multipliers):
        control.forward(rows, x)
    # The model draws the masks of declared rates itself, at the rates in its attributes.
    raw = ("bernoulli", "bernoulli_", "rand", "rand_like", "uniform_")
    expected = {site.name for site in sites if site.op not in raw} | set(rates)
    assert set(multipliers.sites) == expected


def test_a_site_drops_at_the_rate_that_it_is_given():
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    x = torch.ones(3, 40)
    control = ad.find_sites(model, x).control(model)
    kept = {}
    for special in ("", "0", "1"):
        rows = Rows(Plan(2), Asked((1.0,), special), range(1), torch.arange(3))
        with torch.no_grad(), control.prepared():
            kept[special] = control.forward(rows, x) != 0
    assert torch.equal(kept[""], kept["0"] & kept["1"])
    assert not torch.equal(kept["0"], kept["1"])


def test_declared_attributes_are_scaled_and_restored():
    model = nn.Sequential(LockedDropout(0.4), LockedDropout(0.2))
    with scaled_attributes(model, ("0.rate", "1.rate"), Multipliers((0.5,))):
        assert [layer.rate for layer in model] == [0.2, 0.1]
    assert [layer.rate for layer in model] == [0.4, 0.2]


def test_several_multipliers_at_once_are_refused_for_a_declared_attribute():
    model = nn.Sequential(LockedDropout(0.4), LockedDropout(0.2))
    with (
        pytest.raises(SiteError, match=r"'0\.rate'.*2 multipliers"),
        scaled_attributes(model, ("0.rate", "1.rate"), Multipliers((0.5, 1.0))),
    ):
        pass
    assert [layer.rate for layer in model] == [0.4, 0.2]
