"""The engine of a predictor: what it collects of inputs, from chunks of rows under masks.

Legend: B examples, S samples of a chunk, V classes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from afterdrop.evaluation.chunks import Memory, plan_chunks, split_evenly
from afterdrop.evaluation.engines.generic import Operations
from afterdrop.evaluation.engines.model_passes import ModelPasses, run_samples
from afterdrop.evaluation.likelihoods import Likelihood
from afterdrop.evaluation.request import Request
from afterdrop.evaluation.scores.schema import Results
from afterdrop.family.member import Member
from afterdrop.masks.kept_masks import KeptMasks
from afterdrop.masks.model_call import batch_size, take_rows
from afterdrop.masks.prefix import NotRecorded
from afterdrop.masks.rows import Rows
from afterdrop.masks.sites import Sites
from afterdrop.masks.uniforms import Plan
from afterdrop.selection.member_mean import Collector, MemberMean
from afterdrop.selection.stopping_mean import StoppingMean


class PredictionEngine:
    """Predicts batches: a tuple of the arguments of `run`.

    Args:
        model: The model.
        member: How to predict.
        request: Samples and dimensions.
        likelihood: Reads outputs.
        sites: The model's dropout sites.
        memory: The budget.
        operations: Plain ones, or kernels.
        tolerance: The standard error at which an example gets no more samples; None for all.
    """

    ahead = 0

    def __init__(
        self,
        model: nn.Module,
        member: Member,
        request: Request,
        likelihood: Likelihood,
        sites: Sites,
        memory: Memory,
        operations: Operations,
        tolerance: float | None = None,
    ) -> None:
        self.member, self.request, self.sites, self.memory = member, request, sites, memory
        self.likelihood, self.kernels = likelihood, operations.kernels
        self.passes = ModelPasses(model, sites, request.batch_dim, operations.draw)
        self.tolerance = tolerance
        self._draw, self._masks = self.passes.control.draw, KeptMasks(memory.budget // 4)

    def begin(self, batch: Any, number: int) -> Callable[[], Any]:
        """Returns what computes the result, with the classes last."""
        return partial(self.run, *batch)

    def clear(self) -> None:
        """Frees the masks."""
        self._masks = KeptMasks(self.memory.budget // 4)

    def carried(self) -> Results:
        """Nothing."""
        return {}

    def restore(self, carried: Results) -> None:
        """Nothing to do."""

    def run(
        self,
        arguments: Any,
        keys: Tensor,
        collector: Callable[[Member], Collector] = MemberMean,
        samples: range | None = None,
    ) -> Any:
        """What a collector makes of the samples.

        Args:
            arguments: Positional and keyword inputs, a pair (args, kwargs).
            keys: [B] keys of the examples' masks.
            collector: Makes what takes the logits of samples for some of the examples; by default
                the member's log-probabilities.
            samples: Which samples to run; by default all.
        """
        shared = not self.kernels and not keys.any()  # kernels draw as fast as they would read
        self.passes.control.draw = self._masks.draw if shared else self._draw
        try:
            return self._run(arguments, keys, collector, samples)
        except NotRecorded:
            self.sites = self.sites.without_prefix()
            self.passes.run_all_modules()
            return self._run(arguments, keys, collector, samples)

    def _run(
        self,
        arguments: Any,
        keys: Tensor,
        collector: Callable[[Member], Collector],
        samples: range | None,
    ) -> Any:
        size = limit = batch_size(arguments, self.request.batch_dim)
        if self.sites.prefix is not None:  # its modules run with one row per example
            every = self.sites.without_prefix()
            limit = plan_chunks(every, Plan(1), size, 1, 0, self.memory).examples
        found: list[Collector] = []
        dim = 0
        for part in split_evenly(size, limit):
            taken, own = arguments, keys[part.start : part.stop]
            if len(part) < size:
                ends = part.start, part.stop
                taken = take_rows(arguments, self.request.batch_dim, size, *ends, 1)
            dim = self._part(taken, own, collector, samples, found)
            self.passes.end_batch()
        return found[0].join([each.result() for each in found], dim)

    def _part(
        self,
        arguments: Any,
        keys: Tensor,
        collector: Callable[[Member], Collector],
        samples: range | None,
        found: list[Collector],
    ) -> int:
        """Adds a collector per chunk of examples; returns the batch dimension of their logits."""
        # Accumulators are a few times what one row's logits take, which a row's bytes contain.
        accumulators = 4 * self.sites.sampled_row_bytes
        chunks = plan_chunks(self.sites, self.request.plan, len(keys), 1, accumulators, self.memory)
        dim = 0
        for part in split_evenly(len(keys), chunks.examples):
            own = collector(self.member)
            if self.tolerance is not None and collector is MemberMean:
                separable = self.sites.batched
                own = StoppingMean(self.member, self.tolerance, part, separable=separable)
            dim = self._chunk(arguments, keys, part, chunks.samples, own, samples)
            found.append(own)
        return dim

    def _chunk(
        self,
        arguments: Any,
        keys: Tensor,
        part: range,
        at_once: int,
        collector: Collector,
        samples: range | None,
    ) -> int:
        """Runs samples for some examples; returns the batch dimension of their logits."""
        plan, multipliers = self.request.plan, (self.member.multiplier,)
        stopping = collector if isinstance(collector, StoppingMean) else None
        dim = 0

        def add(samples: range) -> None:
            nonlocal dim
            running = part if stopping is None else stopping.running
            if not running:
                return
            rows = Rows(plan, multipliers, samples, keys[torch.tensor(running)])
            output = self.passes.run_arguments(arguments, len(keys), rows, running)
            logits, dim = self.likelihood.read_logits(output)
            if stopping is not None:
                stopping.dim = dim
            collector.add(logits.unflatten(dim, (len(samples), -1)).movedim(dim, 0), "the input")

        if samples is None:
            run_samples(self.passes.control, plan, multipliers, at_once, add, collector.end_block)
            return dim
        with self.passes.control.prepared(multipliers):
            for chunk in split_evenly(len(samples), at_once):
                add(samples[chunk.start : chunk.stop])
        return dim
