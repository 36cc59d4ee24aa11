"""The device of the kernel tests: a GPU, or without one a CPU in Triton's interpreter.

Operands are float32, because the interpreter returns zeros for products of bfloat16. `tests/gpu`
tests 16-bit operands. A GPU multiplies them in full precision here, so that errors of the kernels
are not lost in the rounding of tf32.
"""

import os

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton, which is not installed")

os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

# The interpreter uses NumPy, which warns of exp(-inf - -inf) and log(0) in masked lanes.
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def within(device: torch.device, interpreted: float, gpu: float | None = None) -> float:
    """A tolerance: a GPU, which sums in another order, has ten times that of the interpreter.

    Args:
        device: The device.
        interpreted: In the interpreter.
        gpu: On a GPU, if not ten times `interpreted` (or 1e-6, where the interpreter is exact).
    """
    if device.type != "cuda":
        return interpreted
    return max(10 * interpreted, 1e-6) if gpu is None else gpu


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the error relative to the norm of `wanted`, or absolute if that is 0."""
    wanted = wanted.detach().double().cpu()
    error = (found.detach().double().cpu() - wanted).norm()
    return float(error / (wanted.norm() if wanted.norm() > 0 else 1.0))
