"""Scores of given samples: every power and temperature of their mean, a few examples at a time.

Two passes over the samples. The first finds the sources' cross entropies, each alone; the second
computes what an evaluation keeps, with the best source in the place of the deterministic model, and
with a jackknife over groups of samples in the place of the two halves (`family.estimates`).

Legend: K samples, M multipliers, G groups, B examples, N targets, V classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from afterdrop.errors import DataError
from afterdrop.evaluation.chunks import Memory, split_evenly
from afterdrop.evaluation.ensemble import Ensemble
from afterdrop.evaluation.likelihoods import Accumulator
from afterdrop.evaluation.likelihoods.categorical import Categorical
from afterdrop.evaluation.likelihoods.categorical_sums import at_targets, coarse_xe
from afterdrop.evaluation.request import Protocol, Request
from afterdrop.evaluation.scores import schema
from afterdrop.evaluation.scores.schema import Group, Results
from afterdrop.evaluation.scores.scores import Scores
from afterdrop.evaluation.stored_samples import Column
from afterdrop.family.temperature import Nodes, partitions
from afterdrop.masks.uniforms import Plan

_COPIES = 4  # of the log-probabilities of a chunk that exist at a time


@dataclasses.dataclass(frozen=True)
class GivenSamples:
    """Samples, and what they belong to.

    Attributes:
        columns: The samples, with classes last.
        singles: Each source alone, without dropout, in the same order; None if the samples are it.
        targets: [B, ...], on the CPU.
        models: Names of the models, adapters or stored samples.
        views: Names of the views of an augmentation.
        masks: The mask samples of each source.
        fingerprint: Of the models.
        shared: Whether all examples have the same samples, as the models of an ensemble.
        examples: [B] which error cluster each belongs to; None if they are independent.
        single: Which source stands alone; None for the best on these data.
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


def score_samples(
    given: GivenSamples, request: Request, memory: Memory, *, progress: bool = False
) -> Scores:
    """Scores of given samples.

    Args:
        given: The samples.
        request: What to evaluate; its plan has as many samples.
        memory: The budget.
        progress: Whether to show a progress bar.
    """
    likelihood = Categorical(ignore_index=request.ignore_index)
    singles = given.columns if given.singles is None else given.singles
    total, what = 2 * len(given.targets), f"evaluate {request.split}"
    bar = tqdm(total=total, desc=what, unit="example", disable=not progress)
    with torch.no_grad(), bar:
        protocol = _protocol(given, singles, request, likelihood)
        run = _Run(protocol, likelihood, memory, bar.update)
        alone = run.alone(singles, given.targets)
        best = min(range(len(alone)), key=alone.__getitem__)
        best = best if given.single is None else given.single
        ensemble = Ensemble(given.models, tuple(alone), best, given.views, given.masks)
        run.protocol = dataclasses.replace(protocol, ensemble=ensemble)
        parts = list(run.chunks(given, singles, best))
    tensors = schema.join(parts, "N")
    if not tensors[schema.name_of("data", "targets")].numel():
        raise DataError(f"no target counts: all equal ignore_index={request.ignore_index}")
    return Scores(run.protocol, tensors)


