"""Evaluating language models on a text: its windows, then the loop, shared over ranks if asked."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from torch import Tensor

from afterdrop.data.stripes import EvalStripes
from afterdrop.errors import DataError
from afterdrop.evaluation.dynamic_evaluation import (
    DynamicWindows,
    GradientScale,
    gradient_scale,
    kept_weights,
)
from afterdrop.evaluation.engines.component_temper import require_components
from afterdrop.evaluation.loop import Execution, run_evaluation
from afterdrop.evaluation.rank_shares import split_multipliers
from afterdrop.evaluation.request import Request
from afterdrop.evaluation.scores.scores import Scores
from afterdrop.evaluation.text_windows import open_windows
from afterdrop.family.member import Grid
from afterdrop.masks.model_guard import guarded
from afterdrop.models import LanguageModel
from afterdrop.ranks import SINGLE_PROCESS

_PILOT_BATCHES = 2  # of a short text; one of all its windows could not be divided


def run_text(
    model: LanguageModel,
    tokens: Tensor,
    eos: int,
    request: Request,
    execution: Execution,
    *,
    lines: bool = True,
    training: Tensor | GradientScale | None = None,
) -> Scores:
    """Evaluates every member of the family on a text.

    Args:
        model: The language model; stays on its device.
        tokens: [N] the text.
        eos: The token before the first.
        request: What to evaluate; has stream settings.
        execution: How to carry it out.
        lines: Whether stripes consist of whole lines.
        training: Dynamic evaluation: the training text, or the scale of its gradients.
    """
    stream = request.stream
    assert stream is not None
    require_components(model, request.grid.temper)
    # The text stays on the CPU: which of its targets count is asked for at every step.
    stripes = EvalStripes(tokens.cpu(), eos, stream.stripes, stream.window, lines=lines)
    if request.dynamic is not None:
        return _run_dynamic(model, stripes, request, execution, training)
    if request.adaptive is not None:
        if stream.carry == "sampled" and execution.ranks.count > 1:
            raise DataError(
                "num_samples='auto' with carry='sampled' cannot be shared by ranks, which would "
                "share the multipliers, and a pilot drops most of them; give a number of samples"
            )
        most = math.ceil(request.adaptive.pilot_share * len(stripes) / _PILOT_BATCHES)
        execution = dataclasses.replace(execution, windows=min(execution.windows, most))
    windows = open_windows(model, stripes, request, execution)
    if stream.carry == "deterministic" or execution.ranks.count == 1:
        return run_evaluation(model, windows, request, execution, len(tokens))

    def some(grid: Grid, resume: Path | None) -> Scores:
        shown = execution.progress and execution.ranks.first
        own = dataclasses.replace(execution, resume=resume, ranks=SINGLE_PROCESS, progress=shown)
        mine = dataclasses.replace(request, grid=grid)
        return run_evaluation(model, windows, mine, own, len(tokens))

    return split_multipliers(request.grid, execution.ranks, execution.resume, some)


def _run_dynamic(
    model: LanguageModel,
    stripes: EvalStripes,
    request: Request,
    execution: Execution,
    training: Tensor | GradientScale | None,
) -> Scores:
    """The same with weights that learn from each window, and are restored at the end."""
    settings = request.dynamic
    assert settings is not None
    if training is None:
        raise DataError(
            "dynamic evaluation needs statistics of gradients; give training=, the training text"
        )
    if execution.ranks.count > 1:
        raise DataError(
            "dynamic evaluation learns from one window before it reads the next, so ranks cannot "
            "share it; evaluate with one process"
        )
    if isinstance(training, Tensor):
        eos, window = stripes.eos, stripes.window
        training = gradient_scale(model, training, eos, window, settings, lines=stripes.lines)
    windows = DynamicWindows(model, stripes, settings, training)
    with guarded(model), kept_weights(model):  # no other thread sees the weights until restored
        return run_evaluation(model, windows, request, execution, len(stripes.tokens))
