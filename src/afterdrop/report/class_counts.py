"""Names and training counts of the classes of a run, from its data or from a file."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from afterdrop.data import TextSet
from afterdrop.errors import FileError
from afterdrop.train.build_task import load_set
from afterdrop.train.config import TrainConfig


@dataclass(frozen=True)
class Classes:
    """The classes of a model.

    Attributes:
        names: [V] what each is called.
        counts: [V] how often each occurred in training.
    """

    names: tuple[str, ...]
    counts: Tensor


def classes_of_data(config: TrainConfig, folder: str | Path | None) -> Classes:
    """The classes of the data that a run was trained on.

    Raises:
        AfterdropError: If the data are not there.
    """
    found = load_set(config, folder)
    if isinstance(found, TextSet):
        vocabulary = found.vocabulary
        return Classes(vocabulary.tokens, torch.tensor(vocabulary.counts))
    counts = found.train.labels.bincount(minlength=found.classes)
    return Classes(tuple(map(str, range(len(counts)))), counts)


def classes_of_file(path: Path) -> Classes:
    """The classes of a JSON object from name to training count, in the order of the classes.

    Raises:
        FileError: If it is none.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "classes.json"
        ...     _ = path.write_text('{"cat": 5000, "dog": 120}')
        ...     classes_of_file(path).names
        ('cat', 'dog')
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"cannot read {path}: {error}") from error
    counts = list(content.values()) if isinstance(content, dict) else []
    if not counts or not all(type(n) is int and n >= 0 for n in counts):
        raise FileError(
            f"{path} must be a JSON object from class name to training count, in the order of the "
            'classes, such as {"cat": 5000, "dog": 120}'
        )
    return Classes(tuple(content), torch.tensor(counts))


def shown_name(name: str) -> str:
    r"""A class name that can be seen: blanks and control characters are spelled out.

    Example:
        >>> [shown_name(n) for n in ("word", " ", "a" + chr(10))]
        ['word', "' '", "'a\\n'"]
    """
    return name if name.isprintable() and name.strip() == name and name else repr(name)
