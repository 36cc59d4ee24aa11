"""Losses and gradients of logits against torch in float64."""

import kernel_device
import pytest
import torch
import torch.nn.functional as F

from afterdrop.kernels.cross_entropy import cross_entropy
from afterdrop.kernels.sample_cross_entropy import sample_cross_entropy

pytestmark = kernel_device.quiet
device = kernel_device.device


def both(V, scale, device, hidden=()):
    """Loss and gradient of the kernel and of torch, for V classes padded to a multiple of 8."""
    logits = torch.randn(4, -(-V // 8) * 8) * scale
    bias, targets = torch.randn(V), torch.randint(V, (4,))
    targets[0], targets[1] = 0, V - 1
    bias[list(hidden)] = float("-inf")
    logits[:, V:] = 1e9  # neither read nor written
    gradient, loss = logits.to(device, copy=True), torch.empty(4, device=device)
    cross_entropy(gradient, bias.to(device), targets.to(device), loss, 0.25)
    exact = logits[:, :V].double().requires_grad_()
    wanted = F.cross_entropy(exact + bias.double(), targets, reduction="none")
    (0.25 * wanted.sum()).backward()
    return (loss, gradient), (wanted, exact.grad)


@pytest.mark.parametrize("V", [1, 13, 2048, 2051])  # a block has 2048 classes
def test_losses_and_gradients_match_float64(V, device):
    (loss, gradient), (wanted, d_wanted) = both(V, 3.0, device)
    torch.testing.assert_close(loss.double().cpu(), wanted.detach(), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(gradient[:, :V].double().cpu(), d_wanted, rtol=1e-5, atol=1e-7)
    assert (gradient[:, V:] == 1e9).all()


def test_float16_logits_hold_the_gradient_of_rare_classes(device):
    """Unscaled, a gradient of 2e-9 would be 0; times 64, half a step of float16 is 5e-10."""
    logits = torch.zeros(2, 2056, dtype=torch.float16)
    logits[:, 0] = 20
    targets, bias = torch.tensor([0, 7]), torch.zeros(2051)
    here, loss = logits.to(device, copy=True), torch.empty(2, device=device)
    cross_entropy(here, bias.to(device), targets.to(device), loss, 64.0)
    exact = logits[:, :2051].double().requires_grad_()
    wanted = F.cross_entropy(exact, targets, reduction="none")
    wanted.sum().backward()
    torch.testing.assert_close(loss.double().cpu(), wanted.detach(), rtol=1e-5, atol=1e-6)
    found = here[:, :2051].double().cpu() / 64
    torch.testing.assert_close(found[:, 1:], exact.grad[:, 1:], rtol=2**-10, atol=2**-31)
    torch.testing.assert_close(found[:, 0], exact.grad[:, 0], rtol=2**-10, atol=5e-7)  # p − 1
    assert (exact.grad[0, 1] < 3e-9) and (found[0, 1] > 0)
    assert not here[:, 2051:].any()


def test_large_logits_neither_overflow_nor_underflow(device):
    (loss, gradient), (wanted, d_wanted) = both(70, 1e4, device)
    assert wanted.max() > 1e4
    torch.testing.assert_close(loss.double().cpu(), wanted.detach(), rtol=1e-6, atol=1e-3)
    torch.testing.assert_close(gradient[:, :70].double().cpu(), d_wanted, rtol=1e-3, atol=1e-6)


def test_masked_classes_have_no_gradient(device):
    (loss, gradient), (wanted, _) = both(70, 1.0, device, hidden=(3, 50))
    shown = wanted.isfinite()  # a row whose target is masked has an infinite loss
    torch.testing.assert_close(loss.double().cpu()[shown], wanted.detach()[shown])
    assert not gradient[shown.to(device)][:, [3, 50]].any()


@pytest.mark.parametrize("samples", [1, 3, 8])
@pytest.mark.parametrize("V", [13, 2051])
def test_the_mean_of_samples_matches_float64(V, samples, device):
    """Two steps of three rows; the effective number of samples is 1 / Σ w²."""
    time, B, scale = 2, 3, 0.25
    logits = torch.randn(time, samples, B, -(-V // 8) * 8) * 2
    bias, targets = torch.randn(V), torch.randint(V, (time, 1, B))
    targets[0, 0, 0], targets[1, 0, 2] = 0, V - 1
    logits[..., V:] = 1e9  # neither read nor written
    gradient = logits.flatten(0, 2).to(device, copy=True)
    loss, effective = torch.empty(2, time * B, device=device)
    repeated = targets.expand(time, samples, B).flatten().to(device)
    sample_cross_entropy(gradient, bias.to(device), repeated, loss, effective, B, scale)
    exact = logits[..., :V].double().requires_grad_()
    own = (
        (exact + bias.double())
        .log_softmax(-1)
        .gather(-1, targets.expand(time, samples, B).unsqueeze(-1))[..., 0]
    )
    wanted = -(own.exp().mean(1).log())
    (scale * wanted.sum()).backward()
    near = {"rtol": 1e-5, "atol": 2e-6}
    torch.testing.assert_close(loss.double().cpu(), wanted.detach().flatten(), **near)
    weights = own.detach().softmax(1)
    torch.testing.assert_close(
        effective.double().cpu(), 1 / weights.square().sum(1).flatten(), **near
    )
    found = gradient[:, :V].double().cpu()
    torch.testing.assert_close(found, exact.grad.flatten(0, 2), rtol=1e-4, atol=1e-7)
    assert (gradient[:, V:] == 1e9).all()
