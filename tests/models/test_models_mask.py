"""The dropout of the recurrent models: torch's own by contract, with its own draws on a CPU."""

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from afterdrop.models.mask import Drop, Mask, MaskConfig, dropout


class Seen(TorchFunctionMode):
    """Notes the functions that are called."""

    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.5, 0.99])
def test_units_are_dropped_at_their_rate_and_the_rest_rescaled(rate):
    torch.manual_seed(0)
    count = 200_000
    y = dropout(torch.full((count,), 3.0), rate, training=True)
    dropped = y == 0
    error = (rate * (1 - rate) / count) ** 0.5
    assert abs(dropped.double().mean().item() - rate) < 4 * error
    torch.testing.assert_close(y[~dropped], torch.full_like(y[~dropped], 3 / (1 - rate)))


def test_units_are_dropped_independently_of_their_neighbours():
    torch.manual_seed(0)
    dropped = (dropout(torch.ones(500, 400), 0.3, training=True) == 0).double() - 0.3
    for other in (dropped[:, 1:] * dropped[:, :-1], dropped[1:] * dropped[:-1]):
        assert abs(other.mean().item()) < 4 * 0.21 / other.numel() ** 0.5


def test_gradients_go_through_the_mask():
    torch.manual_seed(0)
    x = torch.randn(50, 40, requires_grad=True)
    y = dropout(x, 0.4, training=True)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.where(y == 0, 0.0, 1 / 0.6))


def test_a_seed_gives_the_same_masks_again():
    x = torch.ones(7, 9)
    torch.manual_seed(3)
    first = dropout(x, 0.5, training=True)
    assert not torch.equal(dropout(x, 0.5, training=True), first)
    torch.manual_seed(3)
    assert torch.equal(dropout(x, 0.5, training=True), first)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_left_to_torch(dtype):
    x = torch.ones(300, dtype=dtype)
    torch.manual_seed(1)
    found = dropout(x, 0.3, training=True)
    torch.manual_seed(1)
    assert torch.equal(found, F.dropout(x, 0.3))


@pytest.mark.parametrize("training", [True, False])
def test_a_function_mode_sees_torchs_operator_and_no_other_draw(training):
    drop, mask = Drop(MaskConfig(0.5)), Mask(MaskConfig(0.5, "sequence"))
    drop.train(training), mask.train(training)
    with Seen() as seen:
        drop(torch.ones(3, 2, 4))
        mask(3, torch.ones(2, 4))
    assert seen.functions.count(F.dropout) == 2
    assert torch.rand_like not in seen.functions
