"""Mogrifier rounds: the input and the state of an LSTM layer gate each other before each step.

With x and h the layer's input and carried h after their dropout, and rounds r counted from 0:

    even r    x ← x · 2σ(h A_rᵀ + b_r)          odd r    h ← h · 2σ(x A_rᵀ + b_r)

A gate reads the latest x and h, which are dropped and already gated. Each round of each layer has
its own A_r, either a full matrix or, with a rank R, a product A_r = U_r D_r. The rounds replace
what enters the cell for one step; the carried h is neither dropped nor gated.

Source: Melis, Kočiský and Blunsom, "Mogrifier LSTM", 2020, with the biases b_r of deepmind/lamb.

Legend: B rows, E inputs, H hidden units, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afterdrop.models.checks import check_count
from afterdrop.models.initial import factor_normal_, gate_normal_

# The factors of A_r in the order in which they are applied (A_r itself, or D_r and U_r), and b_r.
Round = tuple[tuple[Tensor, ...], Tensor]


def round_sizes(rounds: int, input_size: int, hidden_size: int) -> list[tuple[int, int]]:
    """The sizes of what each round reads and of what it gates.

    Example:
        >>> round_sizes(3, input_size=5, hidden_size=4)
        [(4, 5), (5, 4), (4, 5)]
    """
    return [
        (input_size, hidden_size) if number % 2 else (hidden_size, input_size)
        for number in range(rounds)
    ]


def count_mogrifier(rounds: int, rank: int, input_size: int, hidden_size: int) -> int:
    """The number of parameters of the rounds of a layer.

    Example:
        >>> count_mogrifier(5, 84, input_size=912, hidden_size=912)
        770640
    """
    return sum(
        (rank * (read + gated) if rank else read * gated) + gated
        for read, gated in round_sizes(rounds, input_size, hidden_size)
    )


def mogrify(x_BE: Tensor, h_BH: Tensor, rounds: Sequence[Round]) -> tuple[Tensor, Tensor]:
    """The gated x and h of one time step.

    Example:
        >>> x, h = torch.ones(1, 2), torch.ones(1, 3)
        >>> mogrify(x, h, [((torch.zeros(2, 3),), torch.zeros(2))])
        (tensor([[1., 1.]]), tensor([[1., 1., 1.]]))
    """
    for number, (factors, bias) in enumerate(rounds):
        if number % 2:
            h_BH = h_BH * _gate(x_BE, factors, bias)
        else:
            x_BE = x_BE * _gate(h_BH, factors, bias)
    return x_BE, h_BH


def _gate(read: Tensor, factors: tuple[Tensor, ...], bias: Tensor) -> Tensor:
    *inner, last = factors
    for factor in inner:
        read = F.linear(read, factor)
    return F.linear(read, last, bias).sigmoid() * 2


class Mogrifier(nn.Module):
    """The parameters of the rounds of a layer.

    Args:
        rounds: Number of rounds.
        rank: Rank of each matrix; 0 for a full matrix.
        input_size: E.
        hidden_size: H.

    Example:
        >>> mogrifier = Mogrifier(2, 3, input_size=5, hidden_size=4)
        >>> {name: tuple(p.shape) for name, p in mogrifier.named_parameters()}
        {'down.0': (3, 4), 'down.1': (3, 5), 'up.0': (5, 3), 'up.1': (4, 3), 'bias.0': (5,), \
'bias.1': (4,)}
    """

    def __init__(self, rounds: int, rank: int, input_size: int, hidden_size: int) -> None:
        super().__init__()
        check_count("mogrifier_rounds", rounds)
        check_count("mogrifier_rank", rank)
        self.rank, sizes = rank, round_sizes(rounds, input_size, hidden_size)

        def parameters(*shapes: tuple[int, ...]) -> nn.ParameterList:
            return nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)

        if rank:
            self.down = parameters(*((rank, read) for read, _ in sizes))
            self.up = parameters(*((gated, rank) for _, gated in sizes))
        else:
            self.weight = parameters(*((gated, read) for read, gated in sizes))
        self.bias = parameters(*((gated,) for _, gated in sizes))

    @property
    def rounds(self) -> list[Round]:
        """The parameters of each round, as `mogrify` takes them."""
        return list(zip(self._factors(), self.bias))

    def _factors(self) -> Iterator[tuple[Tensor, ...]]:
        return zip(self.down, self.up) if self.rank else zip(self.weight)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws new initial weights (see `initial`)."""
        for factors, bias in self.rounds:
            fan_in = factors[0].shape[1]
            for factor in factors:
                if self.rank:
                    factor_normal_(factor, fan_in, self.rank, generator)
                else:
                    gate_normal_(factor, fan_in, generator=generator)
            bias.zero_()
