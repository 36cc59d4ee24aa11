"""The distributions that a copy learns: those of the chosen member, computed once per input.

A predictor is a fixed function of each input, so that its K passes need not be repeated in every
epoch. Inputs are recognised by a hash, whatever batch they come in.

Legend: B examples, N targets that count, V classes.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from afterdrop.evaluation.batches import Batch, call, digest_tensors
from afterdrop.evaluation.likelihoods.categorical import Categorical
from afterdrop.evaluation.output_summary import OutputSummary, summary
from afterdrop.evaluation.rounding import epsilon_of
from afterdrop.masks.model_call import tensors
from afterdrop.selection.example_keys import input_hashes
from afterdrop.selection.predictor import Predictor
from afterdrop.transfer import with_float64

KEPT_BYTES = 2**28


class Teacher:
    """Log-probabilities of a predictor, kept by input.

    Args:
        predictor: Predicts classes.
        likelihood: Reads outputs.
        budget: Bytes that may be kept, by default 256 MiB; inputs beyond it are predicted again in
            every epoch.
    """

    def __init__(
        self, predictor: Predictor, likelihood: Categorical, budget: int | None = None
    ) -> None:
        self.predictor = predictor
        self.budget = KEPT_BYTES if budget is None else budget
        self._reading = dataclasses.replace(likelihood, logits=None)  # of plain tensors
        self._kept: dict[tuple[int, str], Tensor] = {}

    def log_probs(self, batch: Batch) -> Tensor:
        """[N, V] of the targets of a batch that count."""
        dim = self._reading.batch_dim
        keys = self._keys(batch)
        if all(key in self._kept for key in keys):
            found = torch.stack([self._kept[key] for key in keys], dim)
        else:
            found = call(self.predictor, batch.fresh_inputs(dim))
            if not self.predictor.depends_on_batch:
                self._keep(keys, found, dim)
        return self._reading.read_output(found, batch.host, 1)[0]

    def output_summary(self, batch: Batch) -> OutputSummary:
        """What identifies the predictions for a batch, by which changed code is noticed."""
        found = self.log_probs(batch)
        epsilon = epsilon_of(self.predictor, found.dtype, same_shapes=False)
        return summary(with_float64(found), epsilon)

    def _keys(self, batch: Batch) -> list[tuple[int, str]]:
        """What each example is kept by: its rows of the inputs, and what all examples share."""
        dim = self._reading.batch_dim
        shared = [
            tensor
            for tensor in tensors(batch.inputs)
            if tensor.dim() <= dim or tensor.shape[dim] != batch.size
        ]
        rest = digest_tensors(shared)
        return [(key, rest) for key in input_hashes(batch.inputs, batch.size, dim).tolist()]

    def _keep(self, keys: list[tuple[int, str]], found: Tensor, dim: int) -> None:
        for key, row in zip(keys, found.unbind(dim)):
            size = row.numel() * row.element_size()
            if key not in self._kept and size <= self.budget:
                self._kept[key] = row.clone()
                self.budget -= size


def cross_entropy(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over targets of −Σ_c p(c) log q(c), of logits and log-probabilities [N, V].

    Its gradient is that of KL(p ‖ q).

    Example:
        >>> cross_entropy(torch.zeros(1, 2), torch.tensor([[0.5, 0.5]]).log())
        tensor(0.6931)
    """
    log_q = student.float().log_softmax(-1)
    p = teacher.exp()
    # A class that the teacher excludes must not count, even if the copy excludes it, too.
    return -torch.where(p > 0, p * log_q, torch.zeros_like(p)).sum(-1).mean()


def entropy(teacher: Tensor) -> Tensor:
    """Mean entropy of the distributions [N, V]: the lowest that `cross_entropy` can be."""
    return cross_entropy(teacher, teacher)
