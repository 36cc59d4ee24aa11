"""How an evaluation reads targets that are numbers, and outputs that are parameters.

Legend: B examples, N targets that count, P parameters.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from afterdrop.errors import DataError
from afterdrop.evaluation.likelihoods import Accumulator, Partitions
from afterdrop.evaluation.likelihoods.density_summaries import single_results
from afterdrop.evaluation.likelihoods.density_sums import DensitySums
from afterdrop.evaluation.likelihoods.parametric import ParametricLikelihood
from afterdrop.evaluation.likelihoods.predictive import Average, Predictive
from afterdrop.evaluation.request import Protocol, density_temperatures
from afterdrop.evaluation.scores.schema import Results, summarised
from afterdrop.family.member import Member
from afterdrop.family.temperature import SPAN, Nodes
from afterdrop.masks.model_call import LogitsPlace


@dataclasses.dataclass(frozen=True)
class DensityReading:
    """The likelihood of numbers, for the engines.

    Args:
        kind: The distribution.
        batch_dim: The batch dimension of inputs, targets and outputs.
        ignore_index: Counts with this value do not count, nor does NaN.
        place: Where the output holds what `kind` reads; None for the output itself.
        noise_variance: What temperature 1 stands for, where the temperature is a noise variance.
    """

    kind: ParametricLikelihood
    batch_dim: int = 0
    ignore_index: int = -100
    place: LogitsPlace | None = None
    noise_variance: float | None = None

    @property
    def logits(self) -> LogitsPlace:
        """The function that finds parameters [B, ..., P] in an output."""
        return self._parameters

    def _parameters(self, output: Any) -> Tensor:
        found = output
        if callable(self.place):
            found = self.place(output)
        elif self.place is not None:
            try:
                found = getattr(output, str(self.place), None)
                found = output[self.place] if found is None else found
            except (IndexError, KeyError, TypeError):
                raise DataError(
                    f"logits={self.place!r}: the model returned {type(output).__name__}, which "
                    "has nothing there; give an index, a key or a function of the output"
                ) from None
        return self.kind.parameters(found)

    @property
    def ignored(self) -> float:
        """What stands for a target that does not count."""
        return math.nan

    def read_targets(self, targets: Any, number: int) -> Tensor:
        """Numbers in float64, on the CPU, with the batch dimension first."""
        try:
            given = torch.as_tensor(targets).cpu()
        except (RuntimeError, TypeError, ValueError):
            raise DataError(
                f"the targets of batch {number} are {type(targets).__name__}; give a tensor of "
                "numbers"
            ) from None
        if given.dim() == 0 or given.is_complex():
            raise DataError(
                f"the targets of batch {number} are {given.dtype} of shape {tuple(given.shape)}; "
                "give numbers with a batch dimension"
            )
        if given.dim() > self.batch_dim:
            given = given.movedim(self.batch_dim, 0)
        if given.shape[0] == 0:
            raise DataError(f"batch {number} has no examples; leave it out")
        return given.double()

    def counts(self, targets: Tensor) -> Tensor:
        """Which targets count, flattened: numbers, and counts other than `ignore_index`."""
        counted = ~targets.isnan()
        if self.kind.discrete:
            counted &= targets != self.ignore_index
        return counted.flatten()

    def labels(self, targets: Tensor) -> Tensor | None:
        """Numbers have none."""
        return None

    def read_output(self, output: Any, targets: Tensor, copies: int) -> Tensor:
        """Parameters [copies, N, P] of the targets (on the CPU) that count."""
        found, dim = self.read_logits(output)
        found = found.movedim(dim, 0)
        rows, *rest = targets.shape
        wanted, shape = (copies * rows, *rest), tuple(found.shape[:-1])
        if wanted not in (shape, (*shape, 1), shape[:-1] if shape[-1:] == (1,) else shape):
            raise DataError(
                f"the model gives parameters for targets of shape {shape}, but the targets have "
                f"shape {tuple(targets.shape)}{f' x {copies} samples' * (copies > 1)}; give one "
                f"of each per target (batch_dim={self.batch_dim})"
            )
        found = found.reshape(copies, targets.numel(), found.shape[-1])
        counts = self.counts(targets)
        return found if bool(counts.all()) else found[:, counts]

    def read_logits(self, output: Any) -> tuple[Tensor, int]:
        """Parameters [..., P] without targets, and their batch dimension."""
        found = self._parameters(output)
        return found, self.batch_dim if found.dim() - 1 > self.batch_dim else 0

    def check_axes(self, output: Any, targets: Tensor) -> None:
        """Every parameter belongs to one target: nothing is in doubt."""

    def check_targets(self, targets: Tensor, classes: int, number: int) -> None:
        """Refuses infinite targets, fractions of counts, and what the likelihood calls invalid."""
        valid = targets.flatten()[self.counts(targets)]
        if not bool(valid.isfinite().all()):
            raise DataError(f"batch {number} has infinite targets; give numbers, NaN to ignore")
        if self.kind.discrete and bool((valid != valid.round()).any()):
            raise DataError(
                f"batch {number} has targets that are not integers, such as "
                f"{valid[valid != valid.round()][0].item():g}; {self.kind.name} needs counts"
            )

        if reason := self.kind.why_invalid_targets(valid):
            raise DataError(
                f"batch {number} has {reason}, which {self.kind.name} does not allow; correct "
                "them, or give NaN to ignore them"
            )

    def check_output(self, output: Tensor) -> None:
        """Parameters are checked whenever they are read (`predict`)."""

    def bracket(self, output: Tensor, targets: Tensor) -> Nodes:
        """Temperatures around a power of 4 that suits the first batch, so that parts agree."""
        found = self.kind.start(self.predict(output, "the first batch"), targets.double())
        exponent = round(math.log(min(max(found, 1e-30), 1e30), 4.0))
        return Nodes(4.0**exponent / SPAN, 4.0**exponent * SPAN)

    def predict(self, output: Tensor, where: str | None, room: Tensor | None = None) -> Tensor:
        """Parameters [..., P] in float64, which must be those of distributions."""
        found = output.double()
        if where is None:
            return found
        if not bool(found.isfinite().all()):
            raise DataError(
                f"the model gave NaN or infinite outputs for {where}; look for overflow or inputs "
                "that are not normalised"
            )
        if reason := self.kind.why_invalid(found):
            raise DataError(f"the model gave {reason} (for {where})")
        return found

    def deterministic(
        self, output: Tensor, targets: Tensor, nodes: Nodes, partitions: Partitions
    ) -> Results:
        """Results of parameters [N, P] without dropout."""
        y = targets.double()
        parameters = self.predict(output, "the model without dropout")
        each = summarised(density_temperatures(nodes, noise=self.kind.noise))
        found = single_results(self.kind, parameters, y, each)
        return found | {"target": self.kind.log_prob(parameters, y)}

    def accumulators(
        self, protocol: Protocol, targets: Tensor, partitions: Partitions
    ) -> list[Accumulator]:
        """The members, and the means of quantiles where the likelihood has them."""
        sums: list[Accumulator] = [DensitySums(self.kind, protocol, targets, "sampled")]
        if not self.kind.noise:  # whose mean of quantiles is the member of alpha 0
            sums.append(DensitySums(self.kind, protocol, targets, "quantile"))
        return sums

    def target_bytes(self, protocol: Protocol) -> int:
        """Bytes per target and multiplier: the parameters of all samples, and the results."""
        kept = len(protocol.density_temperatures) * (1 + len(protocol.grid.alphas)) * 8
        return 8 * (3 * protocol.plan.num_samples * protocol.num_classes + kept)

    def prediction(self, found: Tensor, member: Member, average: Average = "power") -> Predictive:
        """The distribution of a member, from parameters [..., K, P] of its samples."""
        return Predictive.of(self.kind, *self.samples(found, member), average)

    def samples(self, found: Tensor, member: Member) -> tuple[Tensor, Member]:
        """Parameters [K, ..., P] from [..., K, P], and the member whose temperature is theirs.

        Raises:
            DataError: If the noise variance that temperature 1 stands for is not known.
        """
        temperature = member.temperature
        if self.kind.noise:
            if self.noise_variance is None:
                raise DataError(
                    f"likelihood={self.kind.name!r} needs the noise variance that temperature 1 "
                    "stands for; give noise_variance=, such as Scores.noise_variance"
                )
            temperature *= self.noise_variance
        samples = self.predict(found, "the input").movedim(-2, 0)
        return samples, member.at_temperature(temperature)
