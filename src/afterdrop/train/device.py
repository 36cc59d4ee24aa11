"""Chooses the device to compute on."""

from __future__ import annotations

import torch

from afterdrop.train.checks import ConfigError


def choose_device(name: str | torch.device | None) -> torch.device:
    """The device with a name; without a name, a GPU if there is one, else the CPU.

    A numbered GPU becomes torch's current device.

    Raises:
        ConfigError: If there is no such device on this machine.

    Example:
        >>> choose_device("cpu")
        device(type='cpu')
        >>> choose_device("gpu")
        Traceback (most recent call last):
        afterdrop.train.checks.ConfigError: device='gpu' is not a device that torch knows; \
give cpu, cuda or cuda:1
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ConfigError(
            f"device={name!r} is not a device that torch knows; give cpu, cuda or cuda:1"
        ) from None
    found = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= found:
        raise ConfigError(
            f"device={str(device)!r} does not exist: torch sees {found} GPUs; give "
            f"{'cpu' if not found else f'cuda:0 to cuda:{found - 1}'}"
        )
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # which kernels and CUDA graphs use
    return device
