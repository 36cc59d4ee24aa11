"""The configuration of a language model: plain values, validated on construction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from afterdrop.models.cell import INPUT_GATES, InputGate
from afterdrop.models.checks import (
    check_choice,
    check_count,
    check_flag,
    check_number,
    check_rate,
    check_size,
    check_sizes,
)
from afterdrop.models.mask import SHARINGS, MaskConfig, Sharing
from afterdrop.models.stack import Stacking, check_stacking

EmbeddingRows = Literal["input", "input_and_softmax"]
EMBEDDING_ROWS: tuple[EmbeddingRows, ...] = ("input", "input_and_softmax")
_Value = TypeVar("_Value")
SITES = ("input", "inter_layer", "state", "update", "output", "projection")


@dataclass(frozen=True)
class LanguageModelConfig:
    """A recurrent language model.

    Rates are probabilities of dropping. Each site has a `_sharing`: `"step"` for a new mask at
    each time step, `"sequence"` for one per window. For None see `resolved`.

    Attributes:
        vocabulary: V, the number of token types.
        hidden_sizes: H of each layer.
        embedding_size: E; None is the size of the last layer. Another size adds a projection
            without bias from H down to E before the softmax.
        tied: Whether the softmax uses the embedding table.
        input_gate: `"capped"`, `"tied"` or `"plain"`.
        stacking: `"skip"`, `"residual"` or `"plain"`.
        layer_norm: Whether layers normalise.
        forget_bias: Mean of the forget gates' initial bias.
        mogrifier_rounds: Number of Mogrifier rounds of each layer (see `mogrifier`); 0 is an LSTM.
        mogrifier_rank: Rank of the matrices of those rounds; 0 for full matrices.
        input_dropout: Rate on the embedding that enters the first layer.
        inter_layer_dropout: Rate between layers; None is that of the input.
        state_dropout: Rate on the recurrent h.
        update_dropout: Rate on the cell's candidate.
        output_dropout: Rate on the stack's output.
        projection_dropout: Rate on the projected output, or on the latent vectors of a mixture;
            None is that of the output.
        embedding_dropout: Rate on whole rows of the embedding table, with one mask per window for
            all rows of the batch.
        embedding_rows: Where that mask acts: on the `"input"`, or on `"input_and_softmax"` (tied
            tables only, as in lamb), where the softmax uses the masked table too.
        softmax_components: K, the softmaxes that are mixed (see `softmax_mixture`). With more than
            1, latent vectors of size E, one per component, take the place of the projection.
        input_sharing: Masks of the input.
        inter_layer_sharing: Masks between layers; None is as the input's.
        state_sharing: Masks of the state; `"step"` is the paper's non-shared variant.
        update_sharing: Masks of the candidate.
        output_sharing: Masks of the output.
        projection_sharing: Masks of the projected output; None is as the output's.

    Example:
        >>> config = LanguageModelConfig(10_001, (723,) * 4, input_dropout=0.3).resolved()
        >>> config.embedding_size, config.inter_layer_dropout
        (723, 0.3)
    """

    vocabulary: int
    hidden_sizes: tuple[int, ...]
    embedding_size: int | None = None
    tied: bool = True
    input_gate: InputGate = "capped"
    stacking: Stacking = "skip"
    layer_norm: bool = False
    forget_bias: float = 1.0
    mogrifier_rounds: int = 0
    mogrifier_rank: int = 0
    input_dropout: float = 0.0
    inter_layer_dropout: float | None = None
    state_dropout: float = 0.0
    update_dropout: float = 0.0
    output_dropout: float = 0.0
    projection_dropout: float | None = None
    embedding_dropout: float = 0.0
    embedding_rows: EmbeddingRows = "input"
    softmax_components: int = 1
    input_sharing: Sharing = "step"
    inter_layer_sharing: Sharing | None = None
    state_sharing: Sharing = "sequence"
    update_sharing: Sharing = "sequence"
    output_sharing: Sharing = "step"
    projection_sharing: Sharing | None = None

    def __post_init__(self) -> None:
        check_size("vocabulary", self.vocabulary)
        check_sizes("hidden_sizes", self.hidden_sizes)
        # JSON and TOML give lists; a tuple keeps the configuration hashable.
        object.__setattr__(self, "hidden_sizes", tuple(self.hidden_sizes))
        if self.embedding_size is not None:
            check_size("embedding_size", self.embedding_size)
        check_size("softmax_components", self.softmax_components)
        check_flag("tied", self.tied)
        check_flag("layer_norm", self.layer_norm)
        check_number("forget_bias", self.forget_bias)
        check_count("mogrifier_rounds", self.mogrifier_rounds)
        check_count("mogrifier_rank", self.mogrifier_rank)
        check_choice("input_gate", self.input_gate, INPUT_GATES)
        check_stacking(self.stacking, self.hidden_sizes)
        check_rate("embedding_dropout", self.embedding_dropout)
        # An untied softmax has its own table, whose rows are not those of the input.
        rows = EMBEDDING_ROWS if self.tied else ("input",)
        check_choice("embedding_rows", self.embedding_rows, rows)
        optional = ("inter_layer", "projection")
        for site in SITES:
            rate, sharing = (getattr(self, f"{site}_{part}") for part in ("dropout", "sharing"))
            if not (rate is None and site in optional):
                check_rate(f"{site}_dropout", rate)
            if not (sharing is None and site in optional):
                check_choice(f"{site}_sharing", sharing, SHARINGS)

    def resolved(self) -> LanguageModelConfig:
        """The same configuration with every None replaced by the value that it stands for.

        Example:
            >>> LanguageModelConfig(9, (4,), output_dropout=0.5).resolved().projection_dropout
            0.5
        """
        return replace(
            self,
            embedding_size=_either(self.embedding_size, self.hidden_sizes[-1]),
            inter_layer_dropout=_either(self.inter_layer_dropout, self.input_dropout),
            inter_layer_sharing=_either(self.inter_layer_sharing, self.input_sharing),
            projection_dropout=_either(self.projection_dropout, self.output_dropout),
            projection_sharing=_either(self.projection_sharing, self.output_sharing),
        )

    def mask(self, site: str) -> MaskConfig:
        """The rate and sharing of one of the sites, resolved.

        Example:
            >>> LanguageModelConfig(9, (4,), state_dropout=0.5).mask("state")
            MaskConfig(rate=0.5, sharing='sequence')
        """
        config = self.resolved()
        return MaskConfig(getattr(config, f"{site}_dropout"), getattr(config, f"{site}_sharing"))


def _either(value: _Value | None, other: _Value) -> _Value:
    return other if value is None else value
