"""The stack: against nn.LSTM, its stackings, its carried state and its masks over time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from watcher import Watcher

from afterdrop.errors import AfterdropError
from afterdrop.models import LSTMLayer, LSTMStack, MaskConfig, ModelError


def copied_to_torch(stack: LSTMStack, inputs: int, hidden: int) -> torch.nn.LSTM:
    """nn.LSTM with the stack's weights: its blocks are i, f, g, o and ours j, o, f, i."""
    reference = torch.nn.LSTM(inputs, hidden, len(stack.layers))
    with torch.no_grad():
        for k, layer in enumerate(stack.layers):
            for ours, theirs in (("weight_x", "weight_ih"), ("weight_h", "weight_hh"),
                                 ("bias", "bias_ih")):  # fmt: skip
                j, o, f, i = getattr(layer, ours).chunk(4)
                getattr(reference, f"{theirs}_l{k}").copy_(torch.cat([i, f, j, o]))
            getattr(reference, f"bias_hh_l{k}").zero_()
    return reference


@settings(max_examples=20, deadline=None)
@given(st.tuples(*[st.integers(1, 6)] * 4), st.integers(1, 3))
def test_without_cap_masks_and_skip_it_is_nn_lstm(shape, layers):
    time, batch, inputs, hidden = shape
    stack = LSTMStack(inputs, (hidden,) * layers, input_gate="plain", stacking="plain")
    reference = copied_to_torch(stack, inputs, hidden)
    x = torch.randn(time, batch, inputs)
    state = torch.randn(2, layers, batch, hidden)
    y, after = stack(x, tuple((state[0, k], state[1, k]) for k in range(layers)))
    wanted, (h, c) = reference(x, (state[0], state[1]))
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(torch.stack([pair[0] for pair in after]), h)
    torch.testing.assert_close(torch.stack([pair[1] for pair in after]), c)
    with torch.no_grad():
        torch.testing.assert_close(stack(x)[0], reference(x)[0])


def test_its_gradients_are_those_of_nn_lstm():
    stack = LSTMStack(3, (4, 4), input_gate="plain", stacking="plain")
    reference = copied_to_torch(stack, 3, 4)
    x = torch.randn(5, 2, 3)
    stack(x)[0].square().sum().backward()
    reference(x)[0].square().sum().backward()
    j, o, f, i = stack.layers[0].weight_x.grad.chunk(4)
    torch.testing.assert_close(torch.cat([i, f, j, o]), reference.weight_ih_l0.grad)
    j, o, f, i = stack.layers[1].weight_h.grad.chunk(4)
    torch.testing.assert_close(torch.cat([i, f, j, o]), reference.weight_hh_l1.grad)


@pytest.mark.parametrize("stacking", ["skip", "residual", "plain"])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_two_windows_are_one_of_twice_the_length(stacking, layer_norm):
    stack = LSTMStack(3, (4, 4), stacking=stacking, layer_norm=layer_norm)
    x = torch.randn(6, 2, 3)
    whole, after = stack(x)
    first, state = stack(x[:3])
    second, state = stack(x[3:], state)
    torch.testing.assert_close(torch.cat([first, second]), whole)
    torch.testing.assert_close(state, after)


def test_layers_of_different_sizes_stack_plainly():
    y, state = LSTMStack(3, (4, 2), stacking="plain")(torch.randn(5, 2, 3))
    assert y.shape == (5, 2, 2)
    assert [tuple(h.shape) for h, _ in state] == [(2, 4), (2, 2)]


SITES = ("input_dropout", "inter_layer_dropout", "state_dropout", "update_dropout")


@pytest.mark.parametrize("sharing", ["sequence", "step"])
def test_masks_are_shared_or_not_over_time_and_each_layer_has_its_own(sharing):
    stack = LSTMStack(8, (8, 8), **{site: MaskConfig(0.5, sharing) for site in SITES})
    with Watcher(stack) as watcher:
        stack(torch.ones(6, 4, 8))
    assert not watcher.stray
    assert set(watcher.masks) == {
        "input_dropout", "inter_layer_dropout.0",
        "layers.0.state_dropout", "layers.0.update_dropout",
        "layers.1.state_dropout", "layers.1.update_dropout",
    }  # fmt: skip
    for name, mask in watcher.masks.items():
        if sharing == "step":
            assert mask.shape == (6, 4, 8)
        else:
            assert mask.shape == ((4, 8) if name.startswith("layers") else (1, 4, 8))