def _protocol(
    given: GivenSamples, singles: Sequence[Column], request: Request, likelihood: Categorical
) -> Protocol:
    """The request, and what the first examples of the first source make of it."""
    first = singles[0].parts[0]
    few = max(1, 2**21 // max(1, first.shape[-1]))
    size = min(singles[0].size, few)
    host = likelihood.read_targets(given.targets[:size], 0)
    logits = likelihood.read_output(first.read(0, size)[0, 0], host, 1)[0]
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


@dataclasses.dataclass
class _Run:
    """The two passes over samples."""

    protocol: Protocol
    likelihood: Categorical
    memory: Memory
    done: Callable[[int], object]

    def alone(self, columns: Sequence[Column], targets: Tensor) -> list[float]:
        """Mean cross entropy of each source."""
        total, count = torch.zeros((), dtype=torch.float64), 0
        for start, number, part in self._pieces(columns, targets):
            host = self._host(targets, start, part)
            lp = self._log_probs(columns[number].read(part.start, part.stop)[:, :1], host, start)
            valid = host.flatten()[self.likelihood.counts(host)]
            total = total - at_targets(lp[:, 0], valid).double().sum(-1)
            count += len(valid)
        return (total / max(1, count)).tolist()

    def chunks(
        self, given: GivenSamples, singles: Sequence[Column], best: int
    ) -> Iterator[Results]:
        """Results of all examples, chunk by chunk."""
        for start, number, part in self._pieces(given.columns, given.targets):
            host = self._host(given.targets, start, part)
            lp = self._log_probs(given.columns[number].read(part.start, part.stop), host, start)
            alone = singles[number].read(part.start, part.stop)[best : best + 1, :1]
            counts = self.likelihood.counts(host)
            targets = host.flatten()[counts]
            each = torch.arange(start, start + len(part))
            each = each if given.examples is None else given.examples[each]
            data = {
                "targets": targets,
                "examples": each.repeat_interleave(host.numel() // len(host))[counts],
            }
            deterministic = self.likelihood.deterministic(
                self._log_probs(alone, host, start)[0, 0], targets, self.protocol.nodes, partitions
            )
            yield {
                **schema.named("data", data),
                **schema.named("deterministic", deterministic),
                **self._sampled(lp, targets),
            }

    def _pieces(
        self, columns: Sequence[Column], targets: Tensor
    ) -> Iterator[tuple[int, int, range]]:
        """Number of the first example, of the column, and examples there, which fit the memory."""
        start, each = 0, max(1, targets[0].numel())
        plan, classes = self.protocol.plan, self.protocol.num_classes
        rows = len(self.protocol.grid.stochastic)
        held = _COPIES * plan.num_samples * 8 * classes + self.likelihood.target_bytes(
            self.protocol
        )
        step = max(1, self.memory.budget // (each * rows * held))
        for number, column in enumerate(columns):
            for part in split_evenly(column.size, step):
                yield start + part.start, number, part
                self.done(len(part))
            start += column.size

    def _host(self, targets: Tensor, start: int, part: range) -> Tensor:
        host = self.likelihood.read_targets(targets[start : start + len(part)], 0)
        self.likelihood.check_targets(host, self.protocol.num_classes, 0)
        return host

    def _log_probs(self, samples: Tensor, host: Tensor, start: int) -> Tensor:
        """Log-probabilities [K, M, N, V] of samples [K, M, b, ..., V]."""
        copies = samples.shape[0] * samples.shape[1]
        logits = self.likelihood.read_output(samples.flatten(0, 2), host, copies)
        where = f"the samples of examples {start} to {start + len(host) - 1}"
        return self.likelihood.predict(logits, where).unflatten(0, samples.shape[:2])

    def _sampled(self, lp: Tensor, targets: Tensor) -> Results:
        """Results of all samples, and by how much groups of them matter."""
        whole = self._accumulated(lp, targets)
        spans = self.protocol.plan.spans
        without = [self._accumulated(_left_out(lp, span), targets) for span in spans]
        scale = [(len(lp) - len(span)) / len(span) for span in spans]
        forms: dict[Group, Callable[[Results], Tensor]] = {
            "sampled": self._mean_xe,
            "tempered": lambda found: found[schema.name_of("tempered", "xe")],
        }
        for group, xe in forms.items():
            if schema.name_of(group, "class") in whole:
                rows = [s * (xe(part) - xe(whole)) for s, part in zip(scale, without)]
                whole[schema.name_of(group, "half")] = torch.stack(rows, -3).float()
        return whole

    def _accumulated(self, lp: Tensor, targets: Tensor) -> Results:
        found: Results = {}
        for accumulator in self._accumulators(targets):
            accumulator.add(lp)
            accumulator.end_block()
            found |= schema.named(accumulator.group, accumulator.results())
        return found

    def _accumulators(self, targets: Tensor) -> list[Accumulator]:
        """Accumulators of one block, without halves."""
        plan = dataclasses.replace(self.protocol.plan, blocks=1)
        request = dataclasses.replace(self.protocol.request, plan=plan)
        protocol = dataclasses.replace(self.protocol, request=request)
        return self.likelihood.accumulators(protocol, targets, partitions)

    def _mean_xe(self, found: Results) -> Tensor:
        """XE [M, A, coarse, N] at the coarse nodes, then at T = 1."""
        part = {
            name: found[schema.name_of("sampled", name)]
            for name in ("partition", "peak", "target", "one")
        }
        one = (part["one"] - part["target"]).unsqueeze(-2)
        return torch.cat([coarse_xe(part, self.protocol.nodes), one], -2)


def _left_out(lp: Tensor, span: range) -> Tensor:
    """All samples but those of a group."""
    return torch.cat([lp[: span.start], lp[span.stop :]])
