"""Scores of given samples: every power and temperature of their mean, a few examples at a time.

Two passes over the samples. The first finds the sources' cross entropies, each alone; the second
computes what an evaluation keeps, with the best source in the place of the deterministic model, and
with a jackknife over groups of samples in the place of the two halves (`jackknife`).

Legend: K samples, M multipliers, B examples, N targets.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from afterdrop.errors import DataError
from afterdrop.evaluation.chunks import Memory, split_evenly
from afterdrop.evaluation.ensemble import Ensemble, source_names
from afterdrop.evaluation.jackknife import Jackknife
from afterdrop.evaluation.request import Protocol, Request
from afterdrop.evaluation.sample_reading import (
    SampleLikelihood,
    SampleReader,
    target_log_likelihoods,
)
from afterdrop.evaluation.scores import schema
from afterdrop.evaluation.scores.schema import Results
from afterdrop.evaluation.scores.scores import Scores
from afterdrop.evaluation.stored_samples import Column
from afterdrop.family.temperature import Nodes, partitions
from afterdrop.masks.uniforms import Plan

_COPIES = 4  # of the log-probabilities of a chunk that exist at a time


@dataclasses.dataclass(frozen=True)
class GivenSamples:
    """Samples, and what they belong to.

    Attributes:
        columns: The samples, as `sample_reading` describes them.
        singles: Each source alone, without dropout, in the same order; None if the samples are it.
        targets: [B, ...], on the CPU.
        models: Names of the models, adapters or stored samples.
        views: Names of the views of an augmentation.
        masks: The mask samples of each source.
        fingerprint: Of the models.
        shared: Whether all examples have the same samples, as the models of an ensemble.
        examples: [B] which error cluster each belongs to; None if they are independent.
        single: Which source stands alone; None for the best on these data.
        labels: [B] the label of each recorded target, if examples have several.
        recorded: Whether samples were recorded from models (`sample_reading`).
    """

    columns: Sequence[Column]
    singles: Sequence[Column] | None
    targets: Tensor
    models: tuple[str, ...]
    views: tuple[str, ...] = ()
    masks: Plan | None = None
    fingerprint: str = ""
    shared: bool = True
    examples: Tensor | None = None
    single: int | None = None
    labels: Tensor | None = None
    recorded: bool = False

    @property
    def alone(self) -> Sequence[Column]:
        """Each source alone."""
        return self.columns if self.singles is None else self.singles


def score_samples(
    given: GivenSamples,
    request: Request,
    likelihood: SampleLikelihood,
    memory: Memory,
    *,
    progress: bool = False,
) -> Scores:
    """Scores of given samples.

    Args:
        given: The samples.
        request: What to evaluate; its plan has as many samples.
        likelihood: The kind of targets.
        memory: The budget.
        progress: Whether to show a progress bar.
    """
    ignored = f"no target counts: all equal ignore_index={request.ignore_index} or NaN"
    if not len(given.targets):  # of those recorded, which all count
        raise DataError(ignored)
    total, what = 2 * len(given.targets), f"evaluate {request.split}"
    bar = tqdm(total=total, desc=what, unit="example", disable=not progress)
    names = source_names(given.models, given.views)
    reader = SampleReader(likelihood, names, given.recorded)
    with torch.no_grad(), bar:
        protocol = _protocol(given, request, reader)
        run = _Run(protocol, reader, memory, bar.update)
        alone = run.alone(given)
        best = min(range(len(alone)), key=alone.__getitem__)
        best = best if given.single is None else given.single
        if request.likelihood == "squared_error":
            alone = _with_noise(alone, best, request.noise_variance)
        ensemble = Ensemble(given.models, tuple(alone), best, given.views, given.masks)
        run.protocol = dataclasses.replace(protocol, ensemble=ensemble)
        parts = list(run.chunks(given, best))
    tensors = schema.join(parts, "N")
    if not tensors[schema.name_of("data", "targets")].numel():
        raise DataError(ignored)
    return Scores(run.protocol, tensors)


def _protocol(given: GivenSamples, request: Request, reader: SampleReader) -> Protocol:
    """The request, and what the first examples of the first source make of it."""
    likelihood, column = reader.likelihood, given.alone[0]
    first = column.parts[0]
    few = max(1, 2**21 // max(1, first.shape[-1]))
    size = min(column.size, few)
    host = reader.targets(given.targets[:size])
    logits = reader.outputs(first.read(0, size)[:1, :1], host, 0)[0, 0]
    likelihood.check_output(logits)
    likelihood.check_targets(host, logits.shape[-1], 0)
    nodes = Nodes(*request.temperatures) if request.temperatures else None
    if nodes is None:
        nodes = likelihood.bracket(logits, host.flatten()[likelihood.counts(host)])
    return Protocol(
        request=request,
        low=nodes.low,
        high=nodes.high,
        num_classes=logits.shape[-1],
        fingerprint=given.fingerprint,
        batched=True,
        shared=given.shared,
    )


def _with_noise(alone: list[float], best: int, variance: float | None) -> list[float]:
    """Negative log-likelihoods at a noise variance, by default the best source's squared error.

    Args:
        alone: Those at a variance of 1.
        best: The source that stands alone.
        variance: What temperature 1 stands for.
    """
    errors = [2 * nll - math.log(2 * math.pi) for nll in alone]  # mean squared errors
    at = max(errors[best], 1e-300) if variance is None else variance
    return [(math.log(2 * math.pi * at) + error / at) / 2 for error in errors]


@dataclasses.dataclass
class _Run:
    """The two passes over samples."""

    protocol: Protocol
    reader: SampleReader
    memory: Memory
    done: Callable[[int], object]

    def alone(self, given: GivenSamples) -> list[float]:
        """Mean negative log-likelihood of each source."""
        total, count = torch.zeros((), dtype=torch.float64), 0
        likelihood, columns = self.reader.likelihood, given.alone
        for start, number, part in self._pieces(columns, given.targets):
            host = self._host(given.targets, start, part)
            samples = columns[number].read(part.start, part.stop)[:, :1]
            found = self.reader.predictions(samples, host, start)[:, 0]
            valid = host.flatten()[likelihood.counts(host)]
            total = total - target_log_likelihoods(found, valid, likelihood).sum(-1)
            count += len(valid)
        return (total / max(1, count)).tolist()

    def chunks(self, given: GivenSamples, best: int) -> Iterator[Results]:
        """Results of all examples, chunk by chunk."""
        reader, jackknife = self.reader, Jackknife(self.protocol, self.reader.likelihood)
        for start, number, part in self._pieces(given.columns, given.targets):
            host = self._host(given.targets, start, part)
            samples = given.columns[number].read(part.start, part.stop)
            found = reader.predictions(samples, host, start)
            single = given.alone[number].read(part.start, part.stop)[best : best + 1, :1]
            each = torch.arange(start, start + len(part))
            labels = None if given.labels is None else given.labels[each]
            each = each if given.examples is None else given.examples[each]
            data = reader.data(host, each, labels)
            deterministic = reader.likelihood.deterministic(
                reader.predictions(single, host, start)[0, 0],
                data["targets"],
                self.protocol.nodes,
                partitions,
            )
            yield {
                **schema.named("data", data),
                **schema.named("deterministic", deterministic),
                **jackknife.results(found, data["targets"]),
            }

    def _pieces(
        self, columns: Sequence[Column], targets: Tensor
    ) -> Iterator[tuple[int, int, range]]:
        """Number of the first example, of the column, and examples there, which fit the memory."""
        start, each = 0, max(1, targets[0].numel())
        plan, classes = self.protocol.plan, self.protocol.num_classes
        rows = len(self.protocol.grid.stochastic)
        held = _COPIES * plan.num_samples * 8 * classes
        held += self.reader.likelihood.target_bytes(self.protocol)
        step = max(1, self.memory.budget // (each * rows * held))
        for number, column in enumerate(columns):
            for part in split_evenly(column.size, step):
                yield start + part.start, number, part
                self.done(len(part))
            start += column.size

    def _host(self, targets: Tensor, start: int, part: range) -> Tensor:
        host = self.reader.targets(targets[start : start + len(part)])
        self.reader.likelihood.check_targets(host, self.protocol.num_classes, 0)
        return host
