"""From logits of mask samples to what `evaluation.likelihoods.categorical_sums` computes.

Letters: N targets, M multipliers, K samples in two halves (S of a chunk), V classes, A alphas,
P powers of the partition ladder, b = 1/T.
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

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)  # the powers whose sums are kept, in their order
LOWEST_MEAN_LOG_P = -115.0  # smallest mean of log p for which lifted sums do not underflow
_ROUGH = 32.0  # highest b for which a lift in the exponent rounds little enough (`sample_sums`)
OF_SAMPLES = ("chosen", "entropies")  # results per sample: log p of the target, −Σ p log p
_POWERS = 6  # sums per class: the alphas, and the power 2
_LSE = {"BLOCK": 1024, "GROUP": 8, "num_warps": 2}  # of a program per row
_SUMS = {"BLOCK": 512, "num_warps": 2}  # of a program per part of the classes
# Of a program that sums over classes; fewer registers let more programs share a multiprocessor.
_NODES = {"TILE": 64, "num_warps": 2, "maxnreg": 112}


def width(classes: int) -> int:
    """Width of the rows of sums: classes padded to whole cache lines of 128 bytes.

    Example:
        >>> width(33)
        64
    """
    return -(-classes // 32) * 32


class FamilySums:
    """Turns logits of targets into what `categorical_sums.distribution` gives.

    Args:
        alphas: The alphas of the grid, all in `ALPHAS`.
        ladder: The inverse temperatures at which partitions are computed.
        classes: V.
        targets: The largest number of targets per call of `finish`.
        samples: K.
        device: The device of all tensors.
        together: The largest number of targets per call of `add`; None for `targets`.
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
        self.powers_of_ladder = len(ladder.inverse)
        assert self.powers_of_ladder == 64  # the kernel has 8 octaves of 8
        assert _SUMS["BLOCK"] % (TOGETHER.value * _NODES["TILE"]) == 0  # each tile lies in one part
        self.first = constant(ladder.inverse[:PER_OCTAVE], device, torch.float32)
        self.width = width(classes)
        zero = torch.zeros(1, device=device)
        self._geometric = zero.int(), zero, zero
        self._sums = torch.empty(2 * _POWERS * targets * self.width, device=device)
        self.lse = torch.empty((together or targets) * samples, device=device)
        self._parts = -(-classes // _SUMS["BLOCK"])  # parts of the classes
        self._highest = torch.empty(2 * _POWERS * targets * self._parts, device=device)

    def results(self, targets: int) -> dict[str, Tensor]:
        """Uninitialised tensors for the results of N targets.

        Returns:
            `G` [A, P + 2, N] at the powers of the ladder, at 1 and at 2, and
            `G_half` [2, A, P / 4 + 1, N] at every fourth power and at 1, both relative to
            `peak` [3, A, N] (of all samples and of the halves); `class` and `entropy` [A, N],
            `spread` [N], and `lowest` [2, N], the smallest mean of log p in a half; `OF_SAMPLES`
            [N, K] for every sample.
        """
        N, K, new = targets, self.samples, self.lse.new_empty
        return self.mean_results(N, len(self.alphas)) | {
            "spread": new(N),
            "lowest": new(2, N),
            **{name: new(N, K) for name in OF_SAMPLES},
        }

    def mean_results(self, targets: int, alphas: int = 1) -> dict[str, Tensor]:
        """The tensors of `results` with an axis of A alphas; those of halves may stay unset."""
        A, N, new = alphas, targets, self.lse.new_empty
        return {
            "G": new(A, self.powers_of_ladder + 2, N),
            "G_half": new(2, A, self.powers_of_ladder // HALVES_EVERY + 1, N),
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
            logits: [S, M, N, V₊], float16 or wider, contiguous in the last dimension; padding
                columns from V on do not count.
            targets: [N].
            found: `OF_SAMPLES` of `results` for the M · N targets.
            samples: The numbers of the samples: all of them, or some of one half.
            place: Position of the first of these targets among those of the next `finish`.
            count: Number of targets of the next `finish`; None for M · N.
        """
        S, M, N, _ = logits.shape
        row_lse[(S * M * N,)](
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
        count = M * N if count is None else count
        self.add_powers(logits, samples, place, count, log2_base=LOG2E.value)

    def add_powers(
        self, logits: Tensor, samples: range, place: int, count: int, *, log2_base: float = 1.0
    ) -> None:
        """The second part of `add`, where `lse` and `OF_SAMPLES` are known already.

        Args:
            logits: As in `add`, but to base 2, as `family_logits` computes them and `lse`.
            samples: As in `add`.
            place: As in `add`.
            count: As in `add`.
            log2_base: Base-2 logarithm of the base of logits and `lse`.
        """
        S, M, N, _ = logits.shape
        half = self.samples // 2
        halves = 2 if half < S else 1
        power_sums[(M * N * self._parts * halves,)](
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
        """Writes the results of the targets added since the last call, from `first` on."""
        powers = self.powers, self.alphas, self.lifts
        self._nodes(self._sums, self._highest, powers, targets, found, first, pairs=False)

    def means(self, logits: Tensor, found: dict[str, Tensor], first: int) -> None:
        """Writes results from logits of mean features, which are alpha 0 up to a constant.

        Args:
            logits: [n, 2, V₊] float32 logits of the halves, to base 2; [n, 1, V₊] without halves.
            found: From `mean_results`, written.
            first: Position of the first of these targets among those of `found`.
        """
        n, halves, parts = len(logits), logits.shape[1], self._parts
        logits = logits.expand(-1, 2, -1)  # a single one is the mean of itself twice
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
        """Launches `family_nodes`, which sums over classes."""
        alphas, unused = (
            len(powers[0]),
            found["entropy"],
        )  # stands for tensors that pairs do not have
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
            unused if pairs else found["spread"],
            unused if pairs else found["lowest"],
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
