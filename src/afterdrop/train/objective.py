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
