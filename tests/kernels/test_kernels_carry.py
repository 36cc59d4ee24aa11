"""Carried states by the kernels' pass, pieces of a text side by side."""

import kernel_device
import pytest
import torch
from tiny_evaluation import MODELS, V, build

from afterdrop.data.stream import EvalStripes
from afterdrop.evaluate.windows import Windows
from afterdrop.models.fused import Copies, DeterministicPass

pytestmark = kernel_device.quiet
device = kernel_device.device


@pytest.mark.parametrize("stripes", [1, 2])
def test_states_are_those_of_the_model_window_after_window(stripes, device):
    """Within 2^-10, as pieces agree to half of that (tf32: 5e-3)."""
    model = build(device, **MODELS["two layers"])
    copies = Copies(model, torch.float32)
    copies.pack()
    text = torch.randint(1, V, (41,), generator=torch.Generator().manual_seed(0))
    windows = EvalStripes(text, 0, stripes, 2, lines=False)
    passes = DeterministicPass(copies, 5, 2)
    found, wanted = (list(Windows(model, windows, 4, p)) for p in (passes, None))
    assert len(found) == len(wanted)
    near = kernel_device.within(device, 2**-10, 5e-3)
    for ((tokens, states), targets), ((other, before), same) in zip(found, wanted):
        assert torch.equal(tokens, other) and torch.equal(targets, same)
        for ours, theirs in zip(states, before):
            for a, b in zip(ours, theirs):
                torch.testing.assert_close(a, b, rtol=0, atol=near)
