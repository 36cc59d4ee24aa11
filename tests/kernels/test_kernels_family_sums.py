"""Every result of power sums of logits against `MeanTemper` in float64.

Sums and logarithms are float32: results agree within 1e-5, partitions and differences of halves,
where 1/T is up to 16, within 1e-4.
"""

import itertools
import math

import kernel_device
import pytest
import torch

from afterdrop.evaluation.likelihoods.categorical_sums import (
    MeanTemper,
    at_targets,
    cross_entropies,
)
from afterdrop.family.partition_ladder import HALVES_EVERY, PartitionLadder
from afterdrop.family.power_mean import log_power_mean
from afterdrop.family.temperature import Nodes, partitions
from afterdrop.kernels.family_sums import ALPHAS, LOWEST_MEAN_LOG_P, OF_SAMPLES, FamilySums

pytestmark = kernel_device.quiet
device = kernel_device.device
NODES = Nodes(0.125, 8.0)
ONE = torch.ones(1, dtype=torch.float64)
LADDER = PartitionLadder(NODES)
FINE = torch.cat([LADDER.inverse, ONE, 2 * ONE])
ROUGH = torch.cat([LADDER.inverse[::HALVES_EVERY], ONE])


def add(sums, rows, targets, found, place=0, count=None):
    """Adds all samples of some targets, given as rows [N · K, V₊]."""
    logits = rows.unflatten(0, (len(targets), 1, -1)).permute(2, 1, 0, 3)
    own = {name: found[name][place:] for name in OF_SAMPLES}
    sums.add(logits, targets, own, range(len(logits)), place, count)


