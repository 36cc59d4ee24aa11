"""Compares tuning objectives (DET at T = 1 and at its optimal T) by the member selected afterwards.

`worth` evaluates one trained model; `comparison` is the table of a pool of them. Errors are over
bootstrap resamples of the pool; differences are paired. Used by `result_tune` and, without optuna
and scipy, by `result_tune_gpu`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

import afterdrop as ad
from afterdrop.evaluation.loop import Execution
from afterdrop.masks.uniforms import Plan

RESAMPLES = 2000


class Family(NamedTuple):
    """The members to select from, the number of mask samples, and the part of the data.

    Attributes:
        grid: Alphas and multipliers.
        samples: Mask samples per member.
        targets: Number of targets per split, from the start; None for all.
        stripes: Stripes of a text; None for those of the run's validation.
    """

    grid: ad.Grid
    samples: int
    targets: int | None = None
    stripes: int | None = None


def worth(
    run: ad.Run, family: Family, data: Path | None = None, device: str = "cpu"
) -> dict[str, float]:
    """XE of DET at T = 1 and at its best T, and of the selected member, on validation and test."""
    stripes = family.stripes or run.config.validation.stripes
    stream = run.stream(stripes=stripes) if run.config.objective.window else None

    def scores(split: str, grid: ad.Grid) -> ad.Scores:
        plan = Plan(family.samples)
        request = ad.Request(grid, plan, split, stream=stream, limit=family.targets)
        return run.evaluate(request, Execution(), which="best", device=device, folder=data)

    rates = vars(run.model("best").config).items()  # type: ignore[arg-type]
    drops = any(value for name, value in rates if name.endswith("_dropout"))
    # If all rates are 0, every member is deterministic.
    valid = scores("valid", family.grid if drops else ad.Grid((0.0,), (0.0,)))
    member = ad.select(valid, folds=0, resamples=0).member
    test = scores("test", ad.Grid((member.alpha,), (member.multiplier,)))
    return {
        "plain": valid.xe(ad.DET).value,
        "optimal": valid.xe(valid.fit(ad.DET).member).value,
        "temperature": valid.fit(ad.DET).member.temperature,
        "selected_valid": valid.xe(member).value,
        "selected": test.xe(member).value,
        "alpha": member.alpha,
        "multiplier": member.multiplier,
    }


def rank_correlations(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Kendall's tau-b and Spearman's rho, with ties, which resamples have.

    Both come from the signs of all differences: their rows sum to the ranks.
    """
    a, b = (np.sign(v[:, None] - v) for v in (x, y))
    both = ((s.ravel(), t.ravel()) for s, t in ((a, b), (a.sum(1), b.sum(1))))
    return tuple(float(s @ t / np.sqrt((s @ s) * (t @ t) or 1)) for s, t in both)


def comparison(title: str, pool: Sequence[dict[str, float]], *, words: bool = False) -> list[str]:
    """The lines of a table that compares both tuning objectives.

    Args:
        title: Title of the pool.
        pool: Results of `worth`.
        words: Whether to print perplexities as well.
    """
    names = ("plain", "optimal", "selected_valid", "selected")
    plain, optimal, same, selected = (np.array([p[name] for p in pool]) for name in names)
    tuned = {"DET at T = 1": plain, "DET at its optimal T": optimal, "the member itself": same}
    targets = (same, selected)
    draws = np.random.default_rng(0).integers(len(pool), size=(RESAMPLES, len(pool)))
    lines = [
        *_heading(title, pool),
        "| tuned on | Kendall, selected member's validation XE | Spearman | Kendall, its test XE "
        "| Spearman | test XE of the pick |",
        "|---|---|---|---|---|---|",
    ]
    resampled = {}
    for name, values in tuned.items():
        here = np.array([rank_correlations(values, target) for target in targets]).ravel()
        resampled[name] = np.array([_of_draw(values, targets, d) for d in draws])
        errors = resampled[name].std(0)
        cells = [f"{r:.3f} ± {error:.3f}" for r, error in zip(here, errors)]
        pick = _shown(selected[values.argmin()], words)
        lines.append(f"| {name} | {' | '.join(cells)} | {pick} |")
    gain = resampled["DET at its optimal T"] - resampled["DET at T = 1"]
    cells = [f"{g.mean():+.3f} ± {g.std():.3f}" for g in gain[:, :-1].T]
    lines.append(f"| optimal T − T = 1 | {' | '.join(cells)} | {_spread(gain[:, -1], 4)} |")
    if words:
        ppl = {name: np.exp(found[:, -1]) for name, found in resampled.items()}
        points = ppl["DET at its optimal T"] - ppl["DET at T = 1"]
        lines.append(f"\nThe pick in test perplexity, optimal T − T = 1: {_spread(points, 2)}.")
    other = (gain[:, -1] != 0).mean()
    lines.append(f"\nThe two pick different configurations in {other:.0%} of the resamples.")
    return lines


def _heading(title: str, pool: Sequence[dict[str, float]]) -> list[str]:
    temperatures = sorted(p["temperature"] for p in pool)
    random_share = sum(p["multiplier"] > 0 for p in pool) / len(pool)
    return [
        f"\n### {title}\n",
        f"Optimal T of DET from {temperatures[0]:.2f} to {temperatures[-1]:.2f}; the selected "
        f"member is not deterministic for {random_share:.0%} of them.\n",
    ]


def _of_draw(values: np.ndarray, targets: tuple, draw: np.ndarray) -> list[float]:
    """Rank correlations with each target in a resample, then the test XE of its pick."""
    found = [r for target in targets for r in rank_correlations(values[draw], target[draw])]
    return [*found, targets[-1][draw][values[draw].argmin()]]


def _shown(xe: float, words: bool) -> str:
    return f"{xe:.4f}" + f" (perplexity {np.exp(xe):.2f})" * words


def _spread(values: np.ndarray, digits: int) -> str:
    return f"{values.mean():+.{digits}f} ± {values.std():.{digits}f}"
