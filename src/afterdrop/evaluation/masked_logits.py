"""Logits of every mask sample of a model, written into an array.

Legend: M multipliers, S mask samples, B examples, n targets of a batch that count, V classes.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch

from afterdrop.evaluation.batches import Batch, to_device
from afterdrop.evaluation.chunks import Memory, plan_chunks, split_evenly
from afterdrop.evaluation.engines.model_passes import ModelPasses, run_samples
from afterdrop.evaluation.likelihoods import Likelihood
from afterdrop.evaluation.request import Request
from afterdrop.evaluation.sample_reading import as_array
from afterdrop.masks.rows import Rows
from afterdrop.masks.sites import Sites
from afterdrop.masks.uniforms import Plan


@dataclasses.dataclass(frozen=True)
class MaskedLogits:
    """The passes of a model under masks.

    Attributes:
        passes: Runs the model.
        sites: Its dropout sites.
        plan: The mask samples.
        request: Its multipliers above 0.
        likelihood: Reads outputs.
        memory: The budget.
    """

    passes: ModelPasses
    sites: Sites
    plan: Plan
    request: Request
    likelihood: Likelihood
    memory: Memory

    def write(self, batch: Batch, room: Any) -> None:
        """Writes the logits of a batch into an array [S, M, n, V]."""
        multipliers, start = self.request.grid.stochastic, 0
        chunks = plan_chunks(self.sites, self.plan, batch.size, len(multipliers), 1, self.memory)
        for examples in split_evenly(batch.size, chunks.examples):
            part = batch.host[examples.start : examples.stop]
            stop = start + int(self.likelihood.counts(part).sum())
            for first in range(0, len(multipliers), chunks.multipliers):
                some = multipliers[first : first + chunks.multipliers]
                place = room[:, first : first + len(some), start:stop]
                add = partial(self._add, batch, examples, some, place)
                run_samples(self.passes.control, self.plan, some, chunks.samples, add, lambda: None)
            start = stop

    def _add(
        self,
        batch: Batch,
        examples: range,
        multipliers: tuple[float, ...],
        place: Any,
        samples: range,
    ) -> None:
        """Runs some samples of some examples."""
        numbers = torch.arange(batch.first + examples.start, batch.first + examples.stop)
        numbers = to_device(numbers, batch.targets.device)
        rows = Rows(self.plan, multipliers, samples, numbers)
        output = self.passes.run(batch.inputs, batch.size, rows, examples)
        part = batch.host[examples.start : examples.stop]
        logits = self.likelihood.read_output(output, part, len(multipliers) * len(samples))
        logits = logits.unflatten(0, (len(multipliers), len(samples))).transpose(0, 1)
        place[samples.start : samples.stop] = as_array(logits)
