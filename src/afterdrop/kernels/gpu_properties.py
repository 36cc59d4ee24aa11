"""Properties of the current GPU, on which sizes of programs depend."""

from __future__ import annotations

import torch
import triton


def processors(device: torch.device) -> tuple[int, int]:
    """Number of multiprocessors, and bytes of shared memory per program; zeros on a CPU."""
    if device.type != "cuda":
        return 0, 0
    found = triton.runtime.driver.active.utils.get_device_properties(torch.cuda.current_device())
    return found["multiprocessor_count"], found["max_shared_mem"]
