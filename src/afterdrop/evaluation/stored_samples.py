"""Samples that were computed elsewhere: arrays in memory and on disk, read in slices of examples.

    array, .npy, .safetensors                one array [K, B, ..., V]
    list of [B, ..., V]                      one array, or file, per member of an ensemble
    iterable of [K, b, ..., V]               batches of examples, which are copied to a file first

Samples of labels and of squared errors have no last dimension V (`sample_reading`). Files are
mapped into memory: only what is read is loaded. Legend: K samples, M multipliers, B examples, V
classes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from torch import Tensor

from afterdrop.errors import DataError, FileError
from afterdrop.evaluation.kept_items import as_sequence
from afterdrop.evaluation.scratch_file import ScratchFile

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_NAMES = {"samples": ("samples", "log_probs", "logits"), "targets": ("targets", "labels")}


@dataclasses.dataclass(frozen=True)
class Part:
    """Samples [K, M, B, ..., V] that can be read in slices of examples.

    Attributes:
        array: Has a shape and slices; what it holds is one array or one slice per call.
        shape: Of the array.
        lead: How many of the dimensions K and M the array has: none, K, or both.
    """

    array: Any
    shape: tuple[int, ...]
    lead: int

    @property
    def num_samples(self) -> int:
        """K."""
        return self.shape[0] if self.lead else 1

    def read(self, start: int, stop: int) -> Tensor:
        """[K, M, b, ..., V] of the examples from `start` to `stop`, as a copy."""
        found = self.array[(slice(None),) * self.lead + (slice(start, stop),)]
        if isinstance(found, Tensor):
            tensor = found.detach().cpu()
        else:
            tensor = _copied(found)
        if tensor.dtype not in _FLOATS:
            raise DataError(f"samples are {tensor.dtype}; give log-probabilities or logits")
        for _ in range(self.lead, 2):
            tensor = tensor.unsqueeze(self.lead)
        return tensor


@dataclasses.dataclass(frozen=True)
class Column:
    """All samples of some consecutive examples.

    Attributes:
        parts: Of the samples, one after another.
        size: B.
    """

    parts: tuple[Part, ...]
    size: int

    @property
    def num_samples(self) -> int:
        """K."""
        return sum(part.num_samples for part in self.parts)

    def read(self, start: int, stop: int) -> Tensor:
        """[K, M, b, ..., V] of some examples."""
        return torch.cat([part.read(start, stop) for part in self.parts])


def read_targets(targets: Any) -> Tensor:
    """Targets as a tensor [B, ...]: from a tensor, an array, a file, or batches of these."""
    if isinstance(targets, str | Path):
        targets = open_file(targets, "targets")[...]
    if isinstance(targets, Iterable) and not hasattr(targets, "shape"):
        listed = list(as_sequence(targets))
        if listed and hasattr(listed[0], "shape") and len(listed[0].shape):
            return torch.cat([torch.as_tensor(part) for part in listed])
        targets = listed
    try:
        if isinstance(targets, np.ndarray):
            return _copied(targets)
        return torch.as_tensor(targets)
    except (RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            f"targets are {_described(targets)}, not numbers ({error}); give class numbers, such "
            "as numpy.unique(targets, return_inverse=True)[1] of names"
        ) from error


def _described(targets: Any) -> str:
    if isinstance(targets, np.ndarray):
        return f"an array of {targets.dtype}"
    some = f" of {type(targets[0]).__name__}" if isinstance(targets, list) and targets else ""
    return f"{type(targets).__name__}{some}"


def _copied(array: Any) -> Tensor:
    """A tensor of an array: files are mapped read-only, and may have another order of bytes."""
    array = np.array(array)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


@contextlib.contextmanager
def naming_files(*given: Any) -> Iterator[None]:
    """Lets errors about samples and targets also name the files that they were read from."""
    listed = [each for one in given for each in (one if isinstance(one, list | tuple) else [one])]
    files = [str(each) for each in listed if isinstance(each, str | Path)]
    try:
        yield
    except DataError as error:
        if not files:
            raise
        raise DataError(f"{error} (in {', '.join(files)})") from error


def open_samples(
    samples: Any, targets: Tensor, scratch: ScratchFile, last: int = 1
) -> list[Column]:
    """Columns of whatever holds samples.

    Args:
        samples: As described above.
        targets: [B, ...]; their number of dimensions tells members from batches.
        scratch: Where batches of an iterator are copied to.
        last: Dimensions after those of the targets: 1 for classes, 0 for a number per target.

    Raises:
        DataError: If shapes do not match the targets.
    """
    if isinstance(samples, str | Path):
        samples = open_file(samples, "samples")
    if hasattr(samples, "shape"):
        return _checked([_column([_part(samples, targets, last)])], targets, last)
    if not isinstance(samples, Iterable):
        raise DataError(
            f"samples is {type(samples).__name__}; give an array {_shape(last)}, a .npy or "
            ".safetensors file, or an iterable of arrays"
        )
    if isinstance(samples, Sequence):
        opened = [open_file(s, "samples") if isinstance(s, str | Path) else s for s in samples]
        parts = [_part(array, targets, last) for array in opened]
    else:
        parts = list(_spilled(samples, targets, scratch, last))
    if not parts:
        raise DataError("samples is empty; give at least 2 samples")
    if all(part.lead == 0 for part in parts):
        return _checked([_column(parts)], targets, last)
    return _checked([_column([part]) for part in parts], targets, last)


def open_file(path: str | Path, what: str) -> Any:
    """An array in a .npy or .safetensors file, mapped into memory.

    Args:
        path: The file.
        what: "samples" or "targets", the name of the tensor if a file holds several.
    """
    path = Path(path)
    try:
        if path.suffix == ".npy":
            with warnings.catch_warnings():  # that a file of Python 2 takes longer to read
                warnings.simplefilter("ignore", UserWarning)
                return _numbers(np.load(path, mmap_mode="r", allow_pickle=False))
        if path.suffix == ".safetensors":
            return _Slices(path, what)
    except FileError:
        raise
    except Exception as error:  # NumPy may fail in any way at the header of a damaged file
        raise FileError(f"cannot read {path}: {error}; is it complete?") from error
    raise FileError(f"{what}={str(path)!r} must be a .npy or a .safetensors file")


def _numbers(array: Any) -> Any:
    """The array, if torch can hold what it has."""
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        raise ValueError(f"it holds {array.dtype}; numbers of at most 64 bits are needed")
    return array


class _Slices:
    """A tensor of a safetensors file, of which slices are read."""

    def __init__(self, path: Path, what: str) -> None:
        self._file = safetensors.safe_open(str(path), framework="pt")
        names = list(self._file.keys())
        known = [name for name in _NAMES[what] if name in names]
        if len(names) != 1 and not known:
            raise FileError(
                f"{path} holds {', '.join(names) or 'nothing'}; name the tensor of the {what} "
                f"{what!r}"
            )
        self._path, self._name = path, known[0] if known else names[0]
        self._slice = self._file.get_slice(self._name)
        self.shape = tuple(self._slice.get_shape())

    def __getitem__(self, index: Any) -> Tensor:
        try:
            return self._file.get_tensor(self._name) if index is ... else self._slice[index]
        except Exception as error:  # the reader has errors of its own for each damage
            raise FileError(f"cannot read {self._path}: {error}; is it complete?") from error


def _shape(last: int, front: str = "K, ") -> str:
    return f"[{front}*targets.shape{', V' * last}]"


def _require_numbers(array: Any) -> None:
    """Refuses arrays and tensors without numbers that can be read in slices."""
    if isinstance(array, Tensor) and (array.layout is not torch.strided or array.is_meta):
        what = "have no data" if array.is_meta else f"are a tensor of layout {array.layout}"
        raise DataError(f"samples {what}; give dense arrays")
    if isinstance(array, np.ndarray):
        try:
            _numbers(array)
        except ValueError as error:
            raise DataError(f"samples cannot be read: {error}") from error


def _part(array: Any, targets: Tensor, last: int) -> Part:
    try:
        array = array if hasattr(array, "shape") else np.asarray(array)
    except ValueError as error:  # rows of different lengths
        raise DataError(f"samples are not an array: {error}") from error
    _require_numbers(array)
    shape = tuple(array.shape)
    lead = len(shape) - targets.dim() - last
    if lead not in (0, 1) or shape[lead + 1 : len(shape) - last] != tuple(targets.shape[1:]):
        raise DataError(
            f"samples of shape {shape} do not match targets of shape {tuple(targets.shape)}; give "
            f"{_shape(last)}, or a list of {_shape(last, '')}, one per member"
        )
    return Part(array, shape, lead)


def _column(parts: Sequence[Part]) -> Column:
    sizes = {part.shape[part.lead :] for part in parts}
    if len(sizes) > 1:
        raise DataError(
            f"members have samples of different shapes: {sorted(sizes)}; give the same examples "
            "and classes of each"
        )
    return Column(tuple(parts), parts[0].shape[parts[0].lead])


def _checked(columns: list[Column], targets: Tensor, last: int) -> list[Column]:
    counts = {column.num_samples for column in columns}
    classes = {part.shape[-1] for column in columns for part in column.parts if last}
    total = sum(column.size for column in columns)
    if classes == {0}:
        raise DataError("samples have no classes: their last dimension has size 0")
    if len(counts) > 1 or len(classes) > 1:
        raise DataError(
            f"batches have {sorted(counts)} samples{f' of {sorted(classes)} classes' * last}; all "
            "must have the same numbers"
        )
    if total != len(targets):
        raise DataError(
            f"samples of {total} examples do not match targets of shape {tuple(targets.shape)}; "
            f"give {_shape(last)}, with one target for each example, in the same order"
        )
    return columns


def _spilled(
    batches: Iterable[Any], targets: Tensor, scratch: ScratchFile, last: int
) -> Iterator[Part]:
    """Batches of an iterator, copied to a file: they are read twice."""
    for batch in batches:
        _require_numbers(batch)
        if isinstance(batch, Tensor):
            batch = batch.detach().cpu()
            batch = (batch.float() if batch.dtype == torch.bfloat16 else batch).numpy()
        elif hasattr(batch, "shape"):
            batch = np.asarray(batch)
        part = _part(batch, targets, last)
        yield dataclasses.replace(part, array=scratch.store(part.array))
