"""Bands of training frequency: those of the paper, custom ones, and defaults for other data."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from torch import Tensor

from afterdrop.errors import DataError

PTB_TOKENS = 929_589  # of the training text for which the paper chose its bands
PAPER_BANDS = ("> 25000", "> 5000", "> 500", "< 500", "< 100", "< 20")


@dataclass(frozen=True)
class FrequencyBand:
    """Classes whose training count lies in a range; bands may overlap.

    Attributes:
        name: The label as in the paper, such as `> 500`.
        low: Counts are above this number.
        high: Counts are at most this number.
    """

    name: str
    low: float
    high: float


def parse_band(text: str) -> FrequencyBand:
    """Parses `> N`, `< N`, or `M-N` (both ends included).

    Raises:
        DataError: If the text has another form.

    Example:
        >>> parse_band("<20")
        FrequencyBand(name='< 20', low=-1, high=19)
        >>> parse_band("5-9").low
        4
    """
    found = re.fullmatch(r"\s*([<>])\s*(\d+)\s*|\s*(\d+)\s*-\s*(\d+)\s*", text)
    if not found:
        raise DataError(f"the band {text!r} must be '> N', '< N' or 'M-N', as in '> 500'")
    if found[3] is not None:
        low, high = int(found[3]), int(found[4])
        if low > high:
            raise DataError(f"the band {text!r} is empty; write the smaller number first")
        return FrequencyBand(f"{low}-{high}", low - 1, high)
    number = int(found[2])
    if found[1] == ">":
        return FrequencyBand(f"> {number}", number, math.inf)
    return FrequencyBand(f"< {number}", -1, number - 1)


def suitable_bands(data: str, counts: Tensor, *, classes: bool) -> list[FrequencyBand]:
    """The default bands for a data set.

    PTB and WikiText-2 get the bands of the paper. For other texts these are scaled to the size of
    the training split, so that a band covers about the same share of the text. The classes of a
    classifier are split at the median count.

    Example:
        >>> import torch
        >>> [b.name for b in suitable_bands("mnist", torch.tensor([9, 5, 7, 1]), classes=True)]
        ['> 5', '< 6']
        >>> suitable_bands("ptb", torch.tensor([1, 2]), classes=False)[-1].name
        '< 20'
    """
    if classes:
        middle = int(counts.median())
        return [parse_band(f"> {middle}"), parse_band(f"< {middle + 1}")]
    if data in ("ptb", "wikitext-2"):
        return [parse_band(text) for text in PAPER_BANDS]
    share = int(counts.sum()) / PTB_TOKENS
    scaled = [f"{text[0]} {max(2, round(int(text[2:]) * share))}" for text in PAPER_BANDS]
    return [parse_band(text) for text in dict.fromkeys(scaled)]
