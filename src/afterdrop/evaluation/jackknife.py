"""Results of given samples, and by how much groups of them matter.

    half_g = (K − m)/m · (x_-g − x)     x_-g without the m samples of group g (`family.estimates`)

Legend: K samples, M multipliers, A alphas, G groups, N targets, V classes or parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from afterdrop.evaluation.likelihoods.categorical_sums import coarse_xe
from afterdrop.evaluation.likelihoods.density_reading import DensityReading
from afterdrop.evaluation.likelihoods.density_sums import DensitySums
from afterdrop.evaluation.request import Protocol
from afterdrop.evaluation.sample_reading import SampleLikelihood
from afterdrop.evaluation.scores import schema
from afterdrop.evaluation.scores.schema import Group, Results
from afterdrop.family.temperature import partitions


@dataclasses.dataclass(frozen=True)
class Jackknife:
    """Accumulates all samples, then all but one group of them at a time.

    Attributes:
        protocol: The evaluation; the blocks of its plan are the groups.
        likelihood: The kind of targets.
    """

    protocol: Protocol
    likelihood: SampleLikelihood

    def results(self, predictions: Tensor, targets: Tensor) -> Results:
        """Results of Scores from predictions [K, M, N, V] of the targets [N]."""
        forms = self._losses()
        whole = self._accumulated(predictions, targets)
        spans = self.protocol.plan.spans
        without = [
            self._accumulated(left_out(predictions, span), targets, losses_only=True)
            for span in spans
        ]
        scale = [(len(predictions) - len(span)) / len(span) for span in spans]
        for group, (field, losses) in forms.items():
            rows = [s * (losses(part) - losses(whole)) for s, part in zip(scale, without)]
            whole[schema.name_of(group, field)] = torch.stack(rows, -3).float()
        return whole

    def _losses(self) -> dict[Group, tuple[str, Callable[[Results], Tensor]]]:
        """Where differences of losses [M, A, temperatures, N] are kept, and the losses."""
        if not self.protocol.has_classes:
            return {"sampled": ("nll_half", _field("sampled", "nll_at"))}
        found: dict[Group, tuple[str, Callable[[Results], Tensor]]] = {
            "sampled": ("half", self._mean_xe)
        }
        if self.protocol.grid.tempered_alphas:
            found["tempered"] = "half", _field("tempered", "xe")
        return found

    def _accumulated(
        self, predictions: Tensor, targets: Tensor, *, losses_only: bool = False
    ) -> Results:
        """Results of samples as one block, without halves."""
        plan = dataclasses.replace(self.protocol.plan, num_samples=len(predictions), blocks=1)
        request = dataclasses.replace(self.protocol.request, plan=plan)
        protocol = dataclasses.replace(self.protocol, request=request)
        sums = self.likelihood.accumulators(protocol, targets, partitions)
        if losses_only and isinstance(self.likelihood, DensityReading):
            # Summaries of distributions take most of the time.
            kind = self.likelihood.kind
            sums = [DensitySums(kind, protocol, targets, "sampled", summaries=False)]
        found: Results = {}
        for accumulator in sums:
            accumulator.add(predictions)
            accumulator.end_block()
            found |= schema.named(accumulator.group, accumulator.results())
        return found

    def _mean_xe(self, found: Results) -> Tensor:
        """XE [M, A, coarse, N] at the coarse nodes, then at T = 1."""
        part = {
            name: found[schema.name_of("sampled", name)]
            for name in ("partition", "peak", "target", "one")
        }
        one = (part["one"] - part["target"]).unsqueeze(-2)
        return torch.cat([coarse_xe(part, self.protocol.nodes), one], -2)


def _field(group: Group, field: str) -> Callable[[Results], Tensor]:
    name = schema.name_of(group, field)
    return lambda found: found[name]


def left_out(predictions: Tensor, span: range) -> Tensor:
    """All samples but those of a group; one that remains alone is there twice.

    That changes no mean, and there is no plan of several alphas for a single sample.
    """
    rest = torch.cat([predictions[: span.start], predictions[span.stop :]])
    return rest if len(rest) > 1 else rest.repeat(2, *[1] * (rest.dim() - 1))
