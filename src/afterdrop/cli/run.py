"""Run folders: where things lie in them that only the command line needs."""

from pathlib import Path


def parts_path(run: Path, split: str) -> Path:
    """Finished parts of an evaluation that has not ended."""
    return run / "scores" / f"{split}.parts"


def is_run(text: str) -> bool:
    """Whether a path is the folder of a training run."""
    return (Path(text) / "config.json").exists()
