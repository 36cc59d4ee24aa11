"""The kernels of a mixture of softmaxes against torch in float64."""

import kernel_device
import pytest
import torch
from kernel_device import within

from afterdrop.kernels.mixture_cross_entropy import mixture_cross_entropy
from afterdrop.kernels.mixture_latents import latent_gradients, latent_vectors
from afterdrop.kernels.sample_cross_entropy import sample_cross_entropy
from afterdrop.models import LanguageModel, LanguageModelConfig, mixture_copies
from afterdrop.models.fused import Copies

pytestmark = kernel_device.quiet
device = kernel_device.device


def weighted(own, prior):
    """Losses [time, B] and weights [time, S, B, C] of the targets' log-probabilities."""
    joint = prior.log_softmax(-1) + own
    loss = torch.tensor(prior.shape[1]).log() - joint.logsumexp((1, 3))
    return loss, (joint - joint.logsumexp((1, 3), keepdim=True)).exp().detach()


# A block has 2048 classes; the lanes of 3 samples and of 3 components are padded to 4.
@pytest.mark.parametrize(("V", "samples", "components"), [(2051, 1, 2), (13, 3, 3)])
def test_losses_and_gradients_of_a_mixture_match_float64(V, samples, components, device):
    """Two steps of three rows; the effective number of samples is 1 / Σ_d (Σ_k w_dk)²."""
    time, B, scale, prior_scale = 2, 3, 0.25, 0.5
    shape = time, samples, B, components
    logits, prior = torch.randn(*shape, -(-V // 8) * 8) * 2, torch.randn(shape)
    bias, targets = torch.randn(V), torch.randint(V, (time, 1, B))
    targets[0, 0, 0], targets[1, 0, 2] = 0, V - 1
    logits[..., V:] = 1e9  # neither read nor written
    gradient = logits.flatten(0, 3).to(device, copy=True)
    given = torch.zeros(time * samples * B, 9, device=device)
    given[:, 4 : 4 + components] = prior.flatten(0, 2)
    d_given = torch.full_like(given, 7.0)
    inside = slice(4, 4 + components)
    loss, effective = torch.empty(2, time * B, device=device)
    repeated = targets.expand(time, samples, B).flatten().to(device)
    mixture_cross_entropy(
        gradient,
        bias.to(device),
        given[:, inside],
        d_given[:, inside],
        repeated,
        loss,
        effective if samples > 1 else None,
        B,
        scale,
        prior_scale,
    )
    exact, exact_prior = (x.double().requires_grad_() for x in (logits[..., :V], prior))
    index = targets[..., None, None].expand(*shape, 1)
    own = (exact + bias.double()).log_softmax(-1).gather(-1, index)[..., 0]
    wanted, weights = weighted(own, exact_prior)
    wanted.sum().backward()
    near = {"rtol": 1e-5, "atol": 2e-6}
    torch.testing.assert_close(loss.double().cpu(), wanted.detach().flatten(), **near)
    if samples > 1:
        of_samples = 1 / weights.sum(3).square().sum(1).flatten()
        torch.testing.assert_close(effective.double().cpu(), of_samples, **near)
    near = {"rtol": 1e-4, "atol": 1e-6}
    found, d_prior = gradient[:, :V].double().cpu(), d_given[:, inside].double().cpu()
    torch.testing.assert_close(found, scale * exact.grad.flatten(0, 3), **near)
    torch.testing.assert_close(d_prior, prior_scale * exact_prior.grad.flatten(0, 2), **near)
    assert (gradient[:, V:] == 1e9).all()
    assert (d_given[:, :4] == 7).all() and (d_given[:, 4 + components :] == 7).all()


def test_one_component_is_the_mean_of_samples(device):
    """The same losses and gradients as `sample_cross_entropy`, whatever the prior's logit."""
    logits, bias = torch.randn(12, 16, device=device), torch.randn(13, device=device)
    targets = torch.randint(13, (2, 1, 3), device=device).expand(2, 2, 3).flatten()
    one, other = logits.clone(), logits.clone()
    found, wanted = torch.empty(2, 2, 6, device=device)
    prior = torch.randn(12, 1, device=device)
    d_prior = torch.ones_like(prior)
    mixture_cross_entropy(one, bias, prior, d_prior, targets, *found, 3, 0.25, 1.0)
    sample_cross_entropy(other, bias, targets, *wanted, 3, 0.25)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(one, other)
    assert d_prior.abs().max() < 1e-6


def test_float16_logits_of_a_component_with_little_weight_keep_their_gradient(device):
    """Two equal components of 2051 classes; the second has a weight of e⁻⁶."""
    logits = torch.zeros(2, 2056, dtype=torch.float16, device=device)
    logits[:, 0] = 9
    prior, d_prior = torch.tensor([[3.0, -3.0]], device=device), torch.empty(1, 2, device=device)
    bias, loss = torch.zeros(2051, device=device), torch.empty(1, device=device)
    targets = torch.zeros(1, dtype=torch.int64, device=device)
    mixture_cross_entropy(logits, bias, prior, d_prior, targets, loss, None, 1, 128.0, 1.0)
    p = torch.exp(-9 - torch.log1p(2050 * torch.tensor(-9.0).exp()))
    wanted = prior[0].softmax(0).cpu() * p
    found = logits[:, 1].float().cpu() / 128
    torch.testing.assert_close(found, wanted, rtol=2**-9, atol=2**-31)
    assert d_prior.abs().max() < 1e-6  # both components predict the same


@pytest.mark.parametrize("rows", [None, 3, 6])
def test_latent_vectors_and_their_gradients_match_float64(rows, device):
    """Six places, two components of 3 units padded to 5; masks per place, per row, or none."""
    R, C, E, P = 6, 2, 3, 5
    projected = torch.zeros(R, 2 * P + 3)
    projected[:, : C * P].view(R, C, P)[..., :E] = torch.randn(R, C, E)
    projected[:, C * P :] = 9.0  # the prior's logits
    bias = torch.zeros(C, P)
    bias[:, :E] = torch.randn(C, E)
    mask = None if rows is None else torch.randint(2, (rows, C * P)) * 2.0
    exact = projected[:, : C * P].double().requires_grad_()
    of_places = 1.0 if mask is None else mask.repeat(R // len(mask), 1).double()
    wanted = (exact + bias.flatten().double()).tanh() * of_places
    d_latents = torch.randn(R, C * P)
    (wanted * d_latents.double() * 0.5).sum().backward()
    held, latents = projected.to(device, copy=True), torch.full((R, C, P), 7.0, device=device)
    given = None if mask is None else mask.to(device)
    latent_vectors(held, bias.flatten().to(device), given, latents, E)
    near = {"rtol": 1e-5, "atol": 1e-6}
    found = latents.double().cpu()
    torch.testing.assert_close(found[..., :E], wanted.detach().view(R, C, P)[..., :E], **near)
    assert (found[..., E:] == 7).all() and (held[:, C * P :] == 9).all()
    d_projected = torch.full_like(held, 7.0)
    latent_gradients(d_latents.to(device), held, given, d_projected, 0.5)
    torch.testing.assert_close(d_projected[:, : C * P].double().cpu(), exact.grad, **near)
    assert (d_projected[:, C * P :] == 7).all()


@pytest.mark.parametrize("at_once", [1, 2**20])
@torch.no_grad()
def test_copies_give_the_log_probabilities_of_the_model(at_once, device, monkeypatch):
    """As a validation reads them, with a row of logits at a time or all at once."""
    monkeypatch.setattr(mixture_copies, "_AT_ONCE", {"cpu": at_once, "cuda": at_once})
    torch.manual_seed(0)
    config = LanguageModelConfig(11, (5,), 3, softmax_components=4, projection_dropout=0.5)
    model = LanguageModel(config).to(device).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    copies = Copies(model, torch.float32)
    copies.pack()
    y = torch.randn(7, 1, 5, device=device)
    padded = torch.zeros(7, copies.mixture.weight.shape[1], device=device)
    padded[:, :5] = y.squeeze(1)
    found, wanted = copies.output(padded), model.output(model.mixture(y)).squeeze(1)
    assert (found - wanted).abs().max() < within(device, 1e-5)
