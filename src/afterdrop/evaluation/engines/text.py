"""Windows of a text on the generic engine: carried states, mask lifetimes, features.

Every window starts from a state:

    carry="deterministic"  the state of a pass without dropout over all tokens before it. Windows
                           are then independent, and windows, samples and multipliers run together.
    carry="sampled"        each sample carries its own state from window to window: the model as it
                           was trained, and lamb's arithmetic evaluation. Windows run in order.

Masks live for a window (as in training); with lifetime="stream" those shared over time live for the
whole text. Alpha 0 is also computed with output dropout integrated out (`integrated_mean`).

Legend: M multipliers, S samples of a chunk, N targets, V token types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from afterdrop.errors import DataError
from afterdrop.evaluation.engines.generic import Operations
from afterdrop.evaluation.engines.integrated_mean import IntegratedMean, integrates
from afterdrop.evaluation.engines.model_passes import ModelPasses
from afterdrop.evaluation.likelihoods import Accumulator
from afterdrop.evaluation.request import Protocol, Request, StreamSettings
from afterdrop.evaluation.scores.schema import Results
from afterdrop.masks.model_call import take_rows
from afterdrop.masks.rows import Rows
from afterdrop.masks.sites import Sites
from afterdrop.models import LanguageModel

_LARGEST = 1e6  # no state of an LSTM comes near it: h is at most 1 before dropout rescales it
_NO_STATES = "remove the folder of finished parts and evaluate again"


def supports(request: Request, model: nn.Module, device: torch.device) -> str | None:
    """Why this engine cannot evaluate a request; None if it can."""
    if request.stream is None:
        return "the request has no stream settings"
    if not isinstance(model, LanguageModel):
        return f"{type(model).__name__} is not a LanguageModel"
    return None


class TextPasses:
    """Forward passes of a language model over windows.

    Args:
        model: The language model.
        protocol: The evaluation.
        sites: The model's dropout sites.
        operations: Plain ones, or kernels.
    """

    def __init__(
        self, model: nn.Module, protocol: Protocol, sites: Sites, operations: Operations
    ) -> None:
        assert isinstance(model, LanguageModel) and protocol.request.stream is not None
        self.model, self.protocol, self.operations = model, protocol, operations
        self.windows = WindowPasses(model, sites, protocol.request.stream, operations)
        self.control = self.windows.control

    def deterministic(self, run: Callable[[], Any], inputs: Any, size: int) -> Any:
        """What `run` returns."""
        return run()

    def run_all_modules(self) -> None:
        """Passes over windows always do."""

    def run(self, inputs: Any, size: int, rows: Rows, examples: range) -> Any:
        """Logits of some windows; notes the features before output dropout."""
        hook = self.model.output_dropout.register_forward_pre_hook(self._capture)
        try:
            return self.windows.run(inputs, size, rows, examples)
        finally:
            hook.remove()

    def _capture(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._captured = args[0]

    def features(self) -> Tensor:
        """The features [time, rows, H] of the last pass, before output dropout."""
        return self._captured

    def accumulators(self, targets: Tensor, counts: Tensor) -> Sequence[Accumulator]:
        """The geometric mean with output dropout integrated out, where that is possible."""
        if not integrates(self.protocol, self.model):
            return ()
        means = IntegratedMean(
            self.model, self.protocol, targets, counts, self.features, self.operations.partitions
        )
        return (means,)

    def end_batch(self) -> None:
        """Moves the samples' states on."""
        self.windows.end_batch()

    def carried(self) -> Results:
        """The samples' states, for resuming."""
        return self.windows.carried()

    def restore(self, carried: Results) -> None:
        """Takes up the samples' states."""
        self.windows.restore(carried)


class WindowPasses:
    """Forward passes over windows, with the states that samples carry between them.

    Args:
        model: The language model.
        sites: Its dropout sites.
        stream: Stripes, carry and lifetime.
        operations: Plain ones, or kernels.
    """

    def __init__(
        self, model: LanguageModel, sites: Sites, stream: StreamSettings, operations: Operations
    ) -> None:
        if stream.lifetime == "stream":
            sites = with_streams(model, sites)
        self.model, self.stream = model, stream
        self._passes = ModelPasses(model, sites.without_prefix(), 0, operations.draw)
        self.control = self._passes.control
        self._states: dict[str, Any] = {}  # after the last finished window
        self._after: dict[str, Any] = {}  # of the window that is running

    def run(self, inputs: Any, size: int, rows: Rows, examples: range) -> Any:
        """Logits and states of some windows, each from the state that it starts with."""
        rows = dataclasses.replace(rows, streams=rows.examples % self.stream.stripes)
        if self.stream.carry == "deterministic":
            return self._passes.run(inputs, size, rows, examples)
        copies = len(rows.multipliers) * len(rows.samples)
        key = f"{examples.start}-{rows.multipliers.values}-{rows.samples}"
        if key not in self._states and int(rows.examples[0]) >= self.stream.stripes:
            raise DataError(
                "the chunks of a sampled carry changed during the evaluation (memory ran out); "
                "evaluate again with less memory= or fewer stripes"
            )
        tokens, start = take_rows(inputs, 0, size, examples.start, examples.stop, copies)
        state = self._states.get(key, start)
        if len(state[0][0]) != len(tokens):
            raise DataError(f"the states carried have {len(state[0][0])} rows; {_NO_STATES}")
        output = self.control.forward(rows, tokens, state)
        self._after[key] = output[1]
        return output

    def end_batch(self) -> None:
        """Moves the samples' states on, now that all results of the window are there."""
        self._states, self._after = self._after, {}

    def carried(self) -> Results:
        """The samples' states, for resuming."""
        return {
            f"{key}/{layer}/{part}": tensor
            for key, state in self._states.items()
            for layer, pair in enumerate(state)
            for part, tensor in enumerate(pair)
        }

    def restore(self, carried: Results) -> None:
        """Takes up the samples' states.

        Raises:
            DataError: If they are not states of this model.
        """
        place, sizes = self.model.softmax_bias, self.model.config.hidden_sizes
        names = [f"{layer}/{part}" for layer in range(len(sizes)) for part in (0, 1)]
        for key in dict.fromkeys(name.rsplit("/", 2)[0] for name in carried):
            parts = [carried.get(f"{key}/{name}", torch.empty(0)) for name in names]
            rows = len(parts[0])
            for part, size in zip(parts, (size for size in sizes for _ in (0, 1))):
                bounded = part.is_floating_point() and bool((part.abs() <= _LARGEST).all())
                if part.shape != (rows, size) or not bounded:
                    raise DataError(f"the states carried are not of this model; {_NO_STATES}")
            pairs = zip(parts[::2], parts[1::2])
            self._states[key] = tuple((h.to(place), c.to(place)) for h, c in pairs)


def with_streams(model: nn.Module, sites: Sites) -> Sites:
    """Sites whose masks shared over time live for the whole stream."""
    layouts = {
        place: dataclasses.replace(
            layout, stream=bool(getattr(model.get_submodule(place.module), "shared", False))
        )
        for place, layout in sites.layouts.items()
    }
    return dataclasses.replace(sites, layouts=layouts)
