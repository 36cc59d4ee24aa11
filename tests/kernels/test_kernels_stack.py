"""The stack's kernels against float64 autograd over sizes, gates, stackings and masks."""

from dataclasses import dataclass

import kernel_device
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_device import relative, within

from afterdrop.kernels import lstm_stack
from afterdrop.kernels.lstm_stack import Stack, StackShape, StackWeights
from oracles.stack import stack as reference

pytestmark = kernel_device.quiet
device = kernel_device.device


@dataclass
class Found:
    """A stack after a forward and a backward pass, its inputs, and the results in float64."""

    stack: Stack
    wanted: torch.Tensor
    h: torch.Tensor
    c: torch.Tensor
    layers: list[tuple[torch.Tensor, ...]]
    x: torch.Tensor


def spread(mask, sharing, layers, shape):
    """A kernel's mask expanded to [layers, time, B, H] float64."""
    size = (layers, shape.time, shape.rows, shape.hidden)
    if sharing == "none":
        return torch.ones(size, dtype=torch.float64)
    return mask[..., : shape.hidden].double().cpu().expand(size)


def run(shape, state, inter, device, sizes=None):
    generator = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64)

    H, L, B, time = shape.hidden, shape.layers, shape.rows, shape.time
    # Weights of this scale do not saturate gates, where a wrong gradient would look right.
    layers = [
        tuple(
            part.requires_grad_()
            for part in (normal(4 * H, n) / n**0.5, normal(4 * H, H) / H**0.5, normal(4 * H))
        )
        for n in (shape.inputs, *[H] * (L - 1))
    ]
    x, h, c = normal(time, B, shape.inputs).requires_grad_(), normal(L, B, H), normal(L, B, H)
    dy = normal(time, B, H)
    weights = StackWeights(shape, torch.float32, device)
    weights.pack([tuple(p.detach().float().to(device) for p in layer) for layer in layers])
    made = Stack(shape, weights, state, inter, sizes=sizes)
    for mask in made.masks:
        kept = torch.rand(mask.shape, generator=generator) >= 0.3
        mask.copy_(kept / 0.7)
    masks = [
        spread(mask, sharing, n, shape)
        for mask, sharing, n in zip(made.masks, made.sharing, (L, max(1, L - 1)))
    ]
    made.last[..., :H], made.c[:, -1, :, :H] = h, c
    made.x[0, ..., : shape.inputs] = x.detach()
    made.start()
    made.forward()
    wide_dy = torch.zeros_like(made.out)
    wide_dy[..., :H] = dy
    mask = None
    if state != "none":  # output masks are shared over time as the state masks here
        steps = time if state == "step" else 1
        mask = (torch.rand(steps, B, made.out.shape[-1], generator=generator) > 0.3) / 0.7
    made.backward(wide_dy, None if mask is None else mask.to(device))
    y, h, c = reference(x, h, c, layers, masks, shape.capped, shape.skip)
    y.backward(dy if mask is None else dy * mask[..., :H])
    return Found(made, y, h, c, layers, x)


def check(found, device):
    """Forward within 1e-6 (tf32: 2e-3) and gradients within 1e-5 (5e-3), relative to the norm."""
    stack, H = found.stack, found.stack.shape.hidden
    near, nearly = within(device, 1e-6, 2e-3), within(device, 1e-5, 5e-3)
    assert relative(stack.out[..., :H], found.wanted) < near
    assert relative(stack.last[..., :H], found.h) < near
    assert relative(stack.c[:, -1, :, :H], found.c) < near
    for d_x, d_h, (w_x, w_h, bias) in zip(*weight_gradients(stack), found.layers):
        d_x, d_h = (d.unflatten(0, (4, -1))[:, :H].flatten(0, 1) for d in (d_x, d_h))
        assert relative(d_x[:, : w_x.shape[1]], w_x.grad) < nearly
        assert relative(d_h[:, :H], w_h.grad) < nearly
        assert relative(d_h[:, H], bias.grad) < nearly
    inputs = stack.input_gradient()[:, : stack.shape.inputs]
    assert relative(inputs.view_as(found.x), found.x.grad) < nearly


def weight_gradients(stack):
    """The gradients of W and U of all layers."""
    found = [
        torch.full_like(w.flatten(1, 2), torch.nan) for w in (stack.weights.w_x, stack.weights.w_h)
    ]
    stack.input_weight_gradients(found[0])
    stack.recurrent_gradients(found[1])
    return found


def check_padding(stack):
    """Padding units are exactly zero wherever they could leak, except for the one that is 1."""
    H = stack.shape.hidden
    for tensor in (stack.out, stack.last, stack.c, stack.d_gates):
        assert not tensor[..., H:].any()
    assert not stack.x[1:, ..., H:].any() and not stack.x[0, ..., stack.shape.inputs :].any()
    assert (stack.h[:, :-1, :, H] == 1).all() and not stack.h[..., H + 1 :].any()


