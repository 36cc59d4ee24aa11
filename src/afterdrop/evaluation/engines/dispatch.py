"""The dispatcher: chooses an engine, falls back to the next, and shrinks chunks.

Engines are tried in order, fastest first. One whose kernels cannot be compiled or launched, or
that says of a batch that it cannot compute it, is given up, and the next one does that batch again.
When memory runs out, the same engine goes on with half the budget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from afterdrop import kernels
from afterdrop.evaluation.chunks import Memory, out_of_memory
from afterdrop.evaluation.engines import Engine, text
from afterdrop.evaluation.engines.generic import GenericEngine, Operations
from afterdrop.evaluation.engines.model_passes import ModelPasses
from afterdrop.evaluation.likelihoods import Likelihood
from afterdrop.evaluation.request import Protocol, Request
from afterdrop.evaluation.scores.schema import Results
from afterdrop.masks.sites import Sites
from afterdrop.models import LanguageModel


@dataclasses.dataclass(frozen=True)
class EngineMaker:
    """An engine that can be made.

    Attributes:
        make: Makes it.
        kernels: Whether it runs kernels.
    """

    make: Callable[[], Engine]
    kernels: bool


class Dispatcher:
    """Runs batches on the first of several engines that can.

    Args:
        candidates: The engines, fastest first; the last must be able to run everything.
        memory: The budget that they share.
        what: What they do, for the warning when kernels fail.
    """

    def __init__(self, candidates: Sequence[EngineMaker], memory: Memory, what: str) -> None:
        self._waiting, self.memory, self._what = list(candidates), memory, what
        self.engine = self._waiting.pop(0).make()

    @property
    def ahead(self) -> int:
        """How many later batches to begin before the results of one are taken."""
        return self.engine.ahead

    def begin(self, batch: Any, number: int = 0) -> Callable[[], Any]:
        """Begins a batch; returns what waits for its results."""

        def start(engine: Engine) -> Callable[[], Any]:
            return engine.begin(batch, number)

        engine, waiting = self._attempt(self.engine, start, start)
        return partial(self._finish, engine, waiting, batch, number)

    def carried(self) -> Results:
        """What the next batch needs of those before it, for resuming."""
        return self.engine.carried()

    def restore(self, carried: Results) -> None:
        """Takes up what `carried` gave."""
        self.engine.restore(carried)

    def _finish(self, engine: Engine, waiting: Callable[[], Any], batch: Any, number: int) -> Any:
        """The results of a batch that `engine` began, which may have been given up since."""

        def again(engine: Engine) -> Any:
            return engine.begin(batch, number)()

        engine, outcome = self._attempt(engine, lambda _: waiting(), again)
        while isinstance(outcome, str):  # why that engine cannot compute this batch
            if engine is self.engine:
                self._move_on(plain=False)
            engine, outcome = self._attempt(self.engine, again, again)
        return outcome

    def _attempt(
        self, engine: Engine, first: Callable[[Engine], Any], again: Callable[[Engine], Any]
    ) -> tuple[Engine, Any]:
        """What `first` gives; `again` on smaller chunks or the next engine where that fails.

        Returns:
            The engine that succeeded, and the result.
        """
        call = first
        while True:
            try:
                return engine, call(engine)
            except Exception as error:
                halved = out_of_memory(error) and self.memory.halve()
                if not halved:
                    self._fall_back(error, engine)
            if halved:  # only here are the tensors freed to which the error's frames refer
                self.engine.clear()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
            engine, call = self.engine, again

    def _fall_back(self, error: Exception, engine: Engine) -> None:
        """Goes on without kernels if they are what failed; raises every other error again."""
        if not engine.kernels:
            raise error
        kernels.reason_to_fall_back(error, self._what)
        if self.engine.kernels:
            self._move_on(plain=True)

    def _move_on(self, *, plain: bool) -> None:
        """Takes the next engine, or the next without kernels; results so far are as good."""
        while plain and self._waiting[0].kernels:
            self._waiting.pop(0)
        carried = self.engine.carried()
        self.engine.clear()
        self.engine = self._waiting.pop(0).make()
        self.engine.restore(carried)


def evaluation_engines(
    model: nn.Module,
    protocol: Protocol,
    likelihood: Likelihood,
    sites: Sites | None,
    memory: Memory,
) -> tuple[Dispatcher, str | None]:
    """The engines that can evaluate a request, and why kernels cannot, if not on a CPU.

    Args:
        model: The model.
        protocol: The evaluation.
        likelihood: Reads targets and outputs, and accumulates.
        sites: The model's dropout sites; None if no member samples.
        memory: The budget.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    request, candidates = protocol.request, []
    if sites is not None and request.stream is not None:
        sites = sites.without_prefix()  # states that samples carry enter before the first site
    reason = fused_text_reason(request, model, device)
    if reason is None:
        from afterdrop.evaluation.engines.text_fused import TextFusedEngine

        assert isinstance(model, LanguageModel)
        make = partial(TextFusedEngine, model, protocol, likelihood, memory)
        candidates.append(EngineMaker(make, kernels=True))

    def generic(operations: Operations) -> GenericEngine:
        passes: text.TextPasses | ModelPasses | None = None
        if sites is not None and request.stream is not None:
            passes = text.TextPasses(model, protocol, sites, operations)
        elif sites is not None:
            passes = ModelPasses(model, sites, request.batch_dim, operations.draw)
        return GenericEngine(model, protocol, likelihood, sites, passes, memory, operations)

    candidates += [
        EngineMaker(partial(generic, operations), operations.kernels)
        for operations in operations_for(request, model, device)
    ]
    dispatcher = Dispatcher(candidates, memory, "the evaluation of samples")
    if device.type != "cuda":
        return dispatcher, None if device.type == "cpu" else reason
    return dispatcher, reason if request.stream is not None else None


def fused_text_reason(request: Request, model: nn.Module, device: torch.device) -> str | None:
    """Why the kernels for texts cannot evaluate a request; None if they can."""
    if reason := kernels.why_not(device):
        return reason
    from afterdrop.evaluation.engines import text_fused

    return text_fused.supports(request, model, device)


def operations_for(request: Request, model: nn.Module, device: torch.device) -> list[Operations]:
    """The forms of masks and sums that can serve a request, fastest first."""
    if kernels.why_not(device) is not None:
        return [Operations()]
    from afterdrop.evaluation.engines import kernel_sums
    from afterdrop.kernels.mask_ops import fused_draw_mask

    masks = Operations(fused_draw_mask, kernels.partitions, None, kernels=True)
    plain = Operations(partitions=kernels.partitions)
    if kernel_sums.supports(request, model, device) is not None:
        return [masks, plain]
    return [dataclasses.replace(masks, sums=kernel_sums.KernelSums), masks, plain]
