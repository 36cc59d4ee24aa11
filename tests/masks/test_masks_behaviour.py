"""Modules are recognised by what they do, and compiled ones run as the eager code."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import afterdrop as ad
from afterdrop.errors import SiteError


class RowDrop(nn.Module):
    """Stochastic depth under any name, with any name of its rate, in any of its usual forms."""

    def __init__(self, form, rescale=True):
        super().__init__()
        self.chance, self.form, self.rescale = 0.4, form, rescale

    def forward(self, x):
        if not self.training:
            return x
        shape, keep = (len(x), *[1] * (x.dim() - 1)), 1 - self.chance
        if self.form == "bernoulli":
            mask = x.new_empty(shape).bernoulli_(keep)
        elif self.form == "floor":
            mask = (keep + torch.rand(shape)).floor()
        else:
            mask = (torch.rand(shape) >= self.chance).to(x.dtype)
        return x * mask / keep if self.rescale else x * mask


class TokenDropPath(nn.Module):
    """One mask value per token: not timm's rule, although the name says so."""

    def __init__(self):
        super().__init__()
        self.drop_prob = 0.6

    def forward(self, x):
        return x * F.dropout(torch.ones_like(x[..., :1]), self.drop_prob, self.training)


class ScheduledDropPath(nn.Module):
    """The rate is a product of two attributes."""

    def __init__(self):
        super().__init__()
        self.drop_prob, self.progress = 0.6, 0.25

    def forward(self, x):
        return x * F.dropout(
            x.new_ones(len(x), 1, 1), self.drop_prob * self.progress, self.training
        )


class Net(nn.Module):
    def __init__(self, drop):
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.drop, self.outside = nn.Linear(8, 24), drop, nn.Linear(24, 4)

    def forward(self, x):
        return self.outside(self.drop(self.inside(x).relu()).mean(1)) * 4


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(20, 6, 8, generator=generator), torch.randint(4, (20,), generator=generator)


DROPS = [
    RowDrop("bernoulli"),
    RowDrop("floor"),
    RowDrop("compare", rescale=False),
    TokenDropPath(),
    ScheduledDropPath(),
]


@pytest.mark.parametrize("drop", DROPS, ids=lambda d: f"{type(d).__name__} {vars(d).get('form')}")
def test_the_arithmetic_mean_is_that_of_the_model_itself(drop):
    model, (x, y) = Net(drop), data()
    grid = ad.Grid((1,), (0, 1))
    found = ad.evaluate(model, [(x, y)], grid=grid, num_samples=200).xe(ad.AMC)
    torch.manual_seed(2)
    model.train()
    with torch.no_grad():
        own = torch.stack([model(x).softmax(-1) for _ in range(3000)])
    expected = F.nll_loss(own.mean(0).log(), y).item()
    # The error of 3,000 independent passes is about that of 200 stratified ones.
    assert abs(found.corrected - expected) < 5 * max(found.mc_error, 2e-3)


def variants(model):
    compiled = Net(nn.Dropout(0.4))
    compiled.compile(backend="eager")
    yield compiled
    yield torch.compile(Net(nn.Dropout(0.4)), backend="eager")
    submodule = Net(nn.Dropout(0.4))
    submodule.outside = torch.compile(submodule.outside, backend="eager")
    yield submodule
    forward = Net(nn.Dropout(0.4))
    forward.forward = torch.compile(forward.forward, backend="eager")
    yield forward


def test_compiled_models_give_the_numbers_of_the_eager_one():
    x, y = data()
    eager = Net(nn.Dropout(0.4))
    options = {"grid": ad.Grid((0, 1), (0, 1)), "num_samples": 4}
    wanted = ad.evaluate(eager, [(x, y)], **options)
    for model in variants(eager):
        with torch.no_grad():
            model(x)  # compiled by now
        found = ad.evaluate(model, [(x, y)], **options)
        assert torch.equal(found.values(ad.DET).whole, wanted.values(ad.DET).whole)
        assert found.xe(ad.AMC).value == pytest.approx(wanted.xe(ad.AMC).value, abs=0.2)
        assert len(ad.find_sites(model, x)) == 1


