"""The layout of a run folder: the one place that knows where each file lies.

config.json               the training configuration, and what the data made of it
metrics.jsonl             one line per validation
checkpoint/best, last     weights and the state of training (safetensors)
scores/SPLIT              results of an evaluation (safetensors)
scores/SPLIT.parts/       finished parts of an evaluation that was interrupted
choice.json               the chosen member, and what it was chosen on
report.html               the page about the run
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from afterdrop.errors import FileError


@dataclass(frozen=True)
class RunLayout:
    """The paths in a run folder.

    Attributes:
        path: The folder.

    Example:
        >>> RunLayout(Path("runs/ptb")).scores("valid").as_posix()
        'runs/ptb/scores/valid.safetensors'
    """

    path: Path

    @property
    def config(self) -> Path:
        """The configuration and what the data made of it."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """One JSON object per validation."""
        return self.path / "metrics.jsonl"

    @property
    def best(self) -> Path:
        """The weights with the lowest validation XE."""
        return self.path / "checkpoint" / "best.safetensors"

    @property
    def last(self) -> Path:
        """The checkpoint to resume from."""
        return self.path / "checkpoint" / "last.safetensors"

    @property
    def lock(self) -> Path:
        """Held by the process that trains here."""
        return self.path / ".lock"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's files."""
        return self.path / "tensorboard"

    @property
    def choice(self) -> Path:
        """The choice."""
        return self.path / "choice.json"

    @property
    def report(self) -> Path:
        """The page about the run."""
        return self.path / "report.html"

    def scores(self, split: str) -> Path:
        """The scores of a split.

        Raises:
            FileError: If the split is not a plain name.
        """
        if not split.strip() or Path(split).name != split:
            raise FileError(f"split={split!r} names a file in the run folder; use a plain word")
        return self.path / "scores" / f"{split}.safetensors"

    def parts(self, split: str) -> Path:
        """Finished parts of an evaluation that was interrupted."""
        return self.scores(split).parent / f"{split}.parts"

    def splits(self) -> list[str]:
        """The splits that have scores, by name."""
        return sorted(path.stem for path in (self.path / "scores").glob("*.safetensors"))
