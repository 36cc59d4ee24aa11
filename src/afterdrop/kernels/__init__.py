"""The fast forms of what family, masks and models define, written in Triton for NVIDIA GPUs.

The plain form is the reference and what runs everywhere else. Nothing here is imported before
`ready` has said that it can run. Tests call the kernels themselves, on a CPU in Triton's
interpreter.
"""

from __future__ import annotations

import subprocess
import warnings
from functools import lru_cache

import torch
from torch import Tensor

from afterdrop.family import temperature

# What a RuntimeError says that Triton, its compilers or its driver raise.
_SIGNS = ("triton error", "c compiler", "ptxas", "passmanager")
_failed: set[str] = set()  # kernels of this file that could not run


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


def reason_to_fall_back(error: Exception, what: str) -> str:
    """Why a kernel could not be compiled or launched, which is warned of; raises all else again.

    Lack of memory is nothing that the plain form would have more of.

    Args:
        error: What the first use of a kernel raised.
        what: What goes on in the plain form.

    Example:
        >>> reason_to_fall_back(ValueError("not a kernel's"), "evaluation")
        Traceback (most recent call last):
        ValueError: not a kernel's
    """
    text = (str(error).strip() or type(error).__name__).splitlines()[-1]
    own = any(kind.__module__.partition(".")[0] == "triton" for kind in type(error).__mro__)
    own |= isinstance(error, subprocess.CalledProcessError)  # the C compiler, which Triton calls
    own |= isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)
    if not own or "out of memory" in str(error).lower():
        raise error
    reason = f"a kernel cannot run here ({type(error).__name__}: {text})"
    warnings.warn(f"{what} goes on without kernels, which is slower: {reason}", stacklevel=3)
    return reason


def partitions(log_means: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """`family.temperature.partitions`, in one kernel where that can run.

    Example:
        >>> G, peak = partitions(torch.tensor([[0.5, 0.25]]).log(), torch.tensor([1.0]))
        >>> (G[0] + peak).exp()
        tensor([0.7500])
    """
    plain = log_means.dtype != torch.float32 or not ready(log_means.device)
    if plain or "partitions" in _failed:
        return temperature.partitions(log_means, inverse)
    from afterdrop.kernels.log_partitions import log_partitions

    try:
        return log_partitions(log_means, inverse)
    except Exception as error:
        reason_to_fall_back(error, "the sum over classes")
        _failed.add("partitions")
        return temperature.partitions(log_means, inverse)
