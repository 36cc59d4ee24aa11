"""afterdrop select: choose a member on validation scores."""

from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from afterdrop.cli.options import OptionalInt
from afterdrop.plain_text import one_line
from afterdrop.runs import Run
from afterdrop.selection import select as choose


def select(
    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")],
    /,
    split: str = "valid",
    by: Literal["xe", "brier", "accuracy", "ece", "crps"] = "xe",
    also: tuple[str, ...] = (),
    num_samples: OptionalInt = None,
    prefer: Literal["best", "cheapest"] = "best",
    folds: int = 5,
    resamples: int = 200,
    seed: int = 0,
) -> None:
    """Choose the best member of the family on validation scores, and say how sure that is.

    Reads RUN/scores/SPLIT.safetensors, prints what was gained over deterministic evaluation and
    the ranking, and writes RUN/choice.json. Scores of a test split are refused.

    For example:
      afterdrop select runs/ptb
      afterdrop select runs/mine --num-samples 20 --prefer cheapest
      afterdrop select runs/mine --by brier --also corrupted

    Args:
        run: The run folder.
        split: Which scores to select on.
        by: What to minimise: cross entropy, Brier score, errors, calibration error, or CRPS.
        also: Other splits of the run (corrupted, out of domain) to show the choice on.
        num_samples: Samples of the predictor you will use; by default those of the scores.
        prefer: The best, or the cheapest member within one standard error of the best.
        folds: Folds of examples for the cross-fitted gain; 0 for none.
        resamples: Bootstrap resamples; 0 for none.
        seed: Seed of folds and resamples.
    """
    folder = Run.open(run)
    choice = choose(
        folder.scores(split),
        by=by,
        also={name: folder.scores(name) for name in also},
        num_samples=num_samples,
        prefer=prefer,
        folds=folds,
        resamples=resamples,
        seed=seed,
    )
    path = folder.save_choice(choice)
    print(choice)
    print(f"\nWrote {one_line(path)}. To predict with it in Python:")
    if folder.trained:
        print(f"  import afterdrop\n  predict = afterdrop.Run.open({str(run)!r}).predictor()")
    else:
        model = "model" if choice.ensemble is None else "models"
        print(
            f"  import afterdrop\n"
            f"  predict = afterdrop.Run.open({str(run)!r}).choice.predictor({model})"
        )
