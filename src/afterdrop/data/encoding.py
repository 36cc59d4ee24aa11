"""Converts text files to token numbers and back, at word, character or byte level.

Every line, blank or not, ends in one end-of-sentence token. Words are separated by white space;
nothing is lower-cased. At character and byte level the newline is the end-of-sentence token, so
decoding restores the text exactly. A byte is represented by the character with the same number.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from afterdrop.data.vocabulary import Vocabulary
from afterdrop.errors import DataError

Level = Literal["word", "char", "byte"]
EOS: dict[Level, str] = {"word": "<eos>", "char": "\n", "byte": "\n"}
_NEWLINE = 10


class Tokens(Protocol):
    """A text split into tokens."""

    def counts(self) -> dict[str, int]:
        """Occurrences of each token."""

    def encode(self, vocabulary: Vocabulary, source: str) -> Tensor:
        """The token numbers, int32."""


class _Words:
    """Words as strings."""

    def __init__(self, text: str, source: str) -> None:
        eos = EOS["word"]
        if clash := re.search(rf"(?<!\S){eos}(?!\S)", text):
            line = text.count("\n", 0, clash.start()) + 1
            raise DataError(
                f"{source}, line {line} holds {eos!r}, the name of the token that afterdrop puts "
                "at the end of every line; remove it there"
            )
        # A last line without a newline counts only if it has words: PTB's character files end in
        # a single space.
        if text.rpartition("\n")[2].strip():
            text += "\n"
        self._words = text.replace("\n", f" {eos} ").split()

    def counts(self) -> dict[str, int]:
        return dict(Counter(self._words))

    def encode(self, vocabulary: Vocabulary, source: str) -> Tensor:
        return vocabulary.encode(self._words, source).to(torch.int32)


class _Symbols:
    """Characters or bytes as an array, because 100 MB of Python objects would be too large."""

    def __init__(self, codes: np.ndarray) -> None:
        self._codes = codes

    def counts(self) -> dict[str, int]:
        codes, counts = np.unique(self._codes, return_counts=True)
        return {chr(code): int(count) for code, count in zip(codes, counts)}

    def encode(self, vocabulary: Vocabulary, source: str) -> Tensor:
        unknown = vocabulary.unknown_id
        table = np.full(int(self._codes.max()) + 1, -1 if unknown is None else unknown, np.int32)
        for token, number in vocabulary.index.items():
            if len(token) == 1 and ord(token) < len(table):
                table[ord(token)] = number
        ids = table[self._codes]
        if unknown is None and (ids < 0).any():
            at = int((ids < 0).argmax())
            line = int((self._codes[:at] == _NEWLINE).sum()) + 1
            raise vocabulary.refusal(chr(self._codes[at]), line, source)
        return torch.from_numpy(ids)


def check_level(level: str) -> Level:
    """Returns `level` if it is valid and raises a `DataError` otherwise.

    Example:
        >>> check_level("word")
        'word'
    """
    for known in get_args(Level):
        if level == known:
            return known
    raise DataError(f"level={level!r} must be one of {', '.join(get_args(Level))}")


def tokenize(content: bytes, level: Level, source: str = "the text") -> Tokens:
    r"""Splits the content of a text file into tokens.

    Args:
        content: The uncompressed content of the file.
        level: `word`, `char` (both UTF-8) or `byte`.
        source: Name of the text (a file), for error messages.

    Raises:
        DataError: If the text is empty, is not UTF-8, or holds the end-of-sentence token as a word.

    Example:
        >>> tokenize(b"a b\n\na\n", "word").counts()
        {'a': 2, 'b': 1, '<eos>': 3}
        >>> tokenize(b"ab\na", "char").counts()
        {'\n': 2, 'a': 2, 'b': 1}
    """
    if not content or (level == "word" and not content.strip()):
        raise DataError(f"{source} holds no text at level={level!r}; put some there")
    if level == "byte":
        return _Symbols(np.frombuffer(content, np.uint8))
    text = _decode_utf8(content, source)
    if level == "word":
        return _Words(text, source)
    if not text.endswith("\n"):
        text += "\n"
    return _Symbols(np.frombuffer(text.encode("utf-32-le"), np.uint32))


def encode_text(
    content: bytes, vocabulary: Vocabulary, level: Level, source: str = "the text"
) -> Tensor:
    r"""The token numbers of a text in a given vocabulary, for example to score a new file.

    Returns:
        A 1-d int32 tensor.

    Raises:
        DataError: As `tokenize`, and for unknown words if there is no unknown token.

    Example:
        >>> vocabulary = Vocabulary.build({"a": 1, "b": 1}, "<eos>")
        >>> encode_text(b"b a\n", vocabulary, "word")
        tensor([2, 1, 0], dtype=torch.int32)
    """
    return tokenize(content, level, source).encode(vocabulary, source)


def decode_text(ids: Iterable[int] | Tensor, vocabulary: Vocabulary, level: Level) -> str:
    r"""The text of token numbers: the inverse of `encode_text`, up to white space between words.

    Bytes that are not UTF-8 (which a generated sample may contain) become U+FFFD.

    Example:
        >>> decode_text([2, 1, 0], Vocabulary.build({"a": 1, "b": 1}, "<eos>"), "word")
        'b a\n'
    """
    tokens = vocabulary.decode(ids)
    if level == "byte":
        return b"".join(
            token.encode("latin-1" if len(token) == 1 else "utf-8") for token in tokens
        ).decode("utf-8", errors="replace")
    if level == "char":
        return "".join(tokens)
    joined = "".join("\n" if token == vocabulary.eos else f"{token} " for token in tokens)
    return joined.replace(" \n", "\n").removesuffix(" ")


def _decode_utf8(content: bytes, source: str) -> str:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source} is not UTF-8: byte 0x{content[error.start]:02x} at byte offset "
            f"{error.start:,} ({error.reason}); convert the file, or read it with level='byte'"
        ) from error
    # A byte-order mark and Windows line ends come from saving the file; they are not text.
    return text.removeprefix("\ufeff").replace("\r\n", "\n")
