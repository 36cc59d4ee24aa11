"""Models whose dropout is controlled correctly pass every test of a check."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import afterdrop as ad
from oracles.zoo import AWD, ConvNet, DropPath, Recurrent, Residual, StochasticDepth, mlp

NAMES = [
    "dropout sites",
    "random operations",
    "mean and variance",
    "model unchanged",
    "eval mode twice",
    "two threads",
]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.encoder(x))


class Noisy(nn.Module):
    """Noise that is drawn in eval mode as well, and then has no effect."""

    def forward(self, x):
        return x + torch.randn_like(x) * (0.3 if self.training else 0.0)


class Gated(nn.Module):
    """Its dropout runs in a module that stays in eval mode because it keeps statistics."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(5, 6), nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += 1
        return self.out(F.dropout(self.inner(x), 0.5, self.training))


class LayerDrop(nn.Module):
    """Skips whole layers in training, each with dropout of its own."""

    def __init__(self, rate=0.4):
        super().__init__()
        self.rate = rate
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.drop, self.out = nn.Dropout(0.2), nn.Linear(6, 3)

    def forward(self, x):
        for layer in self.layers:
            if self.training and torch.rand([]) < self.rate:
                continue
            x = x + self.drop(layer(x).tanh())
        return self.out(x)


def batch(*shape, classes=3, targets=None):
    x = torch.randn(shape)
    return [(x, torch.randint(classes, targets or shape[:1]))]


def tokens(classes, *shape):
    return [(torch.randint(classes, shape), torch.randint(classes, shape))]


MODELS = {
    "mlp": lambda: (mlp(), batch(8, 5), {}),
    "one example": lambda: (mlp(), batch(1, 5), {}),
    "batch norm": lambda: (ConvNet(), batch(6, 1, 9, 9), {}),
    "transformer": lambda: (Encoder(), batch(4, 3, 8, classes=4, targets=(4, 3)), {}),
    "lstm": lambda: (Recurrent(batch_first=True), tokens(11, 4, 5), {}),
    "own masks": lambda: (AWD(), tokens(13, 5, 4), {"rates": AWD.RATES, "batch_dim": 1}),
    "drop path": lambda: (Residual(DropPath(0.3)), batch(8, 6), {}),
    "stochastic depth": lambda: (Residual(StochasticDepth(0.3, "batch")), batch(8, 6), {}),
    "layer drop": lambda: (LayerDrop(), batch(8, 6), {"rates": ("rate",)}),
    "noise": lambda: (nn.Sequential(Noisy(), mlp()), batch(8, 5), {"noise": ("0",)}),
    "noise, found": lambda: (nn.Sequential(Noisy(), mlp()), batch(8, 5), {}),
}


LAYER_DROP = {  # by the seed of the train-mode pass: draws of three layers, and their masks
    0: "5 of 6 in a train-mode pass (others are in skipped layers), all controlled",
    1: "6 in a train-mode pass, all controlled",
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("train", [False, True])
def test_models_pass(kind, train):
    torch.manual_seed(0)
    model, batches, options = MODELS[kind]()
    found = ad.check(model.train(train), batches, num_samples=100, **options)
    assert [(v.name, v.status) for v in found.verdicts] == [(name, "ok") for name in NAMES], (
        f"\n{found}"
    )
    assert found.passed
    assert all(module.training is train for module in model.modules())


@pytest.mark.parametrize(("seed", "said"), LAYER_DROP.items())
def test_the_number_of_random_operations_counts_layers_that_are_dropped(seed, said):
    torch.manual_seed(0)
    found = ad.check(LayerDrop(), batch(8, 6), num_samples=10, rates="rate", seed=seed)
    assert found["dropout sites"].detail.endswith("6 random operations per pass")
    assert found["random operations"].detail.startswith(said)


def test_what_stays_off_is_named():
    found = ad.check(nn.Sequential(Noisy(), mlp()), batch(8, 5), num_samples=10)
    assert "stays off: 0 (draws randn_like)" in found["dropout sites"].detail


def test_dropout_that_runs_only_under_control_is_not_compared():
    found = ad.check(Gated(), batch(8, 5))
    assert "stays off: (root) (changes its buffers in training)" in found["dropout sites"].detail
    assert found["mean and variance"].status == "skipped", f"\n{found}"
    assert [v.status for v in found.verdicts].count("ok") == 5, f"\n{found}"


def test_impossible_classes_can_be_compared():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            return self.inner(x).index_fill(1, torch.tensor([1]), float("-inf"))

    torch.manual_seed(0)
    found = ad.check(Masked(), [(torch.randn(4, 5), torch.zeros(4, dtype=torch.int64))])
    assert found["mean and variance"].status == "ok", f"\n{found}"


def test_too_few_samples_are_not_compared():
    found = ad.check(mlp(), batch(8, 5), num_samples=10)
    assert found["mean and variance"].status == "skipped"
    assert "use at least" in found["mean and variance"].detail
    assert found.passed


def test_a_check_leaves_everything_as_it_was():
    model, data = ConvNet(), batch(6, 1, 9, 9)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    ad.check(model, data, num_samples=10)
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_state_between_calls_passes_with_reset():
    class Recalling(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.state = mlp(), None

        def forward(self, x):
            x = x if self.state is None else x + self.state
            self.state = x.detach()
            return self.inner(x)

    def forget(model):
        model.state = None

    torch.manual_seed(0)
    assert not ad.check(Recalling(), batch(8, 5)).passed
    found = ad.check(Recalling(), batch(8, 5), num_samples=100, reset=forget)
    assert all(verdict.status == "ok" for verdict in found.verdicts), f"\n{found}"
