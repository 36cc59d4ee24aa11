"""Names and training counts of a model's classes, from the training data or from a file."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from afterdrop.data import TextSet
from afterdrop.errors import FileError
from afterdrop.files import read_whole
from afterdrop.train import TrainConfig, load_set
from afterdrop.train.build_task import build_task, require_same
from afterdrop.typed_records import parse_json


@dataclass(frozen=True)
class Classes:
    """The classes of a model.

    Attributes:
        names: [V] names.
        counts: [V] number of occurrences in the training data.
    """

    names: tuple[str, ...]
    counts: Tensor


def classes_of_data(
    config: TrainConfig, places: Iterable[str | Path | None], recorded: dict[str, Any]
) -> Classes:
    """The classes of the data that a run was trained on.

    Args:
        config: The configuration of the run.
        places: Where the data may lie, as for `load_set`.
        recorded: What the run recorded about its data.

    Raises:
        AfterdropError: If the data cannot be loaded, or are not those of the run.
    """
    found = load_set(config, *places)
    require_same(recorded, build_task(config, found, torch.device("cpu")).identity())
    if isinstance(found, TextSet):
        vocabulary = found.vocabulary
        return Classes(vocabulary.tokens, torch.tensor(vocabulary.counts))
    counts = found.train.labels.bincount(minlength=found.classes)
    return Classes(tuple(map(str, range(len(counts)))), counts)


def classes_of_file(path: Path) -> Classes:
    """Reads classes from a JSON object that maps names to training counts, in class order.

    Raises:
        FileError: If the file is not such an object.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "classes.json"
        ...     _ = path.write_text('{"cat": 5000, "dog": 120}')
        ...     classes_of_file(path).names
        ('cat', 'dog')
    """
    try:
        content = parse_json(read_whole(path))
    except ValueError as error:
        raise FileError(
            f"cannot read {path}: {error}; give a JSON file of class names and counts"
        ) from error
    counts = list(content.values()) if isinstance(content, dict) else []
    if not counts or not all(type(n) is int and n >= 0 for n in counts):
        raise FileError(
            f"{path} must be a JSON object that maps class names to training counts, in class "
            'order, such as {"cat": 5000, "dog": 120}'
        )
    return Classes(tuple(content), torch.tensor(counts))


def shown_name(name: str) -> str:
    r"""A printable class name: names with blanks or control characters are quoted and escaped.

    Example:
        >>> [shown_name(n) for n in ("word", " ", "a" + chr(10))]
        ['word', "' '", "'a\\n'"]
    """
    return name if name.isprintable() and name.strip() == name and name else repr(name)
