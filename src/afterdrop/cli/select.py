"""afterdrop select: choose a member on validation scores."""

from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from afterdrop.cli.options import OptionalInt
from afterdrop.runs.chosen import find_chosen
from afterdrop.runs.folder import load_scores, member_path, save_choice
from afterdrop.selection.choice import select as select_member


def select(
    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")],
    /,
    split: str = "valid",
    num_samples: OptionalInt = None,
    prefer: Literal["best", "cheapest"] = "best",
    folds: int = 5,
    resamples: int = 200,
    seed: int = 0,
) -> None:
    """Choose the best member of the family on validation scores, and say how sure that is.

    Reads RUN/scores/SPLIT.safetensors, prints what was gained over deterministic evaluation and
    the ranking, and writes RUN/member.json. Scores of a test split are refused.

    For example:
      afterdrop select runs/ptb
      afterdrop select runs/mine --num-samples 20 --prefer cheapest

    Args:
        run: The run folder.
        split: Which scores to select on.
        num_samples: Samples of the predictor you will use; by default those of the scores.
        prefer: The best, or the cheapest member within one standard error of the best.
        folds: Folds of examples for the cross-fitted gain; 0 for none.
        resamples: Bootstrap resamples; 0 for none.
        seed: Seed of folds and resamples.
    """
    scores = load_scores(run, split)
    choice = select_member(
        scores,
        num_samples=num_samples,
        prefer=prefer,
        folds=folds,
        resamples=resamples,
        seed=seed,
    )
    notes = save_choice(run, scores, choice)
    print(choice)
    print(f"\nWrote {member_path(run)}. To predict with it in Python:")
    print(_to_predict(run, notes))


def _to_predict(run: Path, notes: dict[str, Any]) -> str:
    """Python lines that open the chosen member; a text needs a predictor that carries its state."""
    member = f"Member.load({str(member_path(run))!r})"
    samples = notes["num_samples"]
    if not notes["stream"]:
        declared = f", rates={notes['rates']!r}" if notes["rates"] else ""
        options = f"{samples}, {notes['seed']}, masks={notes['masks']!r}{declared}"
        return f"  import afterdrop\n  afterdrop.Predictor(model, afterdrop.{member}, {options})"
    which, _ = find_chosen(run, notes) or ("best", None)
    stream = ", ".join(f"{name}={value!r}" for name, value in notes["stream"].items())
    lines = (
        "from afterdrop import Member",
        "from afterdrop.evaluation.engines.text import StreamSettings",
        "from afterdrop.selection.stream_predictor import StreamPredictor",
        "from afterdrop.train import load_model",
        f"member, stream = {member}, StreamSettings({stream})",
        f"model = load_model({str(run)!r}, {which!r}).model",
        f"predict = StreamPredictor(model, member, {samples}, {notes['seed']}, stream, "
        f"{notes['masks']!r})",
    )
    return "\n".join(f"  {line}" for line in lines)
