"""Text sets: three splits of token numbers and their vocabulary."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import Tensor

from afterdrop.data.data_files import read_content, require_file
from afterdrop.data.encoding import EOS, Level, tokenize
from afterdrop.data.vocabulary import UNKNOWN, Vocabulary
from afterdrop.errors import DataError

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, Split, Split] = ("train", "valid", "test")


@dataclass(frozen=True, eq=False)
class TextSet:
    r"""A corpus in three splits.

    Attributes:
        name: The name given to `load`, with the Python version if the text depends on it.
        level: How its files are split into tokens: `word`, `char` or `byte`.
        unit: What a token is, which decides how a cross entropy is shown: as perplexity for
            `word`, as bits for `char` and `byte`. It differs from `level` for `ptb-char`, whose
            files contain characters separated by spaces.
        vocabulary: Built from the training split only.
        train: Token numbers of the training split, 1-d int32, every line ended by `eos`.
        valid: The same for the validation split.
        test: The same for the test split.
        checksums: SHA-256 of each split's text, to verify later that it has not changed.

    Example:
        >>> text = build_text_set("toy", {"train": b"a b\n", "valid": b"b\n", "test": b"a\n"})
        >>> text.vocabulary.tokens, text.train.tolist(), text.unit
        (('<eos>', 'a', 'b'), [1, 2, 0], 'word')
    """

    name: str
    level: Level
    unit: Level
    vocabulary: Vocabulary
    train: Tensor
    valid: Tensor
    test: Tensor
    checksums: Mapping[Split, str] = field(default_factory=dict)

    @property
    def has_lines(self) -> bool:
        """Whether stripes start at lines; bytes are one continuous stream."""
        return self.level != "byte"

    def split(self, name: str) -> Tensor:
        """The tokens of a split by name.

        Raises:
            DataError: If there is no such split.
        """
        for known, tokens in zip(SPLITS, (self.train, self.valid, self.test)):
            if name == known:
                return tokens
        raise DataError(f"split={name!r} must be one of {', '.join(SPLITS)}")


def build_text_set(
    name: str,
    contents: Mapping[Split, bytes],
    level: Level = "word",
    *,
    unit: Level | None = None,
    min_count: int = 1,
    unknown: str | None = None,
    sources: Mapping[Split, str] | None = None,
) -> TextSet:
    """Builds a text set from the contents of its three files.

    Args:
        name: Its name.
        contents: The text of each split.
        level: How to split it into tokens.
        unit: What a token is; None is `level`.
        min_count: Tokens rarer than this in training become `<unk>`.
        unknown: The unknown token; None is `<unk>` if `min_count` makes one or the training text
            contains it, else no unknown token.
        sources: The file of each split, for error messages.

    Raises:
        DataError: If a split is not text, or has tokens that do not occur in training and there
            is no unknown token.
    """
    sources = sources or {split: f"{name} ({split})" for split in SPLITS}
    tokens = {split: tokenize(contents[split], level, sources[split]) for split in SPLITS}
    counts = tokens["train"].counts()
    if unknown is None and (min_count > 1 or UNKNOWN in counts):
        unknown = UNKNOWN
    vocabulary = Vocabulary.build(counts, EOS[level], unknown, min_count)
    train, valid, test = (tokens[s].encode(vocabulary, sources[s]) for s in SPLITS)
    checksums = {s: hashlib.sha256(contents[s]).hexdigest() for s in SPLITS}
    return TextSet(name, level, unit or level, vocabulary, train, valid, test, checksums)


def load_text_folder(folder: str | Path, level: Level = "word", min_count: int = 1) -> TextSet:
    """Reads a user's folder of `train.txt`, `valid.txt` and `test.txt` (plain, gz or xz).

    Args:
        folder: The folder.
        level: `word`, `char` or `byte`.
        min_count: Tokens rarer than this in training become `<unk>`.

    Raises:
        FileError: If a split is missing, empty or truncated.
        DataError: As `build_text_set`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for split in SPLITS:
        ...         _ = Path(folder, f"{split}.txt").write_text("to be or not to be")
        ...     load_text_folder(folder, "word", min_count=2).vocabulary.tokens
        ('<eos>', '<unk>', 'be', 'to')
    """
    folder = Path(folder)
    paths = {
        split: require_file(
            f"{split}.txt", [folder], "a text folder needs train.txt, valid.txt and test.txt"
        )
        for split in SPLITS
    }
    return build_text_set(
        str(folder),
        {split: read_content(path) for split, path in paths.items()},
        level,
        min_count=min_count,
        sources={split: str(path) for split, path in paths.items()},
    )
