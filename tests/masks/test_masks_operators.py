"""Controlled operators against torch's own: equal at multiplier 0, with equal moments at 1."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import afterdrop as ad
from afterdrop.masks.rows import Rows
from afterdrop.masks.uniforms import Plan, blocks
from oracles.zoo import AWD, ConvNet, DropPath, Packed, Recurrent, Residual, StochasticDepth, mlp

K = 4000


class Attention(nn.Module):
    def __init__(self, need_weights, masked=False):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.need_weights, self.masked = need_weights, masked

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.masked else None
        return self.attention(x, x, x, need_weights=self.need_weights, attn_mask=mask)[0]


class Fused(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, x):
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        k = q[:, :1] if self.options.get("enable_gqa") else q
        rate = 0.3 if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, k, dropout_p=rate, **self.options).flatten(1)


OPERATORS = {
    "dropout": (lambda: nn.Dropout(0.3), (2, 3)),
    "dropout1d": (lambda: nn.Dropout1d(0.3), (2, 3, 2)),
    "dropout2d": (lambda: nn.Dropout2d(0.3), (2, 3, 2, 2)),
    "dropout3d": (lambda: nn.Dropout3d(0.3), (2, 3, 1, 2, 2)),
    "alpha": (lambda: nn.AlphaDropout(0.3), (2, 3)),
    "feature alpha": (lambda: nn.FeatureAlphaDropout(0.3), (2, 3, 2)),
    "attention weights": (lambda: Attention(True), (2, 3, 8)),
    "attention": (lambda: Attention(False), (2, 3, 8)),
    "attention masked": (lambda: Attention(False, True), (2, 3, 8)),
    "fused": (lambda: Fused(), (2, 3, 8)),
    "fused causal": (lambda: Fused(is_causal=True), (2, 3, 8)),
    "fused scale": (lambda: Fused(scale=0.7), (2, 3, 8)),
    "fused gqa": (lambda: Fused(enable_gqa=True), (2, 3, 8)),
    "lstm": (lambda: First(nn.LSTM(3, 4, 2, dropout=0.3, batch_first=True)), (2, 3, 3)),
    "gru": (lambda: First(nn.GRU(3, 4, 3, dropout=0.3, bidirectional=True)), (3, 2, 3)),
    "drop path": (lambda: DropPath(0.3), (2, 3)),
    "drop path unscaled": (lambda: DropPath(0.3, scale_by_keep=False), (2, 3)),
    "stochastic depth": (lambda: StochasticDepth(0.3, "row"), (2, 3)),
}


class First(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


def native(model, x, count):
    model.train()
    with torch.no_grad():
        return torch.stack([model(x.clone()) for _ in range(count)])


def ours(model, x, count, scheme, multiplier=1.0, batch_dim=0, rates=(), seed=1):
    """`count` samples, which run as rows of a batch where they can."""
    model.eval()
    sites = ad.find_sites(model, x, batch_dim=batch_dim, rates=rates)
    control, size = sites.control(model), x.shape[batch_dim]
    plan = Plan(count, seed, scheme)
    times = [1] * x.dim()
    times[batch_dim] = 500 if sites.batched else 1
    out = []
    with torch.no_grad(), control.prepared(multiplier):
        for start in range(0, count, times[batch_dim]):
            samples = range(start, start + times[batch_dim])
            rows = Rows(plan, (multiplier,), samples, torch.arange(size))
            y = control.forward(rows, x.repeat(times))
            out.append(y.unflatten(batch_dim, (len(samples), size)).movedim(batch_dim, 0))
    return torch.cat(out)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["lhs", "iid", "antithetic"])
@pytest.mark.parametrize("name", OPERATORS)
def test_moments_are_those_of_torch(name, scheme):
    make, shape = OPERATORS[name]
    model, x = make(), torch.randn(shape) + 0.5
    batch_dim = 1 if name == "gru" else 0
    theirs = native(model, x, 2000).double()
    mine = ours(model, x, K, scheme, batch_dim=batch_dim).double()
    # Means within 5 standard errors of the difference, for at most 200 numbers.
    spread = theirs.std(0)
    error = spread * (1 / 2000 + 1 / K) ** 0.5 + 1e-6
    assert ((mine.mean(0) - theirs.mean(0)).abs() < 5 * error).all()
    # Variances have a relative error of about sqrt((kurtosis - 1)/n) < 10 %.
    torch.testing.assert_close(mine.var(0), theirs.var(0), rtol=0.25, atol=1e-5)


@pytest.mark.parametrize("multiplier", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("layer", [nn.Dropout, nn.AlphaDropout])
def test_multiplier_is_a_smaller_rate_of_the_same_operator(layer, multiplier):
    x = torch.randn(2, 3) + 1
    mine = ours(layer(0.6), x, K, "iid", multiplier)
    theirs = native(layer(0.6 * multiplier), x, 4000)
    torch.testing.assert_close(mine.amax(0), theirs.amax(0))
    torch.testing.assert_close(mine.amin(0), theirs.amin(0))
    share_mine = (mine == mine.amax(0)).float().mean(0)
    share_theirs = (theirs == theirs.amax(0)).float().mean(0)
    assert ((share_mine - share_theirs).abs() < 5 * (0.5 / 4000) ** 0.5).all()


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_keep_rate_and_scale_are_exact_for_latin_hypercubes(rate):
    out = ours(nn.Dropout(rate), torch.ones(3, 4), 1000, "lhs")
    assert ((out == 0) | ((out * (1 - rate) - 1).abs() < 1e-5)).all()
    for block in blocks(Plan(1000)):
        kept = (out[block.start : block.stop] > 0).sum(0)
        assert ((kept - len(block) * (1 - rate)).abs() <= 1).all()


def test_tables_of_permutations_can_be_made_while_torch_rand_is_intercepted():
    make, shape = OPERATORS["drop path"]
    out = ours(make(), torch.ones(shape), 1000, "lhs", seed=987654)  # no table of this seed yet
    assert 0 < (out == 0).double().mean() < 1


MODELS = {
    "mlp": (mlp, lambda: torch.randn(4, 5), (), 0, (4,)),
    "alpha": (lambda: mlp(dropout=nn.AlphaDropout), lambda: torch.randn(4, 5), (), 0, (4,)),
    "conv": (ConvNet, lambda: torch.randn(4, 1, 8, 8), (), 0, (4,)),
    "lstm": (Recurrent, lambda: torch.randint(11, (5, 4)), (), 1, (5, 4)),
    "awd": (AWD, lambda: torch.randint(13, (5, 4)), AWD.RATES, 1, (5, 4)),
    "path": (lambda: Residual(DropPath(0.3)), lambda: torch.randn(4, 6), (), 0, (4,)),
    "depth": (
        lambda: Residual(StochasticDepth(0.3, "batch")),
        lambda: torch.randn(4, 6),
        (),
        0,
        (4,),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_multiplier_zero_is_eval_mode_exactly(name):
    make, inputs, rates, batch_dim, shape = MODELS[name]
    model, x = make(), inputs()
    y = torch.randint(3, shape)
    model.train()
    scores = ad.evaluate(
        model,
        [(x, y)],
        grid=ad.Grid((0, 1), (0, 1e-9)),
        num_samples=2,
        rates=rates,
        batch_dim=batch_dim,
    )
    model.eval()
    with torch.no_grad():
        lp = model(x).log_softmax(-1)
    expected = -lp.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    if batch_dim:
        expected = expected.t()
    torch.testing.assert_close(
        scores.values(ad.DET).whole, expected.flatten().double(), rtol=0, atol=2e-6
    )
    # A multiplier so small that nothing is dropped gives the same through the masks.
    for alpha in (0, 1):
        near = scores.values(ad.Member(alpha, 1e-9)).whole
        torch.testing.assert_close(near, expected.flatten().double(), rtol=0, atol=1e-5)
    predict = ad.Predictor(model, ad.DET, rates=rates, batch_dim=batch_dim, class_dim=-1)
    torch.testing.assert_close(predict(x), lp)


def test_packed_sequences_drop_at_their_rate():
    model, tokens = Packed().eval(), torch.randint(11, (3, 5))
    lengths = torch.tensor([5, 2, 3])
    sites = ad.find_sites(model, tokens, lengths)
    control, plan = sites.control(model), Plan(400, 0, "iid")
    with torch.no_grad(), control.prepared():
        mine = torch.stack(
            [
                control.forward(
                    Rows(plan, (1.0,), range(k, k + 1), torch.arange(3)), tokens, lengths
                )
                for k in range(400)
            ]
        )
    model.train()
    with torch.no_grad():
        theirs = torch.stack([model(tokens, lengths) for _ in range(400)])
    error = theirs.std(0) * (2 / 400) ** 0.5
    assert ((mine.mean(0) - theirs.mean(0)).abs() < 5 * error).all()
    torch.testing.assert_close(mine.std(0), theirs.std(0), rtol=0.3, atol=0)


def test_queries_that_see_no_key_are_finite_as_in_torch():
    class Blind(nn.Module):
        def forward(self, x):
            mask = torch.ones(3, 3, dtype=torch.bool)
            mask[1] = False
            rate = 0.3 if self.training else 0.0
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask, dropout_p=rate)

    model, x = Blind(), torch.randn(2, 3, 4)
    assert native(model, x, 1).isfinite().all()
    model.eval()
    assert ours(model, x, 500, "iid").isfinite().all()


def test_float64_and_bfloat16_models_keep_their_dtype():
    for dtype in (torch.float64, torch.bfloat16):
        model, x = nn.Dropout(0.5), torch.ones(2, 3, dtype=dtype)
        assert ours(model, x, 500, "iid").dtype == dtype
