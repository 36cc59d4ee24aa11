"""Clip, L2, Adam and copy against `clip_grad_norm_`, `add_prior_gradient` and `AdamTF`.

Parameters and squares are float32 in both, so they agree within 1e-6 relative to their norm; the
padded copy holds the updated parameter to the bit.
"""

import kernel_device
import pytest
import torch
from kernel_device import relative

from afterdrop.kernels import adam as adam_kernels
from afterdrop.kernels.adam import Adam, Slot
from afterdrop.train.objective import add_prior_gradient
from afterdrop.train.optimiser import AdamTF

pytestmark = kernel_device.quiet
device = kernel_device.device


def padded_slots(device, dtype):
    """A matrix of 4 groups, a vector whose gradient is a column of it, and a separate vector."""
    sizes = {"matrix": (12, 5), "gates": (12,), "bias": (7,)}
    parameters = {name: torch.randn(size, device=device) for name, size in sizes.items()}
    wide = torch.zeros(4 * 8, 16, dtype=dtype, device=device)  # groups of 3 rows in 8
    copies = {
        "matrix": torch.full(
            (4 * 10, 9), -1.0, device=device
        ),  # padded differently from the gradient
        "gates": torch.full((4 * 8,), -1.0, device=device),
    }
    squares = {name: torch.zeros_like(p) for name, p in parameters.items()}
    gradients = {"matrix": wide, "gates": wide[:, 15], "bias": torch.zeros(7, device=device)}
    slots = [
        Slot(parameters[n], gradients[n], squares[n], copies.get(n), 1 if n == "bias" else 4)
        for n in sizes
    ]
    return slots, copies


def true_gradient(slot):
    """A view of the gradient without padding."""
    if slot.parameter.dim() == 2:
        return slot.grad.unflatten(0, (4, 8))[:, :3, :5]
    return slot.grad.unflatten(0, (4, 8))[:, :3] if len(slot.parameter) == 12 else slot.grad


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6])
@pytest.mark.parametrize("l2", [0.0, 0.03])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block", [8, 2048], ids=["pieces across rows and gates", "one piece"])
def test_three_steps_match_torch(block, dtype, max_norm, l2, device):
    slots, copies = padded_slots(device, dtype)
    plain = [torch.nn.Parameter(slot.parameter.clone()) for slot in slots]
    optimiser = AdamTF(plain, 0.01, 0.9, 1e-6)
    adam = Adam([slots[:1], slots[1:]], l2, 0.9, 1e-6, max_norm, block=block)
    adam.learning_rate.fill_(0.01)
    for _ in range(3):
        for slot, parameter in zip(slots, plain):
            parameter.grad = torch.randn_like(parameter).to(dtype).float()
            true = true_gradient(slot)
            true.copy_(parameter.grad.view(true.shape))
        add_prior_gradient(plain, l2)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(plain, max_norm)
        optimiser.step()
        for group in (0, 1):
            adam.sum_squares(group)
        adam.step()
    for slot, parameter in zip(slots, plain):
        assert relative(slot.parameter, parameter) < 1e-6
        assert relative(slot.square, optimiser.state[parameter]["square"]) < 1e-6
    matrix = copies["matrix"].unflatten(0, (4, 10))
    assert torch.equal(matrix[:, :3, :5], slots[0].parameter.view(4, 3, 5))
    assert (matrix[:, 3:] == -1).all() and (matrix[..., 5:] == -1).all()  # padding is not written
    gates = copies["gates"].view(4, 8)
    assert torch.equal(gates[:, :3], slots[1].parameter.view(4, 3)) and (gates[:, 3:] == -1).all()


