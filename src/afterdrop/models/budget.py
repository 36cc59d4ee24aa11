"""Parameter counts, and the largest hidden size within a budget.

    layer      (E_in + H) · GH + GH, and with layer norm 2 GH + 2 H            GH = gates · H
    round      R · (E_in + H), or E_in · H of a full matrix, plus the units that it gates
    embedding  V · E (twice if untied) + V;   projection H · E when E ≠ H;   E = max(1, ⌊ratio·H⌉)
    mixture    C · E · (H + 1) + C · H in the place of the projection, with C > 1 softmaxes

Legend: V token types, E embedding units, H hidden units, R rank of a Mogrifier round, C softmaxes
of a mixture.
"""

from __future__ import annotations

from typing import NamedTuple

from afterdrop.models.cell import gate_count
from afterdrop.models.checks import ModelError, check_size
from afterdrop.models.model_config import LanguageModelConfig
from afterdrop.models.mogrifier import count_mogrifier


class Sizes(NamedTuple):
    """A hidden size, its embedding size, and the number of parameters of the model.

    Example:
        >>> Sizes(hidden=723, embedding=723, parameters=23_979_620).hidden
        723
    """

    hidden: int
    embedding: int
    parameters: int


def count_parameters(config: LanguageModelConfig) -> int:
    """The number of parameters of `LanguageModel(config)`, without building it.

    Example:
        >>> count_parameters(LanguageModelConfig(10_001, (723,) * 4))
        23979620
    """
    whole = config.resolved()
    embedding, top = whole.embedding_size or whole.hidden_sizes[-1], whole.hidden_sizes[-1]
    total = config.vocabulary * (embedding * (1 if config.tied else 2) + 1)
    if (components := config.softmax_components) > 1:
        total += components * (embedding * (top + 1) + top)
    elif embedding != top:
        total += embedding * top
    for size_in, size in zip((embedding, *config.hidden_sizes), config.hidden_sizes):
        rows = gate_count(config.input_gate) * size
        total += (size_in + size + 1) * rows
        if config.layer_norm:
            total += 2 * rows + 2 * size
        total += count_mogrifier(config.mogrifier_rounds, config.mogrifier_rank, size_in, size)
    return total


def sizes_within(
    budget: int,
    vocabulary: int,
    layers: int,
    *,
    embedding_ratio: float = 1.0,
    tied: bool = True,
    layer_norm: bool = False,
    tied_gates: bool = False,
    softmax_components: int = 1,
    mogrifier_rounds: int = 0,
    mogrifier_rank: int = 0,
) -> Sizes:
    """The largest equal hidden size of all layers whose model fits in the budget.

    Args:
        budget: Largest number of parameters allowed.
        vocabulary: V.
        layers: Number of layers.
        embedding_ratio: E/H, in (0, 1].
        tied: Whether the softmax uses the embedding table.
        layer_norm: Whether layers normalise.
        tied_gates: Whether the input gate is 1 − f, which saves a quarter of a layer.
        softmax_components: C, the softmaxes that are mixed.
        mogrifier_rounds: Mogrifier rounds of each layer.
        mogrifier_rank: Rank of their matrices; 0 for full matrices.

    Returns:
        Hidden size, embedding size and parameters.

    Example:
        >>> sizes_within(24_000_000, vocabulary=10_001, layers=4)
        Sizes(hidden=723, embedding=723, parameters=23979620)
    """
    for name, value in (("budget", budget), ("vocabulary", vocabulary), ("layers", layers)):
        check_size(name, value)
    if not 0 < embedding_ratio <= 1:
        raise ModelError(
            f"embedding_ratio is {embedding_ratio!r}; it is E/H, in (0, 1]. Give 1 for equal sizes."
        )

    def sizes(hidden: int) -> Sizes:
        embedding = max(1, round(embedding_ratio * hidden))
        config = LanguageModelConfig(
            vocabulary,
            (hidden,) * layers,
            embedding,
            tied=tied,
            layer_norm=layer_norm,
            input_gate="tied" if tied_gates else "capped",
            softmax_components=softmax_components,
            mogrifier_rounds=mogrifier_rounds,
            mogrifier_rank=mogrifier_rank,
        )
        return Sizes(hidden, embedding, count_parameters(config))

    least = sizes(1)
    if least.parameters > budget:
        raise ModelError(
            f"budget is {budget}; the smallest such model has {least.parameters} parameters. "
            "Allow more, or cut the vocabulary."
        )
    fits, beyond = 1, 2
    while sizes(beyond).parameters <= budget:
        fits, beyond = beyond, 2 * beyond
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        if sizes(middle).parameters <= budget:
            fits = middle
        else:
            beyond = middle
    return sizes(fits)
