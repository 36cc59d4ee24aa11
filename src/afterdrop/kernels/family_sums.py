"""From logits of mask samples to the family: row log-sum-exps, power sums, partitions.

For each target the sums over the samples of a half are kept for every class:

    Σ log p        Σ p^¼  Σ p^½  Σ p^¾  Σ p          Σ p²        and over classes Σ −p log p

One exponential gives all powers. They are plain sums: log p is at most 0 so nothing overflows, and
whoever calls checks `lowest`, for below exp(−80) p underflows.

Letters: N targets, K samples in two halves, V classes, J nodes, b = 1/T; powers in the order above.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)  # their sums come first
LOWEST = -80.0  # smallest log p for which plain sums are exact
_POWERS = 6
_CLASSES = 512  # of a program that sums over samples
_TILE, _WARPS = 128, 4  # classes and warps of a program that sums over classes
_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["S", "N", "k0"])
def _row_lse(
    logits,
    bias,
    targets,
    lse,
    chosen,
    lowest,
    V,
    by_sample,  # strides of the logits
    by_group,
    by_target,
    S,
    N,
    K,
    k0,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    q = tl.program_id(0) // S
    k = tl.program_id(0) % S
    at = logits + k.to(tl.int64) * by_sample
    at += (q // N).to(tl.int64) * by_group + (q % N).to(tl.int64) * by_target
    peak = tl.full((BLOCK,), -1e30, tl.float32)
    least = tl.full((BLOCK,), float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(at + v, mask=v < V, other=0.0).to(tl.float32)
        if BIAS:
            x += tl.load(bias + v, mask=v < V, other=0.0)
        least = tl.minimum(least, tl.where(v < V, x, float("inf")))
        x = tl.where((v < V) & (x != float("-inf")), x, -1e30)  # exp(-inf + inf) would be NaN
        higher = tl.maximum(peak, x)
        total = total * tl.exp(peak - higher) + tl.exp(x - higher)
        peak = higher
    whole = tl.max(peak, 0)
    found = whole + tl.log(tl.sum(total * tl.exp(peak - whole), 0))
    tl.store(lse + tl.program_id(0), found)
    target = tl.load(targets + q % N)
    own = tl.load(at + target).to(tl.float32)
    if BIAS:
        own += tl.load(bias + target)
    tl.store(chosen + q.to(tl.int64) * K + k0 + k, own - found)
    tl.store(lowest + q.to(tl.int64) * K + k0 + k, tl.min(least, 0) - found)


@triton.jit(do_not_specialize=["Q", "N", "S", "size", "half"])
def _power_sums(
    logits,
    bias,
    lse,
    sums,
    entropy,
    V,
    by_sample,
    by_group,
    by_target,
    Q,
    N,
    S,
    size,  # samples of a half in these logits
    half,  # the first half that they belong to
    BIAS: tl.constexpr,
    ADD: tl.constexpr,  # to sums that are there
    BLOCK: tl.constexpr,
):
    q = tl.program_id(0)
    part = tl.program_id(2)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = v < V
    at = logits + (q // N).to(tl.int64) * by_group + (q % N).to(tl.int64) * by_target
    at += (part * size).to(tl.int64) * by_sample + v
    s0 = tl.zeros((BLOCK,), tl.float32)
    s1 = tl.zeros((BLOCK,), tl.float32)
    s2 = tl.zeros((BLOCK,), tl.float32)
    s3 = tl.zeros((BLOCK,), tl.float32)
    s4 = tl.zeros((BLOCK,), tl.float32)
    s8 = tl.zeros((BLOCK,), tl.float32)
    b = tl.zeros((BLOCK,), tl.float32)
    if BIAS:
        b = tl.load(bias + v, mask=inside, other=0.0)
    information = tl.zeros((BLOCK,), tl.float32)
    for k in range(size):
        x = tl.load(at + k * by_sample, mask=inside, other=0.0).to(tl.float32) + b
        lp = tl.where(inside, x - tl.load(lse + q * S + part * size + k), -1e30)
        e1 = tl.exp2(lp * (0.25 * _LOG2E))
        e2 = e1 * e1
        e4 = e2 * e2
        s0 += lp
        s1 += e1
        s2 += e2
        s3 += e1 * e2
        s4 += e4
        s8 += e4 * e4
        information += e4 * lp
    place = sums + ((half + part) * 6 * Q + q).to(tl.int64) * V + v
    power = Q.to(tl.int64) * V
    if ADD:
        s0 += tl.load(place, mask=inside, other=0.0)
        s1 += tl.load(place + power, mask=inside, other=0.0)
        s2 += tl.load(place + 2 * power, mask=inside, other=0.0)
        s3 += tl.load(place + 3 * power, mask=inside, other=0.0)
        s4 += tl.load(place + 4 * power, mask=inside, other=0.0)
        s8 += tl.load(place + 5 * power, mask=inside, other=0.0)
    tl.store(place, s0, mask=inside)
    tl.store(place + power, s1, mask=inside)
    tl.store(place + 2 * power, s2, mask=inside)
    tl.store(place + 3 * power, s3, mask=inside)
    tl.store(place + 4 * power, s4, mask=inside)
    tl.store(place + 5 * power, s8, mask=inside)
    tl.atomic_add(entropy + q, -tl.sum(information, 0))


@triton.jit
def _log_mean(at, half_stride, whole, inside, count, alpha, inverse_alpha):
    """Log M of classes, of one half or of both."""
    total = tl.load(at, mask=inside, other=0.0)
    if whole:
        total += tl.load(at + half_stride, mask=inside, other=0.0)
    mean = tl.where(inside, total / count, 1.0)
    if alpha > 0:
        mean = tl.log(mean) * inverse_alpha
    return tl.where(inside, mean, -1e30)


@triton.jit(do_not_specialize=["N", "first", "total"])
def _nodes(
    sums,
    powers,
    alphas,
    fine,
    coarse,
    G,
    G_half,
    peaks,
    classes,
    entropies,
    spread,
    N,  # targets of this chunk
    V,
    A,
    size,
    first,  # the chunk's first target among all
    total,  # targets of all chunks
    FINE: tl.constexpr,
    COARSE: tl.constexpr,
    ONE: tl.constexpr,
    NODES_A: tl.constexpr,
    NODES_B: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    n = tl.program_id(0)
    a = tl.program_id(1)
    which = tl.program_id(2)  # 0 the whole, 1 and 2 its halves
    power = tl.load(powers + a)
    alpha = tl.load(alphas + a)
    inverse_alpha = 1 / tl.where(alpha > 0, alpha, 1.0)
    half_stride = 6 * N.to(tl.int64) * V
    row = sums + (power * N + n).to(tl.int64) * V + tl.maximum(which - 1, 0) * half_stride
    count = tl.where(which == 0, 2 * size, size).to(tl.float32)
    best = tl.full((BLOCK,), -1e30, tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        lm = _log_mean(row + v, half_stride, which == 0, v < V, count, alpha, inverse_alpha)
        where = tl.where(lm > best, v, where)
        best = tl.maximum(lm, best)
    peak = tl.max(best, 0)
    place = first + n
    tl.store(peaks + (which * A + a) * total + place, peak)
    node_b = tl.arange(0, NODES_B)
    if which == 0:
        tl.store(classes + a * total + place, tl.min(tl.where(best == peak, where, V), 0))
        node_a = tl.arange(0, NODES_A)
        b_a = tl.load(fine + node_a, mask=node_a < FINE, other=1.0) * _LOG2E
        b_b = tl.load(fine + NODES_A + node_b, mask=NODES_A + node_b < FINE, other=1.0) * _LOG2E
        # Classes are the last dimension, along which threads lie: each takes one logarithm and
        # all nodes of a class.
        sum_a = tl.zeros((NODES_A, TILE), tl.float32)
        sum_b = tl.zeros((NODES_B, TILE), tl.float32)
        weighted = tl.zeros((TILE,), tl.float32)
        for start in range(0, V, TILE):
            v = start + tl.arange(0, TILE)
            lm = _log_mean(row + v, half_stride, True, v < V, count, alpha, inverse_alpha)
            below = lm - peak
            sum_a += tl.exp2(b_a[:, None] * below[None, :])
            sum_b += tl.exp2(b_b[:, None] * below[None, :])
            weighted += tl.exp(below) * tl.maximum(below, -1e4)
        g_a = tl.log(tl.sum(sum_a, 1))
        g_b = tl.log(tl.sum(sum_b, 1))
        at = G + (a * FINE).to(tl.int64) * total + place
        tl.store(at + node_a * total, g_a, mask=node_a < FINE)
        tl.store(at + (NODES_A + node_b) * total, g_b, mask=NODES_A + node_b < FINE)
        # Entropy at b = 1: L(1) − Σ p log M, both from the peak.
        log_z = tl.sum(tl.where(NODES_A + node_b == ONE, g_b, 0.0), 0)
        tl.store(entropies + a * total + place, log_z - tl.sum(weighted, 0) * tl.exp(-log_z))
        if a == 0:
            p_row = sums + (4 * N + n).to(tl.int64) * V
            q_row = p_row + N.to(tl.int64) * V
            ratio = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, V, BLOCK):
                v = start + tl.arange(0, BLOCK)
                inside = v < V
                p = tl.load(p_row + v, mask=inside, other=0.0)
                p += tl.load(p_row + half_stride + v, mask=inside, other=0.0)
                q = tl.load(q_row + v, mask=inside, other=0.0)
                q += tl.load(q_row + half_stride + v, mask=inside, other=0.0)
                ratio += tl.where(p > 0, q / tl.where(p > 0, p, 1.0), 0.0)
            tl.store(spread + place, tl.sum(ratio, 0) - 1)
    else:
        b_b = tl.load(coarse + node_b, mask=node_b < COARSE, other=1.0) * _LOG2E
        sum_b = tl.zeros((NODES_B, TILE), tl.float32)
        for start in range(0, V, TILE):
            v = start + tl.arange(0, TILE)
            lm = _log_mean(row + v, half_stride, False, v < V, count, alpha, inverse_alpha)
            sum_b += tl.exp2(b_b[:, None] * (lm - peak)[None, :])
        at = G_half + (((which - 1) * A + a) * COARSE).to(tl.int64) * total + place
        tl.store(at + node_b * total, tl.log(tl.sum(sum_b, 1)), mask=node_b < COARSE)


class FamilySums:
    """Turns logits of targets into what `evaluate.accumulate.distribution` gives.

    Args:
        alphas: Those of the grid, all in `ALPHAS`.
        fine: [J + 2] inverse temperatures of the nodes, then 1 and 2.
        coarse: [Jc + 1] those of the halves, then 1.
        classes: V.
        targets: The most targets at a time.
        samples: K.
        device: Where.
    """

    def __init__(
        self,
        alphas: tuple[float, ...],
        fine: Tensor,
        coarse: Tensor,
        classes: int,
        targets: int,
        samples: int,
        device: torch.device,
    ) -> None:
        assert len(fine) <= 48 and len(coarse) <= 16 and len(fine) > 33
        self.classes, self.samples = classes, samples
        self.alphas = torch.tensor(alphas, dtype=torch.float32, device=device)
        powers = [ALPHAS.index(alpha) for alpha in alphas]
        self.powers = torch.tensor(powers, dtype=torch.int32, device=device)
        self.fine = fine.to(device=device, dtype=torch.float32)
        self.coarse = coarse.to(device=device, dtype=torch.float32)
        self._sums = torch.empty(2 * _POWERS * targets * classes, device=device)
        self._lse = torch.empty(targets * samples, device=device)

    def results(self, targets: int) -> dict[str, Tensor]:
        """Room for the results of N targets.

        Returns:
            `G` [A, J + 2, N] and `G_half` [2, A, Jc + 1, N] relative to `peak` [3, A, N] (of the
            whole and the halves), `class` and `entropy` [A, N], `spread` and `mean_entropy` [N];
            of every sample `chosen`, its log p of the target, and `lowest`, its smallest log p,
            both [N, K].
        """
        A, N, K, new = len(self.alphas), targets, self.samples, self._lse.new_empty
        return {
            "G": new(A, len(self.fine), N),
            "G_half": new(2, A, len(self.coarse), N),
            "peak": new(3, A, N),
            "class": torch.empty(A, N, dtype=torch.int32, device=self._lse.device),
            "entropy": new(A, N),
            "spread": new(N),
            "mean_entropy": torch.zeros(N, device=self._lse.device),
            "chosen": new(N, K),
            "lowest": new(N, K),
        }

    def add(
        self, logits: Tensor, bias: Tensor, targets: Tensor, found: dict[str, Tensor], first: int
    ) -> None:
        """Writes the results of some targets from all their samples.

        Args:
            logits: [n · K, V₊], samples innermost and half by half, float16 or better and without
                the bias; columns from V on are not read.
            bias: [V].
            targets: [n].
            found: From `results`.
            first: The first of these targets among all.
        """
        K, rows = self.samples, logits.unflatten(0, (-1, 1, self.samples))
        own = {name: found[name][first:] for name in ("chosen", "lowest", "mean_entropy")}
        self.stream(rows.permute(2, 1, 0, 3), targets, own, range(K), bias)
        self.finish(len(targets), found, first)

    def stream(
        self,
        logits: Tensor,
        targets: Tensor,
        found: dict[str, Tensor],
        samples: range,
        bias: Tensor | None = None,
    ) -> None:
        """Adds samples to the sums of some targets.

        Args:
            logits: [S, L, N, V₊] of any strides but the last, L groups (multipliers) of N targets.
            targets: [N].
            found: `chosen`, `lowest` and `mean_entropy` of `results` for the L · N targets.
            samples: Which samples: all, or some of one half.
            bias: [V] that the logits lack, or None.
        """
        S, L, N, _ = logits.shape
        half = self.samples // 2
        halves = 2 if half < S else 1
        strides = logits.stride()[:3]
        given = self._lse if bias is None else bias
        _row_lse[(S * L * N,)](
            logits,
            given,
            targets,
            self._lse,
            found["chosen"],
            found["lowest"],
            self.classes,
            *strides,
            S,
            N,
            self.samples,
            samples.start,
            BIAS=bias is not None,
            BLOCK=2048,
            num_warps=8,
        )
        _power_sums[(L * N, -(-self.classes // _CLASSES), halves)](
            logits,
            given,
            self._lse,
            self._sums,
            found["mean_entropy"],
            self.classes,
            *strides,
            L * N,
            N,
            S,
            S // halves,
            samples.start // half,
            BIAS=bias is not None,
            ADD=samples.start % half > 0,
            BLOCK=_CLASSES,
        )

    def finish(self, targets: int, found: dict[str, Tensor], first: int = 0) -> None:
        """Writes what follows from the sums of the last targets added."""
        _nodes[(targets, len(self.alphas), 3)](
            self._sums,
            self.powers,
            self.alphas,
            self.fine,
            self.coarse,
            found["G"],
            found["G_half"],
            found["peak"],
            found["class"],
            found["entropy"],
            found["spread"],
            targets,
            self.classes,
            len(self.alphas),
            self.samples // 2,
            first,
            found["spread"].shape[0],
            FINE=len(self.fine),
            COARSE=len(self.coarse),
            ONE=len(self.fine) - 2,
            NODES_A=32,
            NODES_B=16,
            BLOCK=1024,
            TILE=_TILE,
            num_warps=_WARPS,
        )
