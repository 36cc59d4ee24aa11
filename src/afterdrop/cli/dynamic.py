"""afterdrop dynamic: dynamic evaluation of a language model, tuned on validation data."""

import itertools
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from afterdrop.cli.options import OptionalInt, OptionalPath, OptionalText
from afterdrop.errors import DataError
from afterdrop.evaluation.dynamic_evaluation import DivergedWeights, DynamicEvaluation
from afterdrop.evaluation.scores import Scores
from afterdrop.family.member import DET
from afterdrop.family.presentation import Presentation, presentation
from afterdrop.plain_text import one_line
from afterdrop.runs import Run
from afterdrop.runs.dynamic_search import DynamicSearch, Tried
from afterdrop.train.device import choose_device

DEFAULTS = DynamicEvaluation()


def dynamic(
    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")],
    /,
    window: int = 5,
    etas: tuple[float, ...] = (3e-5, 1e-4, 3e-4, 1e-3),
    kappas: tuple[float, ...] = (2e-3, 2e-2),
    epsilon: float = DEFAULTS.epsilon,
    mean: Literal["tensors", "elements"] = DEFAULTS.mean,
    training_windows: OptionalInt = None,
    limit: OptionalInt = None,
    test: bool = False,
    data: OptionalPath = None,
    device: OptionalText = None,
) -> None:
    """Evaluate a language model that learns from each window of a text once it is predicted.

    Tries every pair of eta and kappa on validation data, with the deterministic member, and writes
    the scores of the best to RUN/dynamic/scores/valid.safetensors. With --test the best is also
    evaluated on test data, at T = 1 and at the temperature of validation data. After an
    interruption, the same command resumes after the settings that were finished.

    For example:
      afterdrop dynamic runs/ptb
      afterdrop dynamic runs/ptb --etas 5e-5 --kappas 2e-3 --test

    Args:
        run: A run folder of afterdrop train.
        window: Tokens per window, after each of which the weights change.
        etas: Learning rates.
        kappas: Decays towards the trained weights.
        epsilon: Added to the root mean square of a gradient.
        mean: How the scale of the decay averages over weights: over tensors (Krause) or over
            elements (lamb).
        training_windows: Windows per stripe of the training text that the statistics read; by
            default all.
        limit: Number of leading tokens of validation and test data to evaluate.
        test: Evaluate the best settings on test data.
        data: The folder of the data, if they have moved since training.
        device: Where the model is evaluated; a GPU if there is one.
    """
    settings = [
        DynamicEvaluation(eta, kappa, epsilon, mean, windows=training_windows)
        for eta, kappa in itertools.product(etas, kappas)
    ]
    if not settings:
        raise DataError("--etas and --kappas are empty; give at least one of each")
    folder = Run.open(run)
    where = choose_device(device)
    splits = ("valid", "test") if test else ("valid",)
    shown = presentation(folder.unit)
    with DynamicSearch(folder, window, limit, splits=splits, device=where, folder=data) as search:
        plain = search.plain("valid")
        best = _search(search, plain, settings, shown)
        assert best.scores is not None
        path = search.kept.save_scores(best.scores)
        print(f"Best on validation data: eta={best.settings.eta:g}, kappa={best.settings.kappa:g}.")
        print(f"Wrote {one_line(path)}.")
        if test:
            _test(search, plain, best, shown)


def _search(
    search: DynamicSearch, plain: Scores, settings: list[DynamicEvaluation], shown: Presentation
) -> Tried:
    """Prints a line per pair of settings; returns the best."""
    print(f"valid, {plain.num_targets} tokens, windows of {search.window}, T = 1")
    print(f"{'eta':>10}{'kappa':>10}{'XE':>9}{shown.name:>20}{'minus fixed weights':>24}")
    _line("", "", plain, shown, "")
    found = []
    for one in search.tried(plain, settings):
        eta, kappa = f"{one.settings.eta:g}", f"{one.settings.kappa:g}"
        if one.scores is None or one.difference is None:
            print(f"{eta:>10}{kappa:>10}  diverged", flush=True)
            continue
        paired = f"{one.difference.value:+.4f} ± {one.difference.error:.4f}"
        _line(eta, kappa, one.scores, shown, paired)
        found.append(one)
    if not found:
        raise DivergedWeights("the weights diverged with every pair of settings; give lower --etas")
    return min(found, key=lambda one: one.xe)


def _test(search: DynamicSearch, plain: Scores, best: Tried, shown: Presentation) -> None:
    """The best settings on test data, compared with fixed weights."""
    assert best.scores is not None
    fixed = search.plain("test")
    (found,) = search.tried(fixed, [best.settings])
    if found.scores is None or found.difference is None:
        raise DivergedWeights("the weights diverged on test data; give lower --etas")
    search.kept.save_scores(found.scores)
    print(f"test, {fixed.num_targets} tokens: {shown.name} at T = 1, and at T* of validation data")
    for name, scores, valid in (
        ("fixed weights", fixed, plain),
        ("dynamic", found.scores, best.scores),
    ):
        member = valid.fit(DET).member
        values = [shown.show(scores.xe(m).value) for m in (DET, member)]
        cells = "  ".join(f"{value:.{shown.digits}f}" for value in values)
        print(f"{name:<15}{cells}  (T* = {member.temperature:.3f})")
    print(f"difference at T = 1: {found.difference.value:+.4f} ± {found.difference.error:.4f} nats")


def _line(eta: str, kappa: str, scores: Scores, shown: Presentation, paired: str) -> None:
    xe = scores.xe(DET).value
    unit = f"{shown.show(xe):.{shown.digits}f}"
    print(
        f"{eta or 'fixed':>10}{kappa or 'weights':>10}{xe:>9.4f}{unit:>20}{paired:>24}", flush=True
    )
