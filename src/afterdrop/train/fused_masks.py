"""The masks of a training step in kernels: which sites have one, and when each is drawn.

A mask is a function of (seed, step, site, element), where an element is counted in the mask of the
whole batch. So a resumed run has the same masks, and ranks that share a batch have those of one
process.

Legend: B rows of this rank's batch, S samples of each, time steps, V token types; a plus marks a
padded size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from afterdrop.kernels.lstm_stack import Stack, StackSharing
from afterdrop.kernels.training_masks import draw_mask
from afterdrop.models import LanguageModelConfig
from afterdrop.models.fused import Copies
from afterdrop.train.config import TrainConfig
from afterdrop.train.whole_masks import RankRows

_IN_STACK = ("state", "inter_layer")  # sites whose masks belong to the stack


def stack_sharing(config: LanguageModelConfig) -> tuple[StackSharing, StackSharing]:
    """How the stack's own masks are shared over time; "none" where nothing is dropped.

    Example:
        >>> stack_sharing(LanguageModelConfig(9, (4, 4), state_dropout=0.5))
        ('sequence', 'none')
    """
    state, inter = (config.mask(name) for name in _IN_STACK)
    return state.sharing if state.rate else "none", inter.sharing if inter.rate else "none"


class StepMasks:
    """All masks of a step.

    Args:
        config: The configuration of the run.
        copies: The weights, for their padded sizes.
        stack: The stack, whose masks are drawn here as well.
        rows: The rows of the batch that this rank computes.
        still: How many of them, at the end, have masks of 1 at all sites.

    Attributes:
        units: Masks [time or 1, S·B, units₊] of the sites outside the stack that drop something.
        kept: [B], 0 where a stripe starts from a state of zero.
        table: [V₊] factors of the rows of the embedding table; None without embedding dropout.
    """

    def __init__(
        self,
        config: TrainConfig,
        copies: Copies,
        stack: Stack,
        rows: RankRows,
        still: int = 0,
    ) -> None:
        self.config, self.stack, self.rows, self._still = config, stack, rows, still
        self._model = model = copies.config
        sizes = {"input": copies.embedding.shape[-1], "output": stack.out.shape[-1]}
        if copies.projection is not None:
            sizes["projection"] = copies.softmax.shape[-1]
        if copies.mixture is not None:
            sizes["projection"] = copies.mixture.width
        half = copies.softmax  # of the dtype of masks

        def steps(name: str) -> int:
            return stack.shape.time if model.mask(name).sharing == "step" else 1

        self.units = {
            name: half.new_ones(steps(name), stack.shape.rows, size)
            for name, size in sizes.items()
            if model.mask(name).rate
        }
        self.kept = torch.ones(rows.mine.stop - rows.mine.start, device=half.device)
        self.table = half.new_ones(len(half)) if model.embedding_dropout else None

    def rows_of(self, name: str) -> Tensor | None:
        """The mask of a site with a row per batch row or per place; None if nothing is dropped."""
        return self.units[name].flatten(0, 1) if name in self.units else None

    def draw(self, reader: str, counter: Tensor) -> None:
        """Draws the masks for one reader: the input, the stack, or the layers after the stack.

        Args:
            reader: "input", "stack" or "output".
            counter: The number of the step, on the device.
        """
        for site, (mask, rate, who) in enumerate(self._sites()):
            if who == reader:
                part = None if mask is self.table else self._part(mask)
                draw_mask(mask, counter, self.config.seed, site, rate, part)
                if self._still and mask.dim() > 1:
                    mask[..., -self._still :, :].fill_(1)

    def _sites(self) -> Iterator[tuple[Tensor, float, str]]:
        """The mask, rate and reader of every site; its place in this order is its number."""
        model, reset = self._model, self.config.objective.state_reset
        for name, mask in self.units.items():
            yield mask, model.mask(name).rate, "input" if name == "input" else "output"
        for mask, sharing, name in zip(self.stack.masks, self.stack.sharing, _IN_STACK):
            if sharing != "none":
                yield mask, model.mask(name).rate, "stack"
        if reset:
            yield self.kept, reset, "stack"
        if self.table is not None:
            yield self.table, model.embedding_dropout, "input"

    def _part(self, mask: Tensor) -> tuple[int, int, int] | None:
        """Where this rank's elements lie in the mask of the whole batch; None if it has all."""
        if self.rows.whole:
            return None
        units = 1 if mask is self.kept else mask.shape[-1]
        mine = self.rows.mine
        return (mine.stop - mine.start) * units, self.rows.batch * units, mine.start * units
