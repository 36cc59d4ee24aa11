"""Triton kernels for NVIDIA GPUs: fast forms of what `family`, `masks` and `models` define.

The plain PyTorch form is the reference, and it runs on every other device. Import the modules of
this package only where `ready` is true: they need Triton. The tests run the kernels on a CPU, in
Triton's interpreter.
"""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from afterdrop.family import temperature

__all__ = ["Fallback", "partitions", "ready", "reason_to_fall_back", "why_not"]

_Result = TypeVar("_Result")
# Parts of the messages of a RuntimeError raised by Triton, its compilers or the CUDA driver.
_SIGNS = ("triton error", "c compiler", "ptxas", "passmanager")


@lru_cache(maxsize=1)
def _installed() -> bool:
    try:
        import triton
    except ImportError:
        return False
    return hasattr(triton, "jit")


def why_not(device: torch.device) -> str | None:
    """The reason why kernels cannot run on a device, or None if they can.

    Example:
        >>> why_not(torch.device("meta"))
        'meta is not a CUDA device'
    """
    if device.type != "cuda":
        return f"{device.type} is not a CUDA device"
    if torch.version.hip is not None:
        return "the kernels were made for NVIDIA GPUs, and this is an AMD GPU"
    if not _installed():
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than the Ampere generation"
    return None


def ready(device: torch.device) -> bool:
    """Whether kernels can run on a device.

    Example:
        >>> ready(torch.device("meta"))
        False
    """
    return why_not(device) is None


def reason_to_fall_back(error: Exception, what: str) -> str:
    """Warns that a kernel cannot be compiled or launched and returns the reason.

    Any other error is raised again, and so is a lack of memory, because the plain form needs no
    less of it.

    Args:
        error: What a kernel raised.
        what: The computation that continues in the plain form, for the warning.

    Example:
        >>> reason_to_fall_back(ValueError("not raised by a kernel"), "evaluation")
        Traceback (most recent call last):
        ValueError: not raised by a kernel
    """
    text = (str(error).strip() or type(error).__name__).splitlines()[-1]
    own = any(kind.__module__.partition(".")[0] == "triton" for kind in type(error).__mro__)
    own |= isinstance(error, subprocess.CalledProcessError)  # the C compiler, which Triton calls
    own |= isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)
    if not own or "out of memory" in str(error).lower():
        raise error
    reason = f"a kernel cannot run here ({type(error).__name__}: {text})"
    warnings.warn(f"{what} continues without kernels, which is slower: {reason}", stacklevel=3)
    return reason


class Fallback:
    """Runs a kernel until it fails to compile or launch, and the plain form from then on.

    The first failure is warned of once. Errors that are not the kernel's are raised.

    Args:
        what: The computation, for the warning.

    Attributes:
        reason: Why the kernel cannot run; None as long as it can.

    Example:
        >>> sums = Fallback("the sum over classes")
        >>> sums.run(kernel=lambda: "fast", plain=lambda: "slow")
        'fast'
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.reason: str | None = None

    def run(self, kernel: Callable[[], _Result], plain: Callable[[], _Result]) -> _Result:
        """The result of `kernel`, or that of `plain` if the kernel cannot run.

        Args:
            kernel: Imports and launches the kernel.
            plain: Computes the same without it.
        """
        if self.reason is None:
            try:
                return kernel()
            except Exception as error:
                self.reason = reason_to_fall_back(error, self.what)
        return plain()


_partitions = Fallback("the sum over classes")


def partitions(log_means: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """`family.temperature.partitions`, computed by a kernel where one can run.

    Same name, arguments and result as the plain form; `log_partitions` is the kernel.

    Example:
        >>> G, peak = partitions(torch.tensor([[0.5, 0.25]]).log(), torch.tensor([1.0]))
        >>> (G[0] + peak).exp()
        tensor([0.7500])
    """

    def kernel() -> tuple[Tensor, Tensor]:
        from afterdrop.kernels.log_partitions import log_partitions

        return log_partitions(log_means, inverse)

    def plain() -> tuple[Tensor, Tensor]:
        return temperature.partitions(log_means, inverse)

    if log_means.dtype != torch.float32 or not ready(log_means.device):
        return plain()
    return _partitions.run(kernel, plain)
