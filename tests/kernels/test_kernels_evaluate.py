"""`FusedLanguageWorker` against `LanguageWorker`: every tensor of the scores.

Operands are float32 here, so both differ by rounding only: within 1e-5 (5e-3 from states carried by
tf32 products). Partitions, where 1/T is up to 16, agree within 50 times that. Differences of halves
are interpolated from few powers of the ladder: within 100 times, and within 1000 times beyond the
lowest temperature.
"""

import importlib
import math

import kernel_device
import pytest
import torch
from tiny_evaluation import MODELS, Float32Worker, V, assert_same, build, evaluated

import afterdrop as ad
from afterdrop.errors import DataError
from afterdrop.evaluation.engines.sampled_features import SampledFeatures, with_bias, with_ones
from afterdrop.evaluation.engines.text import LanguageWorker, StreamSettings
from afterdrop.evaluation.engines.text_fused import FusedLanguageWorker
from afterdrop.evaluation.request import Protocol
from afterdrop.masks.uniforms import Plan
from afterdrop.models.fused import Copies, DeterministicPass

pytestmark = kernel_device.quiet
device = kernel_device.device


@pytest.mark.parametrize(
    ("name", "lifetime"),
    [
        ("two layers", "window"),
        ("two layers", "stream"),
        ("projection", "stream"),
        ("untied plain stack", "window"),
        ("room for one bias", "window"),
    ],
)
def test_all_scores_match_the_plain_worker(name, lifetime, device):
    model = build(device, **MODELS[name])
    stream = StreamSettings(time=3, stripes=2, windows=2, lifetime=lifetime)
    alphas = (0, 0.25, 1) if lifetime == "window" else (0, 1)
    found, worker = evaluated(model, Float32Worker, stream, fused_states=True, alphas=alphas)
    wanted, _ = evaluated(model, LanguageWorker, stream, alphas=alphas)
    assert (worker.chunks, worker.plain) == (1, 0)  # all windows at once
    assert_same(found, wanted, kernel_device.within(device, 1e-5, 5e-3))


def test_chunks_of_windows_and_targets_do_not_change_scores(device, monkeypatch):
    """One window at a time, one of which is all padding, and two targets at a time."""
    model = build(device, **MODELS["projection"])
    stream = StreamSettings(time=4, stripes=2, windows=2)
    whole, worker = evaluated(model, Float32Worker, stream)
    module = importlib.import_module(FusedLanguageWorker.__module__)
    windows = module._ROWS // (2 * 4)  # of two multipliers and four samples
    assert worker.targets_together == 2 * 4 * windows  # limited by the number of targets
    monkeypatch.setattr(module, "_ROWS", 1)
    monkeypatch.setattr(module, "_LOGITS", 2 * 4 * 16)
    monkeypatch.setattr(module, "_SUMS", 5 * 12 * 32)  # finishes two such pairs together
    monkeypatch.setattr(module, "_MEANS", 3 * 2 * 16)  # three targets
    found, worker = evaluated(model, Float32Worker, stream)
    assert (worker.chunks, worker.plain) == (4, 0)
    assert (worker.targets_at_once, worker.targets_together) == (2, 4)
    assert_same(found, whole)


@pytest.mark.parametrize("value", [-200.0, float("-inf")])
def test_too_low_log_probabilities_are_left_to_the_plain_worker(value, device):
    """Sums underflow below exp(−115), and for masked classes. Samples agree to the bit."""
    model = build(device, **MODELS["projection"])
    with torch.no_grad():
        model.softmax_bias[0] = value  # never a target
    stream = StreamSettings(time=3, stripes=2, windows=2)
    found, worker = evaluated(model, Float32Worker, stream, alphas=(1,))
    wanted, _ = evaluated(model, LanguageWorker, stream, alphas=(1,))
    assert worker.plain > 0
    for name, tensor in wanted.tensors.items():
        same = found.tensors[name].nan_to_num(7), tensor.nan_to_num(7)
        if name.startswith("det_"):  # still computed by the kernels
            near = kernel_device.within(device, 1e-4, 1e-2)
            torch.testing.assert_close(*same, rtol=near, atol=near)
        else:
            assert torch.equal(*same), name


def test_nan_logits_are_refused(device):
    model = build(device, **MODELS["projection"])
    stream = StreamSettings(time=3, stripes=2, windows=2)
    with torch.no_grad():
        model.softmax_bias[3] = float("nan")
    with pytest.raises(DataError, match="NaN or infinite logits"):
        evaluated(model, Float32Worker, stream)


@pytest.mark.parametrize("name", ["projection", "room for one bias"])
def test_two_float16_columns_hold_the_bias_nearly_as_float32(name, device):
    model = build(device, **MODELS[name])
    copies = Copies(model, torch.float16)
    copies.pack()
    protocol = Protocol("valid", ad.Grid((1,), (1,)), Plan(4), 0.125, 8.0, V, "", True, False)
    sampled = SampledFeatures(copies, protocol, StreamSettings())
    bias = model.softmax_bias.detach() * math.log2(math.e)
    table = with_bias(sampled).double()
    size = model.embedding.shape[1]
    assert torch.equal(table[:V, :size].half(), (model.embedding * math.log2(math.e)).half())
    held = table[:V, size:].sum(1)
    assert (held - table[:V, size]).abs().max() > 1e-5  # a second column is needed
    torch.testing.assert_close(held, bias.double(), rtol=2**-21, atol=2**-24)
    assert not table[V:].any()
    features = torch.randn(3, copies.softmax.shape[1], device=device).half()
    found = with_ones(features, sampled).double() @ table[:V].t()
    wanted = features[:, :size].double() @ table[:V, :size].t() + bias
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_carried_states_match_the_model(device):
    """Three windows without dropout: within 1e-6 (tf32: 2e-3) of the norm."""
    model = build(device, **MODELS["two layers"])
    copies = Copies(model, torch.float32)
    copies.pack()
    passes = DeterministicPass(copies, 2, 3)
    tokens = torch.randint(V, (3, 2, 3), device=device)
    near = kernel_device.within(device, 1e-6, 2e-3)
    with torch.no_grad():
        for _ in range(2):  # the second time after a reset
            passes.reset()
            state, held = None, []
            for window in tokens:
                y, state = model.features(window, state)
                out = passes.run(window)[..., :6].transpose(0, 1)
                assert kernel_device.relative(out, y) < near
                held.append((state, passes.state))
            for wanted, found in held:  # later windows have not overwritten them
                for pair, ours in zip(wanted, found):
                    assert all(kernel_device.relative(b, a) < near for a, b in zip(pair, ours))


@pytest.mark.parametrize("gate", range(4))
def test_a_nan_gate_shows_in_every_sample(gate, device):
    """The plain form would report it; `require_held` must be able to see it."""
    model = build(device, **MODELS["two layers"])
    with torch.no_grad():
        model.stack.layers[0].bias[6 * gate + 2] = torch.nan
    copies = Copies(model, torch.float32)
    copies.pack()
    grid = ad.Grid((1,), (0.5, 1))
    protocol = Protocol("valid", grid, Plan(4), 0.125, 8.0, V, "", batched=True, shared=False)
    sampled = SampledFeatures(copies, protocol, StreamSettings())
    zeros = torch.zeros(1, 6, device=device)
    tokens = torch.ones(1, 2, dtype=torch.int64, device=device)
    _, plain = sampled.run(tokens, ((zeros, zeros),) * 2, 0)
    seen = plain.view(2, 1, 2, 4, -1)[:, :, 1].isnan()  # the second step reads the first one's c
    assert seen.any(-1).all()
