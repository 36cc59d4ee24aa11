"""Vocabularies: the tokens of a training text, their counts and their numbers.

deepmind/lamb's vocabulary is the training types, an end-of-sentence token and a `<UNK>` that never
occurs: 10,001 classes for PTB, 33,279 for WikiText-2, 206 for enwik8. The published parameter
counts include that dead class, so the named sets keep it (`LAMB_UNKNOWN`); the corpora's own
`<unk>` is an ordinary word. Other texts get `<unk>` (`UNKNOWN`) only if rare words were replaced
by it or the text contains it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from afterdrop.errors import DataError

UNKNOWN = "<unk>"
LAMB_UNKNOWN = "<UNK>"


@dataclass(frozen=True)
class Vocabulary:
    """The classes of a language model, numbered by their place.

    Attributes:
        tokens: Distinct tokens, in Unicode order when made by `build`.
        counts: Occurrences of each token in the training split.
        eos: The token that ends every line and precedes the first one.
        unknown: The token that represents all others; with None, others are refused.

    Example:
        >>> vocabulary = Vocabulary.build({"a": 3, "b": 1, "<eos>": 2}, "<eos>", "<unk>", 2)
        >>> vocabulary.tokens, vocabulary.counts
        (('<eos>', '<unk>', 'a'), (2, 1, 3))
        >>> vocabulary.encode(["a", "b", "never seen"])
        tensor([2, 1, 1])
        >>> vocabulary.decode([2, 0])
        ['a', '<eos>']
    """

    tokens: tuple[str, ...]
    counts: tuple[int, ...]
    eos: str
    unknown: str | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.counts):
            raise DataError(
                f"a vocabulary needs one count per token: {len(self.tokens)} tokens, "
                f"{len(self.counts)} counts"
            )
        if len(self.index) != len(self.tokens):
            raise DataError("the tokens of a vocabulary must be distinct")
        for role, token in (("eos", self.eos), ("unknown", self.unknown)):
            if token is not None and token not in self.index:
                raise DataError(f"{role}={token!r} is not among the tokens; add it")

    @classmethod
    def build(
        cls, counts: Mapping[str, int], eos: str, unknown: str | None = None, min_count: int = 1
    ) -> "Vocabulary":
        """The vocabulary of a training text from the counts of its tokens.

        Args:
            counts: Occurrences of each token in the training split.
            eos: The end-of-sentence token; added if it does not occur.
            unknown: The unknown token, added if it does not occur, or None for none.
            min_count: Tokens that occur less often become `unknown`.

        Raises:
            DataError: If `min_count` is below 1, or above 1 without an unknown token.
        """
        if min_count < 1:
            raise DataError(f"min_count={min_count} must be at least 1")
        if min_count > 1 and unknown is None:
            raise DataError(f"min_count={min_count} needs an unknown token for the rare ones")
        special = {eos, unknown} - {None}
        kept = {t: n for t, n in counts.items() if n >= min_count or t in special}
        rare = sum(counts.values()) - sum(kept.values())
        kept.setdefault(eos, 0)
        if unknown is not None:
            kept[unknown] = kept.get(unknown, 0) + rare
        tokens = tuple(sorted(kept))
        return cls(tokens, tuple(kept[t] for t in tokens), eos, unknown)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def index(self) -> dict[str, int]:
        """The number of each token."""
        return {token: i for i, token in enumerate(self.tokens)}

    @property
    def eos_id(self) -> int:
        """The number of the end-of-sentence token."""
        return self.index[self.eos]

    @property
    def unknown_id(self) -> int | None:
        """The number of the unknown token, or None."""
        return None if self.unknown is None else self.index[self.unknown]

    def encode(self, tokens: Sequence[str], source: str = "the text") -> Tensor:
        """The numbers of `tokens` as an int64 tensor.

        Args:
            tokens: The tokens, with `eos` at the end of each line.
            source: Name of the text (a file), for the error message.

        Raises:
            DataError: If a token is not in the vocabulary and there is no unknown token.
        """
        index, unknown = self.index, self.unknown_id
        if unknown is not None:
            return torch.tensor([index.get(t, unknown) for t in tokens], dtype=torch.int64)
        try:
            return torch.tensor([index[t] for t in tokens], dtype=torch.int64)
        except KeyError:
            at = next(i for i, token in enumerate(tokens) if token not in index)
            raise self.refusal(tokens[at], tokens[:at].count(self.eos) + 1, source) from None

    def refusal(self, token: str, line: int, source: str) -> DataError:
        """The error for a `token` that is not in the vocabulary."""
        return DataError(
            f"{source}, line {line}: {token!r} does not occur in the training text, and the "
            f"vocabulary has no unknown token; min_count=2 makes rare tokens {UNKNOWN}, or write "
            f"{UNKNOWN} for some in the training text"
        )

    def decode(self, ids: Iterable[int] | Tensor) -> list[str]:
        """The tokens with the numbers `ids`: the inverse of `encode`.

        Raises:
            DataError: If a number is not in the vocabulary.
        """
        numbers = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        for number in numbers:
            if not 0 <= number < len(self.tokens):
                raise DataError(f"token number {number} is not in 0..{len(self.tokens) - 1}")
        return [self.tokens[number] for number in numbers]