def both(alphas, N, K, V, device, dtype=torch.float32, scale=3, ladder=LADDER):
    """Results of the kernels for two chunks of targets, of `MeanTemper`, log p and targets."""
    logits = (scale * torch.randn(N * K, -(-V // 8) * 8)).to(dtype)
    targets = torch.randint(V, (N,))
    exact = logits[:, :V].double().log_softmax(-1)
    lp = exact.view(N, K, 1, V).permute(1, 2, 0, 3)  # [K, multipliers, N, V]
    logits[:, V:] = 1e4  # padding
    sums = FamilySums(alphas, ladder, V, N, K, device)
    found = sums.results(N)
    for chunk in (slice(0, 1), slice(1, N)):
        rows = logits[chunk.start * K : chunk.stop * K].to(device)
        add(sums, rows, targets[chunk].to(device), found, chunk.start, N)
    sums.finish(N, found)
    plain = MeanTemper(alphas, targets, ladder.nodes, 2, partitions)
    for half in lp.chunk(2):
        plain.add(half)
        plain.end_block()
    return {k: v.double().cpu() for k, v in found.items()}, plain.results(), lp, targets


@pytest.mark.parametrize(
    ("alphas", "N", "K", "V"), [(ALPHAS, 3, 6, 70), ((0.5,), 2, 2, 2), ((0.0, 1.0), 2, 4, 2053)]
)
@pytest.mark.parametrize("scale", [3, 17])
def test_every_result_matches_the_plain_accumulator(alphas, N, K, V, scale, device):
    """At scale 17 some probabilities would underflow in float32."""
    found, plain, lp, targets = both(alphas, N, K, V, device, scale=scale)
    assert found["lowest"].min() > LOWEST_MEAN_LOG_P and (scale == 3 or V == 2 or lp.min() < -90)
    wanted = {name: tensor[0].double() for name, tensor in plain.items()}
    near, nearly = {"rtol": 1e-5, "atol": 1e-5}, {"rtol": 1e-4, "atol": 1e-4}
    assert_close = torch.testing.assert_close
    peak = found["peak"][0]
    assert_close(peak, wanted["peak"], **near)
    # If each sample is sure of another class, two classes can have the same mean up to rounding.
    own = torch.stack([log_power_mean(lp, alpha)[0] for alpha in alphas])
    best = own.gather(-1, found["class"].long().unsqueeze(-1)).squeeze(-1)
    assert_close(best, wanted["peak"], **near)
    assert_close(found["G"][:, -2] + peak, wanted["one"], **near)
    assert_close(found["G"][:, -1] + 2 * peak, wanted["two"], **near)
    assert_close(LADDER.fine @ found["G"][:, :-2], wanted["partition"], **nearly)
    assert_close(found["entropy"], wanted["entropy"], **near)
    assert_close(found["spread"], wanted["spread"], **near)
    assert_close(found["entropies"].mean(-1), wanted["mean_entropy"], **near)
    assert_close(found["chosen"].t(), at_targets(lp, targets)[:, 0], **near)
    halves = torch.stack([half.mean(0).amin(-1)[0] for half in lp.chunk(2)])
    assert_close(found["lowest"], halves, **near)
    for half, part in enumerate(lp.chunk(2)):
        for a, alpha in enumerate(alphas):
            means = log_power_mean(part, alpha)[0]
            below = found["peak"][1 + half, a] - at_targets(means, targets)
            xe = found["G_half"][half, a] + ROUGH.unsqueeze(1) * below
            assert_close(xe, cross_entropies(means, targets, ROUGH, partitions), **nearly)


def test_lower_temperatures_are_summed_without_a_lift_in_the_exponent(device):
    """Checks peaks and partitions, in which a remaining factor would show."""
    ladder = PartitionLadder(Nodes(1 / 64, 1.0))
    found, plain, _, _ = both(ALPHAS, 3, 6, 70, device, ladder=ladder)
    assert FamilySums(ALPHAS, ladder, 70, 3, 6, device).fine
    assert not FamilySums(ALPHAS, LADDER, 70, 3, 6, device).fine
    near, nearly = {"rtol": 1e-5, "atol": 1e-5}, {"rtol": 1e-4, "atol": 1e-4}
    wanted = {name: tensor[0].double() for name, tensor in plain.items()}
    torch.testing.assert_close(found["peak"][0], wanted["peak"], **near)
    torch.testing.assert_close(found["G"][:, -2] + found["peak"][0], wanted["one"], **near)
    torch.testing.assert_close(found["spread"], wanted["spread"], **near)
    torch.testing.assert_close(
        ladder.fine @ found["G"][:, :-2], wanted["partition"].double(), **nearly
    )


def test_halves_that_are_sure_of_different_classes_do_not_underflow(device):
    """Their largest sums are a poor reference for the sum of both at the highest powers."""
    logits = 0.01 * torch.randn(2 * 2, 72)
    logits[::2, 3] += 9
    logits[1::2, 5] += 9
    nodes, alphas = Nodes(1 / 64, 1.0), (0.25, 0.5, 1.0)
    ladder = PartitionLadder(nodes)
    sums = FamilySums(alphas, ladder, 70, 2, 2, device)
    found = sums.results(2)
    add(sums, logits.to(device), torch.tensor([3, 4]).to(device), found)
    sums.finish(2, found)
    lp = logits[:, :70].double().log_softmax(-1).view(2, 2, 1, 70).permute(1, 2, 0, 3)
    for a, alpha in enumerate(alphas):
        below = log_power_mean(lp, alpha)[0]
        below -= below.amax(-1, keepdim=True)
        wanted = (ladder.inverse.view(-1, 1, 1) * below).logsumexp(-1)
        G = found["G"][a, :-2].double().cpu()
        torch.testing.assert_close(G, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sure", [0, 1])
def test_one_half_may_be_sure_and_the_other_uniform(sure, device):
    """The reference is the sum of the largest of both halves, even of different classes."""
    V = 2053
    logits = torch.zeros(2, V)
    logits[sure, V - 1] = 20
    sums = FamilySums((0.25, 1.0), LADDER, V, 1, 2, device)
    found = sums.results(1)
    add(sums, logits.to(device), torch.tensor([3]).to(device), found)
    sums.finish(1, found)
    lp = logits.double().log_softmax(-1).view(2, 1, 1, V)
    for a, alpha in enumerate((0.25, 1.0)):
        below = log_power_mean(lp, alpha)[0]
        below -= below.amax(-1, keepdim=True)
        wanted = (FINE.view(-1, 1, 1) * below).logsumexp(-1)
        torch.testing.assert_close(found["G"][a].double().cpu(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("agreed", [7, 1500, 2052])
def test_the_class_that_halves_agree_on_may_lie_in_any_part(agreed, device):
    """Each half prefers another class of the first part; a lower reference would overflow."""
    V = 2053
    logits = torch.zeros(2, V)
    logits[0, 3] = logits[1, 5] = 40
    logits[:, agreed] = 39
    sums = FamilySums((0.0, 0.25), LADDER, V, 1, 2, device)
    found = sums.results(1)
    add(sums, logits.to(device), torch.tensor([3]).to(device), found)
    sums.finish(1, found)
    assert found["class"].flatten().tolist() == [agreed, agreed]
    lp = logits.double().log_softmax(-1).view(2, 1, 1, V)
    for a, alpha in enumerate((0.0, 0.25)):
        below = log_power_mean(lp, alpha)[0]
        peak = found["peak"][0, a].double().cpu()
        torch.testing.assert_close(peak, below.amax(-1), rtol=1e-5, atol=1e-5)
        below -= below.amax(-1, keepdim=True)
        wanted = (FINE.view(-1, 1, 1) * below).logsumexp(-1)
        torch.testing.assert_close(found["G"][a].double().cpu(), wanted, rtol=1e-4, atol=1e-4)


def test_samples_may_come_in_parts_of_a_half(device):
    """As if memory is short; two multipliers, three targets, 1030 classes in three parts."""
    K, V, targets = 6, 1030, torch.tensor([0, 1029, 5]).to(device)
    logits = (3 * torch.randn(K, 2, 3, V)).to(device)
    found = []
    for edges in ((0, 6), (0, 2, 3, 4, 6)):
        sums = FamilySums((0.0, 1.0), LADDER, V, 6, K, device)
        found.append(sums.results(6))
        for start, stop in itertools.pairwise(edges):
            sums.add(logits[start:stop], targets, found[-1], range(start, stop))
        sums.finish(6, found[-1])
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize(("N", "V"), [(3, 70), (2, 2053)])
def test_logits_of_mean_features_are_alpha_0_of_two_samples(N, V, halves, device):
    """In two chunks of targets; without halves the one feature is its own mean."""
    logits = 3 * torch.randn(N, halves, -(-V // 8) * 8)
    exact = logits[..., :V].double() * math.log(2)
    logits[..., V:] = 1e4  # padding
    sums = FamilySums((0.5,), LADDER, V, N, 2, device)
    found = sums.mean_results(N)
    for part in (slice(0, 1), slice(1, N)):
        sums.means(logits[part].to(device), found, part.start)
    near, nearly = {"rtol": 1e-5, "atol": 1e-5}, {"rtol": 1e-4, "atol": 1e-4}
    assert_close = torch.testing.assert_close
    found = {name: tensor.double().cpu() for name, tensor in found.items()}
    means = [exact.mean(1), *exact.unbind(1)]
    nodes = [FINE, ROUGH, ROUGH]
    for which, G in enumerate([found["G"][0], *found["G_half"][:, 0]][: halves * 2 - 1]):
        peak = means[which].amax(-1)
        assert_close(found["peak"][which, 0], peak, **near)
        below = (means[which] - peak.unsqueeze(-1)) * nodes[which].view(-1, 1, 1)
        assert_close(G, below.logsumexp(-1), **nearly)
    assert torch.equal(found["class"][0], means[0].argmax(-1).double())
    log_p = means[0].log_softmax(-1)
    assert_close(found["entropy"][0], -(log_p.exp() * log_p).sum(-1), **near)


@pytest.mark.parametrize("below", [1, 2, 2.5, 3, 3.25, 4, 5, 8, 30])
def test_classes_far_below_the_peak_count_as_long_as_they_matter(below, device):
    """Four parts, at distances around the one from which the highest octaves skip a part."""
    V, K = 2053, 4
    logits = -below + 0.01 * torch.randn(K, 2056)
    logits[:, :3] = 0.01 * torch.randn(K, 3)
    sums = FamilySums(ALPHAS, LADDER, V, 1, K, device)
    found = sums.results(1)
    add(sums, logits.to(device), torch.tensor([0]).to(device), found)
    sums.finish(1, found)
    pairs = sums.mean_results(1)
    sums.means(logits.unflatten(0, (2, 2)).mean(1)[None].to(device) / math.log(2), pairs, 0)
    lp = logits[:, :V].double().log_softmax(-1)
    for alpha, parts in zip((*ALPHAS, 0.0), (*found["G"], pairs["G"][0])):
        means = log_power_mean(lp, alpha)
        exact = (FINE.unsqueeze(1) * (means - means.max())).logsumexp(-1)
        torch.testing.assert_close(parts[:, 0].double().cpu(), exact, rtol=1e-4, atol=1e-4)
    for half, part in enumerate(lp.chunk(2)):
        every = zip((*ALPHAS, 0.0), (*found["G_half"][half], pairs["G_half"][half, 0]))
        for alpha, parts in every:
            means = log_power_mean(part, alpha)
            exact = (ROUGH.unsqueeze(1) * (means - means.max())).logsumexp(-1)
            torch.testing.assert_close(parts[:, 0].double().cpu(), exact, rtol=1e-4, atol=1e-4)


def test_float16_logits_are_summed_without_further_rounding(device):
    found, plain, _, _ = both((0.0, 1.0), 2, 4, 70, device, torch.float16)
    wanted = plain["one"][0]
    torch.testing.assert_close(found["G"][:, -2] + found["peak"][0], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [-1e3, float("-inf")])
def test_a_probability_that_plain_sums_cannot_hold_shows_in_lowest(value, device):
    logits = torch.zeros(4, 72, device=device)
    logits[:, 5] = value
    sums = FamilySums((0.0, 1.0), LADDER, 70, 2, 2, device)
    found = sums.results(2)
    add(sums, logits, torch.tensor([0, 1], device=device), found)
    sums.finish(2, found)
    assert (found["lowest"] < LOWEST_MEAN_LOG_P).all()
    torch.testing.assert_close(found["chosen"], torch.full_like(found["chosen"], -4.2341065))


@pytest.mark.parametrize(("value", "held"), [(-110.0, True), (-120.0, False)])
def test_the_limit_of_sums_is_a_mean_log_p(value, held, device):
    logits = torch.zeros(2, 72, device=device)
    logits[:, 5] = value
    sums = FamilySums((0.0, 1.0), LADDER, 70, 1, 2, device)
    found = sums.results(1)
    add(sums, logits, torch.tensor([0], device=device), found)
    sums.finish(1, found)
    assert (found["lowest"] >= LOWEST_MEAN_LOG_P).all() == held


def test_many_sure_samples_do_not_overflow(device):
    """Lifted squares of 400 probabilities near 1."""
    logits = torch.tensor([[30.0] + [0.0] * 7]).expand(400, 8).contiguous()
    sums = FamilySums((1.0,), LADDER, 3, 1, 400, device)
    found = sums.results(1)
    add(sums, logits.to(device), torch.tensor([0], device=device), found)
    sums.finish(1, found)
    assert found["spread"].abs().item() < 1e-6
    torch.testing.assert_close(found["peak"].cpu(), torch.zeros(3, 1, 1), rtol=0, atol=1e-6)


def test_a_single_sample_may_be_far_below_the_limit_of_the_mean(device):
    """One of 50 in each half has a probability of exp(-5000), which adds nothing to any mean."""
    logits = torch.zeros(100, 72)
    logits[:, 5] = -5
    logits[[7, 77], 5] = -5000
    sums = FamilySums(ALPHAS, LADDER, 70, 1, 100, device)
    found = sums.results(1)
    add(sums, logits.to(device), torch.tensor([0], device=device), found)
    sums.finish(1, found)
    assert (found["lowest"] >= LOWEST_MEAN_LOG_P).all()
    lp = logits[:, :70].double().log_softmax(-1).view(100, 1, 1, 70)
    for a, alpha in enumerate(ALPHAS):
        below = log_power_mean(lp, alpha)[0]
        below -= below.amax(-1, keepdim=True)
        wanted = (FINE.view(-1, 1, 1) * below).logsumexp(-1)
        torch.testing.assert_close(found["G"][a].double().cpu(), wanted, rtol=1e-4, atol=1e-4)
