"""afterdrop test: the chosen member on test data, once."""

import contextlib
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from afterdrop.cli.options import OptionalInt, OptionalPath, OptionalText
from afterdrop.cli.torchrun import shared_evaluation, speaks
from afterdrop.errors import FileError
from afterdrop.evaluation.loop import Execution
from afterdrop.family.member import DET
from afterdrop.family.presentation import presentation
from afterdrop.plain_text import shell_word
from afterdrop.runs import Run
from afterdrop.selection import summary_table


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

    Nothing is fitted here: the member and the temperatures come from RUN/choice.json, which
    afterdrop select wrote from validation scores. Writes RUN/scores/test.safetensors.

    For example:
      afterdrop test runs/ptb
      torchrun --nproc-per-node 4 -m afterdrop test runs/ptb --device cuda

    Args:
        run: A run folder of afterdrop train with a chosen member.
        split: Name of the data.
        num_samples: Mask samples; by default those that the choice was made for.
        data: The folder of the data, if they have moved since training.
        device: Where the model is evaluated; a GPU if there is one.
        overwrite: Replace scores that are there.
        quiet: No progress bar.
    """
    folder = Run.open(run)
    choice = folder.choice
    if split in ("train", choice.request.split):
        raise FileError(
            f"split={split!r} would replace scores that were trained or chosen on; give another, "
            "such as test"
        )
    path, parts = folder.layout.scores(split), folder.layout.parts(split)
    if not folder.trained:
        raise FileError(
            f"{run} holds scores of your own model, which cannot be loaded from here; for test "
            f"data: afterdrop evaluate MODEL DATA --out {shell_word(run)} --split test"
        )
    request = choice.test_request(split, num_samples)
    if path.exists() and not overwrite:
        scores = folder.kept_scores(request, choice.fingerprint)
        if not speaks():
            return
    else:
        with contextlib.ExitStack() as held:
            with shared_evaluation(device, parts) as (where, ranks):
                ranks.enter_on_rank0(held, folder.reserved_scores(split, overwrite=overwrite))
                execution = Execution(resume=parts, progress=not quiet, ranks=ranks)
                scores = folder.evaluate(request, execution, device=where, folder=data)
            if not ranks.first:
                return
            folder.save_scores(scores)
    member = choice.member
    members = list(dict.fromkeys([DET, choice.deterministic, member]))
    print(summary_table(scores, members))
    if choice.request.stream is not None:
        shown = presentation(folder.unit)
        values = (shown.show(scores.xe(m).value) for m in members)
        print(f"{shown.name}: {', '.join(f'{value:.{shown.digits}f}' for value in values)}")
    difference = scores.difference(member, DET)
    print(
        f"Chosen minus deterministic at T = 1: {difference.value:+.4f} ± {difference.error:.4f} "
        f"nats on {scores.num_targets} targets of {split}."
    )
