"""Logits, log-sum-exp and entropies of rows against float64.

Products of float32 agree within 1e-5; a GPU computes these without tf32.
"""

import math

import kernel_device
import pytest
import torch

from afterdrop.family.partition_ladder import PartitionLadder
from afterdrop.family.temperature import Nodes
from afterdrop.kernels.family_logits import FamilyLogits
from afterdrop.kernels.family_sums import LOWEST_MEAN_LOG_P, FamilySums

pytestmark = kernel_device.quiet
device = kernel_device.device
LN2 = math.log(2)


def made(targets, samples, classes, features, device, shift=0.0, **options):
    """Exact logits to base e, targets, and the kernel's results, for a table with high padding."""
    x = torch.randn(targets * samples, features)
    x[:, -1] = 1
    table = torch.randn(-(-classes // 8) * 8, features) / features**0.5
    table[:, -1] += shift / LN2
    table[classes:, -1] = 60  # padding, which must not count
    own = torch.randint(classes, (targets,))
    logits = FamilyLogits(table.to(device), classes, targets, samples, **options)
    lse = torch.empty(targets * samples, device=device)
    found = {name: torch.empty(targets, samples, device=device) for name in ("chosen", "entropies")}
    out = logits.product(x.to(device), own.to(device), lse, found)
    return x.double() @ table[:classes].double().t() * LN2, own, out, lse, found


@pytest.mark.parametrize(
    ("targets", "samples", "classes", "features"),
    [(3, 4, 70, 32), (1, 2, 2, 8), (5, 26, 129, 40), (2, 3, 600, 72)],
)
def test_rows_match_float64(targets, samples, classes, features, device):
    """With full and partial tiles of rows, classes and features."""
    exact, own, out, lse, found = made(targets, samples, classes, features, device)
    near = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out[:, :classes].double().cpu() * LN2, exact, **near)
    torch.testing.assert_close(lse.double().cpu() * LN2, exact.logsumexp(-1), **near)
    log_p = exact.log_softmax(-1).view(targets, samples, classes)
    chosen = log_p[torch.arange(targets), :, own]
    torch.testing.assert_close(found["chosen"].double().cpu(), chosen, **near)
    entropies = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(found["entropies"].double().cpu(), entropies, **near)


def test_every_group_of_tiles_is_computed(device):
    """Nine tiles of rows in the interpreter, in groups of one, of two and of all."""
    found = []
    for group in (1, 2, 64):
        torch.manual_seed(0)
        _, _, out, lse, _ = made(9, 64, 129, 40, device, group=group)
        found.append((out[:, :129].clone(), lse))
    for out, lse in found[:-1]:
        torch.testing.assert_close(out, found[-1][0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(lse, found[-1][1], rtol=1e-6, atol=1e-6)


def test_sums_are_those_of_the_rounded_float16_logits(device):
    table, x = torch.randn(72, 40).half(), torch.randn(12, 40).half()
    logits = FamilyLogits(table.to(device), 70, 3, 4)
    lse = torch.empty(12, device=device)
    found = {name: torch.empty(3, 4, device=device) for name in ("chosen", "entropies")}
    out = logits.product(x.to(device), torch.tensor([0, 69, 5]).to(device), lse, found)
    wanted = x.double() @ table.double().t()
    torch.testing.assert_close(out.double().cpu(), wanted, rtol=2**-10, atol=2**-10)
    exact = out[:, :70].double() * LN2
    log_p = exact.log_softmax(-1)
    near = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(lse.double() * LN2, exact.logsumexp(-1), **near)
    entropies = -(log_p.exp() * log_p).sum(-1).view(3, 4)
    torch.testing.assert_close(found["entropies"].double(), entropies, **near)


@pytest.fixture
def no_denormals():
    """As on a GPU, where exponentials flush denormal results to 0."""
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("no_denormals")
@pytest.mark.parametrize(
    "shift", [-200, -102, -92, -88, -86, -75, -70, -60, 60, 75, 82, 84, 86, 200]
)
def test_rows_whose_sum_is_out_of_range_are_nan_and_all_others_are_right(shift, device):
    """Sums from 1e-28 to 1e36 are in range; NaN then shows in `lowest` of the family's sums."""
    exact, _, out, lse, found = made(2, 2, 70, 32, device, float(shift))
    held = lse.isfinite().cpu()
    sums = exact.logsumexp(-1)
    assert torch.equal(held, (sums > math.log(1e-28)) & (sums < math.log(1e36)))
    assert lse.isnan().cpu()[~held].all()
    near = {"rtol": 1e-6, "atol": 3e-5}
    torch.testing.assert_close(lse.double().cpu()[held] * LN2, sums[held], **near)
    log_p = exact.log_softmax(-1)
    entropies = -(log_p.exp() * log_p).sum(-1)[held]
    torch.testing.assert_close(found["entropies"].flatten().double().cpu()[held], entropies, **near)
    family = FamilySums((0.0, 1.0), PartitionLadder(Nodes(0.125, 8.0)), 70, 2, 2, device)
    results = family.results(2)
    family.lse.copy_(lse)
    family.add_powers(out.unflatten(0, (2, 1, 2)).permute(2, 1, 0, 3), range(2), 0, 2)
    family.finish(2, results)
    assert torch.equal((results["lowest"] >= LOWEST_MEAN_LOG_P).cpu(), held.view(2, 2).t())


@pytest.mark.usefixtures("no_denormals")
@pytest.mark.parametrize(
    ("high", "low", "held"), [(-80.0, -88.0, False), (-75.0, -87.5, False), (-55.0, -88.0, True)]
)
def test_many_small_terms_are_summed_or_the_row_is_nan(high, low, held, device):
    """One class far above thousands of others whose terms would underflow."""
    table = torch.full((10_000, 8), low / LN2 / 8)
    table[0] = high / LN2 / 8
    logits, lse = FamilyLogits(table.to(device), 10_000, 1, 2), torch.empty(2, device=device)
    found = {name: torch.empty(1, 2, device=device) for name in ("chosen", "entropies")}
    logits.product(torch.ones(2, 8, device=device), torch.zeros(1).long().to(device), lse, found)
    exact = (table.double() @ torch.ones(8, dtype=torch.float64) * LN2).logsumexp(-1)
    if held:
        wanted = (exact / LN2).expand(2)
        torch.testing.assert_close(lse.double().cpu(), wanted, rtol=1e-6, atol=0)
    else:
        assert lse.isnan().all()
