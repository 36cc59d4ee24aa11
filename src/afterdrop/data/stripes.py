"""Stripes: how a text becomes batches of windows for training and for evaluation.

A stripe is one row of the batch. Its recurrent state is carried from window to window, so each
window continues where the previous one of the stripe ended: its first input is the previous target.
Sentences are not treated as independent, training has no padding, and the very first input is the
end-of-sentence token.

Both classes are pure functions of (text, seed, window number): a resumed run needs no other state
to continue exactly.

Legend: B stripes, t places in a window, p passes over the text, n windows.
"""

import hashlib
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from afterdrop.errors import DataError

IGNORE = -100  # the default ignore_index of torch's cross_entropy
_MOST = 2**20  # stripes or tokens per window, which are in memory with their logits
JITTER = 100  # lines (tokens where there are no lines), as in deepmind/lamb


class TrainStripes:
    """An endless sequence of training windows.

    As in deepmind/lamb, every stripe reads the whole text in order, again and again. The stripes
    start at equidistant lines, all shifted by one random offset and each moved by up to `jitter`
    lines; the moves are drawn again for each pass over the text.

    Args:
        tokens: The text, 1-d, of any integer type and device.
        eos: Number of the end-of-sentence token.
        batch_size: Stripes B.
        window: Tokens per window.
        seed: Seed of the offset and the moves, which are the only randomness.
        jitter: The largest number of lines by which a start is moved.
        lines: Whether stripes start at lines; if False, they may start at any token (bytes).

    Raises:
        DataError: If the text is shorter than one window, or an argument is out of range.

    Example:
        >>> stripes = TrainStripes(torch.tensor([1, 2, 0, 3, 0]), eos=0, batch_size=2, window=3)
        >>> inputs_Bt, targets_Bt = stripes[0]
        >>> inputs_Bt.shape, bool((inputs_Bt[:, 1:] == targets_Bt[:, :-1]).all())
        (torch.Size([2, 3]), True)
    """

    def __init__(
        self,
        tokens: Tensor,
        eos: int,
        batch_size: int,
        window: int,
        *,
        seed: int = 0,
        jitter: int = JITTER,
        lines: bool = True,
    ) -> None:
        _check(tokens, batch_size=batch_size, window=window)
        if jitter < 0:
            raise DataError(f"jitter={jitter} must be at least 0")
        if len(tokens) < window:
            raise DataError(
                f"the training text has {len(tokens)} tokens, fewer than window={window}: "
                "use a shorter window or more text"
            )
        self.tokens, self.eos = tokens, eos
        self.batch_size, self.window = batch_size, window
        self.seed, self.jitter = seed, jitter
        self._starts = _Starts(tokens, eos, lines)
        self._offset = self._draw("offset", self._starts.count)
        # A window lies in at most two passes.
        self._pass_starts = lru_cache(maxsize=2)(self._draw_pass)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [B, window] int64 of the window with this number, from 0."""
        walked = torch.arange(number * self.window - 1, (number + 1) * self.window)
        passes = walked.clamp(min=0) // len(self.tokens)
        first, last = int(passes[0]), int(passes[-1])
        start_Bp = torch.stack([self._pass_starts(p) for p in range(first, last + 1)], dim=1)
        start_Bt = start_Bp[:, passes - first]
        index_Bt = (start_Bt + walked) % len(self.tokens)
        window_Bt = self.tokens[index_Bt.to(self.tokens.device)].long()
        if number == 0:
            window_Bt[:, 0] = self.eos
        return window_Bt[:, :-1], window_Bt[:, 1:]

    def _draw_pass(self, number: int) -> Tensor:
        """The token index [B] at which each stripe starts the pass with this number."""
        count = self._starts.count
        lines = [
            self._offset
            + stripe * count // self.batch_size
            + self._draw(f"{number}/{stripe}", 2 * self.jitter + 1)
            - self.jitter
            for stripe in range(self.batch_size)
        ]
        return self._starts.at(torch.tensor(lines) % count)

    def _draw(self, what: str, below: int) -> int:
        # A hash instead of a generator: the draws of any pass are available without those of the
        # passes before it, and do not depend on the version of a library.
        digest = hashlib.sha256(f"{self.seed}/{what}".encode()).digest()
        return int.from_bytes(digest[:16], "big") % below


class EvalStripes:
    """The windows of an evaluation, in which every token is a target exactly once.

    Each stripe has a contiguous share of the lines (of the tokens where there are no lines). It
    starts with the end-of-sentence token and a zero state, and is read once. Shorter stripes are
    padded with the target -100 (`IGNORE`) and the end-of-sentence token as input. One stripe is the
    exact stream; more of them are faster, but have less context after each start.

    Args:
        tokens: The text, 1-d, of any integer type and device.
        eos: Number of the end-of-sentence token.
        stripes: Number of stripes B; with more stripes than lines some are empty.
        window: Tokens per window.
        lines: Whether the shares consist of whole lines.

    Example:
        >>> windows = EvalStripes(torch.tensor([1, 2, 0, 3, 0]), eos=0, stripes=2, window=2)
        >>> len(windows)
        2
        >>> inputs_Bt, targets_Bt = windows[1]
        >>> inputs_Bt.tolist(), targets_Bt.tolist(), windows.positions(1).tolist()
        ([[2, 0], [0, 0]], [[0, -100], [-100, -100]], [[2, -1], [-1, -1]])
    """

    def __init__(
        self, tokens: Tensor, eos: int, stripes: int, window: int, *, lines: bool = True
    ) -> None:
        _check(tokens, stripes=stripes, window=window)
        self.tokens, self.eos, self.lines = tokens, eos, lines
        self.stripes, self.window = stripes, window
        starts = _Starts(tokens, eos, lines)
        edges = starts.at(torch.arange(stripes + 1) * starts.count // stripes)
        self._first, self._end = edges[:-1, None], edges[1:, None]

    def __len__(self) -> int:
        return -(-int((self._end - self._first).max()) // self.window)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [B, window] int64; window 0 starts from a zero state."""
        inputs_nBt, targets_nBt = self.windows(range(number, number + 1))
        return inputs_nBt[0], targets_nBt[0]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self[number] for number in range(len(self)))

    def windows(self, numbers: range) -> tuple[Tensor, Tensor]:
        """Inputs and targets [n, B, window] int64 of several windows."""
        position_nBt = self._positions(numbers)
        padding_nBt = (position_nBt < 0).to(self.tokens.device)
        at_nBt = position_nBt.clamp(min=0).to(self.tokens.device)
        targets_nBt = self.tokens[at_nBt].long().masked_fill(padding_nBt, IGNORE)
        inputs_nBt = self.tokens[(at_nBt - 1).clamp(min=0)].long()
        inputs_nBt.masked_fill_(padding_nBt, self.eos)
        if 0 in numbers:
            inputs_nBt[numbers.index(0), :, 0] = self.eos
        return inputs_nBt, targets_nBt

    def positions(self, number: int) -> Tensor:
        """The index [B, window] of each target in the text; -1 is padding."""
        return self._positions(range(number, number + 1))[0]

    def _positions(self, numbers: range) -> Tensor:
        for number in (numbers[0], numbers[-1]):
            if not 0 <= number < len(self):
                raise IndexError(f"window {number} is not in 0..{len(self) - 1}")
        start_n = torch.tensor(numbers).view(-1, 1, 1) * self.window
        index_nBt = self._first + start_n + torch.arange(self.window)
        return index_nBt.masked_fill(index_nBt >= self._end, -1)


class _Starts:
    """The places where a stripe may start: at lines, or at any token."""

    def __init__(self, tokens: Tensor, eos: int, lines: bool) -> None:
        self.count = len(tokens)
        self._bounds: Tensor | None = None  # no table for 90 million bytes
        if lines:
            ends = (tokens == eos).nonzero().flatten().cpu() + 1
            starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
            starts = starts[starts < len(tokens)]
            self.count = len(starts)
            self._bounds = torch.cat([starts, torch.tensor([len(tokens)])])

    def at(self, index: Tensor) -> Tensor:
        """The token index of the starts with these numbers; `count` is the end of the text."""
        return index if self._bounds is None else self._bounds[index]


def _check(tokens: Tensor, **sizes: int) -> None:
    if tokens.dim() != 1 or len(tokens) == 0 or tokens.is_floating_point():
        raise DataError(
            f"tokens of shape {list(tokens.shape)} and {tokens.dtype} must be a non-empty vector "
            "of token numbers, such as TextSet.train"
        )
    for name, size in sizes.items():
        if size < 1:
            raise DataError(f"{name}={size} must be at least 1")
        if size > _MOST:
            raise DataError(f"{name}={size} must be at most {_MOST:,}")
