"""Finished parts of an evaluation, kept on disk so that an interrupted one goes on.

A part holds the results of a few batches in order. Parts are written every half minute and on
interruption; joined in order they are what an uninterrupted evaluation would have held.
"""

import contextlib
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from afterdrop.errors import FileError
from afterdrop.evaluate.passes import Batch
from afterdrop.evaluate.protocol import Protocol, digest
from afterdrop.evaluate.scores_file import read_tensors, write_tensors
from afterdrop.evaluate.worker import Worker
from afterdrop.masks.rows import tensors as all_tensors

_SECONDS = 30.0
_CARRIED = "carried_"


class Parts:
    """Collects the results of batches; with a folder, also keeps them there.

    Args:
        folder: Where parts are kept, or None to keep nothing.
        protocol: Of this evaluation; parts of another one are refused.
        worker: Whose carried state, if it has one, is kept with the parts.
        first_example: Number of the first example.
    """

    def __init__(
        self, folder: str | Path | None, protocol: Protocol, worker: Worker, first_example: int
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.protocol, self.worker, self.first_example = protocol, worker, first_example
        self._results: list[dict[str, Tensor]] = []
        self._digests: list[str] = []
        self._unsaved = self._seen = 0
        self._saved = 0.0
        if self.folder is not None and self.folder.exists():
            self._load(self.folder)

    def done(self, number: int, batch: Batch) -> bool:
        """Whether a batch is finished already; refuses if its data are not those of then."""
        self._seen = number + 1
        if number >= len(self._digests):
            return False
        if self._digests[number] != _digest(batch):
            raise FileError(
                f"batch {number} is not the one that was evaluated before the interruption in "
                f"{self.folder}; give the same data in the same order, or remove that folder"
            )
        return True

    def add(self, batch: Batch, results: dict[str, Tensor]) -> None:
        """Adds the results of the next batch."""
        self._results.append(results)
        self._digests.append(_digest(batch) if self.folder is not None else "")
        self._unsaved += 1
        if time.monotonic() - self._saved > _SECONDS:
            self._save()

    def finish(self) -> dict[str, Tensor]:
        """All results joined; the parts on disk are not needed any more."""
        if self._seen < len(self._digests):
            raise FileError(
                f"{self.folder} holds {len(self._digests)} finished batches, the data now have "
                f"{self._seen}; give the same data, or remove that folder"
            )
        joined = {
            name: torch.cat([part[name] for part in self._results], -1) for name in self._results[0]
        }
        if self.folder is not None and self.folder.exists():
            for path in self.folder.glob("part-*.safetensors"):
                path.unlink()
            with contextlib.suppress(OSError):  # what else is in the folder is not ours
                self.folder.rmdir()
        return joined

    def __enter__(self) -> "Parts":
        self._saved = time.monotonic()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self._save()

    def _save(self) -> None:
        self._saved = time.monotonic()
        if self.folder is None or not self._unsaved:
            return
        fresh, digests = self._results[-self._unsaved :], self._digests[-self._unsaved :]
        joined = {name: torch.cat([part[name] for part in fresh], -1) for name in fresh[0]}
        note = {
            "protocol": self.protocol.to_json(),
            "digests": digests,
            "first_example": self.first_example,
        }
        number = len(list(self.folder.glob("part-*.safetensors"))) if self.folder.exists() else 0
        carried = {_CARRIED + name: tensor for name, tensor in self.worker.carried().items()}
        path = self.folder / f"part-{number:05d}.safetensors"
        write_tensors(path, {**joined, **carried}, note)
        # From here on the part is one entry, so that joining in order stays right after loading.
        self._results[-self._unsaved :] = [joined]
        self._unsaved = 0

    def _load(self, folder: Path) -> None:
        for path in sorted(folder.glob("part-*.safetensors")):
            results, note = read_tensors(path)
            if "digests" not in note:
                raise FileError(f"{path} is no part of an evaluation; remove {folder}")
            self.protocol.require_same(
                Protocol.from_json(note["protocol"]), f"this evaluation and the parts in {folder}"
            )
            if note["first_example"] != self.first_example:
                raise FileError(
                    f"the parts in {folder} start at first_example={note['first_example']}, not "
                    f"{self.first_example}; give the same, or remove that folder"
                )
            carried = {n: results.pop(n) for n in list(results) if n.startswith(_CARRIED)}
            self.worker.restore({n.removeprefix(_CARRIED): t for n, t in carried.items()})
            self._results.append(results)
            self._digests += note["digests"]


def _digest(batch: Batch) -> str:
    return digest((str(i), t) for i, t in enumerate([*all_tensors(batch.inputs), batch.targets]))
