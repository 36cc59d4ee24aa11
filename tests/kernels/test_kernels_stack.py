"""The stack's kernels against float64 autograd over sizes, gates, stackings and masks."""

from dataclasses import dataclass, replace

import kernel_device
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_device import relative, within

from afterdrop.kernels import stack_sizes
from afterdrop.kernels.lstm_stack import Stack, StackShape, StackWeights
from afterdrop.kernels.stack_sizes import StackSizes
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
    rounds: list[list[tuple[torch.Tensor, ...]]]


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
    rounds = [
        [make_round(shape, inputs, number, normal) for number in range(shape.rounds)]
        for inputs in (shape.inputs, *[H] * (L - 1))
    ]

    def copied(parts):
        return tuple(p.detach().float().to(device) for p in parts)

    weights = StackWeights(shape, torch.float32, device)
    weights.pack(
        [copied(layer) for layer in layers],
        [[(copied(own[:2]), *copied(own[2:])) for own in layer] for layer in rounds],
    )
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
    y, h, c = reference(x, h, c, layers, masks, shape.capped, shape.skip, rounds)
    y.backward(dy if mask is None else dy * mask[..., :H])
    return Found(made, y, h, c, layers, x, rounds)


def make_round(shape, inputs, number, normal):
    """D, U and b of a round, whose gates are not saturated."""
    read, gated = (inputs, shape.hidden) if number % 2 else (shape.hidden, inputs)
    parts = normal(shape.rank, read) / read**0.5, normal(gated, shape.rank) / shape.rank**0.5
    return tuple(part.requires_grad_() for part in (*parts, normal(gated)))


def check(found, device):
    """Forward within 1e-6 and gradients within 1e-5, relative to the norm."""
    stack, H = found.stack, found.stack.shape.hidden
    near, nearly = within(device, 1e-6), within(device, 1e-5)
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


def check_rounds(found, device):
    """Gradients of the weights and biases of rounds within 1e-5."""
    stack, nearly = found.stack, within(device, 1e-5)
    weights = stack.weights.rounds
    d_down, d_up = (torch.full_like(w, torch.nan) for w in (weights.down, weights.up))
    stack.round_gradients(d_down, d_up)
    for layer, rounds in enumerate(found.rounds):
        for number, (down, up, bias) in enumerate(rounds):
            (rank, read), gated = down.shape, len(up)
            assert relative(d_down[number, layer, :rank, :read], down.grad) < nearly
            assert relative(d_up[number, layer, :gated, :rank], up.grad) < nearly
            assert relative(d_up[number, layer, :gated, rank], bias.grad) < nearly


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


def many_rows():
    """Sizes for many rows and any units; one stage, as float32 takes twice the shared memory."""
    many = stack_sizes.MANY
    forward = many.forward | {"BLOCK_U": 32, "num_stages": 1}
    return replace(many, forward=forward, products=many.products | {"num_stages": 1})


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


ROUNDS = [
    # the case, rounds, rank
    (CASES[0], 1, 1),
    (CASES[2], 5, 3),
    (CASES[3], 4, 2),
    ((70, 9, 2, 17, 2, True, True, "step", "none"), 3, 33),
    ((3, 70, 1, 2, 2, True, False, "sequence", "none"), 2, 5),
    ((3, 5, 1, 513, 1, True, True, "none", "none"), 2, 2),  # the largest programs
]


@pytest.mark.parametrize(("case", "rounds", "rank"), ROUNDS, ids=str)
def test_outputs_and_gradients_with_mogrifier_rounds_match_float64(case, rounds, rank, device):
    *sizes, state, inter = case
    shape = StackShape(*sizes, rounds=rounds, rank=rank)
    large = many_rows() if shape.rows >= stack_sizes.MANY_ROWS else None
    found = run(shape, state, inter, device, large)
    check(found, device)
    check_rounds(found, device)
    check_padding(found.stack)


@pytest.mark.parametrize("case", CASES[2:5], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [StackSizes(16, stack_sizes.LONG), StackSizes(16, stack_sizes.WIDE), many_rows()],
    ids=["long", "wide", "many rows"],
)
def test_programs_of_other_sizes_match_float64(sizes, case, device):
    *shape, state, inter = case
    found = run(StackShape(*shape), state, inter, device, sizes)
    check(found, device)
    check_padding(found.stack)


def test_programs_have_the_smallest_size_that_gives_each_a_multiprocessor():
    large, small = 227 * 2**10, 99 * 2**10

    def forward(hidden, layers, memory):
        return stack_sizes.stack_sizes(hidden, layers, 64, 132, memory).forward

    assert forward(960, 2, large) is stack_sizes.LONG  # 120 programs
    assert forward(736, 4, large) is stack_sizes.WIDE  # 184, so 92
    assert forward(1248, 4, large) is stack_sizes.SMALL  # 312, 156
    assert forward(960, 2, small) is stack_sizes.SMALL


def test_many_rows_have_large_tiles_where_they_fit():
    sizes = [stack_sizes.stack_sizes(960, 2, rows, 132, 227 * 2**10) for rows in (511, 512)]
    assert sizes[0].rows == 64 and sizes[1] == stack_sizes.MANY
    narrow = stack_sizes.stack_sizes(736, 4, 512, 132, 227 * 2**10)
    assert (narrow.rows, narrow.forward["BLOCK_U"]) == (128, 32)
    assert stack_sizes.stack_sizes(960, 2, 512, 108, 99 * 2**10).rows == 64


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
