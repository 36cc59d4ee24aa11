"""Evaluating language models on a text: its windows, then the loop, shared over ranks if asked."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from torch import Tensor

from afterdrop.data.stripes import EvalStripes
from afterdrop.evaluation.loop import Execution, run_evaluation
from afterdrop.evaluation.rank_shares import split_multipliers
from afterdrop.evaluation.request import Protocol, Request
from afterdrop.evaluation.scores.scores import Scores
from afterdrop.evaluation.text_windows import open_windows
from afterdrop.family.member import Grid
from afterdrop.models import LanguageModel
from afterdrop.models.fingerprint import fingerprint
from afterdrop.ranks import SINGLE_PROCESS


def run_text(
    model: LanguageModel,
    tokens: Tensor,
    eos: int,
    request: Request,
    execution: Execution,
    *,
    lines: bool = True,
) -> Scores:
    """Evaluates every member of the family on a text.

    Args:
        model: The language model; stays on its device.
        tokens: [N] the text.
        eos: The token before the first.
        request: What to evaluate; has stream settings.
        execution: How to carry it out.
        lines: Whether stripes consist of whole lines.
    """
    stream = request.stream
    assert stream is not None
    # The text stays on the CPU: which of its targets count is asked for at every step.
    stripes = EvalStripes(tokens.cpu(), eos, stream.stripes, stream.window, lines=lines)
    windows = open_windows(model, stripes, request, execution)
    if stream.carry == "deterministic" or execution.ranks.count == 1:
        return run_evaluation(model, windows, request, execution, len(tokens))

    def fits(kept: Protocol) -> bool:
        same = dataclasses.replace(kept.request, grid=request.grid) == request
        return same and kept.fingerprint == fingerprint(model)

    def some(grid: Grid, resume: Path | None) -> Scores:
        shown = execution.progress and execution.ranks.first
        own = dataclasses.replace(execution, resume=resume, ranks=SINGLE_PROCESS, progress=shown)
        mine = dataclasses.replace(request, grid=grid)
        return run_evaluation(model, windows, mine, own, len(tokens))

    return split_multipliers(request.grid, execution.ranks, execution.resume, fits, some)
