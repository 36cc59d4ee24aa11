"""Logits and what their rows sum to, against float64.

Products of float32 agree within 1e-5; a GPU computes these without tf32.
"""

import kernel_device
import pytest
import torch

from afterdrop.family.ladder import Ladder
from afterdrop.family.temperature import Nodes
from afterdrop.kernels.family_logits import FamilyLogits
from afterdrop.kernels.family_sums import LOWEST, FamilySums

pytestmark = kernel_device.quiet
device = kernel_device.device


def made(targets, samples, classes, features, device, shift=0.0):
    """Features, a table whose padding would be seen, logits without it, and what was found."""
    x = torch.randn(targets * samples, features)
    x[:, -1] = 1
    table = torch.randn(-(-classes // 8) * 8, features) / features**0.5
    table[:, -1] += shift
    table[classes:, -1] = 60  # no class
    own = torch.randint(classes, (targets,))
    logits = FamilyLogits(table.to(device), classes, targets, samples)
    lse = torch.empty(targets * samples, device=device)
    found = {name: torch.empty(targets, samples, device=device) for name in ("chosen", "entropies")}
    out = logits.product(x.to(device), own.to(device), lse, found)
    return x.double() @ table[:classes].double().t(), own, out, lse, found


@pytest.mark.parametrize(
    ("targets", "samples", "classes", "features"),
    [(3, 4, 70, 32), (1, 2, 2, 8), (5, 26, 129, 40), (2, 3, 600, 72)],
)
def test_rows_are_those_of_float64(targets, samples, classes, features, device):
    """Tiles that are full and not, of rows, classes and features."""
    exact, own, out, lse, found = made(targets, samples, classes, features, device)
    near = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out[:, :classes].double().cpu(), exact, **near)
    torch.testing.assert_close(lse.double().cpu(), exact.logsumexp(-1), **near)
    log_p = exact.log_softmax(-1).view(targets, samples, classes)
    chosen = log_p[torch.arange(targets), :, own]
    torch.testing.assert_close(found["chosen"].double().cpu(), chosen, **near)
    entropies = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(found["entropies"].double().cpu(), entropies, **near)


@pytest.mark.parametrize("shift", [-60.0, 60.0])
def test_logits_far_from_zero_are_held(shift, device):
    exact, _, _, lse, _ = made(2, 2, 70, 32, device, shift)
    torch.testing.assert_close(lse.double().cpu(), exact.logsumexp(-1), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("shift", [-200.0, 200.0])
def test_logits_too_far_from_zero_are_told(shift, device):
    """Their sums are no numbers, and `lowest` says so to whoever asks what sums can hold."""
    _, _, out, lse, _ = made(2, 2, 70, 32, device, shift)
    assert lse.isnan().all()
    sums = FamilySums((0.0, 1.0), Ladder(Nodes(0.125, 8.0)), 70, 2, 2, device)
    found = sums.results(2)
    sums.lse.copy_(lse)
    sums.add_powers(out.unflatten(0, (2, 1, 2)).permute(2, 1, 0, 3), range(2), 0, 2)
    sums.finish(2, found)
    assert not (found["lowest"] >= LOWEST).any()