def test_torchscript_and_meta_tensors_are_refused_with_the_remedy():
    x = torch.randn(3, 4)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).eval()
    with pytest.warns(DeprecationWarning):
        scripted = torch.jit.script(net)
    with pytest.raises(SiteError, match="TorchScript"):
        ad.find_sites(scripted, x)
    with pytest.raises(SiteError, match="load its weights"):
        ad.find_sites(net.to("meta"), x.to("meta"))


class Mixed(nn.Module):
    """Computes in bfloat16 and returns float32 logits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).bfloat16()
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        return self.head(self.encoder(x.bfloat16()).float().mean(1)) * 5


def test_computation_in_16_bits_that_ends_in_float32_is_judged_by_its_own_rounding():
    x = torch.randn(4, 12, 32)
    assert len(ad.find_sites(Mixed().eval(), x)) > 0


class Noisy(nn.Module):
    """A forward hook of a child draws noise in training, as NEFTune does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.dropout = nn.Linear(6, 8), nn.Dropout(0.5)
        self.head = nn.Linear(8, 3)
        self.embed.register_forward_hook(self._noise)

    def _noise(self, module, args, output):
        return output + 0.1 * torch.randn_like(output) if module.training else output

    def forward(self, x):
        return self.head(self.dropout(self.embed(x)))


def test_a_draw_in_a_forward_hook_belongs_to_its_module():
    assert [name for name, _ in ad.find_sites(Noisy(), torch.randn(4, 6)).off] == ["embed"]


class ManyNorms(nn.Module):
    """Norms with a forward of their own that update statistics in training."""

    def __init__(self, count):
        super().__init__()
        self.norms = nn.ModuleList(OwnNorm() for _ in range(count))
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(6, 3)

    def forward(self, x):
        for norm in self.norms:
            x = norm(x)
        return self.head(self.dropout(x))


class OwnNorm(nn.BatchNorm1d):
    def __init__(self):
        super().__init__(6)

    def forward(self, x):
        return super().forward(x).relu()


def test_modules_that_are_left_off_for_one_reason_share_a_line():
    text = str(ad.find_sites(ManyNorms(20).eval(), torch.randn(4, 6)))
    lines = [line for line in text.splitlines() if line.startswith("left off")]
    assert len(lines) == 1 and "and 17 more: changes its buffers in training" in lines[0]


class LayerDropped(nn.Module):
    """Skips each of its layers with a probability, decided by one number per layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.dropout, self.head, self.layerdrop = nn.Dropout(0.3), nn.Linear(8, 3), 0.4

    def forward(self, x):
        for layer in self.layers:
            if self.training and torch.rand([]) < self.layerdrop:
                continue
            x = x + layer(x).tanh()
        return self.head(self.dropout(x)) * 3


def test_layerdrop_is_a_site_where_its_rate_is_declared():
    model, x = LayerDropped(), torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    grid = ad.Grid((1,), (0, 1))
    with pytest.warns(UserWarning, match="stays off"):
        without = ad.evaluate(model, [(x, y)], grid=grid, num_samples=200)
    assert "no member has: (root) draws" in str(ad.select(without, folds=0, resamples=0))
    found = ad.evaluate(model, [(x, y)], grid=grid, num_samples=400, rates="layerdrop")
    torch.manual_seed(4)
    model.train()
    with torch.no_grad():
        own = torch.stack([model(x).softmax(-1) for _ in range(5000)]).mean(0)
    expected = F.nll_loss(own.log(), y).item()
    assert abs(found.xe(ad.AMC).corrected - expected) < 0.02
    assert abs(without.xe(ad.AMC).corrected - expected) > 0.05


class Skipping(nn.Module):
    """Skips all that it contains, by a number of Python's generator."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return x if self.training and random.random() < 1.0 else self.layers(x)


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x) if self.training else x


def test_modules_that_were_skipped_at_random_are_found():
    inner = Skipping(nn.Linear(6, 6), nn.Dropout(0.2), Noise())
    model = nn.Sequential(Skipping(nn.Linear(6, 6), nn.Dropout(0.3), inner), nn.Linear(6, 3)).eval()
    found = ad.find_sites(model, torch.randn(4, 6))
    assert [(site.name, site.rate) for site in found] == [
        ("0.layers.1", 0.3),
        ("0.layers.2.layers.1", 0.2),
    ]
    assert [name for name, _ in found.off] == ["0", "0.layers.2", "0.layers.2.layers.2"]
