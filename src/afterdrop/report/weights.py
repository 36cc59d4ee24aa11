"""Which weights a run folder keeps."""

from pathlib import Path

from afterdrop.models.fingerprint import fingerprint
from afterdrop.train import load_model
from afterdrop.train.folder import RunFolder
from afterdrop.train.load_run import Which


def kept_fingerprints(path: Path) -> set[str]:
    """Fingerprints of the best and the last weights, as far as they are kept.

    Scores of a fingerprint that is not among them are of other weights; where none is kept, nobody
    can tell.

    Raises:
        AfterdropError: If a checkpoint cannot be read.
    """
    folder = RunFolder(path)
    kept: list[Which] = ["best"] if folder.best.exists() else []
    kept += ["last"] if folder.last.exists() else []
    return {fingerprint(load_model(path, which).model) for which in kept}
