"""Scores of finished stages of a longer evaluation: of a pilot, or of some settings of a search.

They lie beside the parts of the evaluation, and are removed with them (`part_files.remove_parts`).
A file is named after all that its scores depend on, so that one of other work is never taken up.
"""

import dataclasses
import hashlib
import json
import warnings
from pathlib import Path

from afterdrop.errors import DamagedError
from afterdrop.evaluation.part_files import stage_path
from afterdrop.evaluation.request import Request
from afterdrop.evaluation.scores.scores import Scores


def stage_file(folder: Path, request: Request, *about: str) -> Path:
    """The file of a stage's scores.

    Args:
        folder: Of the parts.
        request: What the stage evaluates.
        about: What else its scores depend on, such as the fingerprint of the weights.
    """
    known = [json.dumps(dataclasses.asdict(request), sort_keys=True), *about]
    name = hashlib.blake2b("\n".join(known).encode(), digest_size=12).hexdigest()
    return stage_path(folder, name)


def read_stage(path: Path) -> Scores | None:
    """The scores of a finished stage; None if it is not finished, or its file is damaged."""
    if not path.exists():
        return None
    try:
        return Scores.load(path)
    except DamagedError as error:
        warnings.warn(f"{error}. That stage is evaluated again.", stacklevel=2)
        return None
