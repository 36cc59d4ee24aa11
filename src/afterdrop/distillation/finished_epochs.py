"""The file of finished epochs, from which an interrupted distillation resumes.

It holds the copy and the state of Adam after the last finished epoch, and what they depend on: of
other settings, other data or other predictions of the chosen member it is refused. One distillation
at a time uses it, and it is removed once the whole result exists.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from torch import Tensor

from afterdrop.distillation.student_settings import (
    FirstBatch,
    StudentSettings,
    first_difference,
)
from afterdrop.errors import FileError
from afterdrop.file_locks import sole_lock
from afterdrop.files import check_header, make_folder, remove_abandoned
from afterdrop.tensor_files import read_tensors, write_tensors
from afterdrop.typed_records import read_record

_FILE, _LOCK = "distil.safetensors", ".distil.lock"
_KIND, _VERSION = "afterdrop-distillation", 3
_OUTPUTS = "outputs"


class EpochsNote(TypedDict):
    """What the file says beside its tensors."""

    settings: StudentSettings
    first_batch: str
    device: str
    losses: tuple[float, ...]


class FinishedEpochs:
    """The finished epochs of a distillation (`finished_epochs`).

    Args:
        file: Where they are kept.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._count: int | None = None  # of epochs in the file, once it is known to be usable
        self._settings: StudentSettings | None = None
        self._first: FirstBatch | None = None

    def take_up(
        self, settings: StudentSettings, first: FirstBatch
    ) -> tuple[dict[str, Tensor], tuple[float, ...]] | None:
        """Tensors and divergences of the finished epochs; None if there are none.

        Args:
            settings: Of this distillation.
            first: The first batch of its data.

        Raises:
            FileError: If the file is damaged, or of another distillation.
        """
        self._settings, self._first = settings, first
        if not self.file.exists():
            self._count = 0
            return None
        tensors, note = self._read()
        outputs = tensors.pop(_OUTPUTS, None)
        if note["settings"] != settings:
            raise FileError(
                f"{self.file} is of another distillation: "
                f"{first_difference(settings, note['settings'])}; give the same arguments, or "
                "remove that file to begin again"
            )
        if note["first_batch"] != first.digest:
            self._other_batch(first.fixed)
        elif outputs is None or not first.outputs.matches(
            outputs, same_device=note["device"] == first.device
        ):
            raise FileError(
                "the chosen member does not predict for the first batch what it predicted in the "
                f"finished epochs in {self.file}, although the weights are the same: the model's "
                "code or its settings have changed. Restore them, or remove that file."
            )
        self._count = len(note["losses"])
        return tensors, note["losses"]

    def write(self, tensors: dict[str, Tensor], losses: list[float]) -> None:
        """Replaces the file by one with another finished epoch."""
        assert self._settings is not None and self._first is not None
        note = {
            "kind": _KIND,
            "version": _VERSION,
            "settings": dataclasses.asdict(self._settings),
            "first_batch": self._first.digest,
            "device": self._first.device,
            "losses": losses,
        }
        write_tensors(self.file, {**tensors, _OUTPUTS: self._first.outputs.projections}, note)
        self._count = len(losses)

    def damaged(self, error: ValueError) -> FileError:
        """The error to raise for content that cannot be right."""
        self._count = None
        return FileError(
            f"{self.file} is damaged ({error}); remove it to begin the distillation again"
        )

    def add_note(self, error: BaseException) -> None:
        """Says with an error what is kept, unless the error is that the file cannot be used."""
        if self._count is None:
            return
        if not self._count:
            kept = "no epoch was finished, so nothing is kept: the same call starts over"
        else:
            what = "epoch is" if self._count == 1 else "epochs are"
            kept = f"{self._count} finished {what} kept in {self.file}: the same call resumes"
        error.add_note(kept)

    def _read(self) -> tuple[dict[str, Tensor], EpochsNote]:
        try:
            tensors, note = read_tensors(self.file)
            check_header(self.file, note, _KIND, _VERSION)
        except FileError as error:
            raise FileError(
                f"{error}; or remove that file, to begin the distillation again"
            ) from error
        try:
            return tensors, read_record(EpochsNote, note)
        except ValueError as error:
            raise self.damaged(error) from error

    def _other_batch(self, fixed: bool) -> None:
        """Refuses other data; warns where they may be the same in another order."""
        what = f"the first batch is not the one of the finished epochs in {self.file}"
        if fixed:
            raise FileError(
                f"{what}; give the same data in the same order, or remove that file to begin again"
            )
        warnings.warn(
            f"{what}. If the loader only shuffles, the copy will differ slightly from that of an "
            "uninterrupted distillation; if these are other data, remove that file and begin again",
            stacklevel=2,
        )


@contextlib.contextmanager
def finished_epochs(folder: str | Path | None) -> Iterator[FinishedEpochs | None]:
    """Reserves the file of a folder until the result exists, and then removes it.

    Args:
        folder: The folder, which is created if necessary; None to keep nothing.

    Raises:
        FileError: If another distillation uses the file, or the folder cannot be written to.
    """
    if folder is None:
        yield None
        return
    file = Path(folder) / _FILE
    make_folder(file.parent)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(sole_lock(file.with_name(_LOCK)))
        except BlockingIOError as error:
            raise FileError(
                f"another process is distilling into {file}; wait for it, or give another folder"
            ) from error
        remove_abandoned(file.parent)
        epochs = FinishedEpochs(file)
        try:
            yield epochs
        except BaseException as error:
            epochs.add_note(error)
            raise
        file.unlink(missing_ok=True)
