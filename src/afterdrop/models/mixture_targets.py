"""The targets' log-probabilities under a mixture of softmaxes, for training.

    log p(y) = log Σ_k π_k p_k(y)          r_k = π_k p_k(y) / Σ_j π_j p_j(y)
    ∂ log p(y) / ∂ logits_k(c) = r_k ([c = y] − p_k(c))
    ∂ log p(y) / ∂ prior_k     = r_k − π_k                          prior: the logits of π

The target's own entries and each component's log-sum-exp are all that it takes, so the mixture over
the vocabulary is never computed. Logits are computed for some rows at a time, and again for the
gradient: memory does not grow with the number of rows.

Legend: C components, N rows (n at a time), V token types, E embedding units.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from afterdrop.models.softmax_mixture import rows_at_once

# Larger on a CPU than for evaluation: the products of the gradient sum over rows.
_AT_ONCE = {"cpu": 2**23, "cuda": 2**27}


def target_log_probs(
    latent_NCE: Tensor, prior_NC: Tensor, table_VE: Tensor, bias_V: Tensor, targets_N: Tensor
) -> Tensor:
    """The log-probability [N] of each row's target, differentiable in all but the targets.

    Example:
        >>> latent, table = torch.tensor([[[1.0], [-1.0]]]), torch.tensor([[9.0], [-9.0]])
        >>> prior = torch.tensor([[0.75, 0.25]]).log()
        >>> target_log_probs(latent, prior, table, torch.zeros(2), torch.tensor([1])).exp()
        tensor([0.2500])
    """
    return _TargetLogProbs.apply(latent_NCE, prior_NC, table_VE, bias_V, targets_N)


class _TargetLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, latent: Tensor, prior: Tensor, table: Tensor, bias: Tensor, targets: Tensor
    ) -> Tensor:
        log_z, chosen = torch.empty_like(prior), torch.empty_like(prior)
        for rows in _slices(latent, table):
            logits_nCV = _logits(latent[rows], table, bias)
            log_z[rows] = logits_nCV.logsumexp(-1)
            chosen[rows] = logits_nCV.gather(-1, _index(targets[rows], prior)).squeeze(-1)
        joint_NC = prior.log_softmax(-1) + chosen - log_z
        found_N = joint_NC.logsumexp(-1)
        weights_NC = (joint_NC - found_N.unsqueeze(-1)).exp()
        ctx.save_for_backward(latent, prior, table, bias, targets, log_z, weights_NC)
        return found_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        latent, prior, table, bias, targets, log_z, weights_NC = ctx.saved_tensors
        d_latent, d_table, d_bias = map(torch.zeros_like, (latent, table, bias))
        scale_NC1 = (grad_N.unsqueeze(-1) * weights_NC).unsqueeze(-1)
        for rows in _slices(latent, table):
            logits_nCV = _logits(latent[rows], table, bias)
            d_nCV = logits_nCV.sub_(log_z[rows].unsqueeze(-1)).exp_().mul_(-scale_NC1[rows])
            d_nCV.scatter_add_(-1, _index(targets[rows], prior), scale_NC1[rows])
            d_RV = d_nCV.flatten(0, 1)
            torch.mm(d_RV, table, out=d_latent[rows].view(len(d_RV), -1))
            d_table.addmm_(d_RV.t(), latent[rows].flatten(0, 1))
            d_bias += d_RV.sum(0)
        d_prior = grad_N.unsqueeze(-1) * (weights_NC - prior.softmax(-1))
        return d_latent, d_prior, d_table, d_bias, None


def _logits(latent_nCE: Tensor, table_VE: Tensor, bias_V: Tensor) -> Tensor:
    return torch.addmm(bias_V, latent_nCE.flatten(0, 1), table_VE.t()).unflatten(
        0, latent_nCE.shape[:2]
    )


def _index(targets_n: Tensor, prior_NC: Tensor) -> Tensor:
    """Targets [n, C, 1], the same for every component."""
    return targets_n.view(-1, 1, 1).expand(-1, prior_NC.shape[1], 1)


def _slices(latent_NCE: Tensor, table_VE: Tensor) -> list[slice]:
    step = rows_at_once(latent_NCE, table_VE, _AT_ONCE)
    return [slice(at, at + step) for at in range(0, len(latent_NCE), step)]
