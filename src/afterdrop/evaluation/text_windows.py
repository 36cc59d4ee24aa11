"""A text as batches of windows, each with the state that a pass without dropout carries into it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from afterdrop import kernels
from afterdrop.data.stream import EvalStripes
from afterdrop.evaluation.carried_states import carried_states
from afterdrop.masks.eval_mode import eval_mode
from afterdrop.models import LanguageModel
from afterdrop.transfer import upload

if TYPE_CHECKING:
    from afterdrop.models.fused import DeterministicPass


class Windows:
    """Windows of a text as batches ((tokens, state), targets), states without dropout.

    Args:
        model: The model.
        stripes: The text.
        together: Windows of each stripe a batch.
        passes: The kernels' pass, or None to run the model.
    """

    def __init__(
        self,
        model: LanguageModel,
        stripes: EvalStripes,
        together: int,
        passes: "DeterministicPass | None" = None,
    ) -> None:
        self.model, self.stripes, self.together = model, stripes, together
        self.passes = passes

    def __len__(self) -> int:
        return -(-len(self.stripes) // self.together)

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        held: list[tuple[Tensor, Any, Tensor]] = []
        windows = zip(self.stripes, self._states())
        for number, ((tokens, targets), state) in enumerate(windows):
            held.append((tokens, state, targets))
            if len(held) == self.together or number + 1 == len(self.stripes):
                joined = tuple(
                    tuple(torch.cat(parts) for parts in zip(*layer))
                    for layer in zip(*(before for _, before, _ in held))
                )
                inputs = torch.cat([tokens for tokens, _, _ in held])
                yield (inputs, joined), torch.cat([targets for _, _, targets in held])
                held = []

    def _states(self) -> Iterator[Any]:
        """The state before each window."""
        known, state = 0, self.model.initial_state(self.stripes.stripes)
        if self.passes is not None:
            try:
                for state in carried_states(self.passes, self.stripes):
                    known += 1
                    yield state
            except Exception as error:
                kernels.reason_to_fall_back(error, "the deterministic pass")
        if known == 0:
            yield state
        device = self.model.softmax_bias.device
        for number in range(max(known - 1, 0), len(self.stripes) - 1):
            with torch.no_grad(), eval_mode(self.model):
                state = self.model.features(upload(self.stripes[number][0], device), state)[1]
            yield state