@pytest.mark.parametrize("site, sharing", [(s, h) for s in SITES for h in ("sequence", "step")])
def test_a_real_mask_is_constant_over_time_exactly_when_shared(site, sharing):
    stack = LSTMStack(64, (64, 64), **{site: MaskConfig(0.5, sharing)})
    drawn = []
    module = {
        "input_dropout": stack.input_dropout,
        "inter_layer_dropout": stack.inter_layer_dropout[0],
    }.get(site)
    for target in [module] if module else [getattr(layer, site) for layer in stack.layers]:
        target.register_forward_hook(lambda _m, _i, out: drawn.append(out.detach()))
    stack(torch.ones(5, 3, 64))
    for out in drawn:
        kept = out != 0
        if out.dim() == 2:
            assert sharing == "sequence"
        else:
            assert bool((kept == kept[0]).all()) == (sharing == "sequence")
    if len(drawn) == 2:
        assert not torch.equal(drawn[0], drawn[1])


def test_eval_mode_and_rate_zero_are_deterministic():
    stack = LSTMStack(3, (4, 4), **{site: MaskConfig(0.5) for site in SITES})
    bare = LSTMStack(3, (4, 4))
    bare.load_state_dict(stack.state_dict())
    x = torch.randn(5, 2, 3)
    assert not torch.equal(stack(x)[0], stack(x)[0])
    torch.testing.assert_close(stack.eval()(x)[0], bare(x)[0], rtol=0, atol=0)


def test_eval_mode_still_shows_every_site():
    stack = LSTMStack(3, (4, 4), **{site: MaskConfig(0.5) for site in SITES}).eval()
    with Watcher(stack) as watcher:
        stack(torch.ones(2, 2, 3))
    assert len(watcher.masks) == 6


def test_layer_initialisation_statistics():
    layer = LSTMLayer(400, 100, forget_bias=2.0)
    for weight, fan_in in ((layer.weight_x, 400), (layer.weight_h, 100)):
        sigma = (1.3 / fan_in) ** 0.5
        assert weight.abs().max() <= 2 * sigma + 1e-6
        # 40 000 draws and more: the standard error of a standard deviation is below 0.4 percent.
        assert abs(weight.std().item() * fan_in**0.5 - 1.003) < 0.015
    forget = layer.bias[200:300]
    assert (forget - 2).abs().max() <= 2 * 0.013**0.5 + 1e-6
    assert abs(forget.mean().item() - 2) < 0.05
    rest = torch.cat([layer.bias[:200], layer.bias[300:]])
    assert 0.08 < rest.std().item() < 0.12 and abs(rest.mean().item()) < 0.03


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: LSTMStack(3, ()), "hidden_sizes"),
        (lambda: LSTMStack(3, (4, 5)), "plain"),
        (lambda: LSTMStack(3, (4,), input_gate="peephole"), "capped"),
        (lambda: LSTMStack(0, (4,)), "input_size"),
        (lambda: MaskConfig(1.0), "rate"),
        (lambda: MaskConfig(0.5, "window"), "sequence"),
        (lambda: LSTMStack(3, (4,))(torch.zeros(2, 3)), "time, B, E"),
        (lambda: LSTMStack(3, (4,))(torch.zeros(0, 2, 3)), "at least one step"),
        (
            lambda: LSTMStack(3, (4,))(torch.zeros(1, 2, 3), LSTMStack(3, (4,)).initial_state(5)),
            "initial_state",
        ),
    ],
)
def test_errors_name_the_argument_and_the_remedy(make, words):
    with pytest.raises(ModelError, match=words) as caught:
        make()
    assert isinstance(caught.value, AfterdropError) and isinstance(caught.value, ValueError)
