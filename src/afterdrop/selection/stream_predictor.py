"""A member of a language model as a predictor that carries its state through a stream.

Legend: B streams, K samples, V token types.
"""

from typing import Any

import torch
from torch import Tensor

from afterdrop.errors import DataError
from afterdrop.evaluation.accumulators import log_softmax
from afterdrop.evaluation.engines.text import StreamSettings, with_streams
from afterdrop.evaluation.passes import Chunks, memory_budget, plan_chunks, sample_ranges
from afterdrop.family.member import Member
from afterdrop.family.power_mean import PowerSums
from afterdrop.masks.eval_mode import eval_mode
from afterdrop.masks.nested_inputs import take_rows
from afterdrop.masks.rows import Rows
from afterdrop.masks.sites import Sites, find_sites
from afterdrop.masks.uniforms import Plan, Scheme
from afterdrop.models import LanguageModel


class StreamPredictor:
    """Predicts a text window by window with one member, carrying the state.

    Each call is a window: it returns the log-probabilities of every next token and moves the
    state on. With carry="deterministic" one state is carried, without dropout; with "sampled" each
    of the K samples carries its own. Masks are drawn per call, or with lifetime="stream" those
    shared over time stay for the whole stream.

    Args:
        model: The language model.
        member: How to predict.
        num_samples: Mask samples, even.
        seed: Of the masks.
        stream: Carry and lifetime; its window and stripes do not matter here.
        masks: How they are drawn, as in the evaluation.

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
    ) -> None:
        self.model, self.member = model, member
        self.plan = Plan(num_samples, seed, masks)
        self.stream = stream or StreamSettings()
        self.reset()
        self._sites: Sites | None = None

    def reset(self) -> None:
        """Forgets the state: the next token starts a new stream."""
        self.position = 0
        self._window = 0
        self._state: Any = None
        self._states: dict[range, Any] = {}
        self._chunks: Chunks | None = None  # planned once: carried states are those of its samples

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
        with eval_mode(self.model):
            logits, state = self.model(tokens, self._state)
            if self.member.deterministic:
                result = log_softmax(logits.float() / self.member.temperature, "the text")
            else:
                result = self._sampled(tokens)
        self._state = state
        self._window += 1
        self.position += tokens.shape[1]
        return result

    def _sampled(self, tokens: Tensor) -> Tensor:
        member, size = self.member, len(tokens)
        if self._sites is None:
            sites = find_sites(self.model, tokens, self._state)
            kept = self.stream.lifetime == "stream"
            self._sites = with_streams(self.model, sites) if kept else sites
        if self._chunks is None:
            budget, cache = memory_budget(None, tokens.device)
            self._chunks = plan_chunks(self._sites, self.plan, size, 1, 1, budget, cache)
        control = self._sites.control(self.model)
        sums = PowerSums((member.alpha,))
        streams = torch.arange(size, device=tokens.device)
        with control.prepared(member.multiplier):
            for samples in (s for b in sample_ranges(self.plan, self._chunks.samples) for s in b):
                numbers = streams + self._window * size
                rows = Rows(self.plan, (member.multiplier,), samples, numbers, streams)
                part = take_rows((tokens, self._state), 0, size, 0, size, len(samples))
                start = self._states.get(samples, part[1])
                logits, after = control.forward(rows, part[0], start)
                if self.stream.carry == "sampled":
                    self._states[samples] = after
                if member.temper == "sample":
                    logits = logits / member.temperature
                lp = log_softmax(logits.float(), "the text")
                sums.add(lp.unflatten(0, (len(samples), size)))
        log_means = sums.log_mean(member.alpha)
        if member.temper == "mean":
            log_means = log_means / member.temperature
        return log_means.log_softmax(-1)

    def sample(self, first: int, length: int, seed: int = 0) -> list[int]:
        """Draws a text token by token, starting after the token `first`.

        Args:
            first: The token before the text (end of sentence).
            length: Number of tokens.
            seed: Of the drawing.

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
