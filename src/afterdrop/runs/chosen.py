"""Run folders: where things lie in them that only the command line needs."""

import contextlib
from pathlib import Path
from typing import Any

import torch

from afterdrop.errors import FileError
from afterdrop.models.fingerprint import fingerprint
from afterdrop.runs.folder import scores_path
from afterdrop.train import LoadedRun, load_model
from afterdrop.train.load_run import Which


def parts_path(run: Path, split: str) -> Path:
    """Finished parts of an evaluation that has not ended."""
    return scores_path(run, split).parent / f"{split}.parts"


def is_run(text: str) -> bool:
    """Whether a path is the folder of a training run."""
    return (Path(text) / "config.json").exists()


def find_chosen(
    run: Path, notes: dict[str, Any], device: str | torch.device = "cpu"
) -> tuple[Which, LoadedRun] | None:
    """The weights of a run that its member was chosen for; None if it has those no more.

    Args:
        run: The run folder.
        notes: Those of the member.
        device: Where the model goes.
    """
    either: tuple[Which, ...] = ("best", "last")
    for which in either:
        with contextlib.suppress(FileError):  # a run may lack one of them
            loaded = load_model(run, which, device=device)
            if fingerprint(loaded.model) == notes["fingerprint"]:
                return which, loaded
    return None


def load_chosen(run: Path, notes: dict[str, Any], device: str | torch.device) -> LoadedRun:
    """The run with the weights that its member was chosen for.

    Args:
        run: The run folder.
        notes: Those of the member.
        device: Where the model goes.
    """
    if not is_run(str(run)):
        raise FileError(
            f"{run} holds scores of your own model, which this verb cannot open; for test data: "
            f"afterdrop evaluate MODEL DATA --out {run} --split test"
        )
    found = find_chosen(run, notes, device)
    if found is None:
        raise FileError(
            f"the member in {run} was chosen for other weights than the run has now; evaluate and "
            f"select again: afterdrop evaluate {run} --overwrite && afterdrop select {run}"
        )
    return found[1]