CASES = [
    # inputs, H, L, B, time, capped, skip, state, inter
    (1, 1, 1, 1, 1, True, True, "none", "none"),
    (5, 33, 1, 2, 2, True, True, "sequence", "none"),
    (5, 33, 2, 2, 2, True, True, "step", "sequence"),
    (40, 7, 2, 3, 3, False, True, "sequence", "step"),
    (6, 9, 3, 5, 2, True, False, "none", "step"),
    (9, 9, 3, 1, 4, True, True, "sequence", "step"),
    (9, 31, 2, 17, 1, False, False, "step", "none"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients_match_float64(case, device):
    *sizes, state, inter = case
    found = run(StackShape(*sizes), state, inter, device)
    check(found, device)
    check_padding(found.stack)


@pytest.mark.parametrize("case", CASES[2:5], ids=str)
@pytest.mark.parametrize("sizes", [lstm_stack._LONG, lstm_stack._WIDE], ids=["long", "wide"])
def test_programs_of_other_sizes_match_float64(sizes, case, device):
    *shape, state, inter = case
    found = run(StackShape(*shape), state, inter, device, sizes)
    check(found, device)
    check_padding(found.stack)


def test_programs_have_the_smallest_size_that_gives_each_a_multiprocessor():
    large, small = 227 * 2**10, 99 * 2**10
    assert lstm_stack.forward_sizes(960, 2, 132, large) is lstm_stack._LONG  # 120 programs
    assert lstm_stack.forward_sizes(736, 4, 132, large) is lstm_stack._WIDE  # 184, so 92
    assert lstm_stack.forward_sizes(1248, 4, 132, large) is lstm_stack._SMALL  # 312, 156
    assert lstm_stack.forward_sizes(960, 2, 132, small) is lstm_stack._SMALL


@given(
    sizes=st.tuples(*[st.integers(1, 6)] * 2, *[st.integers(1, 3)] * 3),
    form=st.tuples(st.booleans(), st.booleans()),
    sharing=st.tuples(*[st.sampled_from(["none", "sequence", "step"])] * 2),
)
@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_small_stack_matches_float64(sizes, form, sharing, device):
    check(run(StackShape(*sizes, *form), *sharing, device), device)


@pytest.mark.parametrize("capped", [True, False])
@pytest.mark.parametrize("gate", range(4))
def test_a_nan_gate_shows_in_the_output(gate, capped, device):
    """As in the plain form: a run or an evaluation with broken weights must not look sound."""
    shape = StackShape(3, 5, 1, 2, 2, capped)
    weights = StackWeights(shape, torch.float32, device)
    weights.bias[0, gate, 4] = torch.nan
    stack = Stack(shape, weights, training=False)
    stack.c[:, -1, :, :5] = 1.0
    stack.start()
    stack.forward()
    assert stack.out[..., 4].isnan().all()


@pytest.mark.parametrize("bias", [-200.0, 200.0])
def test_saturated_gates_are_finite(bias, device):
    """Although their exponentials overflow."""
    shape = StackShape(3, 5, 1, 2, 2)
    weights = StackWeights(shape, torch.float32, device)
    weights.bias[0, 0, :5], weights.bias[0, 1:, :5] = bias, abs(bias)
    weights.bias[0, 2, :5] = -abs(bias)
    stack = Stack(shape, weights, training=False)
    stack.start()
    stack.forward()  # c = j = ±1, h = tanh(c)
    wanted = torch.tensor(bias).sign().tanh().to(device).expand(2, 2, 5)
    torch.testing.assert_close(stack.out[..., :5], wanted)


def test_rows_that_are_not_kept_start_from_zero(device):
    """The others start from the dropped state and the cell of the last window."""
    stack = Stack(
        StackShape(3, 5, 2, 2, 3),
        StackWeights(StackShape(3, 5, 2, 2, 3), torch.float32, device),
        state="step",
    )
    stack.last[..., :5], stack.c[:, -1, :, :5] = 2.0, 3.0
    stack.masks[0].fill_(7.0)
    stack.masks[0][:, 0] = 0.5
    stack.dc.fill_(1.0)
    stack.start(torch.tensor([0.0, 1.25], device=device))
    for row, (h, c) in enumerate([(0.0, 0.0), (1.0, 3.0)]):
        assert (stack.h[:, 0, row, :5] == h).all() and (stack.c[:, 0, row, :5] == c).all()
    assert (stack.h[:, 0, :, 5] == 1).all() and not stack.h[:, 0, :, 6:].any()
    assert not stack.dc.any() and (stack.last[..., :5] == 2.0).all()


def test_windows_without_training_carry_the_state(device):
    """Two windows of 2 steps equal one of 4 to the bit; nothing is kept for a backward pass."""
    whole, part = StackShape(3, 5, 2, 2, 4), StackShape(3, 5, 2, 2, 2)
    weights = StackWeights(whole, torch.float32, device)
    generator = torch.Generator().manual_seed(0)
    sizes = [(20, 3), (20, 5)]
    weights.pack(
        [
            tuple(
                torch.randn(size, generator=generator).to(device)
                for size in (first, (20, 5), (20,))
            )
            for first in sizes
        ]
    )
    x = torch.randn(4, 2, 3, generator=generator).to(device)
    one, two = (Stack(shape, weights, training=False) for shape in (whole, part))
    one.x[0, ..., :3] = x
    one.start()
    one.forward()
    for window in x.split(2):
        two.x[0, ..., :3] = window
        two.start()
        two.forward()
    assert torch.equal(two.out, one.out[2:])
    assert torch.equal(two.last, one.last) and torch.equal(two.c[:, -1], one.c[:, -1])
    assert two.gates.numel() == 1 and not two.h[..., 5].any()
