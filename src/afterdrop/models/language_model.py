"""The paper's language model: embedding, LSTM stack, output dropout, projection, softmax.

    y = D_out(stack(D_emb(table)[tokens]))         logits = y tableᵀ + b
    with E ≠ H:  y = D_proj(D_out(stack(·)) P)     P of H×E without bias or nonlinearity

With several softmax components the output is a mixture of softmaxes (`softmax_mixture`), whose
log-probabilities are returned in the place of logits.

The temperature is not part of the model: it divides log-probabilities afterwards (`family`). One
that acts on the components of a mixture is set for a while (`SoftmaxMixture.tempered`).

Legend: B rows, time steps, V token types, E embedding units, H hidden units.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afterdrop.models.checks import ModelError
from afterdrop.models.initial import embedding_normal_
from afterdrop.models.mask import Drop, DropoutSite, MaskConfig
from afterdrop.models.mixture_targets import target_log_probs
from afterdrop.models.model_config import LanguageModelConfig
from afterdrop.models.softmax_mixture import SoftmaxMixture
from afterdrop.models.stack import LSTMStack, StackState


class RowMask(DropoutSite):
    """Draws the mask [V, 1] of the rows of an embedding table, one per window.

    Example:
        >>> RowMask(MaskConfig(0.5, "sequence"))(torch.ones(7, 3)).shape
        torch.Size([7, 1])
    """

    def forward(self, table_VE: Tensor) -> Tensor | None:
        """The mask, or None if nothing is dropped."""
        return self.draw((len(table_VE), 1), table_VE)


class Activations(NamedTuple):
    """What a pass computes on its way to the logits.

    Attributes:
        top_tBH: The output of the stack.
        dropped_tBH: The same after output dropout, before the projection.
        features: The input of the softmax [B, time, E].
        state: The state after the window.
        rows_V1: The mask of the softmax table's rows; None if they are not dropped.
    """

    top_tBH: Tensor
    dropped_tBH: Tensor
    features: Tensor
    state: StackState
    rows_V1: Tensor | None


class LanguageModel(nn.Module):
    """A recurrent language model, tokens [B, time] to logits [B, time, V].

    Args:
        config: The sizes, rates and sharings.
        generator: Generator of the initial weights; None is torch's global one.

    Example:
        >>> model = LanguageModel(LanguageModelConfig(vocabulary=9, hidden_sizes=(4, 4)))
        >>> tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
        >>> logits, state = model(tokens)
        >>> logits.shape
        torch.Size([2, 3, 9])
        >>> logits, state = model(tokens, state)  # the next window carries the state
    """

    def __init__(
        self, config: LanguageModelConfig, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.config = config
        whole = config.resolved()
        size, top = whole.embedding_size or whole.hidden_sizes[-1], whole.hidden_sizes[-1]
        self.embedding = nn.Parameter(torch.empty(config.vocabulary, size))
        self.embedding_dropout = RowMask(MaskConfig(config.embedding_dropout, "sequence"))
        self.stack = LSTMStack(
            size,
            config.hidden_sizes,
            input_gate=config.input_gate,
            stacking=config.stacking,
            layer_norm=config.layer_norm,
            forget_bias=config.forget_bias,
            mogrifier_rounds=config.mogrifier_rounds,
            mogrifier_rank=config.mogrifier_rank,
            input_dropout=config.mask("input"),
            inter_layer_dropout=config.mask("inter_layer"),
            state_dropout=config.mask("state"),
            update_dropout=config.mask("update"),
            generator=generator,
        )
        self.output_dropout = Drop(config.mask("output"))
        mixes, dropout = config.softmax_components > 1, config.mask("projection")
        projects = size != top and not mixes
        self.projection = nn.Parameter(torch.empty(size, top)) if projects else None
        self.projection_dropout = Drop(dropout) if projects else None
        self.softmax = None if config.tied else nn.Parameter(torch.empty_like(self.embedding))
        self.softmax_bias = nn.Parameter(torch.zeros(config.vocabulary))
        self._reset_own_parameters(generator)
        self.mixture = (
            SoftmaxMixture(config.softmax_components, top, size, dropout, generator)
            if mixes
            else None
        )

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws new initial weights (see `initial`)."""
        for layer in self.stack.layers:
            layer.reset_parameters(generator)  # type: ignore[operator]
        self._reset_own_parameters(generator)
        if self.mixture is not None:
            self.mixture.reset_parameters(generator)

    @torch.no_grad()
    def _reset_own_parameters(self, generator: torch.Generator | None) -> None:
        embedding_normal_(self.embedding, generator)
        if self.softmax is not None:
            embedding_normal_(self.softmax, generator)
        if self.projection is not None:
            nn.init.orthogonal_(self.projection, generator=generator)
        self.softmax_bias.zero_()

    def initial_state(self, batch: int) -> StackState:
        """Zeros: (h, c) of each layer, each [B, H].

        Example:
            >>> model = LanguageModel(LanguageModelConfig(vocabulary=9, hidden_sizes=(4,)))
            >>> model.initial_state(2)[0][0].shape
            torch.Size([2, 4])
        """
        return self.stack.initial_state(batch)

    def forward(self, tokens: Tensor, state: StackState | None = None) -> tuple[Tensor, StackState]:
        """Logits [B, time, V] of each next token, and the state after the window.

        A mixture of softmaxes has no logits: these are its log-probabilities.
        """
        found = self.activations(tokens, state)
        return self.logits(found), found.state

    def features(
        self, tokens: Tensor, state: StackState | None = None
    ) -> tuple[Tensor, StackState]:
        """The input of the softmax [B, time, E], after dropout and projection, and the state.

        With a mixture it is [B, time, C·E + C]: latent vectors and the prior's logits.

        Example:
            >>> model = LanguageModel(LanguageModelConfig(vocabulary=9, hidden_sizes=(4,)))
            >>> features, state = model.features(torch.tensor([[1, 2, 3]]))
            >>> model.output(features).shape
            torch.Size([1, 3, 9])
        """
        found = self.activations(tokens, state)
        if found.rows_V1 is not None:
            raise ModelError(
                "embedding_rows is 'input_and_softmax' and embedding_dropout is "
                f"{self.config.embedding_dropout}; the softmax is then random as well, and "
                "features alone do not determine the logits. Call the model itself, or set "
                "embedding_rows='input'."
            )
        return found.features, found.state

    def output(self, features: Tensor) -> Tensor:
        """Logits [..., V] of features [..., E]; linear, so the mean features give the mean logits.

        With a mixture they are log-probabilities, and not linear in the features.

        Example:
            >>> model = LanguageModel(LanguageModelConfig(vocabulary=9, hidden_sizes=(4,)))
            >>> model.output(torch.zeros(2, 4)).shape
            torch.Size([2, 9])
        """
        return self._output(features, None)

    def target_log_probs(self, activations: Activations, targets: Tensor) -> Tensor:
        """Log-probabilities [B, time] of targets under a mixture.

        For training: the gradient does not need the mixture over the vocabulary
        (`mixture_targets`).

        Example:
            >>> model = LanguageModel(LanguageModelConfig(9, (4,), softmax_components=2))
            >>> tokens = torch.tensor([[1, 2, 3]])
            >>> model.target_log_probs(model.activations(tokens), tokens).shape
            torch.Size([1, 3])
        """
        if self.mixture is None:
            raise ModelError(
                "softmax_components is 1; only a mixture of softmaxes computes the targets' "
                "log-probabilities alone. Call the model itself and take the log-softmax."
            )
        latent, prior = self.mixture.split(activations.features.flatten(0, 1))
        table_VE, bias_V = self._table(activations.rows_V1), self.softmax_bias
        found = target_log_probs(latent, prior, table_VE, bias_V, targets.flatten())
        return found.view(targets.shape)

    def _table(self, rows_V1: Tensor | None) -> Tensor:
        return self.softmax_table if rows_V1 is None else self.softmax_table * rows_V1

    def _output(self, features: Tensor, rows_V1: Tensor | None) -> Tensor:
        table_VE = self._table(rows_V1)
        if self.mixture is not None:
            return self.mixture.log_probs(features, table_VE, self.softmax_bias)
        return F.linear(features, table_VE, self.softmax_bias)

    @property
    def softmax_table(self) -> Tensor:
        """The table [V, E] of the softmax: the embedding's, if they are tied."""
        return self.embedding if self.softmax is None else self.softmax

    def logits(self, activations: Activations) -> Tensor:
        """Logits [B, time, V] of a pass, with the dropped rows of its table.

        Of a mixture, log-probabilities.

        Example:
            >>> model = LanguageModel(LanguageModelConfig(vocabulary=9, hidden_sizes=(4,)))
            >>> model.logits(model.activations(torch.tensor([[1, 2, 3]]))).shape
            torch.Size([1, 3, 9])
        """
        return self._output(activations.features, activations.rows_V1)

    def activations(self, tokens: Tensor, state: StackState | None = None) -> Activations:
        """A pass without its logits.

        Example:
            >>> model = LanguageModel(LanguageModelConfig(vocabulary=9, hidden_sizes=(4,)))
            >>> model.activations(torch.tensor([[1, 2, 3]])).top_tBH.shape
            torch.Size([3, 1, 4])
        """
        if tokens.dim() != 2 or 0 in tokens.shape or tokens.dtype != torch.int64:
            raise ModelError(
                f"tokens is {tokens.dtype} of shape {tuple(tokens.shape)}; a model reads int64 "
                "[B, time] with at least one row and one step. Reshape, or convert with .long()."
            )
        tokens_tB = tokens.t()
        x_tBE = F.embedding(tokens_tB, self.embedding)
        rows_V1 = self.embedding_dropout(self.embedding)
        if rows_V1 is not None:
            # Equivalent to dropping rows of the table, without a second table.
            x_tBE = x_tBE * F.embedding(tokens_tB, rows_V1)
        top_tBH, state = self.stack(x_tBE, state)
        y_tBH = dropped_tBH = self.output_dropout(top_tBH)
        if self.mixture is not None:
            y_tBH = self.mixture(y_tBH)
        if self.projection is not None and self.projection_dropout is not None:
            y_tBH = self.projection_dropout(F.linear(y_tBH, self.projection))
        on_softmax = self.config.embedding_rows == "input_and_softmax"
        rows_V1 = rows_V1 if on_softmax else None
        return Activations(top_tBH, dropped_tBH, y_tBH.transpose(0, 1), state, rows_V1)
