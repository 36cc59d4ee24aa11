"""Carried states from parallel pieces: the number of rounds that a model needs, and the error.

    python benchmarks/result_rounds.py RUN [--data DIR] [--tokens N]

Runs `evaluation.carried_states` on validation data with the plain model on a CPU, in float32, and
compares the state before each window with that of the sequential pass.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

from afterdrop.data import EvalStripes
from afterdrop.evaluation.carried_states import ROWS, carried_states
from afterdrop.models import LanguageModel
from afterdrop.train import load_model


class PlainPass:
    """A pass as `carried_states` needs it, run by the model itself; counts its windows."""

    def __init__(self, model: LanguageModel, rows: int) -> None:
        self.model, self.rows, self.runs = model, rows, 0
        self.reset()

    def reset(self) -> None:
        """Forgets the state."""
        self.begin(self.model.initial_state(self.rows))

    def begin(self, state: tuple[tuple[Tensor, Tensor], ...]) -> None:
        """Starts from a state."""
        self.state = state

    @torch.no_grad()
    def run(self, tokens: Tensor) -> None:
        """A window."""
        self.runs += 1
        self.state = self.model.features(tokens, self.state)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tokens", type=int)
    options = parser.parse_args()
    model, config, load_data = load_model(options.run)
    text = load_data(options.data)
    assert isinstance(model, LanguageModel)
    window = config.objective.window or 35
    tokens = text.valid[: options.tokens]
    stripes = EvalStripes(tokens, text.vocabulary.eos_id, 1, window, lines=text.has_lines)
    pieces, start = PlainPass(model, ROWS), time.perf_counter()
    found = list(carried_states(pieces, stripes))
    took, start = time.perf_counter() - start, time.perf_counter()
    chain, gaps = PlainPass(model, 1), []
    for (inputs, _), state in zip(stripes, found):
        pairs = zip(sum(state, ()), sum(chain.state, ()))
        gaps.append(max(float((a - b).abs().max()) for a, b in pairs))
        chain.run(inputs)
    each = -(-len(stripes) // ROWS)
    print(f"{len(tokens)} tokens in {len(stripes)} windows, {each} per piece")
    print(f"in pieces: {pieces.runs / each:.0f} rounds, {took:.0f} s")
    print(f"in sequence: {time.perf_counter() - start:.0f} s")
    print(
        f"largest difference of a state: {max(gaps):.1e}, of the median window "
        f"{sorted(gaps)[len(gaps) // 2]:.1e}"
    )


if __name__ == "__main__":
    main()
