"""Log-partitions at many inverse temperatures in one kernel.

The fast form of `family.temperature.partitions`, which `kernels.partitions` uses on a GPU. A
program handles one target. It keeps a tile of partial sums [J, BLOCK_V] in registers while it goes
over the classes, and reduces the tile once at the end.

Letters: N targets, V classes, J nodes, b = 1/T.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from afterdrop.kernels.log_constants import LOG2E
from afterdrop.transfer import constant

_BLOCK = 2048  # classes at a time while searching for the maximum
_BLOCK_V = 128  # classes at a time in the sums: with 64 nodes the tile fits the registers


@triton.jit
def _row(
    log_means,  # [N, V] float32
    inverse,  # [J] float32, ascending
    G,  # [J, N] float32
    peaks,  # [N] float32
    N,
    V,
    stride,
    J,
    NODES: tl.constexpr,  # J rounded up to a power of 2
    BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = log_means + row * stride
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        highest = tl.maximum(highest, tl.load(at + v, mask=v < V, other=float("-inf")))
    peak = tl.max(highest, 0)
    node = tl.arange(0, NODES)
    b = tl.load(inverse + node, mask=node < J, other=1.0) * LOG2E
    total = tl.zeros((NODES, BLOCK_V), tl.float32)
    for start in range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        below = tl.load(at + v, mask=v < V, other=float("-inf")) - peak
        total += tl.exp2(b[:, None] * below[None, :])
    tl.store(G + node * N + row, tl.log(tl.sum(total, 1)), mask=node < J)
    tl.store(peaks + row, peak)


def log_partitions(log_means: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """G(b) = log Σ_c exp(b (log M(c) − max)) [J, ...] and the maximum [...].

    Args:
        log_means: [..., V] float32, where −inf marks classes of probability zero.
        inverse: [J] inverse temperatures, all above 0.
    """
    rows = log_means.flatten(0, -2)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    J, (N, V) = len(inverse), rows.shape
    G, peak = rows.new_empty(J, N), rows.new_empty(N)
    nodes = constant(inverse, rows.device, torch.float32)
    if N:
        _row[(N,)](
            rows,
            nodes,
            G,
            peak,
            N,
            V,
            rows.stride(0),
            J,
            NODES=max(16, triton.next_power_of_2(J)),
            BLOCK=_BLOCK,
            BLOCK_V=_BLOCK_V,
        )
    return G.unflatten(1, log_means.shape[:-1]), peak.view(log_means.shape[:-1])
