"""What the current GPU has: sizes of programs depend on it."""

from __future__ import annotations

import torch
import triton


def processors(device: torch.device) -> tuple[int, int]:
    """How many the current GPU has, and the bytes of memory that a program can have on one."""
    if device.type != "cuda":
        return 0, 0
    found = triton.runtime.driver.active.utils.get_device_properties(torch.cuda.current_device())
    return found["multiprocessor_count"], found["max_shared_mem"]
