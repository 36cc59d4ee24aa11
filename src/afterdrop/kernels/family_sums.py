"""From logits of mask samples to the family: what `evaluation.accumulators` needs, by the kernels.

Letters: N targets, K samples in two halves, V classes, A alphas, R rungs of a ladder, b = 1/T.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from afterdrop.family.partition_ladder import HALVES_EVERY, PER_OCTAVE, PartitionLadder
from afterdrop.kernels.family_nodes import family_nodes, pair_tops
from afterdrop.kernels.family_partitions import TOGETHER
from afterdrop.kernels.log_constants import LOG2E
from afterdrop.kernels.sample_sums import LIFTS, power_sums, row_lse
from afterdrop.transfer import constant

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)  # their sums come first
LOWEST_MEAN_LOG_P = -115.0  # smallest mean of log p for which lifted sums are exact
_ROUGH = 32.0  # last rung up to which what is lifted in the exponent is fine enough
OF_SAMPLES = ("chosen", "entropies")  # log p of the target, −Σ p log p
_POWERS = 6
_LSE = {"BLOCK": 1024, "GROUP": 8, "num_warps": 2}  # of a program that has a row
_SUMS = {"BLOCK": 512, "num_warps": 2}  # of a program that has a part of the classes
_NODES = {"TILE": 64, "num_warps": 2, "maxnreg": 112}  # of a program that sums over classes


def width(classes: int) -> int:
    """Of the rows of sums, which then begin at a line of the cache.

    Example:
        >>> width(33)
        64
    """
    return -(-classes // 32) * 32


class FamilySums:
    """Turns logits of targets into what `evaluation.accumulators.distribution` gives.

    Args:
        alphas: Those of the grid, all in `ALPHAS`.
        ladder: The inverse temperatures at which partitions are kept.
        classes: V.
        targets: The most targets that are finished together.
        samples: K.
        device: Where.
        together: The most targets that are added together; None if they are `targets`.
    """

    def __init__(
        self,
        alphas: tuple[float, ...],
        ladder: PartitionLadder,
        classes: int,
        targets: int,
        samples: int,
        device: torch.device,
        together: int | None = None,
    ) -> None:
        self.classes, self.samples = classes, samples
        self.alphas = constant(torch.tensor(alphas), device, torch.float32)
        lifts = torch.tensor([LIFTS[ALPHAS.index(alpha)] for alpha in alphas])
        self.lifts = constant(lifts, device, torch.float32)
        powers = torch.tensor([ALPHAS.index(alpha) for alpha in alphas])
        self.powers = constant(powers, device, torch.int32)
        self.fine = float(ladder.inverse[-1]) > _ROUGH
        self.rungs = len(ladder.inverse)
        assert self.rungs == 64  # what the kernel climbs
        assert _SUMS["BLOCK"] % (TOGETHER.value * _NODES["TILE"]) == 0  # tiles lie in one part
        self.first = constant(ladder.inverse[:PER_OCTAVE], device, torch.float32)
        self.width = width(classes)
        zero = torch.zeros(1, device=device)
        self._geometric = zero.int(), zero, zero
        self._sums = torch.empty(2 * _POWERS * targets * self.width, device=device)
        self.lse = torch.empty((together or targets) * samples, device=device)
        self._parts = -(-classes // _SUMS["BLOCK"])  # of the classes
        self._highest = torch.empty(2 * _POWERS * targets * self._parts, device=device)

    def results(self, targets: int) -> dict[str, Tensor]:
        """Room for the results of N targets.

        Returns:
            `G` [A, R + 2, N] on the rungs, at 1 and 2, and `G_half` [2, A, R / 4 + 1, N] on every
            fourth and at 1, relative to `peak` [3, A, N] (of the whole and the halves);
            `class` and `entropy` [A, N], `spread` [N], and `lowest` [2, N], the smallest mean of
            log p in a half; of every sample `OF_SAMPLES` [N, K].
        """
        N, K, new = targets, self.samples, self.lse.new_empty
        return self.mean_results(N, len(self.alphas)) | {
            "spread": new(N),
            "lowest": new(2, N),
            **{name: new(N, K) for name in OF_SAMPLES},
        }

    def mean_results(self, targets: int, alphas: int = 1) -> dict[str, Tensor]:
        """Room for what `results` has of each of A alphas; that of halves may stay unwritten."""
        A, N, new = alphas, targets, self.lse.new_empty
        return {
            "G": new(A, self.rungs + 2, N),
            "G_half": new(2, A, self.rungs // HALVES_EVERY + 1, N),
            "peak": new(3, A, N),
            "class": torch.empty(A, N, dtype=torch.int32, device=self.lse.device),
            "entropy": new(A, N),
        }

    def add(
        self,
        logits: Tensor,
        targets: Tensor,
        found: dict[str, Tensor],
        samples: range,
        place: int = 0,
        count: int | None = None,
    ) -> None:
        """Adds samples to the sums of some targets.

        Args:
            logits: [S, L, N, V₊] of any strides but the last, L groups (multipliers) of N targets,
                float16 or better; columns from V on do not count.
            targets: [N].
            found: `OF_SAMPLES` of `results` for the L · N targets.
            samples: Which samples: all, or some of one half.
            place: The first of these targets among those that `finish` takes together.
            count: How many those are; None if they are these.
        """
        S, L, N, _ = logits.shape
        row_lse[(S * L * N,)](
            logits,
            targets,
            self.lse,
            *(found[name] for name in OF_SAMPLES),
            self.classes,
            *logits.stride()[:3],
            S,
            N,
            self.samples,
            samples.start,
            **_LSE,
        )
        count = L * N if count is None else count
        self.add_powers(logits, samples, place, count, log2_base=LOG2E.value)

    def add_powers(
        self, logits: Tensor, samples: range, place: int, count: int, *, log2_base: float = 1.0
    ) -> None:
        """What is left of `add` where `lse` and `OF_SAMPLES` are known.

        Args:
            logits: As in `add`, but to base 2 as those of `family_logits`, and so is `lse`.
            samples: Which of them.
            place: The first of these targets among those that `finish` takes together.
            count: How many those are.
            log2_base: The logarithm of another base.
        """
        S, L, N, _ = logits.shape
        half = self.samples // 2
        halves = 2 if half < S else 1
        power_sums[(L * N * self._parts * halves,)](
            logits,
            self.lse,
            self._sums,
            self._highest,
            self.classes,
            logits.shape[-1],
            self.width,
            *logits.stride()[:3],
            place,
            count,
            N,
            S,
            S // halves,
            samples.start // half,
            halves,
            log2_base / 4,
            FINE=self.fine,
            ADD=samples.start % half > 0,
            TOGETHER=next(n for n in (10, 5, 4, 3, 2, 1) if S // halves % n == 0),
            **_SUMS,
        )

    def finish(self, targets: int, found: dict[str, Tensor], first: int = 0) -> None:
        """Writes what follows from the sums of the targets added since the last time."""
        powers = self.powers, self.alphas, self.lifts
        self._nodes(self._sums, self._highest, powers, targets, found, first, pairs=False)

    def means(self, logits: Tensor, found: dict[str, Tensor], first: int) -> None:
        """Writes what follows from logits of mean features, which are alpha 0 but for a constant.

        Args:
            logits: [n, 2, V₊] float32 of either half, to base 2; [n, 1, V₊] if there are none.
            found: From `mean_results`.
            first: The first of these targets among all.
        """
        n, halves, parts = len(logits), logits.shape[1], self._parts
        logits = logits.expand(-1, 2, -1)  # what is no mean is that of itself
        tops = self.lse.new_empty(3 * n * parts)
        pair_tops[(n, parts)](
            logits,
            tops,
            n,
            self.classes,
            *logits.stride()[:2],
            parts,
            **_SUMS,
        )
        self._nodes(logits, tops, self._geometric, n, found, first, halves=halves > 1, pairs=True)

    def _nodes(
        self,
        sums: Tensor,
        highest: Tensor,
        powers: tuple[Tensor, Tensor, Tensor],
        targets: int,
        found: dict[str, Tensor],
        first: int,
        *,
        halves: bool = True,
        pairs: bool,
    ) -> None:
        """Sums over classes at every node."""
        alphas, nothing = len(powers[0]), found["entropy"]  # where nothing is written
        strides = sums.stride()[:2] if pairs else (self.width, 6 * targets * self.width)
        family_nodes[(targets, alphas, 3 if halves else 1)](
            sums,
            highest,
            *powers,
            self.first,
            found["G"],
            found["G_half"],
            found["peak"],
            found["class"],
            found["entropy"],
            nothing if pairs else found["spread"],
            nothing if pairs else found["lowest"],
            targets,
            self.classes,
            *strides,
            alphas,
            1 if pairs else self.samples // 2,
            first,
            found["entropy"].shape[1],
            self._parts,
            PARTS=triton.next_power_of_2(self._parts),
            PART=_SUMS["BLOCK"],
            BLOCK=1024,
            PAIRS=pairs,
            FAST=sums.is_cuda,
            **_NODES,
        )
