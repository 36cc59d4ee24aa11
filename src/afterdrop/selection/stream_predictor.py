"""A member of a language model as a predictor that carries its state through a stream.

Legend: B streams, K samples, V token types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from afterdrop.errors import DataError
from afterdrop.evaluation.chunks import Memory, plan_chunks
from afterdrop.evaluation.engines.component_temper import require_components
from afterdrop.evaluation.engines.dispatch import Dispatcher, EngineMaker, operations_for
from afterdrop.evaluation.engines.generic import Operations
from afterdrop.evaluation.engines.model_passes import run_samples
from afterdrop.evaluation.engines.text import WindowPasses
from afterdrop.evaluation.likelihoods.build_likelihood import build_likelihood
from afterdrop.evaluation.request import Request, StreamSettings
from afterdrop.evaluation.scores.schema import Results
from afterdrop.family.member import Grid, Member
from afterdrop.masks.model_call import output_tensor
from afterdrop.masks.model_guard import guarded
from afterdrop.masks.rows import Rows
from afterdrop.masks.sites import Sites, find_sites
from afterdrop.masks.uniforms import Plan, Scheme
from afterdrop.models import LanguageModel
from afterdrop.selection.member_mean import MemberMean


class StreamPredictor:
    """Predicts a text window by window with one member, carrying the state.

    Each call is a window: it returns the log-probabilities of every next token and moves the
    state on. With carry="deterministic" one state is carried, without dropout; with "sampled" each
    of the K samples carries its own. Masks are drawn per call; with lifetime="stream" those shared
    over time stay for the whole stream.

    `Choice.predictor` makes one from a choice, as it was evaluated.

    Args:
        model: The language model.
        member: How to predict.
        num_samples: Mask samples, even.
        seed: Seed of the masks.
        stream: Carry and lifetime; its window and stripes do not matter here.
        masks: How they are drawn, as in the evaluation.
        memory: Bytes for accumulators and activations.

    Example:
        >>> from afterdrop.models import LanguageModelConfig
        >>> config = LanguageModelConfig(vocabulary=9, hidden_sizes=(8,), output_dropout=0.5)
        >>> predict = StreamPredictor(LanguageModel(config), Member(1, 0.8), num_samples=4)
        >>> predict(torch.tensor([[0, 3, 4]])).shape
        torch.Size([1, 3, 9])
        >>> predict.position
        3
    """

    def __init__(
        self,
        model: LanguageModel,
        member: Member,
        num_samples: int = 100,
        seed: int = 0,
        stream: StreamSettings | None = None,
        masks: Scheme = "lhs",
        memory: int | None = None,
    ) -> None:
        require_components(model, member.temper)
        self.model, self.member, self.memory = model, member, memory
        self.request = Request(
            Grid((member.alpha,), (member.multiplier,), member.temper),
            Plan(num_samples, seed, masks),
            stream=stream or StreamSettings(),
        )
        self.reset()

    def __repr__(self) -> str:
        plan, stream = self.request.plan, self.request.stream
        assert stream is not None
        return (
            f"StreamPredictor({self.member}, K = {plan.num_samples}, seed = {plan.seed}, "
            f"carry = {stream.carry!r}, lifetime = {stream.lifetime!r})"
        )

    def reset(self) -> None:
        """Forgets the state: the next token starts a new stream."""
        self.position = 0
        self._window = 0
        self._state: Any = None
        self._engines: Dispatcher | None = None  # which hold the samples' states

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Log-probabilities [B, time, V] of the token after each of `tokens` [B, time]."""
        if self._state is None:
            self._state = self.model.initial_state(len(tokens))
        if len(tokens) != len(self._state[0][0]):
            raise DataError(
                f"tokens has {len(tokens)} streams, the carried state {len(self._state[0][0])}; "
                "call reset() before another number of streams"
            )
        tokens = tokens.to(self.model.softmax_bias.device)
        with guarded(self.model), self._tempered_components():
            logits, state = self.model(tokens, self._state)
            if self.member.deterministic:
                likelihood = build_likelihood(self.request)
                divides = self.member.temper != "component"
                logits = logits.float() / (self.member.temperature if divides else 1.0)
                result = likelihood.predict(logits, "the text")
            else:
                result = self._sampled(tokens)
        self._state = state
        self._window += 1
        self.position += tokens.shape[1]
        return result

    def _tempered_components(self) -> AbstractContextManager[None]:
        """Passes at the member's temperature, if that acts on the components of a mixture."""
        if self.member.temper != "component" or self.model.mixture is None:
            return nullcontext()
        return self.model.mixture.tempered(self.member.temperature)

    def _sampled(self, tokens: Tensor) -> Tensor:
        if self._engines is None:
            sites = find_sites(self.model, tokens, self._state, compute_once=False)
            memory = Memory.of(tokens.device, self.memory)
            make = partial(
                _StreamEngine, self.model, self.member, self.request, len(tokens), sites, memory
            )
            candidates = [
                EngineMaker(partial(make, operations), operations.kernels)
                for operations in operations_for(self.request, self.model, tokens.device)
                if operations.sums is None  # those keep the targets only, not all classes
            ]
            self._engines = Dispatcher(candidates, memory, "the prediction")
        return self._engines.begin((tokens, self._state), self._window)()

    def sample(self, first: int, length: int, seed: int = 0) -> list[int]:
        """Draws a text token by token, starting after the token `first`.

        Args:
            first: The token before the text (end of sentence).
            length: Number of tokens.
            seed: Seed of the drawing.

        Example:
            >>> from afterdrop.models import LanguageModelConfig
            >>> model = LanguageModel(LanguageModelConfig(vocabulary=9, hidden_sizes=(8,)))
            >>> len(StreamPredictor(model, Member(0, 0)).sample(0, 5))
            5
        """
        generator = torch.Generator().manual_seed(seed)
        drawn: list[int] = []
        token = first
        for _ in range(length):
            log_probs = self(torch.tensor([[token]]))[0, -1]
            probabilities = log_probs.double().exp().cpu()
            token = int(torch.multinomial(probabilities, 1, generator=generator))
            drawn.append(token)
        return drawn


