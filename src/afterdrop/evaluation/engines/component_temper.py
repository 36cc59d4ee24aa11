"""Temperatures that act on the components of a mixture of softmaxes, before they are mixed.

    log p(c) = log Σ_k π_k softmax_c(l_k / T)        the prior weights π stay as they are

This is where lamb applies its temperature. The results for every temperature come from the features
of one pass: the latent vectors of all components and the logits of the prior.

Legend: M multipliers, S samples of a chunk, J nodes of temperature, N targets, V token types,
F = K·E + K features.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from afterdrop.errors import MemberError
from afterdrop.evaluation.likelihoods.tempered_sums import SampleTemper
from afterdrop.evaluation.request import Protocol
from afterdrop.evaluation.scores.schema import Results
from afterdrop.family.member import Temper
from afterdrop.models import LanguageModel
from afterdrop.transfer import with_float64


def require_components(model: nn.Module, temper: Temper) -> None:
    """Refuses a temperature on components where there are none to read.

    Raises:
        MemberError: With the remedy.
    """
    if temper != "component":
        return
    config = model.config if isinstance(model, LanguageModel) else None
    if config is None or config.softmax_components == 1:
        raise MemberError(
            "temper='component' needs a language model with softmax_components above 1; with a "
            "single softmax use temper='sample', which is the same model there"
        )
    if config.embedding_rows == "input_and_softmax" and config.embedding_dropout:
        raise MemberError(
            "temper='component' needs a softmax table without dropout, and embedding_rows is "
            "'input_and_softmax'; use temper='sample' or 'mean'"
        )


class ComponentTemper:
    """Keeps the features of a model's last pass, for log-probabilities at any temperature.

    Args:
        model: A language model that mixes softmaxes.
        protocol: The evaluation.
    """

    def __init__(self, model: nn.Module, protocol: Protocol) -> None:
        assert isinstance(model, LanguageModel) and model.mixture is not None
        self.model, self.mixture, self.protocol = model, model.mixture, protocol
        self._features = torch.empty(0)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keeps the features of the pass inside."""

        def keep(module: nn.Module, args: object, features: Tensor) -> None:
            self._features = features

        hook = self.mixture.register_forward_hook(keep)
        try:
            yield
        finally:
            hook.remove()

    def sums(self, targets: Tensor, counts: Tensor) -> SampleTemper:
        """The accumulator of samples whose components are tempered.

        Args:
            targets: [N] those that count.
            counts: Which of all targets do.
        """
        protocol = self.protocol

        def temper(lp: Tensor, inverse: float) -> Tensor:
            S, M = lp.shape[:2]
            return self._log_probs(counts, M * S, 1 / inverse).unflatten(0, (M, S)).transpose(0, 1)

        alphas, blocks = protocol.grid.tempered_alphas, protocol.plan.blocks
        return SampleTemper(alphas, targets, protocol.sample_nodes, blocks, temper)

    def deterministic(self, targets: Tensor, counts: Tensor) -> Results:
        """Results [J, N] of a pass without dropout."""
        nodes = self.protocol.sample_nodes

        def temper(lp: Tensor, inverse: float) -> Tensor:
            return self._log_probs(counts, 1, 1 / inverse).unsqueeze(0)

        one = SampleTemper((0.0,), targets, nodes, 1, temper)
        one.add(targets.new_zeros(1, 1, 1))
        one.end_block()
        found = one.results()
        return {name: found[name][0, 0] for name in ("xe", "peak", "square", "entropy", "class")}

    def _log_probs(self, counts: Tensor, copies: int, temperature: float) -> Tensor:
        """Log-probabilities [copies, N, V] of the targets that count."""
        features = self._features.transpose(0, 1)  # [rows, time, F], rows = copies · examples
        features = features.unflatten(0, (copies, -1)).flatten(1, 2)
        if not bool(counts.all()):
            features = features[:, counts.to(features.device)]
        with self.mixture.tempered(temperature):
            return with_float64(self.model.output(features))
