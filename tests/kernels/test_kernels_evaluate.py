"""`TextFusedEngine` against `GenericEngine`: every tensor of the scores.

Operands are float32 here, so both differ by rounding only: within 1e-5. Partitions, where 1/T is up
to 16, agree within 50 times that. Differences of halves are interpolated from few powers of the
ladder: within 100 times, and within 1000 times beyond the lowest temperature.
"""

import math

import kernel_device
import pytest
import torch
from tiny_evaluation import MODELS, Engines, Float32Engine, V, assert_same, build, evaluate_nine

import afterdrop as ad
from afterdrop.errors import DataError
from afterdrop.evaluation.engines.sampled_features import SampledFeatures, with_bias, with_ones
from afterdrop.evaluation.engines.text_fused import Sizes
from afterdrop.evaluation.request import Protocol, Request, StreamSettings
from afterdrop.masks.uniforms import Plan
from afterdrop.models.fused import Copies, DeterministicPass

pytestmark = kernel_device.quiet
device = kernel_device.device


@pytest.mark.parametrize(
    ("name", "lifetime"),
    [
        ("two layers", "window"),
        ("projection", "stream"),
        ("Mogrifier", "stream"),
        ("untied plain stack", "window"),
        ("room for one bias", "window"),
        ("embedding rows", "window"),
        ("embedding rows", "stream"),
    ],
)
def test_all_scores_match_the_plain_engine(name, lifetime, device):
    model = build(device, **MODELS[name])
    stream = StreamSettings(window=3, stripes=2, lifetime=lifetime)
    alphas = (0, 0.25, 1) if lifetime == "window" else (0, 1)
    engines = Engines(fused=Float32Engine)
    found = evaluate_nine(model, engines, stream, fused_states=True, alphas=alphas)
    wanted = evaluate_nine(model, Engines(), stream, alphas=alphas)
    (engine,) = engines.made
    assert engine.chunks == 1  # all windows at once
    assert_same(found, wanted, kernel_device.within(device, 1e-5))


def test_chunks_of_windows_and_targets_do_not_change_scores(device):
    """One window at a time, one of which is all padding, and two targets at a time."""
    model = build(device, **MODELS["projection"])
    stream, engines = StreamSettings(window=4, stripes=2), Engines(fused=Float32Engine)
    whole = evaluate_nine(model, engines, stream)
    windows = Sizes().rows // (2 * 4)  # of two multipliers and four samples
    assert engines.made[0].targets_together == 2 * 4 * windows  # limited by the number of targets
    sizes = Sizes(
        rows=1,
        logits=2 * 4 * 16,
        sums=5 * 12 * 32,  # finishes two such pairs together
        means=3 * 2 * 16,  # three targets
    )
    engines = Engines(fused=Float32Engine, sizes=sizes)
    found = evaluate_nine(model, engines, stream)
    (engine,) = engines.made
    assert (engine.chunks, engine.targets_at_once, engine.targets_together) == (4, 2, 4)
    assert_same(found, whole)


@pytest.mark.parametrize("value", [-200.0, float("-inf")])
def test_too_low_log_probabilities_are_left_to_the_plain_engine(value, device):
    """Sums underflow below exp(−115), and for masked classes."""
    model = build(device, **MODELS["projection"])
    with torch.no_grad():
        model.softmax_bias[0] = value  # never a target
    stream, engines = StreamSettings(window=3, stripes=2), Engines(fused=Float32Engine)
    found = evaluate_nine(model, engines, stream, alphas=(1,))
    wanted = evaluate_nine(model, Engines(), stream, alphas=(1,))
    assert engines.made[1].batches == [0]
    for name, tensor in wanted.tensors.items():
        assert torch.equal(found.tensors[name].nan_to_num(7), tensor.nan_to_num(7)), name


def test_nan_logits_are_refused(device):
    model = build(device, **MODELS["projection"])
    with torch.no_grad():
        model.softmax_bias[3] = float("nan")
    engines = Engines(fused=Float32Engine)
    with pytest.raises(DataError, match="NaN or infinite logits"):
        evaluate_nine(model, engines, StreamSettings(window=3, stripes=2))


def protocol_of(multipliers):
    """A protocol of 4 samples, for features under masks."""
    request = Request(ad.Grid((1,), multipliers), Plan(4), stream=StreamSettings())
    return Protocol(request, 0.125, 8.0, V, "", batched=True, shared=False)


@pytest.mark.parametrize("name", ["projection", "room for one bias"])
def test_two_float16_columns_hold_the_bias_nearly_as_float32(name, device):
    model = build(device, **MODELS[name])
    copies = Copies(model, torch.float16)
    copies.pack()
    sampled = SampledFeatures(copies, protocol_of((1,)))
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
    """Three windows without dropout: within 1e-6 of the norm."""
    model = build(device, **MODELS["two layers"])
    copies = Copies(model, torch.float32)
    copies.pack()
    passes = DeterministicPass(copies, 2, 3)
    tokens = torch.randint(V, (3, 2, 3), device=device)
    near = kernel_device.within(device, 1e-6)
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
    """The plain form would report it; `why_not_held` must be able to see it."""
    model = build(device, **MODELS["two layers"])
    with torch.no_grad():
        model.stack.layers[0].bias[6 * gate + 2] = torch.nan
    copies = Copies(model, torch.float32)
    copies.pack()
    sampled = SampledFeatures(copies, protocol_of((0.5, 1)))
    zeros = torch.zeros(1, 6, device=device)
    tokens = torch.ones(1, 2, dtype=torch.int64, device=device)
    _, plain = sampled.run(tokens, ((zeros, zeros),) * 2, 0)
    seen = plain.view(2, 1, 2, 4, -1)[:, :, 1].isnan()  # the second step reads the first one's c
    assert seen.any(-1).all()