class _StreamEngine:
    """Log-probabilities of one window after another, under masks.

    Args:
        model: The language model.
        member: How to predict.
        request: Samples, carry and lifetime.
        size: B.
        sites: The model's dropout sites.
        memory: The budget.
        operations: Plain ones, or kernels.
    """

    ahead = 0

    def __init__(
        self,
        model: LanguageModel,
        member: Member,
        request: Request,
        size: int,
        sites: Sites,
        memory: Memory,
        operations: Operations,
    ) -> None:
        assert request.stream is not None
        self.member, self.plan, self.size, self.memory = member, request.plan, size, memory
        self.sites, self.kernels = sites, operations.kernels
        stream = dataclasses.replace(request.stream, stripes=size)
        self.passes = WindowPasses(model, sites, stream, operations)
        self._at_once: int | None = None  # planned once: carried states are those of its samples

    def begin(self, batch: Any, number: int) -> Callable[[], Tensor]:
        """Returns what computes the log-probabilities of a window (tokens, state)."""
        return partial(self._run, batch, number)

    def clear(self) -> None:
        """Plans smaller chunks the next time."""
        self._at_once = None

    def carried(self) -> Results:
        """The samples' states."""
        return self.passes.carried()

    def restore(self, carried: Results) -> None:
        """Takes up the samples' states."""
        self.passes.restore(carried)

    def _run(self, inputs: Any, window: int) -> Tensor:
        size, multipliers = self.size, (self.member.multiplier,)
        if self._at_once is None:
            self._at_once = plan_chunks(self.sites, self.plan, size, 1, 1, self.memory).samples
        numbers = torch.arange(size, device=inputs[0].device) + window * size
        mean = MemberMean(self.member)

        def add(samples: range) -> None:
            rows = Rows(self.plan, multipliers, samples, numbers)
            output = self.passes.run(inputs, size, rows, range(size))
            logits = output_tensor(output)
            mean.add(logits.unflatten(0, (len(samples), size)), "the text")

        run_samples(self.passes.control, self.plan, multipliers, self._at_once, add, lambda: None)
        self.passes.end_batch()
        return mean.result()
