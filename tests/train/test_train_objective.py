import math

import pytest
import torch
from torch import nn

from afterdrop.errors import DataError
from afterdrop.train.objective import (
    add_prior_gradient,
    data_loss,
    effective_samples,
    prior_loss,
    prior_scale,
    step_loss,
)
from afterdrop.train.optimiser import AdamTF, build_optimiser
from afterdrop.train.sections import OptimiserSection


def test_the_loss_sums_over_time_and_averages_over_the_batch():
    logits = torch.randn(3, 5, 7, dtype=torch.float64)
    targets = torch.randint(7, (3, 5))
    total = 0.0
    for b in range(3):
        for t in range(5):
            probs = logits[b, t].exp() / logits[b, t].exp().sum()
            total -= math.log(probs[targets[b, t]])
    assert data_loss(logits, targets).item() == pytest.approx(total / 3)


def test_the_classifiers_loss_is_the_mean():
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    expected = nn.functional.cross_entropy(logits, labels)
    assert torch.allclose(data_loss(logits, labels), expected)


@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.5, 1.0])
def test_several_samples_are_the_members_renormalised_mean(alpha):
    logits = torch.randn(4 * 2, 3, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(5, (2, 3))
    probs = logits.detach().view(4, 2, 3, 5).softmax(-1)
    mean = probs.log().mean(0).exp() if alpha == 0 else probs.pow(alpha).mean(0).pow(1 / alpha)
    mean = mean / mean.sum(-1, keepdim=True)
    expected = -mean.gather(-1, targets.unsqueeze(-1)).log().sum() / 2
    assert data_loss(logits, targets, samples=4, alpha=alpha).item() == pytest.approx(expected)
    assert torch.autograd.gradcheck(lambda x: data_loss(x, targets, samples=4, alpha=alpha), logits)


def test_the_gradient_of_the_arithmetic_mean_is_that_of_each_sample_times_its_weight():
    """d loss / d logits_d = w_d (p_d − 1_y) / B, with w the softmax of the targets' log p_d."""
    logits = torch.randn(4 * 2, 3, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(5, (2, 3))
    data_loss(logits, targets, samples=4).backward()
    probs = logits.detach().view(4, 2, 3, 5).softmax(-1)
    hot = nn.functional.one_hot(targets, 5).double()
    weights = (probs * hot).sum(-1) / (probs * hot).sum(-1).sum(0)
    wanted = weights.unsqueeze(-1) * (probs - hot) / 2
    torch.testing.assert_close(logits.grad.view(4, 2, 3, 5), wanted)
    found = effective_samples(logits, targets, samples=4)
    torch.testing.assert_close(found, 1 / weights.square().sum(0))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_effective_samples_lie_between_one_and_their_number(alpha):
    logits = 20 * torch.randn(8 * 3, 6)
    targets = torch.randint(6, (3,))
    found = effective_samples(logits, targets, samples=8, alpha=alpha)
    assert (found >= 1 - 1e-5).all() and (found <= 8 + 1e-5).all()
    equal = effective_samples(logits[:3].repeat(8, 1), targets, samples=8, alpha=alpha)
    torch.testing.assert_close(equal, torch.full((3,), 8.0))
    if alpha == 0:  # the geometric mean weighs all samples alike
        torch.testing.assert_close(found, torch.full((3,), 8.0))


def test_the_numbers_of_shares_sum_to_those_of_the_batch():
    logits, targets = torch.randn(2, 6, 4, 5), torch.randint(5, (6, 4))
    options = {"samples": 2, "alpha": 1.0, "whole_batch": 6}
    whole = step_loss(logits.flatten(0, 1), targets, **options)
    parts = [
        step_loss(logits[:, part].flatten(0, 1), targets[part], **options)
        for part in (slice(0, 2), slice(2, 6))
    ]
    for one, *shares in zip(whole, *parts):
        torch.testing.assert_close(sum(shares), one)


def test_rows_must_be_repeated():
    with pytest.raises(DataError, match="samples=2"):
        data_loss(torch.zeros(3, 4, 5), torch.zeros(3, 4, dtype=torch.int64), samples=2)


def test_the_prior_gradient_is_that_of_its_term():
    model = nn.Linear(3, 2)
    inputs = torch.randn(4, 3)
    (
        model(inputs).square().sum() + 0.35 * sum(p.square().sum() for p in model.parameters())
    ).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(inputs).square().sum().backward()
    add_prior_gradient(list(model.parameters()), 0.7)
    for parameter, grad in zip(model.parameters(), expected):
        torch.testing.assert_close(parameter.grad, grad)
    norm = sum(p.square().sum().item() for p in model.parameters())
    assert prior_loss(list(model.parameters()), 0.7) == pytest.approx(0.35 * norm)


def test_the_prior_scale_makes_the_loss_a_map_objective():
    # loss · N/time = Σ −log p + ‖Θ‖²/(2σ²), so l2·N/time = 1/σ²
    scale = prior_scale(2e-4, targets=1000, window=20)
    assert 1 / scale**2 == pytest.approx(2e-4 * 1000 / 20)
    assert prior_scale(0.0, 1000, 20) == math.inf


def tf_adam(weight, grads, lr, beta2, epsilon):
    """TensorFlow's formula for β1 = 0, in Python floats."""
    square = 0.0
    for t, grad in enumerate(grads, 1):
        square = beta2 * square + (1 - beta2) * grad**2
        weight -= lr * math.sqrt(1 - beta2**t) * grad / (math.sqrt(square) + epsilon)
    return weight


@pytest.mark.parametrize("epsilon", [1e-8, 1e-2])
def test_adam_is_tensorflows(epsilon):
    grads = [0.3, -0.02, 0.001, 0.5]
    weight = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    optimiser = AdamTF([weight], 0.1, 0.99, epsilon)
    for grad in grads:
        weight.grad = torch.tensor([grad], dtype=torch.float64)
        optimiser.step()
    assert weight.item() == pytest.approx(tf_adam(1.0, grads, 0.1, 0.99, epsilon), abs=1e-12)


def test_the_two_adams_differ_by_the_place_of_epsilon_only():
    def train(section):
        weight = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
        optimiser = build_optimiser([weight], section)
        for grad in (0.3, -0.02, 0.001):
            weight.grad = torch.tensor([grad], dtype=torch.float64)
            optimiser.step()
        return weight.item()

    small = [train(OptimiserSection(0.1, name, epsilon=1e-12)) for name in ("adam-tf", "adam")]
    large = [train(OptimiserSection(0.1, name, epsilon=1e-2)) for name in ("adam-tf", "adam")]
    assert small[0] == pytest.approx(small[1], abs=1e-9)
    assert abs(large[0] - large[1]) > 1e-2


def test_parameters_without_gradient_stay():
    used, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    optimiser = AdamTF([used, unused], 0.1)
    assert optimiser.step() is None  # no gradient at all
    assert optimiser.step(lambda: (used.sum().backward(), 2.0)[1]) == 2.0
    assert unused.tolist() == [1, 1] and used.tolist() != [1, 1]
