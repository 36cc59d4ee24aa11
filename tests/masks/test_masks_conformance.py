"""Every random operation of common models is found as a call of a dropout site."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import afterdrop as ad
from oracles.hugging import HUGGING, hugging_inputs, quiet
from oracles.random_operations import count_random
from oracles.zoo import (
    AWD,
    ConvNet,
    DropPath,
    Packed,
    Recurrent,
    Residual,
    StochasticDepth,
    mlp,
)

B, TIME = 3, 5


def tokens(high=11, shape=(B, TIME)):
    return torch.randint(high, shape)


def conforms(model, *args, sites=None, rates=(), batch_dim=0, **kwargs):
    """Checks that every random operation of a train-mode pass is a call of a site."""
    expected = count_random(model, *args, **kwargs)
    found = ad.find_sites(model, *args, rates=rates, batch_dim=batch_dim, **kwargs)
    assert expected > 0
    assert found.calls == expected, str(found)
    if sites is not None:
        assert len(found) == sites, str(found)
    return found


def test_mlp_has_one_site():
    found = conforms(mlp(), torch.randn(B, 5), sites=1)
    (site,) = found
    assert (site.name, site.op, site.rate, site.calls) == ("2", "dropout", 0.5, 1)
    assert found.batched and not found.shared


def test_two_calls_of_one_module_are_one_site_with_two_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.out = nn.Dropout(0.5), nn.Linear(5, 3)

        def forward(self, x):
            return self.out(self.drop(self.drop(x).tanh()))

    (site,) = conforms(Twice(), torch.randn(B, 5))
    assert site.calls == 2


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout,
        nn.AlphaDropout,
        nn.FeatureAlphaDropout,
        nn.Dropout1d,
    ],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_modules_on_sequences(layer, inplace):
    model = nn.Sequential(nn.Linear(4, 6), layer(0.3, inplace=inplace), nn.Linear(6, 3))
    (site,) = conforms(model, torch.randn(B, TIME, 4), sites=1)
    assert site.rate == 0.3


@pytest.mark.parametrize(
    ("layer", "space"), [(nn.Dropout1d, 1), (nn.Dropout2d, 2), (nn.Dropout3d, 3)]
)
@pytest.mark.parametrize("inplace", [False, True])
def test_feature_dropout_modules(layer, space, inplace):
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[space - 1]
    model = nn.Sequential(
        conv(2, 4, 1), layer(0.3, inplace=inplace), nn.Flatten(), nn.Linear(4 * 3**space, 3)
    )
    conforms(model, torch.randn(B, 2, *[3] * space), sites=1)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (F.dropout, (16,)),
        (F.dropout1d, (4, 4)),
        (F.dropout2d, (2, 2, 4)),
        (F.dropout3d, (2, 2, 2, 2)),
        (F.alpha_dropout, (16,)),
        (F.feature_alpha_dropout, (2, 8)),
    ],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_functional_dropout_gated_on_training(function, shape, inplace):
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(16, 3)

        def forward(self, x):
            x = function(x * 1.0, 0.3, self.training, inplace)
            return self.out(x.flatten(1))

    conforms(Functional(), torch.randn(B, *shape), sites=1)


def test_dropout_that_runs_only_if_training():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(5, 3)

        def forward(self, x):
            if self.training:
                x = F.dropout(x, 0.4)
            return self.out(x)

    conforms(Gated(), torch.randn(B, 5), sites=1)


def test_torch_dropout_function():
    class TorchDropout(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(5, 3)

        def forward(self, x):
            return self.out(torch.dropout(x, p=0.4, train=self.training))

    conforms(TorchDropout(), torch.randn(B, 5), sites=1)


def test_native_dropout_is_a_site():
    class Native(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.out = nn.Dropout(0.5), nn.Linear(5, 3)

        def forward(self, x):
            x = torch.native_dropout(self.drop(x), 0.4, self.training)[0]
            return self.out(x)

    found = conforms(Native(), torch.randn(B, 5), sites=2)
    assert {site.op: site.rate for site in found} == {"dropout": 0.5, "native_dropout": 0.4}


def test_convolutional_network_with_batch_norm():
    found = conforms(ConvNet(), torch.randn(B, 1, 8, 8), sites=2)
    assert [site.rate for site in found] == [0.2, 0.3]
    assert found.batched


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder_layer_has_four_sites(batch_first, norm_first):
    model = nn.TransformerEncoderLayer(
        8, 2, 16, dropout=0.2, batch_first=batch_first, norm_first=norm_first
    )
    found = conforms(
        model,
        torch.randn(B, TIME, 8) if batch_first else torch.randn(TIME, B, 8),
        sites=4,
        batch_dim=0 if batch_first else 1,
    )
    assert found.batched


def test_transformer_encoder_of_two_layers():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    conforms(model, torch.randn(B, TIME, 8), sites=8)


def test_transformer_encoder_with_padding_whose_fast_path_zeroes_padded_positions():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.out = nn.Linear(8, 3)

        def forward(self, x, padding):
            return self.out(self.encoder(x, src_key_padding_mask=padding)[:, 0])

    padding = torch.arange(TIME) >= torch.tensor([[5], [3], [2]])
    conforms(Pooled(), torch.randn(B, TIME, 8), padding, sites=8)


@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_decoder_layer_has_six_sites(batch_first):
    model = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.2, batch_first=batch_first)
    shape = (B, TIME, 8) if batch_first else (TIME, B, 8)
    conforms(
        model, torch.randn(shape), torch.randn(shape), sites=6, batch_dim=0 if batch_first else 1
    )


class SelfAttention(nn.Module):
    def __init__(self, need_weights):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention(need_weights):
    found = conforms(SelfAttention(need_weights), torch.randn(B, TIME, 8), sites=1)
    assert found.batched


@pytest.mark.parametrize("causal", [True, False])
def test_fused_attention(causal):
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
            rate = 0.3 if self.training else 0.0
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=causal)
            return out.flatten(2)

    conforms(Fused(), torch.randn(B, TIME, 8), sites=1)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_stacks_with_output_dropout_have_two_sites(kind, bidirectional, batch_first):
    model = Recurrent(kind, bidirectional=bidirectional, batch_first=batch_first)
    found = conforms(model, tokens(), sites=2, batch_dim=0 if batch_first else 1)
    assert found.batched


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("options", [{"proj_size": 4}, {"bias": False}])
def test_lstm_options(options):
    conforms(Recurrent(nn.LSTM, batch_first=True, **options), tokens(), sites=2)


def test_relu_rnn():
    conforms(Recurrent(nn.RNN, batch_first=True, nonlinearity="relu"), tokens(), sites=2)


def test_packed_sequences_run_one_sample_per_pass():
    found = conforms(Packed(), tokens(), torch.tensor([5, 2, 3]), sites=1)
    assert not found.batched and "rows share the mask" in found.reason


def test_awd_lstm_has_eight_sites():
    found = conforms(AWD(), tokens(13, (TIME, B)), sites=8, rates=AWD.RATES, batch_dim=1)
    assert not found.batched and "layers.0" in found.reason


@pytest.mark.parametrize(
    "path",
    [
        DropPath(0.3),
        DropPath(0.3, scale_by_keep=False),
        StochasticDepth(0.3, "row"),
        StochasticDepth(0.3, "batch"),
    ],
)
def test_stochastic_depth_is_a_site(path):
    model = Residual(path)
    model.train()
    found = ad.find_sites(model, torch.randn(B, 6))
    (site,) = found
    assert (site.name, site.op, site.rate, site.calls) == ("path", "drop_path", 0.3, 1)
    assert found.batched == (getattr(path, "mode", "row") == "row")


def test_drop_path_of_rate_zero_is_not_a_site():
    model = nn.Sequential(nn.Dropout(0.5), Residual(DropPath(0.0)))
    conforms(model, torch.randn(B, 6), sites=1)


@pytest.mark.parametrize("name", HUGGING)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_transformers_models(name, attention):
    make, kinds = HUGGING[name]
    model = quiet(make)
    model.set_attn_implementation(attention)
    found = conforms(model, **hugging_inputs(kinds))
    assert found.batched, found.reason
    assert {round(site.rate, 9) for site in found} <= {0.1, 0.2, 0.3}


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_transformers_models_with_left_padding(name):
    make, kinds = HUGGING[name]
    model = quiet(make)
    inputs = hugging_inputs(kinds)
    inputs["attention_mask"] = (torch.arange(TIME) >= torch.tensor([[0], [3], [2]])).long()
    targets = torch.randint(3, (B,)) if name == "bert" else tokens()
    conforms(model, **inputs)
    scores = ad.evaluate(model, [(inputs, targets)], grid=ad.Grid((0, 1), (0, 1)), num_samples=4)
    assert scores.xe(ad.AMC).value > 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padded_positions_that_the_fast_path_zeroes():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)

    class PerToken(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.TransformerEncoder(layer, 2)
            self.out = nn.Linear(8, 3)

        def forward(self, x, padding):
            return self.out(self.encoder(x, src_key_padding_mask=padding))

    padding = torch.arange(TIME) >= torch.tensor([[5], [3], [2]])
    conforms(PerToken(), torch.randn(B, TIME, 8), padding, sites=8)


def test_spectral_norm_stays_in_eval_mode_is_listed_and_restored():
    linear = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6))
    model = nn.Sequential(linear, nn.Dropout(0.5), nn.Linear(6, 3))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = ad.find_sites(model, torch.randn(B, 5))
    assert len(found) == 1 and any("parametrizations" in name for name, _ in found.off)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_models_that_round_to_16_bits_have_all_their_sites(how):
    """Attention is computed in another order under control, so it is rounded differently."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    x = torch.randn(6, 9, 64)
    if how == "weights":
        found = ad.find_sites(model.bfloat16(), x.bfloat16())
    else:
        with torch.autocast("cpu", torch.bfloat16):
            found = ad.find_sites(model, x)
    assert len(found) == 16
