"""Carried states from the kernels' pass, with pieces of a text as rows of a batch."""

import kernel_device
import pytest
import torch
from tiny_evaluation import MODELS, V, build

import afterdrop as ad
from afterdrop import kernels
from afterdrop.data import EvalStripes
from afterdrop.evaluation.loop import Execution
from afterdrop.evaluation.request import Request, StreamSettings
from afterdrop.evaluation.text_windows import Windows, open_windows
from afterdrop.masks.uniforms import Plan
from afterdrop.models.fused import Copies, DeterministicPass

pytestmark = kernel_device.quiet
device = kernel_device.device


@pytest.mark.parametrize("stripes", [1, 2])
def test_states_match_the_model_window_by_window(stripes, device):
    """Within 2^-10, since pieces overlap until they agree to half of that (GPU: 5e-3)."""
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


@pytest.mark.parametrize(
    ("stripes", "window", "windows", "rows"),
    [(1, 3, 9, 9), (1, 3, 99, 64), (7, 3, 99, 63), (99, 3, 9, 99), (2, 99, 99, 6), (2, 999, 9, 2)],
)
def test_the_number_of_pieces_is_limited_by_windows_rows_and_memory(
    stripes, window, windows, rows, device, monkeypatch
):
    """A window of two stripes and 99 steps takes 280 of 1,024 KiB."""
    monkeypatch.setattr(kernels, "why_not", lambda *_: None)
    model = build(device, **MODELS["two layers"])
    stream = StreamSettings(window, stripes)
    request = Request(ad.Grid((1,), (0, 1)), Plan(4), stream=stream)
    text = torch.ones(stripes * window * windows, dtype=torch.int64)
    shares = EvalStripes(text, 0, stripes, window, lines=False)
    assert len(shares) == windows
    found = open_windows(model, shares, request, Execution(memory=2**20))
    assert found.passes.tokens.shape == (window, rows)
