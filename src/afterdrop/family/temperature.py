"""Temperatures after the passes: log-partitions at nodes, their interpolation, and exact fits.

Legend: b = 1/T; N targets, V classes, J nodes. log M is the log power mean of one target.

    L(b)  = log Σ_c M(c)^b               XE(b) = L(b) − b log M(y), convex in b
    ECE needs exp(b max − L(b)), Brier exp(L(2b) − 2 L(b)), entropy L − b L′

G(b) = L(b) − b max_c log M(c) is stored at Chebyshev–Lobatto nodes in s = log b. G falls from log V
to 0, so float32 holds it within 1e-6 whatever the scale of the logits. The polynomial through the
nodes is evaluated by the barycentric formula (Berrut and Trefethen, 2004), which is stable;
`partition_interpolation` does better where one class stands above very many equal ones. Every
fourth of the 41 nodes is again a Lobatto set (of 11). It suffices for the differences between the
halves of the samples and the whole, which are small and smooth.
"""

import dataclasses
import functools
import math

import torch
from torch import Tensor

from afterdrop.errors import MemberError
from afterdrop.family.binned_sums import BinnedSums
from afterdrop.family.exponential import exp_times

NODES = 41  # XE within 1e-5 in a bracket of 1/8 to 8 (see `partition_interpolation`)
COARSE = 4  # every fourth node also holds the differences of the halves
SPAN = 8.0  # the bracket of temperatures extends from center/SPAN to center*SPAN
WIDEST = 1000.0  # largest high/low that the nodes can span
BINS_FROM = 1024  # number of classes from which bins are cheaper than one pass per node
_SLICE = 2**18  # elements per slice: 1 MiB of float32 stays in the cache
_ROUNDING = 1e-7  # rounding error of a mean XE from float32 nodes


@dataclasses.dataclass(frozen=True)
class Nodes:
    """The inverse temperatures at which log-partitions are stored, from `low` to `high`.

    Args:
        low: Lowest temperature.
        high: Highest temperature.
        count: Number of nodes.
        reach: The highest inverse temperature is reach/low: 2 because the Brier score at b needs
            L(2b), 1 where that is stored separately.

    Example:
        >>> nodes = Nodes(0.25, 4.0)
        >>> [round(b, 6) for b in nodes.inverse()[[0, -1]].tolist()]
        [0.25, 8.0]
    """

    low: float
    high: float
    count: int = NODES
    reach: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < math.inf:
            raise MemberError(
                f"temperatures=({self.low:g}, {self.high:g}) must satisfy 0 < low < high"
            )
        if self.high > WIDEST * self.low:
            raise MemberError(
                f"temperatures=({self.low:g}, {self.high:g}) are too far apart to "
                f"interpolate between; give a high of at most {WIDEST:g} times the low"
            )

    def inverse(self, step: int = 1) -> Tensor:
        """The inverse temperatures of every `step`-th node, ascending, float64."""
        return self._positions(step).mul(self._half()).add(self._middle()).exp()

    def weights(self, inverse: Tensor, step: int = 1) -> Tensor:
        """Weights [..., J] that interpolate values at the nodes at inverse temperatures [...]."""
        x = self.position(inverse)
        nodes = self._positions(step)
        sign = 1.0 - 2.0 * (torch.arange(len(nodes)) % 2)
        sign[0] *= 0.5
        sign[-1] *= 0.5
        gap = x.unsqueeze(-1) - nodes
        hit = gap.abs() < 1e-14
        terms = sign / torch.where(hit, torch.ones_like(gap), gap)
        terms = torch.where(hit.any(-1, keepdim=True), hit.double(), terms)
        return terms / terms.sum(-1, keepdim=True)

    def position(self, inverse: Tensor) -> Tensor:
        """Where inverse temperatures lie between the first node (−1) and the last (1), in log b."""
        return (inverse.double().log() - self._middle()) / self._half()

    def _middle(self) -> float:
        return 0.5 * (math.log(self.reach / self.low) - math.log(self.high))

    def _half(self) -> float:
        return 0.5 * (math.log(self.reach / self.low) + math.log(self.high))

    def _positions(self, step: int) -> Tensor:
        angles = torch.arange(0, self.count, step, dtype=torch.float64) * math.pi / (self.count - 1)
        return -torch.cos(angles)


