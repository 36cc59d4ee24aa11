"""From arrays of given samples to what a likelihood predicts.

Stored samples have the shape of the targets, and as their last dimension:

    categorical          classes: logits or log-probabilities
    binary, multilabel   nothing: one logit per target
    gaussian             means and variances
    squared_error        nothing: one mean per target

Samples that an evaluation recorded from models have one row [V] for each target that counts.

Legend: K samples, M multipliers, B examples, N targets that count, V classes or parameters.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from afterdrop.errors import DataError
from afterdrop.evaluation.likelihoods.binary import Binary, two_classes
from afterdrop.evaluation.likelihoods.categorical import Categorical
from afterdrop.evaluation.likelihoods.categorical_sums import at_targets
from afterdrop.evaluation.likelihoods.density_reading import DensityReading

SampleLikelihood = Categorical | DensityReading
_WITH_CLASSES = ("categorical", "gaussian")  # whose stored samples have one dimension more
_PARAMETERS = 2  # means and variances


def last_dimensions(likelihood: str) -> int:
    """How many dimensions stored samples have beyond those of samples and targets."""
    return int(likelihood in _WITH_CLASSES)


def stored_outputs(samples: Tensor, likelihood: SampleLikelihood) -> Any:
    """What models would have returned, from samples as they are stored.

    Raises:
        DataError: If samples of a Gaussian are not means and variances.
    """
    if not isinstance(likelihood, DensityReading) or likelihood.kind.name != "gaussian":
        return samples
    if samples.shape[-1] != _PARAMETERS:
        raise DataError(
            f"samples have {samples.shape[-1]} entries in their last dimension; "
            "likelihood='gaussian' needs means and variances there, as in "
            "numpy.stack([means, variances], -1)"
        )
    return samples.unbind(-1)


def stored_predictions(samples: Tensor, likelihood: SampleLikelihood) -> Tensor:
    """Logits or parameters [K, ..., V] of samples as they are stored, without targets."""
    if isinstance(likelihood, DensityReading):
        return likelihood.kind.parameters(stored_outputs(samples, likelihood))
    return two_classes(samples) if isinstance(likelihood, Binary) else samples


def target_log_likelihoods(
    predictions: Tensor, targets: Tensor, likelihood: SampleLikelihood
) -> Tensor:
    """Log-likelihoods [..., N] of the targets, from predictions [..., N, V]."""
    if isinstance(likelihood, DensityReading):
        return likelihood.kind.log_prob(predictions, targets.double())
    return at_targets(predictions, targets).double()


@dataclasses.dataclass(frozen=True)
class SampleReader:
    """Reads given samples, a few examples at a time.

    Attributes:
        likelihood: The kind of targets.
        names: Of the sources that gave the samples, for messages.
        recorded: Whether samples and targets are as the likelihood reads them, and all count.
    """

    likelihood: SampleLikelihood
    names: tuple[str, ...]
    recorded: bool = False

    def targets(self, targets: Tensor) -> Tensor:
        """Targets of some examples, checked."""
        return targets if self.recorded else self.likelihood.read_targets(targets, 0)

    def outputs(self, samples: Tensor, targets: Tensor, start: int) -> Tensor:
        """Logits or parameters [K, M, N, V] of samples [K, M, b, ...].

        Args:
            samples: Of some examples.
            targets: Of the same examples.
            start: Number of the first of them, for messages.

        Raises:
            DataError: If they are not numbers; names the source.
        """
        copies = samples.shape[0] * samples.shape[1]
        if self.recorded:
            found = samples.flatten(0, 1)
        else:
            given = stored_outputs(samples.flatten(0, 2), self.likelihood)
            found = self.likelihood.read_output(given, targets, copies)
        found = found.unflatten(0, samples.shape[:2])
        if isinstance(self.likelihood, DensityReading):
            known = found.isfinite().all(-1)
        else:  # a class may be impossible, but not all of them
            known = found.amax(-1).isfinite()
        if not bool(known.all()):
            sample = int((~known).flatten(1).any(1).nonzero()[0])
            name = self.names[sample * len(self.names) // len(found)]
            raise DataError(
                f"{name} gave NaN, infinity or a target without a possible class for examples "
                f"{start} to {start + len(targets) - 1}; look for overflow in the model, or leave "
                "these examples out"
            )
        return found

    def predictions(self, samples: Tensor, targets: Tensor, start: int) -> Tensor:
        """Log-probabilities or parameters [K, M, N, V] of samples [K, M, b, ...]."""
        where = f"the samples of examples {start} to {start + len(targets) - 1}"
        return self.likelihood.predict(self.outputs(samples, targets, start), where)

    def data(self, targets: Tensor, examples: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
        """The targets that count, with their examples and labels.

        Args:
            targets: Of some examples.
            examples: The error cluster of each.
            labels: Of recorded targets, the label of each, if there are several.
        """
        counts = self.likelihood.counts(targets)
        each = examples.repeat_interleave(targets.numel() // max(1, len(targets)))
        found = {"targets": targets.flatten()[counts], "examples": each[counts]}
        labels = labels if self.recorded else self.likelihood.labels(targets)
        return found if labels is None else found | {"labels": labels}


def as_array(outputs: Tensor) -> Any:
    """Outputs as a NumPy array to store: float64 as it is, everything else in float32."""
    kept = outputs.dtype if outputs.dtype == torch.float64 else torch.float32
    return outputs.to(kept).cpu().numpy()
