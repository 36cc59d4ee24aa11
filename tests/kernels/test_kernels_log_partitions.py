"""Log-partitions at many temperatures against `family.temperature.partitions` and float64.

G is a logarithm of a float32 sum of V terms, with b·(log M − max) down to −16·40: within 1e-5.
"""

import kernel_device
import pytest
import torch

from afterdrop import kernels
from afterdrop.family import temperature
from afterdrop.family.temperature import Nodes
from afterdrop.kernels.log_partitions import log_partitions

pytestmark = kernel_device.quiet
device = kernel_device.device
INVERSE = torch.cat([Nodes(0.125, 8.0).inverse(), torch.tensor([1.0, 2.0])])


@pytest.mark.parametrize("shape", [(2, 3, 70), (1, 128), (3, 2, 1, 5), (2, 2100)])
def test_log_partitions_match_the_plain_form(shape, device):
    log_means = (4 * torch.randn(shape)).log_softmax(-1)
    G, peak = log_partitions(log_means.to(device), INVERSE)
    exact, top = temperature.partitions(log_means.double(), INVERSE)
    assert G.shape == exact.shape and torch.equal(peak.cpu(), top.float())
    torch.testing.assert_close(G.double().cpu(), exact, rtol=1e-5, atol=1e-5)


def test_classes_of_probability_zero_do_not_count(device):
    log_means = torch.randn(3, 70).log_softmax(-1)
    hidden = log_means.clone()
    hidden[:, ::3] = float("-inf")
    hidden[0, 1:] = float("-inf")
    hidden[0, 0] = 0.0  # one class is certain
    G, peak = log_partitions(hidden.to(device), INVERSE)
    exact, _ = temperature.partitions(hidden.double(), INVERSE)
    torch.testing.assert_close(G.double().cpu(), exact, rtol=1e-5, atol=1e-5)
    assert peak[0] == 0 and not G[:, 0].any()


def test_strided_and_empty_rows(device):
    log_means = torch.randn(70, 4).log_softmax(0).t().to(device)
    G, peak = log_partitions(log_means, INVERSE)
    again, top = log_partitions(log_means.contiguous(), INVERSE)
    assert torch.equal(G, again) and torch.equal(peak, top)
    assert log_partitions(log_means[:0], INVERSE)[0].shape == (len(INVERSE), 0)


def test_the_plain_form_runs_where_kernels_do_not():
    """On a CPU, even with the interpreter, and in float64: the same bits."""
    log_means = torch.randn(3, 70).log_softmax(-1)
    for rows in (log_means, log_means.double()):
        found, wanted = kernels.partitions(rows, INVERSE), temperature.partitions(rows, INVERSE)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted))
