"""The windows of a validation text, held on the device between validations.

Which places are padding is found on the CPU, once: asking a GPU for it would wait for every kernel
that was launched before.

Legend: B rows, time places a window, N targets that are not padding.
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
        inputs: [B, time] of the text's integer type, padding included.
        targets: [N] int64, row by row.
        places: [N] where they are among the B · time; None if there is no padding.
    """

    inputs: Tensor
    targets: Tensor
    places: Tensor | None

    def real(self, values: Tensor) -> Tensor:
        """Of values [B, time, ...] those of targets, [N, ...]."""
        flat = values.flatten(0, 1)
        return flat if self.places is None else flat[self.places]


def held_windows(
    stripes: EvalStripes, device: torch.device, rows: slice, most: int | None = None
) -> list[Window]:
    """The windows of an evaluation on a device, as views of a few tensors.

    Args:
        stripes: The windows, made on the CPU.
        device: Where they are to be.
        rows: The stripes to take; no windows without any.
        most: No window after that many targets of all stripes; None is all windows.

    Example:
        >>> stripes = EvalStripes(torch.tensor([1, 2, 0, 3, 0]), eos=0, stripes=2, window=2)
        >>> first, last = held_windows(stripes, torch.device("cpu"), slice(0, 2))
        >>> first.targets.tolist(), first.places
        ([1, 2, 3, 0], None)
        >>> last.targets.tolist(), last.places.tolist()
        ([0], [0])
    """
    inputs, targets, places, seen = [], [], [], 0
    for number in range(len(stripes) if rows.start < rows.stop else 0):
        if most is not None and seen >= most:
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
    """The tensors on a device, brought there as one."""
    if not tensors:
        return iter(())
    whole = upload(torch.cat(tensors), device)
    return iter(whole.split([len(tensor) for tensor in tensors]))
