"""The dropout sites of the recurrent models: what draws masks and what applies them.

Every random number of a forward pass comes from `dropout`, called once a site and window with an
explicit batch dimension. To whoever intercepts torch functions it is `torch.nn.functional.dropout`,
so all of them are seen, counted and controlled. The call is made in eval mode too, where it returns
its input untouched.

Letters: time steps, B rows of the batch, H units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import has_torch_function_unary

from afterdrop.models.checks import check_choice, check_rate

Sharing = Literal["sequence", "step"]
SHARINGS: tuple[Sharing, ...] = ("sequence", "step")


@dataclass(frozen=True)
class MaskConfig:
    """How one site drops.

    Attributes:
        rate: Probability of dropping a unit, in [0, 1).
        sharing: `"sequence"` for one mask over all time steps of the window, `"step"` for a fresh
            one at each.

    Example:
        >>> MaskConfig(0.5, "sequence")
        MaskConfig(rate=0.5, sharing='sequence')
    """

    rate: float = 0.0
    sharing: Sharing = "step"

    def __post_init__(self) -> None:
        check_rate("rate", self.rate)
        check_choice("sharing", self.sharing, SHARINGS)


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """`torch.nn.functional.dropout`; on a CPU and in float32 with masks that are drawn faster.

    torch draws its own with 53 random bits an element, one by one where the processor is not
    Intel's: 9.6 ns on an AMD EPYC, a sixth of the forward pass of a stack of 2 x 200. From uniforms
    of 24 bits it is 3.2 ns, and the masks of a seed are the same on any processor.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> dropout(torch.ones(1000), 0.5, training=True).unique()
        tensor([0., 2.])
        >>> x = torch.ones(3)
        >>> dropout(x, 0.5, training=False) is x
        True
    """
    fast = x.device.type == "cpu" and x.dtype == torch.float32
    if not (training and fast) or has_torch_function_unary(x):
        return F.dropout(x, p=rate, training=training)
    return x * torch.rand_like(x).ge_(rate).mul_(1 / (1 - rate))


class Site(nn.Module):
    """A place where units are dropped; it has a rate and a way to share its masks over time.

    Example:
        >>> Site(MaskConfig(0.5))
        Site(rate=0.5, sharing='step')
    """

    def __init__(self, config: MaskConfig) -> None:
        super().__init__()
        self.rate = config.rate
        self.sharing = config.sharing

    @property
    def shared(self) -> bool:
        """Whether one mask serves all time steps of a window."""
        return self.sharing == "sequence"

    def extra_repr(self) -> str:
        """The rate and sharing, for `print(model)`."""
        return f"rate={self.rate}, sharing={self.sharing!r}"

    def draw(self, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
        """One inverted-dropout mask, or None where the operator left the ones alone."""
        if self.rate == 0.0:
            return None
        ones = torch.ones(shape, dtype=like.dtype, device=like.device)
        mask = dropout(ones, self.rate, self.training)
        # In eval mode dropout hands back its input: None then saves a multiplication a step.
        return None if mask is ones else mask


class Drop(Site):
    """Drops units of activations [time, B, H].

    Example:
        >>> drop = Drop(MaskConfig(0.5, "sequence"))
        >>> kept = drop(torch.ones(3, 2, 4)) != 0
        >>> bool((kept == kept[0]).all())
        True
    """

    def forward(self, x_TBH: Tensor) -> Tensor:
        """The activations with units dropped and the kept ones rescaled."""
        if self.rate == 0.0:
            return x_TBH
        if not self.shared:
            return dropout(x_TBH, self.rate, self.training)
        mask_1BH = self.draw((1, *x_TBH.shape[1:]), x_TBH)
        return x_TBH if mask_1BH is None else x_TBH * mask_1BH


class Mask(Site):
    """Draws the masks of a site inside the recurrence, all of a window in one call.

    Example:
        >>> state_BH = torch.zeros(2, 4)
        >>> Mask(MaskConfig(0.5, "sequence"))(3, state_BH).shape
        torch.Size([2, 4])
        >>> Mask(MaskConfig(0.5, "step"))(3, state_BH).shape
        torch.Size([3, 2, 4])
    """

    def forward(self, time: int, state_BH: Tensor) -> Tensor | None:
        """A mask [B, H] if shared over time, else [time, B, H]; None if nothing is dropped."""
        shape = tuple(state_BH.shape)
        return self.draw(shape if self.shared else (time, *shape), state_BH)
