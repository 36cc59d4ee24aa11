"""Log-partitions between temperature nodes, against sums over all classes in float64."""

import math

import pytest
import torch

from afterdrop.family.partition_interpolation import between_nodes, is_smooth
from afterdrop.family.partition_ladder import PartitionLadder
from afterdrop.family.temperature import Nodes, partitions

NODES = Nodes(0.125, 8.0)
BETWEEN = torch.exp(torch.linspace(math.log(0.15), math.log(7), 90, dtype=torch.float64))


def exact(logits, inverse):
    below = (logits - logits.amax(-1, keepdim=True)).double()
    return torch.stack([torch.logsumexp(b * below, -1) for b in inverse])


def one_peak(classes, share, spread, targets=12):
    """A class of probability `share` above others whose logits have a standard deviation."""
    generator = torch.Generator().manual_seed(classes)
    logits = spread * torch.randn(targets, classes, generator=generator)
    margin = math.log(share / (1 - share) * (classes - 1)) + spread**2 / 2
    logits[:, 0] = margin + 0.3 * torch.randn(targets, generator=generator)
    return logits


def two_peaks(classes):
    logits = one_peak(classes, 0.9, 0.1)
    logits[:, 1] = logits[:, 0] - torch.linspace(0, 2, len(logits))
    return logits


def zipf(classes, targets=12):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(targets, classes, generator=generator)
    logits = noise - 1.1 * torch.arange(1, classes + 1).log()
    logits[:, 5] += 4
    return logits


CASES = {
    "1,000 classes": (one_peak(1000, 0.9, 0.5), 1e-6),
    "10,000 classes": (one_peak(10_000, 0.9, 0.5), 2e-6),
    "10,000 classes, wider": (one_peak(10_000, 0.9, 1.0), 2e-6),
    "30,000 classes, an even chance": (one_peak(30_000, 0.5, 0.5), 3e-6),
    "100,000 classes": (one_peak(100_000, 0.9, 0.5), 5e-6),
    "100,000 equal classes": (one_peak(100_000, 0.7, 0.0), 5e-6),
    "two peaks": (two_peaks(30_000), 3e-6),
    "Zipf": (zipf(50_000), 3e-6),
}


@pytest.mark.parametrize("case", CASES)
def test_a_peak_above_many_nearly_equal_classes_is_interpolated_exactly(case):
    logits, tolerance = CASES[case]
    at_nodes = exact(logits, NODES.inverse()).float()
    wanted = exact(logits, 1 / BETWEEN)
    found = between_nodes(at_nodes, NODES, 1 / BETWEEN)
    assert (found - wanted).abs().max() < tolerance
    polynomial = NODES.weights(1 / BETWEEN) @ at_nodes.double()
    assert (polynomial - wanted).abs().max() > 1e-4
    assert not is_smooth(at_nodes, NODES)


@pytest.mark.parametrize("case", ["10,000 classes", "100,000 classes", "two peaks", "Zipf"])
def test_partitions_as_they_are_computed_are_good_enough(case):
    logits, _ = CASES[case]
    at_nodes, _ = partitions(logits, NODES.inverse())
    found = between_nodes(at_nodes, NODES, 1 / BETWEEN)
    assert (found - exact(logits, 1 / BETWEEN)).abs().max() < 5e-5


def test_errors_at_the_nodes_are_not_magnified():
    """Kernels give values at the nodes within 3e-5 of the truth."""
    logits, _ = CASES["100,000 classes"]
    at_nodes = exact(logits, NODES.inverse())
    noise = torch.randn(at_nodes.shape, generator=torch.Generator().manual_seed(0)) * 1e-5
    found = between_nodes(at_nodes + noise, NODES, 1 / BETWEEN)
    assert (found - exact(logits, 1 / BETWEEN)).abs().max() < 1e-4


def test_wide_brackets_are_less_exact_as_documented():
    wide, logits = Nodes(0.03, 30.0), CASES["10,000 classes"][0]
    found = between_nodes(exact(logits, wide.inverse()), wide, 1 / BETWEEN)
    assert (found - exact(logits, 1 / BETWEEN)).abs().max() < 2e-4


def test_few_classes_are_smooth_and_nodes_are_reproduced():
    logits = 3 * torch.randn(20, 10, generator=torch.Generator().manual_seed(0))
    at_nodes = exact(logits, NODES.inverse()).float()
    assert is_smooth(at_nodes, NODES)
    again = between_nodes(at_nodes, NODES, NODES.inverse())
    torch.testing.assert_close(again, at_nodes.double(), rtol=0, atol=1e-12)


def test_a_target_without_any_probability_does_not_disturb_the_others():
    at_nodes = exact(CASES["10,000 classes"][0], NODES.inverse())
    with_nan = at_nodes.clone()
    with_nan[:, 3] = math.nan
    found, wanted = (between_nodes(v, NODES, 1 / BETWEEN) for v in (with_nan, at_nodes))
    others = torch.arange(12) != 3
    torch.testing.assert_close(found[:, others], wanted[:, others])
    assert found[:, 3].isnan().all()


@pytest.mark.parametrize("case", CASES)
def test_nodes_that_come_from_a_ladder_of_powers_are_good_enough(case):
    """As in the kernels: float32 at the powers, and the nodes by interpolation between those."""
    ladder, logits = PartitionLadder(NODES), CASES[case][0]
    at_nodes = (ladder.fine @ exact(logits, ladder.inverse).float().double()).float()
    found = between_nodes(at_nodes, NODES, 1 / BETWEEN)
    off = (found - exact(logits, 1 / BETWEEN)).abs().max()
    assert off < (2e-4 if "100,000" in case else 1e-4)
