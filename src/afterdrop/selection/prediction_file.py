"""Predictions of examples as a file: NumPy arrays (npz), rows (csv) or JSON objects (jsonl).

    npz     one array per column, [B, ...]
    csv     one row per target: the number of its example, its own within it if there are several
    jsonl   one object per example, with nested lists if an example has several targets

Legend: B examples, V classes.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from afterdrop.errors import DataError
from afterdrop.files import write_atomic
from afterdrop.selection.number_uncertainty import NumberUncertainty
from afterdrop.selection.uncertainty import Uncertainty, has_mutual_information

SUFFIXES = (".npz", ".csv", ".jsonl")


def check_suffix(path: Path) -> None:
    """Refuses a file whose name does not say how to write it.

    Raises:
        DataError: If its suffix is unknown.
    """
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path} must end with {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")


class PredictionTable:
    """Collects the predictions of batches, and writes them as a file.

    Columns are `prediction` (the class), `confidence`, `entropy` and `mutual_information`, or
    `disagreement` where mutual information does not exist, the last three each with its standard
    error from the number of masks. Of numbers they are `prediction` (the mean),
    `standard_deviation`, `expected_variance` and `variance_of_means`, each with its standard error.

    Args:
        batch_dim: Batch dimension of the logits.
        class_dim: Class dimension of the logits.

    Example:
        >>> import torch
        >>> from afterdrop.family.member import AMC
        >>> from afterdrop.selection.uncertainty import UncertaintySums
        >>> sums = UncertaintySums(AMC)
        >>> for _ in range(2):
        ...     sums.add(torch.zeros(2, 1, 4), "the input")
        ...     sums.end_block()
        >>> table = PredictionTable()
        >>> table.add(sums.result())
        >>> print(table.encoded(".jsonl").decode()[:50])
        {"example": 0, "prediction": 0, "confidence": 0.25
    """

    def __init__(self, batch_dim: int = 0, class_dim: int = -1) -> None:
        self.batch_dim, self.class_dim = batch_dim, class_dim
        self._batches: list[dict[str, np.ndarray[Any, Any]]] = []

    def add(self, found: Uncertainty | NumberUncertainty) -> None:
        """Adds the examples of a batch."""
        if isinstance(found, NumberUncertainty):
            columns = _number_columns(found)
        else:
            columns = _class_columns(found, self.class_dim)
        # Logits [B, V] of time-major inputs have no time, so their examples come first.
        at = self.batch_dim if columns["prediction"].dim() > self.batch_dim else 0
        self._batches.append({k: v.movedim(at, 0).cpu().numpy() for k, v in columns.items()})

    @property
    def num_examples(self) -> int:
        """B of all batches together."""
        return sum(len(batch["prediction"]) for batch in self._batches)

    def means(self) -> dict[str, float]:
        """The mean over all targets of each column but the classes and the errors."""
        names = [n for n in self._batches[0] if n != "prediction" and not n.endswith("_error")]
        return {
            name: float(np.concatenate([b[name].ravel() for b in self._batches]).mean())
            for name in names
        }

    def write(self, path: Path) -> None:
        """Writes the file, atomically, in the form that its suffix names."""
        check_suffix(path)
        write_atomic(path, self.encoded(path.suffix))

    def encoded(self, suffix: str) -> bytes:
        """The bytes of the file."""
        if suffix == ".npz":
            return self._npz()
        text = io.StringIO(newline="")
        if suffix == ".jsonl":
            for number, row in self._examples():
                values = {name: value.tolist() for name, value in row.items()}
                text.write(json.dumps({"example": number, **values}) + "\n")
        else:
            self._write_csv(text)
        return text.getvalue().encode()

    def _examples(self) -> Iterator[tuple[int, dict[str, np.ndarray[Any, Any]]]]:
        number = 0
        for batch in self._batches:
            for row in range(len(batch["prediction"])):
                yield number, {name: values[row] for name, values in batch.items()}
                number += 1

    def _write_csv(self, text: io.StringIO) -> None:
        several = any(batch["prediction"].ndim > 1 for batch in self._batches)
        writer = csv.writer(text)
        writer.writerow(["example", *["target"] * several, *self._batches[0]])
        for number, row in self._examples():
            flat = [values.ravel().tolist() for values in row.values()]
            for target, values in enumerate(zip(*flat)):
                writer.writerow([number, *[target] * several, *values])

    def _npz(self) -> bytes:
        shapes = sorted({batch["prediction"].shape[1:] for batch in self._batches})
        if len(shapes) > 1:
            raise DataError(
                f"examples of shapes {shapes[0]} and {shapes[1]} do not fit one array of an npz "
                "file; write csv or jsonl"
            )
        names, file = self._batches[0], io.BytesIO()
        arrays: dict[str, Any] = {
            name: np.concatenate([batch[name] for batch in self._batches]) for name in names
        }
        np.savez_compressed(file, **arrays)
        return file.getvalue()


def _class_columns(found: Uncertainty, class_dim: int) -> dict[str, Tensor]:
    name = "mutual_information" if has_mutual_information(found.member) else "disagreement"
    columns = {"prediction": found.log_probs.argmax(class_dim)}
    for column, field in (
        ("confidence", "confidence"),
        ("entropy", "predictive_entropy"),
        (name, "disagreement"),
    ):
        columns[column] = getattr(found, field)
        if found.errors is not None:
            columns[f"{column}_error"] = getattr(found.errors, field)
    return columns


def _number_columns(found: NumberUncertainty) -> dict[str, Tensor]:
    deviation, errors = found.variance.sqrt(), found.errors
    columns: dict[str, Tensor] = {}
    for column, field in (
        ("prediction", "mean"),
        ("standard_deviation", "variance"),
        ("expected_variance", "expected_variance"),
        ("variance_of_means", "variance_of_means"),
    ):
        scale = 0.5 / deviation if field == "variance" else 1.0  # of the root of the variance
        columns[column] = deviation if field == "variance" else getattr(found, field)
        if errors is not None:
            columns[f"{column}_error"] = scale * getattr(errors, field)
    return columns
