"""Targets that are class numbers, and outputs that are logits.

Legend: M multipliers, S samples of a chunk, N targets that count, V classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from afterdrop.errors import DataError
from afterdrop.evaluation.likelihoods import Accumulator, Partitions
from afterdrop.evaluation.likelihoods.categorical_sums import MeanTemper, distribution
from afterdrop.evaluation.likelihoods.tempered_sums import SampleTemper
from afterdrop.evaluation.request import SAMPLE_NODES, Protocol
from afterdrop.evaluation.scores.schema import Results
from afterdrop.family.member import Member
from afterdrop.family.temperature import NODES, Nodes, bracket
from afterdrop.masks.model_call import LogitsPlace, output_tensor

_ONE_LOGIT = (
    "give at least 2 classes, or say what a single output is: likelihood='binary' for one logit "
    "per example, likelihood='squared_error' for a mean"
)
_OTHER_TARGETS = (
    "give class numbers (int64) with a batch dimension, or say what the targets are: "
    "likelihood='binary' or 'multilabel' for targets of 0 and 1, 'gaussian' or 'squared_error' for "
    "numbers"
)
_AT_ONCE = {"cpu": 2**21, "cuda": 2**26}  # deterministic log-probabilities at a time


@dataclasses.dataclass(frozen=True)
class Categorical:
    """The likelihood of classifiers and language models.

    Args:
        batch_dim: The batch dimension of inputs, targets and logits.
        class_dim: The class dimension of the logits; None for the last, if that is beyond doubt.
        ignore_index: Targets with this value do not count.
        logits: Where the output holds its logits; None for its only tensor that may be them.
    """

    batch_dim: int = 0
    class_dim: int | None = None
    ignore_index: int = -100
    logits: LogitsPlace | None = None

    @property
    def ignored(self) -> float:
        """What stands for a target that does not count."""
        return self.ignore_index

    def read_targets(self, targets: Any, number: int) -> Tensor:
        """Class numbers, on the CPU, with the batch dimension first."""
        if not isinstance(targets, Tensor):
            try:
                targets = torch.as_tensor(targets)
            except (RuntimeError, TypeError, ValueError):
                of = f" of {type(targets[0]).__name__}" if isinstance(targets, list) else ""
                raise DataError(
                    f"the targets of batch {number} are {type(targets).__name__}{of}; "
                    + _OTHER_TARGETS
                ) from None
        if targets.is_floating_point() or targets.dtype == torch.bool or targets.dim() == 0:
            raise DataError(
                f"the targets of batch {number} are {targets.dtype} of shape "
                f"{tuple(targets.shape)}; {_OTHER_TARGETS}"
            )
        if targets.dim() > self.batch_dim:
            targets = targets.movedim(self.batch_dim, 0)
        if targets.shape[0] == 0:
            raise DataError(f"batch {number} has no examples; leave it out")
        return targets.cpu().long()

    def counts(self, targets: Tensor) -> Tensor:
        """Which targets count, flattened."""
        return (targets != self.ignore_index).flatten()

    def read_output(self, output: Any, targets: Tensor, copies: int) -> Tensor:
        """Logits [copies, N, V] of the targets (on the CPU) that count."""
        given = output_tensor(output, self.logits)
        logits, dim = classes_last(given, self._class_dim, self.batch_dim)
        if dim:
            logits = logits.movedim(dim, 0)
        if not self._fits(logits.shape, targets, copies):
            raise DataError(
                f"logits of shape {tuple(given.shape)} do not match targets of shape "
                f"{tuple(targets.shape)}"
                + f" x {copies} samples"
                * (copies > 1)
                + "; logits must have the targets' shape and a dimension of classes, "
                f"class_dim={self._class_dim} (batch_dim={self.batch_dim})"
                + self._other_reading(given, targets, copies)
            )
        logits = logits.reshape(copies, targets.numel(), logits.shape[-1])
        counts = self.counts(targets)
        return logits if bool(counts.all()) else logits[:, counts]

    def check_axes(self, output: Any, targets: Tensor) -> None:
        """Refuses an output whose shape does not say which dimension holds the classes."""
        logits = output_tensor(output, self.logits)
        dims = self._readings(logits, targets)
        if self.class_dim is None and len(dims) > 1:
            raise DataError(
                f"logits of shape {tuple(logits.shape)} with targets of shape "
                f"{tuple(targets.shape)} may have their classes in any of the dimensions "
                f"{', '.join(map(str, dims))}; say in which: class_dim={dims[-1]} or another"
            )

    def read_logits(self, output: Any) -> tuple[Tensor, int]:
        """Logits with the class dimension last, where no targets say how to read them.

        Returns:
            The logits, and their batch dimension.

        Raises:
            DataError: If it is in doubt which dimension holds the classes, or there is one class.
        """
        logits = output_tensor(output, self.logits)
        shape = tuple(logits.shape)
        if self.class_dim is None and logits.dim() > 2:
            raise DataError(
                f"logits of shape {shape} have several dimensions that may hold the classes; say "
                "which: class_dim=-1 for the last (sequences), class_dim=1 for [B, V, height, "
                "width] (images)"
            )
        moved, dim = classes_last(logits, self._class_dim, self.batch_dim)
        if moved.shape[-1] < 2:
            raise DataError(f"logits of shape {shape} have one class; {_ONE_LOGIT}")
        return moved, dim

    def prediction(self, found: Tensor, member: Member) -> Tensor:
        """Log-probabilities [..., V] in the shape of the logits."""
        return found.movedim(-1, self._class_dim)

    def labels(self, targets: Tensor) -> Tensor | None:
        """[N] the number of each counted target's label, if examples have several."""
        return None

    @property
    def _class_dim(self) -> int:
        return -1 if self.class_dim is None else self.class_dim

    def _fits(self, shape: Sequence[int], targets: Tensor, copies: int = 1) -> bool:
        """Whether logits with the examples first and the classes last belong to targets."""
        rows, *rest = targets.shape
        whole = (copies * rows, *rest)
        # [B · time, V] is read batch-major, which no other batch dimension gives.
        flat = (copies * targets.numel(),) if self.batch_dim == 0 else whole
        return tuple(shape[:-1]) in (whole, flat)

    def _readings(self, logits: Tensor, targets: Tensor) -> list[int]:
        """The dimensions of the logits that may hold the classes of some targets."""
        found = []
        for class_dim in range(logits.dim()):
            if class_dim == self.batch_dim or logits.dim() < 3:
                continue  # [B, V] can be read in one way only
            moved, dim = classes_last(logits, class_dim, self.batch_dim)
            if self._fits(moved.movedim(dim, 0).shape, targets):
                found.append(class_dim)
        return found

    def _other_reading(self, logits: Tensor, targets: Tensor, copies: int) -> str:
        dims = self._readings(logits, targets)
        if dims:
            return f"; they would match with class_dim={dims[0]}"
        same = logits.numel() == copies * targets.numel()
        return "; one logit per target needs likelihood='binary' or 'multilabel'" if same else ""

    def check_targets(self, targets: Tensor, classes: int, number: int) -> None:
        """Refuses targets outside 0 to classes − 1."""
        valid = targets.flatten()[self.counts(targets)]
        if valid.numel() and (int(valid.min()) < 0 or int(valid.max()) >= classes):
            raise DataError(
                f"batch {number} has targets from {int(valid.min())} to {int(valid.max())}, but "
                f"the model has {classes} classes (0 to {classes - 1}); ignored targets must be "
                f"ignore_index={self.ignore_index}"
            )

    def check_output(self, output: Tensor) -> None:
        """Refuses a single logit, and probabilities: positive numbers that all sum to 1."""
        if output.shape[-1] < 2:
            raise DataError(f"the model gives {output.shape[-1]} logit per target; {_ONE_LOGIT}")
        sums = output.double().sum(-1)
        if len(output) and bool((output >= 0).all()) and bool(((sums - 1).abs() < 1e-3).all()):
            raise DataError(
                "the model gives probabilities (no row has a negative number, and each sums to 1); "
                "give logits, or log-probabilities, which are logits too"
            )

    def bracket(self, output: Tensor, targets: Tensor) -> Nodes:
        """Temperatures that suit the logits of a first batch."""
        some = max(1, 2**21 // output.shape[-1])  # enough to tell the scale
        return bracket(self.predict(output[:some], "the first batch"), targets[:some])

    def predict(self, output: Tensor, where: str | None, room: Tensor | None = None) -> Tensor:
        """Log-probabilities in float32 or better; NaN and +inf logits are refused.

        Args:
            output: Logits [..., V].
            where: What they belong to, for the message; None leaves `require_numbers` to the
                caller, because it waits for a device.
            room: An earlier result that may be overwritten where it is large enough: fresh memory
                costs as much as the logarithms.
        """
        lp = output.double() if output.dtype == torch.float64 else output.float()
        out = None
        if room is not None and room.numel() >= lp.numel() and room.dtype == lp.dtype:
            out = room.view(-1)[: lp.numel()].view(lp.shape)
        lp = torch.log_softmax(lp, -1, out=out)
        if where is not None:
            require_numbers(lp[..., 0], where)
        return lp

    def deterministic(
        self, output: Tensor, targets: Tensor, nodes: Nodes, partitions: Partitions
    ) -> Results:
        """Results of logits [N, V] without dropout, on their device; NaN is not looked for."""
        # In slices: the copies that a distribution needs would multiply the batch's own logits.
        step = max(1, _AT_ONCE.get(output.device.type, _AT_ONCE["cpu"]) // output.shape[-1])
        parts = [
            distribution(self.predict(part, None), of, nodes, partitions)
            for part, of in zip(output.split(step), targets.split(step))
        ]
        if len(parts) == 1:
            return parts[0]
        return {name: torch.cat([part[name] for part in parts], -1) for name in parts[0]}

    def accumulators(
        self, protocol: Protocol, targets: Tensor, partitions: Partitions
    ) -> list[Accumulator]:
        """Sums for temperatures that act on the mean, and where asked for on each sample."""
        grid, blocks, samples = protocol.grid, protocol.plan.blocks, protocol.plan.num_samples
        sums: list[Accumulator] = [
            MeanTemper(grid.alphas, targets, protocol.nodes, blocks, partitions, samples)
        ]
        if grid.temper == "sample" and max(grid.alphas) > 0:
            sums.append(SampleTemper(grid.tempered_alphas, targets, protocol.sample_nodes, blocks))
        return sums

    def target_bytes(self, protocol: Protocol) -> int:
        """Bytes per target and multiplier: class accumulators of all open blocks, and K floats."""
        alphas, plan = len(protocol.grid.alphas), protocol.plan
        levels = plan.blocks.bit_length()
        # The last term: copies that turn sums into distributions at the end of a chunk.
        powers = (alphas + 3) * levels + 3 + 12
        if protocol.grid.temper != "mean":
            powers += 2 * (alphas + 1) * SAMPLE_NODES
        kept = alphas * (NODES + 32)
        return 4 * (powers * protocol.num_classes + 2 * plan.num_samples + kept)


def classes_last(logits: Tensor, class_dim: int, batch_dim: int) -> tuple[Tensor, int]:
    """Logits with the class dimension last, and their batch dimension then.

    Raises:
        DataError: If there is no such dimension, or it is the batch dimension.

    Example:
        >>> classes_last(torch.zeros(2, 3, 8, 9), class_dim=1, batch_dim=0)[0].shape
        torch.Size([2, 8, 9, 3])
    """
    if not -logits.dim() <= class_dim < logits.dim():
        raise DataError(
            f"logits of shape {tuple(logits.shape)} have no dimension class_dim={class_dim}"
        )
    at = class_dim % logits.dim()
    # Logits [B, V] of time-major inputs have no time, so their examples come first.
    timeless = logits.dim() <= batch_dim or at == batch_dim == logits.dim() - 1
    examples = 0 if timeless else batch_dim
    if at == examples:
        remedy = _ONE_LOGIT if logits.dim() == 1 else "give the dimension of the classes"
        raise DataError(
            f"class_dim={class_dim} of logits of shape {tuple(logits.shape)} is their batch "
            f"dimension; {remedy}"
        )
    return logits.movedim(at, -1), examples - (at < examples)


def require_numbers(log_probs: Tensor, where: str) -> None:
    """Refuses the log-softmax of NaN or +inf logits.

    Args:
        log_probs: One of each row: a single such logit makes the whole row NaN.
        where: What they belong to, for the message.
    """
    if log_probs.isnan().any():
        raise DataError(
            f"the model gave NaN or infinite logits for {where}; look for overflow, inputs "
            "that are not normalised, or a row in which every class is masked"
        )
