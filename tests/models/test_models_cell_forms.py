"""All forms of the LSTM cell (docs/cells.md) on the same weights and input, against float64.

Each form runs one layer over a window in float32, with or without a state mask. Outputs and
gradients are compared with autograd over the plain equations in float64.

Legend: t time steps, B rows, E inputs, H hidden units.
"""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from afterdrop.models.cell import lstm_step
from afterdrop.models.recurrence import lstm_recurrence
from afterdrop.models.unrolled import unrolled_recurrence
from oracles.stack import stack as oracle

TIME, B, E, H = 4, 3, 5, 6
NAMES = ("x", "h", "c", "w_x", "w_h", "bias")
REPOSITORY = Path(__file__).parents[2]


def make_inputs():
    """x, h, c, W_x, W_h, b and the gradient of the output, float64; gates are not saturated."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(TIME, B, E), (B, H), (B, H), (4 * H, E), (4 * H, H), (4 * H,), (TIME, B, H)]
    scales = [1, 1, 0.5, E**-0.5, H**-0.5, 1, 1]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        for shape, scale in zip(shapes, scales)
    ]


def make_mask(masked):
    generator = torch.Generator().manual_seed(2)
    return (torch.rand(B, H, generator=generator) > 0.3) / 0.7 if masked else None


def by_autograd(form, inputs, dy, dtype):
    """Output, last c, and the gradients of all inputs for the output's gradient dy."""
    leaves = [part.to(dtype).requires_grad_() for part in inputs]
    y, c = form(*leaves)
    return {"y": y, "last c": c} | dict(
        zip(NAMES, torch.autograd.grad(y, leaves, dy.to(dtype)), strict=True)
    )


def wanted(gate, mask):
    full = torch.ones(1, TIME, B, H, dtype=torch.float64) * (1.0 if mask is None else mask.double())

    def form(x, h, c, w_x, w_h, bias):
        layers = [(w_x, w_h, bias)]
        y, _, last_c = oracle(x, h[None], c[None], layers, (full, None), gate == "capped", True)
        return y, last_c[0]

    *inputs, dy = make_inputs()
    return by_autograd(form, inputs, dy, torch.float64)


def loop_of_cells(gate, mask):
    def form(x, h, c, w_x, w_h, bias):
        outputs = []
        for x_BE in x:
            dropped = h if mask is None else h * mask
            h, c = lstm_step(x_BE @ w_x.t() + dropped @ w_h.t() + bias, c, gate)
            outputs.append(h)
        return torch.stack(outputs), c

    *inputs, dy = make_inputs()
    return by_autograd(form, inputs, dy, torch.float32)


def unrolled(gate, mask):
    def form(x, h, c, w_x, w_h, bias):
        gates = x @ w_x.t() + bias
        return unrolled_recurrence(gates, (h, c), lambda g, h: g + h @ w_h.t(), gate, (mask, None))

    *inputs, dy = make_inputs()
    return by_autograd(form, inputs, dy, torch.float32)


def recurrence(gate, mask):
    def form(x, h, c, w_x, w_h, bias):
        return lstm_recurrence(x, (h, c), (w_x, w_h, bias), gate, (mask, None))

    *inputs, dy = make_inputs()
    return by_autograd(form, inputs, dy, torch.float32)


def kernels(gate, mask):
    """A stack of one layer in float32: on a GPU, or on a CPU in Triton's interpreter."""
    from afterdrop.kernels.lstm_stack import Stack, StackShape, StackWeights

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x, h, c, w_x, w_h, bias, dy = (part.float().to(device) for part in make_inputs())
    shape = StackShape(E, H, 1, B, TIME, capped=gate == "capped", skip=True)
    weights = StackWeights(shape, torch.float32, device)
    weights.pack([(w_x, w_h, bias)])
    stack = Stack(shape, weights, "none" if mask is None else "sequence")
    if mask is not None:
        stack.masks[0][..., :H] = mask
    stack.last[0, :, :H], stack.c[0, -1, :, :H] = h, c
    stack.x[0, ..., :E] = x
    stack.start()
    stack.forward()
    wide_dy = torch.zeros_like(stack.out)
    wide_dy[..., :H] = dy
    found = {"y": stack.out[..., :H].clone(), "last c": stack.c[0, -1, :, :H].clone()}
    stack.backward(wide_dy, None)
    d_w_x, d_w_h = (torch.zeros_like(w.flatten(1, 2)) for w in (weights.w_x, weights.w_h))
    stack.input_weight_gradients(d_w_x)
    stack.recurrent_gradients(d_w_h)
    d_w_x, d_w_h = (d[0].unflatten(0, (4, -1))[:, :H].flatten(0, 1) for d in (d_w_x, d_w_h))
    # The kernels treat the carried state as a constant, as training does: it has no gradient.
    found |= {"w_x": d_w_x[:, :E], "w_h": d_w_h[:, :H], "bias": d_w_h[:, H]}
    return found | {"x": stack.input_gradient()[:, :E].view(TIME, B, E)}


FORMS = [loop_of_cells, unrolled, recurrence]
if importlib.util.find_spec("triton") is not None:
    FORMS.append(kernels)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of masked lanes, in the interpreter
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "state mask"])
@pytest.mark.parametrize("gate", ["capped", "plain"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_form_gives_the_outputs_and_gradients_of_float64(form, gate, masked):
    mask = make_mask(masked)
    exact, found = wanted(gate, mask), form(gate, mask)
    assert found.keys() >= {"y", "last c", "x", "w_x", "w_h", "bias"}
    # Products on a GPU have 10-bit mantissas (tf32).
    tolerance = 5e-3 if form is kernels and torch.cuda.is_available() else 1e-5
    for name, value in found.items():
        error = (value.detach().double().cpu() - exact[name]).norm() / exact[name].norm()
        assert error < tolerance, name


def test_the_page_about_the_forms_names_files_that_exist():
    text = (REPOSITORY / "docs/cells.md").read_text(encoding="utf-8")
    files = re.findall(r"`((?:src|tests)/[\w/]+\.py)`", text)
    assert len(files) >= 8
    for file in files:
        assert (REPOSITORY / file).is_file(), file
