"""Scores of the finished settings of a search, kept until the search ends.

A file is named after all that its scores depend on, so that one of other work is never taken up.
"""

import dataclasses
import hashlib
import json
import warnings
from pathlib import Path

from afterdrop.errors import DamagedError
from afterdrop.evaluation.request import Request
from afterdrop.evaluation.scores import Scores
from afterdrop.files import make_folder


class FinishedSettings:
    """The finished settings in a folder, which is created when it is needed.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, request: Request, *about: str) -> Path:
        """The file of the scores of a request.

        Args:
            request: What was evaluated, with the settings.
            about: What else the scores depend on, such as the fingerprint of the weights.
        """
        known = [json.dumps(dataclasses.asdict(request), sort_keys=True), *about]
        name = hashlib.blake2b("\n".join(known).encode(), digest_size=12).hexdigest()
        return self.folder / f"settings-{name}.safetensors"

    def read(self, path: Path) -> Scores | None:
        """The scores in a file of `file`; None if it does not exist or is damaged."""
        if not path.exists():
            return None
        try:
            return Scores.load(path)
        except DamagedError:
            warnings.warn(f"{path} is damaged; its settings are evaluated again", stacklevel=2)
            return None

    def save(self, path: Path, scores: Scores) -> None:
        """Writes the scores to a file of `file`."""
        make_folder(self.folder)
        scores.save(path)

    def remove(self) -> None:
        """Removes all files, and the folder if nothing else is in it."""
        for path in self.folder.glob("settings-*.safetensors"):
            path.unlink(missing_ok=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()
