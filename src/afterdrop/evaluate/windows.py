"""A text as batches of windows, each with the state that a pass without dropout carries into it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from afterdrop import kernels
from afterdrop.data.stream import EvalStripes
from afterdrop.masks.mode import eval_mode
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
        batches = self._batches()
        return batches if self.passes is None else ahead(batches, self.model.softmax_bias.device)

    def _batches(self) -> Iterator[tuple[Any, Tensor]]:
        state: Any = self.model.initial_state(self.stripes.stripes)
        if self.passes is not None:
            self.passes.reset()
        held: list[tuple[Tensor, Any, Tensor]] = []
        for number, (tokens, targets) in enumerate(self.stripes):
            held.append((tokens, state, targets))
            state = self._after(tokens, state)
            if len(held) == self.together or number + 1 == len(self.stripes):
                joined = tuple(
                    tuple(torch.cat(parts) for parts in zip(*layer))
                    for layer in zip(*(before for _, before, _ in held))
                )
                inputs = torch.cat([tokens for tokens, _, _ in held])
                yield (inputs, joined), torch.cat([targets for _, _, targets in held])
                held = []

    def _after(self, tokens: Tensor, state: Any) -> Any:
        if self.passes is not None:
            try:
                self.passes.run(tokens)
                return self.passes.state
            except Exception as error:
                kernels.reason_to_fall_back(error, "the deterministic pass")
                self.passes = None
        device = self.model.softmax_bias.device
        with torch.no_grad(), eval_mode(self.model):
            return self.model.features(upload(tokens, device), state)[1]


def ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Makes each batch on a stream of its own while those before are evaluated.

    Whoever takes a batch must hold it until its results are there: that stream writes the next
    states to memory that is given back.
    """
    if device.type != "cuda":
        yield from batches
        return
    stream = torch.cuda.Stream(device, priority=-1)  # small kernels, which large ones would hold up
    stream.wait_stream(torch.cuda.current_stream(device))

    def start() -> tuple[Any, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            return next(batches, None), stream.record_event()

    following = [start()]  # alone: nothing is evaluated yet that the second could run beside
    while following[0][0] is not None:
        batch, made = following.pop(0)
        torch.cuda.current_stream(device).wait_event(made)
        yield batch
        while len(following) < 2:
            following.append(start())
