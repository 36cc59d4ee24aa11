"""The device of the kernel tests: a GPU, or without one a CPU in Triton's interpreter.

Operands are float32, because the interpreter returns zeros for products of bfloat16. `tests/gpu`
tests 16-bit operands.
"""

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton, which is not installed")

# The interpreter uses NumPy, which warns of exp(-inf - -inf) and log(0) in masked lanes.
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def within(device: torch.device, interpreted: float, tf32: float) -> float:
    """A tolerance: float32 in the interpreter, products of 10-bit mantissas (tf32) on a GPU."""
    return tf32 if device.type == "cuda" else interpreted


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the error relative to the norm of `wanted`, or absolute if that is 0."""
    wanted = wanted.detach().double().cpu()
    error = (found.detach().double().cpu() - wanted).norm()
    return float(error / (wanted.norm() if wanted.norm() > 0 else 1.0))
