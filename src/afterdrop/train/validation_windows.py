"""The windows of a validation text, kept on the device between validations.

Padding is found on the CPU, once: reading it from a GPU would wait for every kernel that was
launched before.

Legend: B stripes, t places in a window, N targets that are not padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from afterdrop.data import IGNORE, EvalStripes
from afterdrop.transfer import upload


class Window(NamedTuple):
    """A window without its padding.

    Attributes:
        inputs: [B, t] of the text's integer dtype, padding included.
        targets: [N] int64, stripe by stripe.
        places: [N] the index of each target among the B · t; None if there is no padding.
    """

    inputs: Tensor
    targets: Tensor
    places: Tensor | None

    def real(self, values: Tensor) -> Tensor:
        """The values [N, ...] of the targets, from values [B, t, ...]."""
        flat = values.flatten(0, 1)
        return flat if self.places is None else flat[self.places]


def windows_on_device(
    stripes: EvalStripes, device: torch.device, rows: slice, max_targets: int | None = None
) -> list[Window]:
    """Copies the windows of a validation to a device, as views of a few tensors.

    Args:
        stripes: The windows, made on the CPU.
        device: The device.
        rows: The stripes to take; if there are none, there are no windows.
        max_targets: Stop after the window with which all stripes together have this number of
            targets; None for all windows.

    Example:
        >>> stripes = EvalStripes(torch.tensor([1, 2, 0, 3, 0]), eos=0, stripes=2, window=2)
        >>> first, last = windows_on_device(stripes, torch.device("cpu"), slice(0, 2))
        >>> first.targets.tolist(), first.places
        ([1, 2, 3, 0], None)
        >>> last.targets.tolist(), last.places.tolist()
        ([0], [0])
    """
    inputs, targets, places, seen = [], [], [], 0
    for number in range(len(stripes) if rows.start < rows.stop else 0):
        if max_targets is not None and seen >= max_targets:
            break
        inputs_Bt, targets_Bt = stripes[number]
        seen += int((targets_Bt != IGNORE).sum())
        target_R = targets_Bt[rows].flatten()
        place_N = (target_R != IGNORE).nonzero().flatten()
        inputs.append(inputs_Bt[rows].to(stripes.tokens.dtype))
        targets.append(target_R[place_N])
        places.append(place_N if len(place_N) < len(target_R) else None)
    padded = _together([place for place in places if place is not None], device)
    return [
        Window(window, target, None if place is None else next(padded))
        for window, target, place in zip(
            _together(inputs, device), _together(targets, device), places
        )
    ]


def _together(tensors: list[Tensor], device: torch.device) -> Iterator[Tensor]:
    """The tensors on a device, copied there as one."""
    if not tensors:
        return iter(())
    whole = upload(torch.cat(tensors), device)
    return iter(whole.split([len(tensor) for tensor in tensors]))
