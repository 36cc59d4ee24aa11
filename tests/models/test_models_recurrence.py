"""The layer in both forms, and its gradient, against the oracle and each other."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afterdrop.models import LSTMLayer, ModelError
from afterdrop.models.cell import INPUT_GATES, gate_count, lstm_step
from afterdrop.models.product import PACK_FROM_ELEMENTS, accumulator, linear, row_product
from afterdrop.models.recurrence import lstm_recurrence
from afterdrop.models.unrolled import unrolled_recurrence
from oracles import lstm as oracle

GATES = st.sampled_from(INPUT_GATES)
MASK_KINDS = st.sampled_from(["none", "sequence", "step"])


def make(gate, shape, seed=0, dtype=torch.float64):
    """x, h, c, W_x, W_h, b of a layer, as leaves."""
    time, batch, inputs, hidden = shape
    rows = gate_count(gate) * hidden
    generator = torch.Generator().manual_seed(seed)
    shapes = [(time, batch, inputs), (batch, hidden), (batch, hidden), (rows, inputs)]
    shapes += [(rows, hidden), (rows,)]
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


def make_mask(kind, time, batch, hidden, seed, dtype=torch.float64):
    if kind == "none":
        return None
    shape = (batch, hidden) if kind == "sequence" else (time, batch, hidden)
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) > 0.4).to(dtype) / 0.6


def fused(gate, masks, x, h, c, w_x, w_h, b):
    return lstm_recurrence(x, (h, c), (w_x, w_h, b), gate, masks)


def plain(gate, masks, x, h, c, w_x, w_h, b):
    return unrolled_recurrence(x @ w_x.t() + b, (h, c), lambda x, h: x + h @ w_h.t(), gate, masks)


@settings(max_examples=40, deadline=None)
@given(GATES, MASK_KINDS, MASK_KINDS, st.tuples(*[st.integers(1, 4)] * 4), st.integers(0, 2**20))
def test_both_forms_equal_the_oracle(gate, state_kind, update_kind, shape, seed):
    time, batch, _, hidden = shape
    arrays = make(gate, shape, seed)
    masks = tuple(
        make_mask(kind, time, batch, hidden, seed + n)
        for n, kind in enumerate((state_kind, update_kind))
    )
    full = [None if m is None else m.expand(time, batch, hidden).tolist() for m in masks]
    x, h, c, w_x, w_h, b = (a.detach().numpy() for a in arrays)
    wanted_h, wanted_c = oracle.layer(
        x, h, c, {"weight_x": w_x, "weight_h": w_h, "bias": b}, gate, *full
    )
    with torch.no_grad():
        without_grad = fused(gate, masks, *arrays)
    for got_h, got_c in (fused(gate, masks, *arrays), plain(gate, masks, *arrays), without_grad):
        np.testing.assert_allclose(got_h.detach().numpy(), wanted_h, atol=1e-12)
        np.testing.assert_allclose(got_c.detach().numpy(), wanted_c, atol=1e-12)


@pytest.mark.parametrize("gate", INPUT_GATES)
@pytest.mark.parametrize("kinds", [("none", "none"), ("sequence", "step"), ("step", "sequence")])
def test_hand_written_gradient_passes_gradcheck(gate, kinds):
    shape = (3, 2, 2, 2)
    masks = tuple(make_mask(kind, 3, 2, 2, seed=5 + n) for n, kind in enumerate(kinds))
    assert torch.autograd.gradcheck(lambda *a: fused(gate, masks, *a), make(gate, shape, 3))


@settings(max_examples=30, deadline=None)
@given(GATES, MASK_KINDS, MASK_KINDS, st.tuples(*[st.integers(1, 5)] * 4), st.integers(0, 2**20))
def test_hand_written_gradient_equals_autograd(gate, state_kind, update_kind, shape, seed):
    time, batch, _, hidden = shape
    arrays = make(gate, shape, seed)
    masks = (
        make_mask(state_kind, time, batch, hidden, seed),
        make_mask(update_kind, time, batch, hidden, seed + 1),
    )
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(s, generator=generator, dtype=torch.float64)
               for s in ((time, batch, hidden), (batch, hidden))]  # fmt: skip
    gradients = []
    for form in (fused, plain):
        h, c = form(gate, masks, *arrays)
        gradients.append(
            torch.autograd.grad((h * weights[0]).sum() + (c * weights[1]).sum(), arrays)
        )
    for got, wanted in zip(*gradients):
        torch.testing.assert_close(got, wanted)


def test_gradient_matches_the_oracle_by_finite_differences():
    arrays = make("capped", (3, 2, 2, 2), 7)
    h, _ = fused("capped", (None, None), *arrays)
    h.sum().backward()
    x, h0, c0, w_x, w_h, b = (a.detach().numpy().copy() for a in arrays)
    weight = {"weight_x": w_x, "weight_h": w_h, "bias": b}
    for n, array in ((0, x), (1, h0), (2, c0), (3, w_x), (4, w_h), (5, b)):
        index, step = tuple(0 for _ in array.shape), 1e-6
        sums = []
        for sign in (1, -1):
            array[index] += sign * step
            sums.append(oracle.layer(x, h0, c0, weight)[0].sum())
            array[index] -= sign * step
        slope = (sums[0] - sums[1]) / (2 * step)
        assert arrays[n].grad[index].item() == pytest.approx(slope, abs=1e-8)


def test_one_step_of_the_cell_equals_the_oracle():
    gates, c = torch.randn(2, 12, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    h, after = lstm_step(gates, c, "capped")
    parameters = {
        "weight_x": np.eye(12), "weight_h": np.zeros((12, 3)), "bias": np.zeros(12)
    }  # fmt: skip
    wanted_h, wanted_c = oracle.layer(gates[None].numpy(), c.numpy(), c.numpy(), parameters)
    np.testing.assert_allclose(h.numpy(), wanted_h[0])
    np.testing.assert_allclose(after.numpy(), wanted_c)


def test_capped_cell_stays_within_one():
    arrays = [a.detach() * 5 for a in make("capped", (40, 2, 3, 4), 1, torch.float32)]
    arrays[2] = arrays[2].clamp(-1, 1)
    assert fused("capped", (None, None), *arrays)[1].abs().max() <= 1 + 1e-6


@settings(max_examples=15, deadline=None)
@given(GATES, st.tuples(*[st.integers(1, 3)] * 4), st.integers(0, 2**20))
def test_layer_norm_equals_the_oracle(gate, shape, seed):
    time, batch, inputs, hidden = shape
    layer = LSTMLayer(inputs, hidden + 1, input_gate=gate, layer_norm=True).double()
    torch.manual_seed(seed)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(time, batch, inputs, dtype=torch.float64)
    state = tuple(torch.randn(2, batch, hidden + 1, dtype=torch.float64))
    y, (_, c) = layer(x, state)
    parameters = {name: p.detach().numpy() for name, p in layer.named_parameters()}
    wanted, wanted_c = oracle.layer(x.numpy(), *(s.numpy() for s in state), parameters, gate)
    np.testing.assert_allclose(y.detach().numpy(), wanted, atol=1e-9)
    np.testing.assert_allclose(c.detach().numpy(), wanted_c, atol=1e-9)


def test_packed_products_change_nothing():
    x, weight, bias, total = (torch.randn(s) for s in ((3, 5), (8, 5), (8,), (3, 8)))
    for wanted, form in (
        (x @ weight.t() + bias, lambda size: linear(x, weight, bias, size)),
        (total + x @ weight.t(), lambda size: accumulator(weight, 3, size)(total.clone(), x)),
        (total @ weight, lambda size: row_product(weight, 3, size)(total)),
    ):
        for from_elements in (1, 2**40):  # packed where oneDNN is available, and plain
            torch.testing.assert_close(form(from_elements), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("gate", INPUT_GATES)
def test_a_layer_that_is_large_enough_to_be_packed_equals_float64(gate):
    """As any smaller one: weights of 2^18 elements or more are packed where oneDNN is available."""
    shape = (2, 2, 8, 300)
    arrays = [a.detach() / a.shape[-1] ** 0.5 for a in make(gate, shape, 2)]
    assert arrays[4].numel() >= PACK_FROM_ELEMENTS
    results = []
    for form, dtype in ((fused, torch.float32), (plain, torch.float64)):
        leaves = [a.to(dtype).requires_grad_() for a in arrays]
        h, c = form(gate, (None, None), *leaves)
        results.append([h, c, *torch.autograd.grad(h.sum() + c.sum(), leaves)])
    for found, wanted in zip(*results):
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-4)


def test_second_derivatives_are_refused_not_wrong():
    arrays = make("capped", (2, 1, 2, 2))
    h, _ = fused("capped", (None, None), *arrays)
    with pytest.raises(ModelError, match="create_graph"):
        torch.autograd.grad(h.sum(), arrays[0], create_graph=True)


def test_autocast_leaves_the_layer_in_its_own_type():
    layer = LSTMLayer(3, 4)
    zero = torch.zeros(2, 4)
    x = torch.randn(5, 2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = layer(x.bfloat16().float(), (zero, zero))
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, layer(x.bfloat16().float(), (zero, zero))[0])
