"""A language model in the form that the kernels read: padded 16-bit copies of its weights.

Legend: L layers, B rows, R = time · B places (time first), H hidden units, E embedding units,
V classes; a plus marks a padded size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from afterdrop.kernels.cuda_graph import Replay
from afterdrop.kernels.lstm_stack import Stack, StackShape, StackWeights, fine, padded, product
from afterdrop.models.kernel_support import Table, why_unsupported
from afterdrop.models.language_model import LanguageModel
from afterdrop.models.layer import LSTMLayer
from afterdrop.models.mixture_copies import MixtureCopies
from afterdrop.models.model_config import LanguageModelConfig
from afterdrop.transfer import upload

_ALIGN = 8  # classes are padded to a multiple of it, which aligns products with the table
_SHARINGS = ("step", "sequence")
MOST_RANK = 255  # of Mogrifier rounds: a program holds whole rows of a factor
# The values of every field of `LanguageModelConfig` that the kernels support.
SUPPORTED: Table = {
    "vocabulary": "any",
    "hidden_sizes": lambda config: (
        None if len(set(config.hidden_sizes)) == 1 else f"hidden_sizes is {config.hidden_sizes}"
    ),
    "embedding_size": "any",
    "tied": "any",
    "input_gate": ("capped", "plain"),
    # A stack of one layer has nothing to stack.
    "stacking": lambda config: (
        None
        if config.stacking in ("skip", "plain") or len(config.hidden_sizes) == 1
        else f"stacking is {config.stacking!r}"
    ),
    "layer_norm": (False,),
    "forget_bias": "any",
    "mogrifier_rounds": "any",
    "mogrifier_rank": lambda config: (
        None
        if config.mogrifier_rounds == 0 or 0 < config.mogrifier_rank <= MOST_RANK
        else f"mogrifier_rank is {config.mogrifier_rank}"
    ),
    "input_dropout": "any",
    "inter_layer_dropout": "any",
    "state_dropout": "any",
    "update_dropout": (0.0,),
    "output_dropout": "any",
    "projection_dropout": "any",
    "embedding_dropout": "any",
    # Without embedding dropout it has no effect.
    "embedding_rows": lambda config: (
        None
        if config.embedding_rows == "input" or config.embedding_dropout == 0
        else f"embedding_rows is {config.embedding_rows!r}"
    ),
    "softmax_components": "any",
    "input_sharing": _SHARINGS,
    "inter_layer_sharing": (None, *_SHARINGS),
    "state_sharing": _SHARINGS,
    "update_sharing": "any",  # without update dropout it has no effect
    "output_sharing": _SHARINGS,
    "projection_sharing": (None, *_SHARINGS),
}


def why_not_fused(config: LanguageModelConfig) -> str | None:
    """Why the kernels cannot run a language model; None if they can.

    Example:
        >>> why_not_fused(LanguageModelConfig(9, (4, 4), layer_norm=True))
        'layer_norm is True'
    """
    return why_unsupported(config, SUPPORTED)


def lstm_layers(model: LanguageModel) -> list[LSTMLayer]:
    """The LSTM layers of a model."""
    return [layer for layer in model.stack.layers if isinstance(layer, LSTMLayer)]


class Copies:
    """Padded copies of the weights of a model, in the dtype of the products.

    Args:
        model: The model.
        dtype: Dtype of the stack: float16 or bfloat16, or float32 if nothing may be rounded. With
            bfloat16 the tables are float16, so that the logits can be float16, too.
    """

    def __init__(self, model: LanguageModel, dtype: torch.dtype) -> None:
        config = model.config.resolved()
        device = model.softmax_bias.device
        self.model, self.config, self.dtype = model, config, dtype
        V, (H, E) = config.vocabulary, (config.hidden_sizes[0], config.embedding_size)
        assert E is not None
        classes = -(-V // _ALIGN) * _ALIGN
        self.stack = StackWeights(self.shape(1, 1), dtype, device)
        half = fine(dtype)
        self.embedding = torch.zeros(classes, padded(E), dtype=half, device=device)
        untied = model.softmax is not None
        self.softmax = torch.zeros_like(self.embedding) if untied else self.embedding
        projected = model.projection is not None
        self.projection = (
            torch.zeros(padded(E), padded(H), dtype=half, device=device) if projected else None
        )
        self.mixture = None if model.mixture is None else MixtureCopies(model.mixture, half)

    def shape(self, rows: int, time: int) -> StackShape:
        """The shape of the stack for windows of a given size."""
        config = self.config
        assert config.embedding_size is not None
        return StackShape(
            config.embedding_size,
            config.hidden_sizes[0],
            len(config.hidden_sizes),
            rows,
            time,
            capped=config.input_gate == "capped",
            skip=config.stacking == "skip",
            rounds=config.mogrifier_rounds,
            rank=config.mogrifier_rank,
        )

    @torch.no_grad()
    def pack(self) -> None:
        """Copies the current weights of the model."""
        model, layers = self.model, lstm_layers(self.model)
        rounds = [layer.mogrifier.rounds for layer in layers]
        self.stack.pack([(y.weight_x, y.weight_h, y.bias) for y in layers], rounds)
        _copy(self.embedding, model.embedding)
        if model.softmax is not None:
            _copy(self.softmax, model.softmax)
        if self.projection is not None and model.projection is not None:
            _copy(self.projection, model.projection)
        if self.mixture is not None:
            self.mixture.pack()

    def output(self, y_RH: Tensor) -> Tensor:
        """Logits [R, V] for outputs [R, H₊] of the stack, without dropout, in float32.

        Of a mixture, log-probabilities.
        """
        bias = self.model.softmax_bias.detach()
        if self.mixture is not None:
            return self.mixture.log_probs(y_RH, self.softmax, bias)
        return self.logits(self.features(y_RH))[:, : len(bias)].add_(bias)

    def features(self, y_RH: Tensor) -> Tensor:
        """The input of the softmax [R, E₊] for outputs [R, H₊] of the stack, without dropout."""
        y_RH = y_RH.to(self.softmax.dtype)
        return (
            y_RH if self.projection is None else product(y_RH, self.projection.t()).to(y_RH.dtype)
        )

    def logits(self, features_RE: Tensor) -> Tensor:
        """Logits [R, V₊] in float32 without the bias; columns from V on are undefined."""
        return product(features_RE, self.softmax.t())


class DeterministicPass:
    """Runs windows through a model without dropout and carries the state between them.

    Args:
        copies: The weights.
        rows: B.
        time: Steps per window.
        recorded: Whether to record a pass as a CUDA graph and replay it. Recording blocks the
            device once, which pays off over many passes.
    """

    def __init__(
        self,
        copies: Copies,
        rows: int,
        time: int,
        *,
        recorded: bool = True,
    ) -> None:
        self.copies = copies
        self.stack = Stack(copies.shape(rows, time), copies.stack, training=False)
        device = copies.embedding.device
        self.tokens = torch.zeros(time, rows, dtype=torch.int64, device=device)
        self._replay = Replay(device) if recorded else None

    def reset(self) -> None:
        """Sets the state to zero."""
        self.stack.last.zero_()
        self.stack.c.zero_()

    def begin(self, state: tuple[tuple[Tensor, Tensor], ...]) -> None:
        """Starts from the state (h, c) of each layer, [n, H] with n ≤ B; other rows start at 0."""
        self.reset()
        H = self.copies.config.hidden_sizes[0]
        for layer, (h, c) in enumerate(state):
            self.stack.last[layer, : len(h), :H].copy_(h)
            self.stack.c[layer, -1, : len(c), :H].copy_(c)

    @property
    def state(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Copies of the carried (h, c) of each layer, each [B, H], as the model takes them."""
        H = self.copies.config.hidden_sizes[0]
        after = zip(self.stack.last[..., :H].clone(), self.stack.c[:, -1, :, :H].clone())
        return tuple(after)

    @torch.no_grad()
    def run(self, tokens_Bt: Tensor) -> Tensor:
        """The output [time, B, H₊] of a window in float32; the next run overwrites it."""
        self.tokens.copy_(upload(tokens_Bt, self.tokens.device).t())
        if self._replay is None:
            self._run()
        else:
            self._replay(self._run)
        return self.stack.out

    def _run(self) -> None:
        stack = self.stack
        x = self.copies.embedding[self.tokens]
        stack.x[0, ..., : x.shape[-1]].copy_(x)
        stack.start()
        stack.forward()


def _copy(padded_copy: Tensor, weight: nn.Parameter) -> None:
    padded_copy[: weight.shape[0], : weight.shape[1]].copy_(weight)