def partitions(log_means: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """G(b) = log Σ_c exp(b (log M(c) − max)) and the maximum.

    From `BINS_FROM` classes on, classes are summed in bins (`BinnedSums`), except at b = 1 and 2,
    which stay exact. `kernels.partitions` is the same function with a kernel for GPUs.

    Args:
        log_means: [..., V], where −inf marks classes of probability zero.
        inverse: [J] inverse temperatures.

    Returns:
        G [J, ...] and the maximum [...].

    Example:
        >>> G, peak = partitions(torch.tensor([[0.5, 0.25]]).log(), torch.tensor([1.0]))
        >>> (G[0] + peak).exp()
        tensor([0.7500])
    """
    rows = log_means.flatten(0, -2)
    peak = rows.amax(-1)
    exact = torch.ones(len(inverse), dtype=torch.bool)
    if rows.shape[-1] >= BINS_FROM:
        exact = (inverse == 1) | (inverse == 2)
    rest = tuple(inverse[~exact].tolist())
    bins = _bins(rest, rows.dtype, rows.device) if rest else None
    G = torch.empty(len(inverse), len(rows), dtype=rows.dtype, device=rows.device)
    step = max(1, _SLICE // rows.shape[-1])
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        below = rows[part] - peak[part].unsqueeze(-1)
        G[exact, part] = _exact_sums(below, inverse[exact].tolist())
        if bins is not None:
            G[~exact, part] = bins.sums(below).t()
    return G.log_().unflatten(1, log_means.shape[:-1]), peak.view(log_means.shape[:-1])


@functools.lru_cache(maxsize=8)  # an evaluation uses two or three sets of nodes many times
def _bins(inverse: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> BinnedSums:
    return BinnedSums(
        torch.tensor(inverse, dtype=torch.float64), torch.empty(0, dtype=dtype).to(device)
    )


def _exact_sums(below: Tensor, inverse: list[float]) -> Tensor:
    """Σ_c exp(b δ_c) [J, N] for δ [N, V]."""
    if below.numel() * len(inverse) <= _SLICE:  # few classes: all nodes in one operation
        nodes = torch.tensor(inverse, dtype=below.dtype, device=below.device).view(-1, 1, 1)
        return exp_times(below, nodes).sum(-1)
    buffer = torch.empty_like(below)
    return torch.stack([exp_times(below, b, out=buffer).sum(-1) for b in inverse])


def bracket(log_probs: Tensor, targets: Tensor) -> Nodes:
    """Nodes around the best temperature of a first batch of deterministic predictions.

    The center is the power of 4 with the lowest penalised XE, so ordinary networks get 1/8 to 8
    and logits multiplied by 100 get 8 to 512. A batch without a mistake has its optimum at 0,
    which is uninformative; the scale of the margins decides there. The penalty of 2 j² nats (center
    4^j) keeps small batches at 1. Powers of 4 make parts of one data set agree.

    Args:
        log_probs: [N, V] log-probabilities.
        targets: [N] classes.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0]])
        >>> bracket(logits.log_softmax(-1), torch.tensor([0, 0, 1]))
        Nodes(low=0.125, high=8.0, count=41, reach=2.0)
    """
    exponents = range(-6, 7)
    at_target = log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1).double()
    G, peak = partitions(log_probs, torch.tensor([4.0**-j for j in exponents]))
    below = peak.double() - at_target
    possible = below.isfinite()  # an impossible target is impossible at every temperature
    G, below = G[:, possible].double(), below[possible]
    if not bool((below > 0).any()):
        return _around(_margin_scale(log_probs))
    costs = [(G[i] + 4.0**-j * below).sum().item() + 2 * j * j for i, j in enumerate(exponents)]
    return _around(4.0 ** exponents[costs.index(min(costs))])


def _around(center: float) -> Nodes:
    return Nodes(center / SPAN, center * SPAN)


def _margin_scale(log_probs: Tensor) -> float:
    """1 if the median lead of the best class is 1 to 16 nats, else the power of 4 that makes it so.

    Fewer than 16 examples are left at 1 for leads of 1/64 to 1024 nats, since they say little.
    """
    if not log_probs.numel():
        return 1.0
    least, most = (1, 16) if len(log_probs) >= 16 else (1 / 64, 1024)
    first, second = log_probs.double().topk(2, -1).values.unbind(-1)
    margin = (first - second).median().item()
    if least <= margin <= most or not 0 < margin < math.inf:
        return 1.0
    return 4.0 ** round(math.log(margin / 4.0, 4.0))


def fit_temperature(values: Tensor, targets: Tensor, nodes: Nodes) -> tuple[Tensor, Tensor]:
    """The temperature that minimises mean XE, as the root of a monotone derivative.

    XE(b) = mean G(b) − b·mean(log M(y) − max) is convex in b, so its derivative changes sign once
    and bisection in s = log b finds the root. Resamples (bootstrap, folds) are fitted together.

    Args:
        values: [resamples, J] mean of G at the nodes.
        targets: [resamples] mean of log M(y) − max, at most 0.
        nodes: The nodes.

    Returns:
        Temperatures [resamples], and whether each lies at the edge of the bracket: the optimum is
        beyond it, or XE at the edge equals it up to rounding.
    """
    low = torch.full_like(targets, math.log(1 / nodes.high), dtype=torch.float64)
    high = torch.full_like(low, math.log(1 / nodes.low))
    ends = low.clone(), high.clone()

    def slope(s: Tensor) -> Tensor:
        step = 1e-4  # central difference: its error of 1e-9 is below that of float32 nodes
        ahead = (nodes.weights((s + step).exp()) * values).sum(-1)
        behind = (nodes.weights((s - step).exp()) * values).sum(-1)
        return (ahead - behind) / (2 * step) - s.exp() * targets

    def xe(s: Tensor) -> Tensor:
        return (nodes.weights(s.exp()) * values).sum(-1) - s.exp() * targets

    for _ in range(40):  # narrows a bracket of at most 10 in s to 1e-11
        middle = (low + high) / 2
        up = slope(middle) > 0
        low, high = torch.where(up, low, middle), torch.where(up, middle, high)
    s = (low + high) / 2
    rising, falling = (xe(end) <= xe(s) + _ROUNDING for end in ends)
    s = torch.where(rising, ends[0], torch.where(falling, ends[1], s))
    return (-s).exp(), rising | falling


def fit_interpolated(values: Tensor, nodes: Nodes) -> tuple[Tensor, Tensor]:
    """The temperature with the lowest XE where XE need not be convex, by many starts.

    Args:
        values: [resamples, J] mean XE at the nodes.
        nodes: The nodes.

    Returns:
        Temperatures [resamples], and whether each lies at the edge of the bracket.
    """
    ends = math.log(1 / nodes.high), math.log(1 / nodes.low)
    starts = torch.linspace(*ends, 257, dtype=torch.float64)
    best = (values @ nodes.weights(starts.exp()).t()).argmin(-1)
    step = float(starts[1] - starts[0])
    s = starts[best]
    for _ in range(40):  # three-point search around the best start, with a shrinking step
        step *= 0.6
        trial = torch.stack([s - step, s, s + step], -1).clamp(*ends)
        at = (nodes.weights(trial.exp()) * values.unsqueeze(-2)).sum(-1)
        s = trial.gather(-1, at.argmin(-1, keepdim=True)).squeeze(-1)
    edge = (s <= ends[0] + 1e-6) | (s >= ends[1] - 1e-6)
    return (-s).exp(), edge