def test_rows_that_begin_inside_a_piece(device):
    """1,500 columns in pieces of 2,048, clipped; a float16 copy is rounded."""
    parameter = torch.randn(2, 1500, device=device)
    plain = torch.nn.Parameter(parameter.clone())
    plain.grad = torch.randn_like(plain)
    copy = torch.zeros(2, 1536, dtype=torch.float16, device=device)
    slot = Slot(parameter, plain.grad.clone(), torch.zeros_like(parameter), copy)
    adam = Adam([[slot]], 0.0, 0.999, 1e-8, 1.0)
    adam.learning_rate.fill_(0.1)
    adam.sum_squares(0)
    adam.step()
    torch.nn.utils.clip_grad_norm_([plain], 1.0)
    AdamTF([plain], 0.1).step()
    assert relative(parameter, plain) < 1e-6
    assert torch.equal(copy[:, :1500], parameter.half()) and not copy[:, 1500:].any()


def test_vectors_longer_than_a_piece_whose_gradient_is_a_column(device):
    """Two groups of 1,100 elements in pieces of 2,048, clipped; 2 sums of squares at a time."""
    parameter, rest = torch.randn(2 * 1100, device=device), torch.randn(20, 3, device=device)
    plain = [torch.nn.Parameter(p.clone()) for p in (parameter, rest)]
    for p in plain:
        p.grad = torch.randn_like(p)
    wide = torch.zeros(2 * 1120, 4, device=device)
    wide[:, 1].view(2, 1120)[:, :1100] = plain[0].grad.view(2, 1100)
    copy = torch.zeros(2 * 1104, device=device)
    slots = [
        Slot(parameter, wide[:, 1], torch.zeros_like(parameter), copy, 2),
        Slot(rest, plain[1].grad.clone(), torch.zeros_like(rest)),
    ]
    adam = Adam([slots], 0.0, 0.999, 1e-8, 1.0, sums_at_once=2)
    adam.learning_rate.fill_(0.1)
    adam.sum_squares(0)
    adam.step()
    torch.nn.utils.clip_grad_norm_(plain, 1.0)
    optimiser = AdamTF(plain, 0.1)
    optimiser.step()
    for slot, p in zip(slots, plain):
        assert relative(slot.parameter, p) < 1e-6
        assert relative(slot.square, optimiser.state[p]["square"]) < 2e-5  # 1 − β2 in float32
    assert torch.equal(copy.view(2, 1104)[:, :1100], parameter.view(2, 1100))
    assert not copy.view(2, 1104)[:, 1100:].any()


def test_copies_of_every_dtype_in_one_step(device):
    types = [None, torch.float32, torch.float16, torch.bfloat16]
    parameters = [torch.randn(3, 5, device=device) for _ in types]
    copies = [t and torch.full((3, 8), -1.0, dtype=t, device=device) for t in types]
    slots = [
        Slot(p, torch.randn(3, 5, device=device), torch.zeros_like(p), copy)
        for p, copy in zip(parameters, copies)
    ]
    adam = Adam([slots], 0.0, 0.999, 1e-8, None)
    adam.learning_rate.fill_(0.1)
    adam.step()
    for parameter, copy in zip(parameters, copies):
        if copy is not None:
            # The interpreter truncates to bfloat16 where a device rounds.
            cut = device.type == "cpu" and copy.dtype == torch.bfloat16
            near = 2**-7 if cut else 0
            wanted = parameter.to(copy.dtype)
            torch.testing.assert_close(copy[:, :5], wanted, rtol=near, atol=0)
            assert (copy[:, 5:] == -1).all()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 723, 951, 2047, 2048, 2049, 33_279, 45_000])
def test_places_are_divided_exactly(size):
    """The kernel takes the high 32 bits of the product of 2 x and the divider."""
    x = torch.cat([torch.arange(size + 2048), torch.tensor([size - 1, size])])
    found = (2 * x * adam_kernels._divider(size, 2048)) >> 32
    assert torch.equal(found, x // size)


def test_sizes_that_cannot_be_divided_are_refused():
    with pytest.raises(AssertionError):
        adam_kernels._divider(50_000, 2048)
