"""Chooses the device to compute on."""

from __future__ import annotations

import torch

from afterdrop.train.checks import ConfigError

_ACCELERATORS = ("cuda", "mps", "xpu")


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
    if device.type != "cpu" and (device.index or 0) >= _count(device.type):
        raise ConfigError(
            f"device={str(device)!r} does not exist: torch sees {torch.cuda.device_count()} GPUs; "
            f"give {', '.join(_available())}"
        )
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # which kernels and CUDA graphs use
    return device


def _available() -> list[str]:
    """The names of the devices that there are, the CPU first."""
    return ["cpu"] + [f"{kind}:{index}" for kind in _ACCELERATORS for index in range(_count(kind))]


def _count(kind: str) -> int:
    """The number of accelerators of a kind; 0 of what cannot compute, such as meta."""
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    module = getattr(torch, kind, None) if kind in _ACCELERATORS else None
    return module.device_count() if module is not None and module.is_available() else 0
