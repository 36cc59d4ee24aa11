"""Results do not depend on the batch size, the chunks, or the order of evaluation."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import afterdrop as ad
from afterdrop.masks.rows import Rows
from afterdrop.masks.uniforms import Plan
from oracles.hugging import HUGGING, hugging_inputs, quiet
from oracles.zoo import AWD, ConvNet, DropPath, Packed, Recurrent, Residual, StochasticDepth, mlp

GRID = ad.Grid((0, 0.5, 1), (0, 0.5, 1))
N, TIME = 8, 3


class TimeMajorFlat(nn.Module):
    """[batch, time] inputs, flattened time-major before dropout, as in old RNN code."""

    def __init__(self, drop):
        super().__init__()
        self.inner, self.drop, self.out = nn.Linear(4, 6), drop, nn.Linear(6, 3)

    def forward(self, x):
        rows = len(x)
        flat = self.inner(x).tanh().transpose(0, 1).flatten(0, 1)
        flat = self.out(self.drop(flat))
        return flat.unflatten(0, (-1, rows)).transpose(0, 1)


class Windows(nn.Module):
    """Flattens to [batch · windows, ...], as Swin does."""

    def __init__(self):
        super().__init__()
        self.inner, self.drop, self.out = nn.Linear(4, 6), nn.Dropout(0.4), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.drop(self.inner(x.flatten(0, 1)).tanh())).unflatten(0, (len(x), -1))


class OwnRandFlat(nn.Module):
    """Draws its own mask for rows that are flattened time-major."""

    def __init__(self):
        super().__init__()
        self.rate = 0.4

    def forward(self, x):
        if not self.training:
            return x
        return x * (torch.rand(len(x), 1) < 1 - self.rate) / (1 - self.rate)


def sequence(width=4):
    return lambda: torch.randn(N, TIME, width)


MODELS = {
    "mlp": (mlp, lambda: torch.randn(N, 5), (), 0, (N,)),
    "alpha": (lambda: mlp(dropout=nn.AlphaDropout), lambda: torch.randn(N, 5), (), 0, (N,)),
    "conv": (ConvNet, lambda: torch.randn(N, 1, 8, 8), (), 0, (N,)),
    "lstm": (Recurrent, lambda: torch.randint(11, (TIME, N)), (), 1, (TIME, N)),
    "gru": (
        lambda: Recurrent(nn.GRU, bidirectional=True, batch_first=True),
        lambda: torch.randint(11, (N, TIME)),
        (),
        0,
        (N, TIME),
    ),
    "awd": (AWD, lambda: torch.randint(13, (TIME, N)), AWD.RATES, 1, (TIME, N)),
    "path": (lambda: Residual(DropPath(0.3)), lambda: torch.randn(N, 6), (), 0, (N,)),
    "depth": (
        lambda: Residual(StochasticDepth(0.3, "batch")),
        lambda: torch.randn(N, 6),
        (),
        0,
        (N,),
    ),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        sequence(8),
        (),
        0,
        (N, TIME),
    ),
    "windows": (Windows, sequence(), (), 0, (N, TIME)),
    "time major flat": (lambda: TimeMajorFlat(nn.Dropout(0.4)), sequence(), (), 0, (N, TIME)),
    "time major feature": (
        lambda: TimeMajorFlat(nn.FeatureAlphaDropout(0.4)),
        sequence(),
        (),
        0,
        (N, TIME),
    ),
    "time major path": (lambda: TimeMajorFlat(DropPath(0.4)), sequence(), (), 0, (N, TIME)),
    "time major own": (
        lambda: TimeMajorFlat(OwnRandFlat()),
        sequence(),
        ("drop.rate",),
        0,
        (N, TIME),
    ),
}


def data(x, y, size, batch_dim):
    return list(zip(x.split(size, batch_dim), y.split(size, batch_dim)))


def equal(a, b, atol=2e-5):
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        if name.endswith("class") or name in ("targets", "examples"):
            assert torch.equal(tensor, b.tensors[name]), name
        elif not name.endswith("half"):  # differences between halves contain float32 rounding
            torch.testing.assert_close(
                tensor, b.tensors[name], rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
            )
        else:
            torch.testing.assert_close(tensor, b.tensors[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_scores_do_not_depend_on_the_batch_size(name):
    make, inputs, rates, batch_dim, shape = MODELS[name]
    model, x = make(), inputs()
    y = torch.randint(3, shape)
    options = {
        "grid": GRID,
        "num_samples": 8,
        "rates": rates,
        "batch_dim": batch_dim,
        "class_dim": -1,
        "temperatures": (0.25, 4.0),
    }
    whole = ad.evaluate(model, data(x, y, N, batch_dim), **options)
    assert whole.bounds(ad.AMC).variance > 0
    for size in (1, 3):
        equal(whole, ad.evaluate(model, data(x, y, size, batch_dim), **options))


@pytest.mark.parametrize("name", MODELS)
def test_scores_do_not_depend_on_memory_and_chunks(name):
    make, inputs, rates, batch_dim, shape = MODELS[name]
    model, x = make(), inputs()
    y = torch.randint(3, shape)
    options = {"grid": GRID, "num_samples": 20, "rates": rates, "batch_dim": batch_dim}
    options["class_dim"] = -1
    batches = data(x, y, N, batch_dim)
    equal(
        ad.evaluate(model, batches, **options), ad.evaluate(model, batches, memory=2**20, **options)
    )


def test_little_memory_makes_small_chunks():
    seen = []

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp(5, 400, 50)

        def forward(self, x):
            seen.append(len(x))
            return self.inner(x)

    model, x, y = Watched(), torch.randn(40, 5), torch.randint(50, (40,))
    wide = ad.evaluate(model, [(x, y)], num_samples=20)
    largest = max(seen)
    seen.clear()
    narrow = ad.evaluate(model, [(x, y)], num_samples=20, memory=2**20)
    assert max(seen) < largest
    equal(wide, narrow)


def test_scores_follow_the_numbers_of_the_examples():
    model, x, y = mlp(), torch.randn(6, 5), torch.randint(3, (6,))
    options = {"grid": GRID, "num_samples": 4, "temperatures": (0.25, 4.0)}
    whole = ad.evaluate(model, [(x, y)], **options)
    part = ad.evaluate(model, [(x[4:], y[4:])], first_example=4, **options)
    torch.testing.assert_close(whole.values(ad.AMC).whole[4:], part.values(ad.AMC).whole)


def test_seeds_and_schemes_change_the_masks():
    model, x, y = mlp(), torch.randn(6, 5), torch.randint(3, (6,))
    kinds = [{}, {"seed": 1}, {"masks": "iid"}, {"masks": "antithetic"}]
    values = [
        ad.evaluate(model, [(x, y)], grid=GRID, num_samples=8, **kind).values(ad.AMC).whole
        for kind in kinds
    ]
    for i, a in enumerate(values):
        for b in values[i + 1 :]:
            assert not torch.allclose(a, b)


def masks(layer, multipliers, x, scheme="lhs", count=40):
    sites = ad.find_sites(layer.eval(), x)
    control = sites.control(layer)
    rows = Rows(Plan(count, 0, scheme), multipliers, range(count), torch.arange(len(x)))
    with torch.no_grad(), control.prepared(1.0):
        out = control.forward(rows, x.repeat(len(rows) // len(x), *[1] * (x.dim() - 1)))
    return out.unflatten(0, (len(multipliers), count, len(x)))


@pytest.mark.parametrize("scheme", ["lhs", "iid", "antithetic"])
def test_a_unit_dropped_at_one_multiplier_is_dropped_at_every_larger_one(scheme):
    multipliers = (0.1, 0.3, 0.5, 0.9, 1.0)
    kept = masks(nn.Dropout(0.7), multipliers, torch.ones(5, 6), scheme) > 0
    for smaller, larger in itertools.pairwise(kept):
        assert not (larger & ~smaller).any()
        assert (smaller & ~larger).any()


def test_multipliers_give_the_same_together_and_alone():
    x = torch.ones(5, 6)
    for layer in (nn.Dropout(0.7), nn.AlphaDropout(0.7), nn.Dropout1d(0.7)):
        shaped = x if not isinstance(layer, nn.Dropout1d) else x.unsqueeze(-1).expand(-1, -1, 2)
        together = masks(layer, (0.2, 1.0), shaped)
        for i, multiplier in enumerate((0.2, 1.0)):
            torch.testing.assert_close(together[i], masks(layer, (multiplier,), shaped)[0])


def test_every_row_has_its_own_mask():
    out = masks(nn.Dropout(0.5), (1.0,), torch.ones(5, 64))[0].flatten(0, 1)
    assert len(out.unique(dim=0)) == len(out)


def test_time_steps_have_their_own_masks_in_time_major_models():
    class Identity(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return (
                self.drop(x.transpose(0, 1).flatten(0, 1))
                .unflatten(0, (-1, len(x)))
                .transpose(0, 1)
            )

    out = masks(Identity(), (1.0,), torch.randn(5, 7, 64)) != 0
    assert len(out[0].flatten(0, 2).unique(dim=0)) == out[0].flatten(0, 2).shape[0]


def test_halves_are_independent():
    kept = (masks(nn.Dropout(0.5), (1.0,), torch.ones(50, 60), count=200)[0] > 0).double() - 0.5
    a, b = kept[:100].flatten(1), kept[100:].flatten(1)
    z = 4 * (a * b).mean(1) * a.shape[1] ** 0.5
    assert z.abs().max() < 4.5
    assert z.mean().abs() < 4.5 / 100**0.5


def test_packed_sequences_are_repeatable():
    model, x, lengths = Packed(), torch.randint(11, (N, 5)), torch.randint(1, 6, (N,))
    batches = [((x, lengths), torch.randint(3, (N,)))]
    a, b = (ad.evaluate(model, batches, grid=GRID, num_samples=4) for _ in "ab")
    assert torch.equal(a.values(ad.AMC).whole, b.values(ad.AMC).whole)
    assert a.bounds(ad.AMC).variance > 0


def test_weight_dropout_drops_the_same_weights_for_every_example():
    class Weights(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 5))

        def forward(self, x):
            return x @ F.dropout(self.weight, 0.5, self.training).t()

    model, x = Weights(), torch.randn(1, 5).expand(N, 5).contiguous()
    scores = ad.evaluate(model, [(x, torch.zeros(N, dtype=torch.long))], grid=GRID, num_samples=4)
    assert not scores.protocol.batched and scores.protocol.shared
    assert scores.values(ad.AMC).whole.std() < 1e-6
    assert scores.bounds(ad.AMC).variance > 0


@pytest.mark.parametrize("name", ["bart", "gpt2", "bert", "t5", "vit", "swin", "llama"])
def test_transformers_do_not_depend_on_batch_size_and_memory(name):
    make, kinds = HUGGING[name]
    model, inputs = quiet(make), hugging_inputs(kinds, 4)
    sequence = name in ("bart", "gpt2", "t5", "llama")
    y = torch.randint(3, (4, 5) if sequence else (4,))
    options = {"grid": ad.Grid((0, 1), (0.5, 1)), "num_samples": 4, "temperatures": (0.25, 4.0)}
    whole = ad.evaluate(model, [(inputs, y)], **options)
    assert whole.bounds(ad.AMC).variance > 0
    ones = [({k: v[i : i + 1] for k, v in inputs.items()}, y[i : i + 1]) for i in range(4)]
    equal(whole, ad.evaluate(model, ones, **options), atol=1e-4)
    equal(whole, ad.evaluate(model, [(inputs, y)], memory=2**20, **options), atol=1e-4)


def test_later_batches_may_have_other_lengths():
    model = Recurrent(batch_first=True)
    batches = [(torch.randint(11, (4, n)), torch.randint(11, (4, n))) for n in (3, 7, 1)]
    scores = ad.evaluate(model, batches, grid=GRID, num_samples=4)
    assert scores.num_targets == 4 * 11


def test_padding_a_batch_does_not_change_the_masks():
    model, x, y = Windows(), torch.randn(N, 2, 4), torch.randint(3, (N, 2))
    options = {"grid": GRID, "num_samples": 4, "temperatures": (0.25, 4.0)}
    short = ad.evaluate(model, [(x, y)], **options)
    longer = torch.cat([x, torch.randn(N, 3, 4)], 1), torch.cat([y, torch.full((N, 3), -100)], 1)
    equal(short, ad.evaluate(model, [longer], **options))


def test_row_layouts_are_found_with_identical_examples():
    model = TimeMajorFlat(nn.Dropout(0.4))
    x, y = torch.zeros(N, TIME, 4), torch.randint(3, (N, TIME))
    x[N // 2 :] = torch.randn(N // 2, TIME, 4)
    options = {"grid": GRID, "num_samples": 4, "temperatures": (0.25, 4.0), "class_dim": -1}
    whole = ad.evaluate(model, data(x, y, N, 0), **options)
    equal(whole, ad.evaluate(model, data(x, y, 1, 0), **options))


def test_running_out_of_memory_shrinks_the_chunks():
    class Greedy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.limit = mlp(), 10**9

        def forward(self, x):
            if len(x) > self.limit:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return self.inner(x)

    model, x, y = Greedy(), torch.randn(60, 5), torch.randint(3, (60,))
    options = {"num_samples": 100, "temperatures": (0.25, 4.0), "grid": ad.Grid((0, 1))}
    before = ad.evaluate(model, [(x, y)], **options)
    model.limit = 5000
    equal(before, ad.evaluate(model, [(x, y)], **options))
    with pytest.raises(torch.OutOfMemoryError):
        model.limit = 3
        ad.evaluate(model, [(x, y)], **options)
