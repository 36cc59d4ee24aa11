"""Where to compute."""

from __future__ import annotations

import torch

from afterdrop.train.checks import ConfigError


def choose_device(name: str | torch.device | None) -> torch.device:
    """The device of a name that a user gave; a GPU if there is one where none was given.

    A numbered GPU becomes the current one.

    Raises:
        ConfigError: If there is no such device here.

    Example:
        >>> choose_device("cpu")
        device(type='cpu')
        >>> choose_device("gpu")
        Traceback (most recent call last):
        afterdrop.train.checks.ConfigError: device='gpu' is none that torch knows; give cpu, cuda \
or cuda:1
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ConfigError(
            f"device={name!r} is none that torch knows; give cpu, cuda or cuda:1"
        ) from None
    found = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= found:
        raise ConfigError(
            f"device={str(device)!r} is not here: torch sees {found} GPUs; give "
            f"{'cpu' if not found else f'cuda:0 to cuda:{found - 1}'}"
        )
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # where kernels and graphs go
    return device
