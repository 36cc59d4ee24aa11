"""Engines: how the results of a batch are computed.

    generic      any module; masks and sums in their plain forms, or by kernels
    text         the generic engine for windows of a text: carried states, mask lifetimes
    text_fused   windows of a text by kernels alone, for the language models they support

Each says whether it supports a request (`supports`: None, or a sentence why not), and the
dispatcher (`engines.dispatch`) chooses. Engines do not inherit from each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from afterdrop.evaluation.result_buffer import Pieces
from afterdrop.evaluation.scores.schema import Results

Outcome = Pieces | str  # the results, or a sentence why this engine cannot give them


class Engine(Protocol):
    """Computes the results of batches.

    Attributes:
        ahead: How many later batches to begin before the results of one are taken.
        kernels: Whether it runs kernels, which may fail to compile or to launch.
    """

    ahead: int
    kernels: bool

    def begin(self, batch: Any, number: int) -> Callable[[], Any]:
        """Begins a batch; returns what waits for its results, or only then computes them.

        The results of an evaluation are an `Outcome`, those of a predictor log-probabilities.
        """

    def clear(self) -> None:
        """Frees memory that is kept for the next batch."""

    def carried(self) -> Results:
        """What the next batch needs of those before it, for resuming."""

    def restore(self, carried: Results) -> None:
        """Takes up what `carried` gave."""
