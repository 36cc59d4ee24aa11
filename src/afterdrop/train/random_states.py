"""The states of torch's global random generators, as tensors of a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from afterdrop.train.checkpoint import Checkpoint


def random_states(device: torch.device) -> dict[str, Tensor]:
    """The state of the CPU's generator and, on a GPU, of the device's."""
    states = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(saved: Checkpoint, device: torch.device) -> None:
    """Continues the random numbers of a checkpoint."""
    states = saved.group("random")
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
