"""The engine of a predictor: log-probabilities of inputs, from chunks of rows under masks.

Legend: B examples, S samples of a chunk, V classes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from afterdrop.evaluation.chunks import Memory, plan_chunks, split_evenly
from afterdrop.evaluation.engines.generic import ModelPasses, Operations, run_samples
from afterdrop.evaluation.likelihoods.categorical import Categorical
from afterdrop.evaluation.request import Request
from afterdrop.evaluation.scores.schema import Results
from afterdrop.family.member import Member
from afterdrop.masks.model_call import batch_size
from afterdrop.masks.rows import Rows
from afterdrop.masks.sites import Sites
from afterdrop.selection.member_mean import MemberMean


class PredictionEngine:
    """Predicts batches of a pair ((args, kwargs), keys [B] of the examples' masks).

    Args:
        model: The model.
        member: How to predict.
        request: Samples and dimensions.
        likelihood: Reads outputs.
        sites: The model's dropout sites.
        memory: The budget.
        operations: Plain ones, or kernels.
    """

    ahead = 0

    def __init__(
        self,
        model: nn.Module,
        member: Member,
        request: Request,
        likelihood: Categorical,
        sites: Sites,
        memory: Memory,
        operations: Operations,
    ) -> None:
        self.member, self.request, self.sites, self.memory = member, request, sites, memory
        self.likelihood, self.kernels = likelihood, operations.kernels
        self.passes = ModelPasses(model, sites, request.batch_dim, operations.draw)

    def begin(self, batch: Any, number: int) -> Callable[[], Tensor]:
        """Returns what computes the log-probabilities, with the classes last."""
        return partial(self._run, *batch)

    def clear(self) -> None:
        """Nothing is kept."""

    def carried(self) -> Results:
        """Nothing."""
        return {}

    def restore(self, carried: Results) -> None:
        """Nothing to do."""

    def _run(self, arguments: Any, keys: Tensor) -> Tensor:
        size = batch_size(arguments, self.request.batch_dim)
        # Accumulators are a few times what one row's logits take, which row_bytes contains.
        accumulators = 4 * self.sites.row_bytes
        chunks = plan_chunks(self.sites, self.request.plan, size, 1, accumulators, self.memory)
        ranges = split_evenly(size, chunks.examples)
        parts = [self._chunk(arguments, keys, part, chunks.samples) for part in ranges]
        dims = {dim for _, dim in parts}
        return torch.cat([found for found, _ in parts], dims.pop())

    def _chunk(self, arguments: Any, keys: Tensor, part: range, at_once: int) -> tuple[Tensor, int]:
        """Log-probabilities of some examples, and their batch dimension."""
        mean, plan = MemberMean(self.member), self.request.plan
        multipliers, own = (self.member.multiplier,), keys[part.start : part.stop]
        dim = 0

        def add(samples: range) -> None:
            nonlocal dim
            rows = Rows(plan, multipliers, samples, own)
            output = self.passes.run_arguments(arguments, len(keys), rows, part)
            logits, dim = self.likelihood.read_logits(output)
            mean.add(logits.unflatten(dim, (len(samples), -1)).movedim(dim, 0), "the input")

        run_samples(self.passes.control, plan, multipliers, at_once, add, lambda: None)
        return mean.log_probs(), dim
