"""Built-in sets that need no files, for first experiments: `builtin:pydoc`, `builtin:digits`.

The text of `builtin:pydoc` is Python's own help topics (`pydoc_data.topics`), so it changes with
the Python version. The name of the set records the version, and results are comparable only under
the same name. Topics repeat each other's sections, so a paragraph is kept only where it occurs
first; otherwise parts of the test split would also be in the training split. Words are runs of
letters, digits and underscores; any other character is a word of its own.
"""

import hashlib
import platform
import re
from pydoc_data.topics import topics

import numpy as np
import torch

from afterdrop.data.encoding import Level
from afterdrop.data.images import ImageSet, Labelled
from afterdrop.data.text_set import Split, TextSet, build_text_set
from afterdrop.errors import DataError, ExtraError

PYDOC = "builtin:pydoc"
DIGITS = "builtin:digits"
_MIN_COUNT = 2  # held-out topics have new words, which need an <unk> seen in training
_HELD_OUT_SHARE = 0.1  # of the characters, for valid and for test each
_UNDERLINE = re.compile(r"^ *([*=~^-])\1{2,}$", re.MULTILINE)  # below a heading
_LARGEST_SHARE = 0.04  # larger topics go to train; one of them would fill a held-out split
_DIGITS_TRAIN, _DIGITS_VALID = 1_000, 400  # of 1,797; the rest is test
_DIGITS_SEED = 0


def pydoc_name() -> str:
    """The full name of the set under this Python.

    Example:
        >>> pydoc_name().startswith("builtin:pydoc-3.")
        True
    """
    return f"{PYDOC}-{platform.python_version()}"


def load_pydoc(name: str = PYDOC, level: Level = "word", min_count: int | None = None) -> TextSet:
    """Python's help topics as a text set, split by topic.

    Args:
        name: `builtin:pydoc`, or the full name with the Python version, which must be this one.
        level: `word` or `char` (or `byte`).
        min_count: Tokens rarer than this in training become `<unk>`; None is 2.

    Raises:
        DataError: If `name` asks for another Python version.

    Example:
        >>> text = load_pydoc(level="char")
        >>> len(text.train) > 6 * len(text.valid) > 0
        True
    """
    if name not in (PYDOC, pydoc_name()):
        raise DataError(
            f"{name} needs that Python version, this is {platform.python_version()}: "
            f"use {PYDOC} (results will differ) or that Python"
        )
    texts = {
        split: "\n".join(_words_apart(text) if level == "word" else text for text in members)
        for split, members in _split_topics(_unrepeated(topics)).items()
    }
    return build_text_set(
        pydoc_name(),
        {split: text.encode() for split, text in texts.items()},
        level,
        min_count=_MIN_COUNT if min_count is None else min_count,
    )


def load_digits() -> ImageSet:
    """scikit-learn's 1,797 digits of 8x8 pixels: 1,000 for training, 400 and 397 held out.

    Every split has its even share of each class. The order is the same for all numpy versions.

    Raises:
        ExtraError: If scikit-learn is not installed.

    Example:
        >>> digits = load_digits()
        >>> digits.train.images.shape, digits.valid.labels.bincount().tolist()
        (torch.Size([1000, 8, 8]), [40, 40, 40, 40, 40, 40, 40, 40, 40, 40])
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ExtraError.of(error, f"{DIGITS} needs scikit-learn", "demo") from error
    digits = datasets.load_digits()
    shuffled = np.random.RandomState(_DIGITS_SEED).permutation(len(digits.target))
    labels = digits.target[shuffled]
    rank = np.zeros(len(labels), np.int64)  # index of an image within its class
    for label in np.unique(labels):
        rank[labels == label] = np.arange((labels == label).sum())
    order = shuffled[np.argsort(rank, kind="stable")]
    images = torch.from_numpy(digits.images[order]).float() / 16
    targets = torch.from_numpy(digits.target[order]).long()
    train, valid = slice(_DIGITS_TRAIN), slice(_DIGITS_TRAIN, _DIGITS_TRAIN + _DIGITS_VALID)
    test = slice(valid.stop, None)
    return ImageSet(
        DIGITS, *(Labelled(images[part], targets[part]) for part in (train, valid, test))
    )


def _unrepeated(topics: dict[str, str]) -> dict[str, str]:
    """Keeps each paragraph only in the first topic (by name) with it; drops empty topics."""
    seen: set[str] = set()
    kept: dict[str, str] = {}
    for name in sorted(topics):
        text = re.sub(_UNDERLINE, "", topics[name])
        paragraphs = [p.strip("\n") for p in re.split(r"\n\s*\n", text)]
        fresh = [p for p in dict.fromkeys(paragraphs) if p and p not in seen]
        seen.update(fresh)
        if fresh:
            kept[name] = "\n".join(fresh) + "\n"
    return kept


def _split_topics(topics: dict[str, str]) -> dict[Split, list[str]]:
    """Assigns whole topics to splits, in an order that depends on their names only."""
    total = sum(map(len, topics.values()))
    splits: dict[Split, list[str]] = {"train": [], "valid": [], "test": []}
    room: dict[Split, float] = {"test": _HELD_OUT_SHARE * total, "valid": _HELD_OUT_SHARE * total}
    for name in sorted(topics, key=lambda name: hashlib.sha256(name.encode()).digest()):
        text = topics[name]
        chosen: Split = "train"
        if len(text) <= _LARGEST_SHARE * total:
            chosen = next((split for split, left in room.items() if left > 0), "train")
        if chosen != "train":
            room[chosen] -= len(text)
        splits[chosen].append(text)
    return splits


def _words_apart(text: str) -> str:
    return re.sub(r"(\w+|[^\w\s])", r" \1 ", text)
