"""afterdrop test: the chosen member on test data, once."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from afterdrop.cli.options import OptionalInt, OptionalPath, OptionalText
from afterdrop.cli.torchrun import shared_evaluation
from afterdrop.errors import FileError
from afterdrop.evaluation.api import Settings
from afterdrop.family.member import DET, Grid
from afterdrop.family.presentation import presentation
from afterdrop.masks.uniforms import Plan
from afterdrop.models import LanguageModel
from afterdrop.runs.chosen import load_chosen, parts_path
from afterdrop.runs.folder import load_choice, scores_path
from afterdrop.runs.trained import evaluate_run
from afterdrop.selection.text_tables import summary_table
from afterdrop.train.folder import RunFolder


def test(
    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")],
    /,
    split: str = "test",
    num_samples: OptionalInt = None,
    data: OptionalPath = None,
    device: OptionalText = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> None:
    """Evaluate the chosen member on test data, beside deterministic evaluation.

    Nothing is fitted here: the member and the temperatures come from RUN/member.json, which
    afterdrop select wrote from validation scores. Writes RUN/scores/test.safetensors.

    For example:
      afterdrop test runs/ptb
      torchrun --nproc-per-node 4 -m afterdrop test runs/ptb --device cuda

    Args:
        run: A run folder of afterdrop train with a chosen member.
        split: Name of the data.
        num_samples: Mask samples; by default those that the choice was made for.
        data: The folder of the named data sets, if not the one of training.
        device: Where the model is evaluated; a GPU if there is one.
        overwrite: Replace scores that are there.
        quiet: No progress bar.
    """
    member, notes = load_choice(run)
    if split in ("train", notes["split"]):
        raise FileError(
            f"split={split!r} would replace scores that were trained or chosen on; give another, "
            "such as test"
        )
    path = scores_path(run, split)
    if path.exists() and not overwrite:
        raise FileError(f"{path} exists: test data were used already; --overwrite does it again")
    settings = Settings(
        Grid((member.alpha,), (0.0, member.multiplier), member.temper),
        Plan(num_samples or notes["num_samples"], notes["seed"], notes["masks"]),
        split,
        # The bracket of the choice: the test data's own need not hold the chosen temperatures.
        temperatures=tuple(notes["temperatures"]) if "temperatures" in notes else None,
        resume=parts_path(run, split),
        progress=not quiet,
    )
    with shared_evaluation(device, parts_path(run, split)) as (where, ranks):
        settings = dataclasses.replace(settings, ranks=ranks)
        loaded = load_chosen(run, notes, where)
        scores = evaluate_run(loaded, split, settings, notes["stream"], data)
    if not ranks.first:
        return
    scores.save(path)
    tempered = DET.at_temperature(notes["deterministic_temperature"])
    members = list(dict.fromkeys([DET, tempered, member]))
    print(summary_table(scores, members))
    if isinstance(loaded.model, LanguageModel):
        shown = presentation(RunFolder(run).read_config()[1]["unit"])
        values = (shown.show(scores.xe(m).value) for m in members)
        print(f"{shown.name}: {', '.join(f'{value:.{shown.digits}f}' for value in values)}")
    difference = scores.difference(member, DET)
    print(
        f"Chosen minus deterministic at T = 1: {difference.value:+.4f} ± {difference.error:.4f} "
        f"nats on {scores.num_targets} targets of {split}."
    )
