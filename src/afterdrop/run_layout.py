"""The layout of a run folder: the one place that knows where each file lies.

config.json               the training configuration, and what the data made of it
metrics.jsonl             one line per validation
checkpoint/best, last     weights and the state of training (safetensors)
checkpoint/previous       the last but one, for the case that the last one is damaged
scores/SPLIT              results of an evaluation (safetensors)
scores/SPLIT.parts/       finished parts of an evaluation that was interrupted
dynamic/                  a folder like this one, for scores of dynamic evaluation
choice.json               the chosen member, and what it was chosen on
report.html               the page about the run
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from afterdrop.errors import FileError

_LONGEST = 100  # bytes of a split's name; file systems allow 255 with what is added to it


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
    def previous(self) -> Path:
        """The checkpoint before the last one."""
        return self.path / "checkpoint" / "previous.safetensors"

    @property
    def lock(self) -> Path:
        """Held by the process that trains here."""
        return self.path / ".lock"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's files."""
        return self.path / "tensorboard"

    @property
    def dynamic(self) -> Path:
        """A run folder of its own, for scores of dynamic evaluation."""
        return self.path / "dynamic"

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
        plain = split.isprintable() and split.strip() == split and Path(split).name == split
        if not plain or split.startswith(".") or not 0 < len(split.encode()) <= _LONGEST:
            raise FileError(
                f"split={split!r:.60} names a file in the run folder; use a plain word of at most "
                f"{_LONGEST} bytes"
            )
        return self.path / "scores" / f"{split}.safetensors"

    def parts(self, split: str) -> Path:
        """Finished parts of an evaluation that was interrupted."""
        return self.scores(split).parent / f"{split}.parts"

    def scores_lock(self, split: str) -> Path:
        """Held by the process that evaluates a split, until its scores are saved."""
        return self.scores(split).parent / f".{split}.lock"

    def splits(self) -> list[str]:
        """The splits that have scores, by name."""
        return sorted(path.stem for path in (self.path / "scores").glob("*.safetensors"))
