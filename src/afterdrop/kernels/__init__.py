"""The fast forms of what family, masks and models define, written in Triton for NVIDIA GPUs.

The plain form is the reference and what runs everywhere else. Nothing here is imported before
`ready` has said that it can run. Tests call the kernels themselves, on a CPU in Triton's
interpreter.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from afterdrop.family import temperature


@lru_cache(maxsize=1)
def _installed() -> bool:
    try:
        import triton
    except ImportError:
        return False
    return hasattr(triton, "jit")


def why_not(device: torch.device) -> str | None:
    """Why kernels cannot run on a device; None if they can.

    Example:
        >>> why_not(torch.device("meta"))
        'meta is no CUDA device'
    """
    if device.type != "cuda":
        return f"{device.type} is no CUDA device"
    if not _installed():
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than the Ampere generation"
    return None


def ready(device: torch.device) -> bool:
    """Whether kernels run on a device.

    Example:
        >>> ready(torch.device("meta"))
        False
    """
    return why_not(device) is None


def partitions(log_means: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """`family.temperature.partitions`, in one kernel where that can run.

    Example:
        >>> G, peak = partitions(torch.tensor([[0.5, 0.25]]).log(), torch.tensor([1.0]))
        >>> (G[0] + peak).exp()
        tensor([0.7500])
    """
    if log_means.dtype != torch.float32 or not ready(log_means.device):
        return temperature.partitions(log_means, inverse)
    from afterdrop.kernels.partition import partitions as fused

    return fused(log_means, inverse)
