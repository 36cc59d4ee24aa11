"""The algebra of penalties on two passes against differences of all logits, in float64."""

import pytest

pytest.importorskip("triton", reason="kernels need Triton, which is not installed")

import torch

from afterdrop.train.fused_comparison import LogitComparison
from afterdrop.train.sections import ObjectiveSection
from afterdrop.train.whole_masks import RankRows
from oracles.waits import CountWaits

TIME, ROWS, SIZE, CLASSES = 5, 3, 20, 4000
NEAR = {torch.float32: 1e-6, torch.float16: 2e-3}  # float16 rounds by up to 5e-4


@pytest.mark.parametrize("name", ["fraternal_penalty", "expectation_linear_penalty"])
@pytest.mark.parametrize("size", [0.02, 10.0], ids=["small table", "large table"])
@pytest.mark.parametrize("dtype", NEAR)
def test_value_and_gradients_are_those_of_all_logits(name, size, dtype):
    torch.manual_seed(0)
    table = (size * torch.randn(CLASSES, SIZE)).to(dtype)
    features = torch.randn(TIME * 2 * ROWS, SIZE).to(dtype)
    section = ObjectiveSection(ROWS, TIME, **{name: 0.5})
    first, value = RankRows(slice(0, ROWS), ROWS), torch.zeros(1, dtype=torch.float64)
    comparison = LogitComparison(section, first, TIME, table, CLASSES, value)
    d_table = torch.zeros(CLASSES, SIZE)
    with CountWaits() as waits:
        scored = comparison.compare(features)
        d_features = comparison.feature_gradient(torch.zeros_like(scored).float(), 1.0)
        comparison.add_table_gradient(d_table)
    assert waits.ops == []  # a CUDA graph can record them

    exact = features.double().requires_grad_()
    weight = table.double().requires_grad_()
    one, other = (exact @ weight.t()).unflatten(0, (TIME, 2, ROWS)).unbind(1)
    wanted = 0.5 * TIME * (one - other).square().mean()
    gradients = torch.autograd.grad(wanted, (exact, weight))
    wanted = wanted.detach()
    assert abs(value / wanted - 1) < NEAR[dtype]
    for found, gradient in zip((d_features, d_table), gradients):
        assert (found - gradient).norm() < NEAR[dtype] * gradient.norm()


def test_rows_without_dropout_have_no_loss():
    """Their features are not scored, and their gradient is that of the penalty alone."""
    torch.manual_seed(0)
    features, table = torch.randn(TIME * 2 * ROWS, SIZE), torch.randn(CLASSES, SIZE)
    first = RankRows(slice(0, ROWS), ROWS)
    section = ObjectiveSection(ROWS, TIME, expectation_linear_penalty=0.5)
    comparison = LogitComparison(section, first, TIME, table, CLASSES, torch.zeros(1))
    scored = comparison.compare(features)
    passes = features.view(TIME, 2, ROWS, SIZE)
    assert torch.equal(scored.view(TIME, ROWS, SIZE), passes[:, 0])
    targets = torch.arange(TIME * 2 * ROWS)
    assert torch.equal(comparison.targets(targets), targets.view(TIME, 2, ROWS)[:, 0].flatten())
    losses = torch.randn(TIME * ROWS, SIZE)
    with_losses = comparison.feature_gradient(losses, 3.0).view(passes.shape)
    alone = comparison.feature_gradient(torch.zeros_like(losses), 3.0).view(passes.shape)
    torch.testing.assert_close(with_losses[:, 0] - alone[:, 0], losses.view(TIME, ROWS, SIZE))
    assert torch.equal(with_losses[:, 1], alone[:, 1])
    assert torch.equal(alone[:, 1], -alone[:, 0])
