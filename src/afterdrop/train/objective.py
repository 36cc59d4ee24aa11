"""The MAP objective of dropout training.

    loss = 1/B Σ_b Σ_t −log p(y_bt | x, ω̂_b) + l2/2 ‖Θ‖²                (Melis et al., 2018, §2)

With one mask sample ω̂ per row, the data term is an unbiased estimate of the dropout bound. The L2
term is a Gaussian prior: multiplied by N/time, the loss estimates Σ_N −log p + ‖Θ‖²/(2σ_p²) over
the whole data, with σ_p² = time / (N l2). The batch size cancels, because the loss is a mean over
the batch.

With S samples, the predictions of S masks of the same row are averaged inside the logarithm, as a
member of the family does: a tighter bound on that member, at S times the cost.

Legend: B rows, S samples, time steps, V classes, N targets of the training data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from afterdrop.errors import DataError
from afterdrop.family.power_mean import log_power_mean


def data_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    samples: int = 1,
    alpha: float = 1.0,
    whole_batch: int | None = None,
) -> Tensor:
    """The data term: summed over time, averaged over the batch.

    Args:
        logits: [S·B, time, V] of a text, [S·B, V] of images, all rows of one sample together.
        targets: [B, time] or [B].
        samples: S.
        alpha: Power of the mean over samples; the mean is renormalised.
        whole_batch: Rows of the whole batch if these are one rank's share; the losses of all ranks
            then sum to the loss of the batch. None is B.

    Returns:
        A scalar, in nats.

    Example:
        >>> data_loss(torch.zeros(2, 5, 4), torch.zeros(2, 5, dtype=torch.int64))
        tensor(6.9315)
    """
    batch = targets.shape[0]
    if logits.shape[:-1] != (samples * batch, *targets.shape[1:]):
        raise DataError(
            f"logits of shape {tuple(logits.shape)} do not match targets of shape "
            f"{tuple(targets.shape)} and samples={samples}; repeat each row samples times"
        )
    if samples > 1:
        log_probs = logits.unflatten(0, (samples, batch)).log_softmax(-1)
        logits = log_power_mean(log_probs, alpha)  # cross_entropy renormalises
    total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
    return total / (batch if whole_batch is None else whole_batch)


def step_loss(
    logits: Tensor, targets: Tensor, *, samples: int, alpha: float, whole_batch: int
) -> tuple[Tensor, Tensor | None]:
    """`data_loss`, and the mean of `effective_samples` over targets; None with one sample.

    Example:
        >>> step_loss(
        ...     torch.zeros(6, 4), torch.tensor([0, 1]), samples=3, alpha=1.0, whole_batch=2
        ... )
        (tensor(1.3863), tensor(3.0000))
    """
    loss = data_loss(logits, targets, samples=samples, alpha=alpha, whole_batch=whole_batch)
    if samples == 1:
        return loss, None
    effective = effective_samples(logits, targets, samples=samples, alpha=alpha)
    return loss, effective.mean() * (len(targets) / whole_batch)


def target_loss(
    log_probs: Tensor, *, samples: int, whole_batch: int
) -> tuple[Tensor, Tensor | None]:
    """`step_loss` from the targets' log-probabilities [S·B, time], which suffice for alpha = 1.

    Example:
        >>> log_probs = torch.tensor([[0.5], [1.0]]).log()
        >>> target_loss(log_probs, samples=2, whole_batch=1)
        (tensor(0.2877), tensor(1.8000))
    """
    lp = log_probs.unflatten(0, (samples, -1))
    loss = (math.log(samples) - lp.logsumexp(0)).sum() / whole_batch
    if samples == 1:
        return loss, None
    effective = 1 / lp.detach().softmax(0).square().sum(0)
    return loss, effective.mean() * (lp.shape[1] / whole_batch)


@torch.no_grad()
def effective_samples(
    logits: Tensor, targets: Tensor, *, samples: int, alpha: float = 1.0
) -> Tensor:
    """The effective number of samples 1 / Σ_d w_d² of each target, between 1 and S.

    w_d ∝ p_d(y)^α is the weight of sample d in the gradient of the target's log M_α. Near S the
    samples agree and the bound is tight; near 1 one sample takes the whole gradient.

    Args:
        logits: As in `data_loss`.
        targets: As in `data_loss`.
        samples: S.
        alpha: Power of the mean over samples.

    Returns:
        In the shape of the targets.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0], [0.0, 20.0]])  # p = 0.5 and about 1
        >>> effective_samples(logits, torch.tensor([1]), samples=2)
        tensor([1.8000])
    """
    repeated = targets.repeat(samples, *[1] * (targets.dim() - 1))
    xe = F.cross_entropy(logits.flatten(0, -2), repeated.flatten(), reduction="none")
    weights = (-alpha * xe).view(samples, *targets.shape).softmax(0)
    return 1 / weights.square().sum(0)


def prior_loss(parameters: Sequence[Tensor], l2_penalty: float) -> float:
    """The term of the prior, l2/2 ‖Θ‖², over all parameters including biases and embeddings.

    Example:
        >>> prior_loss([torch.full((4,), 2.0), torch.ones(9)], 0.5)
        6.25
    """
    norms = torch._foreach_norm([p.detach() for p in parameters])
    return 0.5 * l2_penalty * float(torch.stack(norms).double().square().sum())


def add_prior_gradient(parameters: Sequence[Tensor], l2_penalty: float) -> None:
    """Adds the gradient of the prior, l2·Θ, without building a graph.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> weight.sum().backward()
        >>> add_prior_gradient([weight], 0.5)
        >>> weight.grad
        tensor([1.5000, 1.5000])
    """
    if l2_penalty == 0:
        return
    grads = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grads.append(parameter.grad)
    torch._foreach_add_(grads, [p.detach() for p in parameters], alpha=l2_penalty)


def prior_scale(l2_penalty: float, targets: int, window: int = 1) -> float:
    """The standard deviation σ_p of the Gaussian prior that corresponds to an L2 penalty.

    Args:
        l2_penalty: On the scale of the loss.
        targets: N, tokens (or images) of the training data.
        window: Tokens that the loss sums over; 1 for images.

    Returns:
        σ_p = √(window / (N l2)); infinite without a penalty.

    Example:
        The retuned 24M model of PTB:

        >>> round(prior_scale(0.000093711, targets=929_589, window=35), 3)
        0.634
    """
    return math.sqrt(window / (targets * l2_penalty)) if l2_penalty > 0 else math.inf
