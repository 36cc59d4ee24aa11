"""Writes the metrics of each validation for TensorBoard, an optional dependency."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from afterdrop.errors import ExtraError


class Tracker:
    """Writes the metrics of each validation for TensorBoard below the run folder.

    Args:
        folder: Where; TensorBoard is pointed at it or at a parent.
        step: The step of a resumed run: what was written beyond it is hidden.

    Raises:
        ExtraError: If tensorboard is not installed.
    """

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ExtraError.of(error, "track=True needs tensorboard", "track") from error
        self._writer: Any = SummaryWriter(str(folder), purge_step=step)

    def add(self, line: Mapping[str, Any]) -> None:
        """The numbers of one line of metrics."""
        for name, value in line.items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(name, value, line["step"])
        self._writer.flush()

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()
