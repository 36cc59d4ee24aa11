"""A text as batches of windows, each with the state that a pass without dropout carries into it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from afterdrop import kernels
from afterdrop.data.stripes import EvalStripes
from afterdrop.evaluation.carried_states import ROWS, carried_states
from afterdrop.evaluation.chunks import Memory
from afterdrop.evaluation.engines.dispatch import fused_text_reason
from afterdrop.evaluation.loop import Execution
from afterdrop.evaluation.request import Request, StreamSettings
from afterdrop.masks.model_guard import guarded
from afterdrop.models import LanguageModel
from afterdrop.transfer import upload

if TYPE_CHECKING:
    from afterdrop.models.fused import DeterministicPass

# A batch is what an interruption loses. On a CPU, where a batch may take minutes, a text has at
# least so many, fewer with many samples, for which each batch makes tables of masks anew. There are
# fewer, too, if passes would have so few rows that they were slower, or the first batch so few
# targets that they say little about temperatures.
_BATCHES, _BATCHES_OF_MANY, _MANY = 16, 4, 256
_ROWS, _TARGETS = 256, 128


def open_windows(
    model: LanguageModel, stripes: EvalStripes, request: Request, execution: Execution
) -> Windows:
    """The windows of a text, as many per batch as fit the memory, with their states.

    Args:
        model: The model.
        stripes: The text.
        request: The evaluation.
        execution: How it is carried out.
    """
    stream, device = request.stream, model.softmax_bias.device
    assert stream is not None
    budget = Memory.of(device, execution.memory).budget
    together = 1
    if stream.carry == "deterministic":  # else each window needs the one before it
        logits = 4 * stream.stripes * stream.window * model.config.vocabulary
        most = _most_windows(model, stream, budget, 4 * logits)
        together = max(1, min(execution.windows, most))
        if device.type == "cpu":
            together = min(together, _windows_of_share(stripes, request))
    if fused_text_reason(request, model, device) is not None:
        return Windows(model, stripes, together)
    from afterdrop.evaluation.engines.text_fused import DTYPE
    from afterdrop.models.fused import Copies, DeterministicPass

    copies = Copies(model, DTYPE)
    copies.pack()
    most = _most_windows(model, stream, budget)
    pieces = max(1, min(ROWS // stream.stripes, len(stripes), most))
    passes = DeterministicPass(copies, pieces * stream.stripes, stream.window)
    return Windows(model, stripes, together, passes)


def _windows_of_share(stripes: EvalStripes, request: Request) -> int:
    """Windows of each stripe in one of several batches that a text is divided into."""
    count = request.plan.num_samples
    rows = stripes.stripes * count * max(1, len(request.grid.stochastic))
    batches = _BATCHES if count <= _MANY else _BATCHES_OF_MANY
    targets = stripes.stripes * stripes.window
    return math.ceil(max(len(stripes) / batches, _ROWS / rows, _TARGETS / targets))


def _most_windows(model: LanguageModel, stream: StreamSettings, budget: int, more: int = 0) -> int:
    """Windows of all stripes whose states, and `more` bytes of each, fit the memory."""
    config = model.config.resolved()
    width = max(*config.hidden_sizes, config.embedding_size or 0) + 64  # padded
    units = len(config.hidden_sizes) * (stream.window + 1) * stream.stripes * width
    # The kernels count in 32 bits.
    return min(budget // (more + 10 * units), (2**31 - 1) // units)


class Windows:
    """Windows of a text as batches ((tokens, state), targets), states without dropout.

    Args:
        model: The model.
        stripes: The text.
        together: Windows of each stripe per batch.
        passes: The kernels' pass, or None to run the model itself.
    """

    def __init__(
        self,
        model: LanguageModel,
        stripes: EvalStripes,
        together: int,
        passes: DeterministicPass | None = None,
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
            with torch.no_grad(), guarded(self.model):
                state = self.model.features(upload(self.stripes[number][0], device), state)[1]
            yield state
