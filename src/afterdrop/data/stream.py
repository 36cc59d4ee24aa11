"""Stripes: how a text becomes batches of windows for training and for evaluation.

Shapes: B stripes, t places in a window (`time` of them), p passes. A stripe is one row of the
batch; its recurrent state is carried from window to window, so each window goes on where the row's
last one ended: its first input is the previous target. Sentences are not independent, there is no
padding in training, and the first input of all is the end-of-sentence token.

Both classes are pure functions of (text, seed, window number): nothing else needs to be saved to
go on exactly where a run stopped.
"""

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from afterdrop.errors import DataError

IGNORE = -100  # the ignore index of torch's cross_entropy
JITTER = 100  # lines (tokens where there are no lines), as in deepmind/lamb


class TrainStripes:
    """An endless iterator of training windows.

    As in deepmind/lamb, every stripe walks the whole text in order, over and over. Starts are
    equidistant lines, all shifted by one random offset, each moved by up to `jitter` lines; that
    move is drawn again after each full pass.

    Args:
        tokens: The text, 1-d, of any integer type and device.
        eos: Number of the end-of-sentence token.
        batch_size: Stripes B.
        time: Tokens a window.
        seed: Of the offset and the moves; the only randomness there is.
        jitter: The most lines a start is moved.
        lines: Whether starts are at lines; False is for bytes: any token is a start.

    Raises:
        DataError: If the text is shorter than one window, or an argument is out of range.

    Example:
        >>> stripes = TrainStripes(torch.tensor([1, 2, 0, 3, 0]), eos=0, batch_size=2, time=3)
        >>> inputs_Bt, targets_Bt = next(stripes)
        >>> inputs_Bt.shape, bool((inputs_Bt[:, 1:] == targets_Bt[:, :-1]).all())
        (torch.Size([2, 3]), True)
        >>> stripes.state_dict()["step"]
        1
    """

    def __init__(
        self,
        tokens: Tensor,
        eos: int,
        batch_size: int,
        time: int,
        *,
        seed: int = 0,
        jitter: int = JITTER,
        lines: bool = True,
    ) -> None:
        _check(tokens, batch_size=batch_size, time=time)
        if jitter < 0:
            raise DataError(f"jitter={jitter} must be at least 0")
        if len(tokens) < time:
            raise DataError(
                f"the training text has {len(tokens)} tokens, fewer than one window of "
                f"time={time}: use a shorter window or more text"
            )
        self.tokens, self.eos = tokens, eos
        self.batch_size, self.time = batch_size, time
        self.seed, self.jitter = seed, jitter
        self.step = 0
        self._starts = _Starts(tokens, eos, lines)
        self._offset = self._draw("offset", self._starts.count)
        # A window touches two passes at most.
        self._pass_starts = lru_cache(maxsize=2)(self._draw_pass)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        window = self.window(self.step)
        self.step += 1
        return window

    def window(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one step, [B, time] int64 each; does not move the iterator."""
        walked = torch.arange(step * self.time - 1, (step + 1) * self.time)
        passes = walked.clamp(min=0) // len(self.tokens)
        first, last = int(passes[0]), int(passes[-1])
        start_Bp = torch.stack([self._pass_starts(p) for p in range(first, last + 1)], dim=1)
        start_Bt = start_Bp[:, passes - first]
        index_Bt = (start_Bt + walked) % len(self.tokens)
        window_Bt = self.tokens[index_Bt.to(self.tokens.device)].long()
        if step == 0:
            window_Bt[:, 0] = self.eos
        return window_Bt[:, :-1], window_Bt[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Where the iterator is, JSON-friendly: the next step, and what it only fits."""
        return {"step": self.step, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state, bit-identically.

        Raises:
            DataError: If the state is of other stripes.
        """
        for name, own in self._identity().items():
            if state.get(name) != own:
                raise DataError(
                    f"the saved data position has {name}={state.get(name)!r}, these stripes "
                    f"{own!r}: resume with the data and settings of the saved run"
                )
        self.step = int(state["step"])

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "time": self.time,
            "jitter": self.jitter,
            "tokens": len(self.tokens),
            "starts": self._starts.count,
        }

    def _draw_pass(self, number: int) -> Tensor:
        """Token index [B] at which each stripe starts its pass of that number."""
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
        # A hash and no generator: the draw of any pass is there without the ones before it, and
        # it does not change with the version of a library.
        digest = hashlib.sha256(f"{self.seed}/{what}".encode()).digest()
        return int.from_bytes(digest[:16], "big") % below


class EvalStripes:
    """The windows of an evaluation: every token is a target exactly once.

    Each stripe has a contiguous share of the lines (of the tokens where there are no lines),
    starts with the end-of-sentence token and a zero state, and runs once. Shorter stripes are
    padded: target -100 (`IGNORE`), input the end-of-sentence token. One stripe is the exact stream;
    more are faster and see less context after each start.

    Args:
        tokens: The text, 1-d, of any integer type and device.
        eos: Number of the end-of-sentence token.
        stripes: Number of stripes B; more than there are lines leaves some of them empty.
        time: Tokens a window.
        lines: Whether shares are made of whole lines.

    Example:
        >>> windows = EvalStripes(torch.tensor([1, 2, 0, 3, 0]), eos=0, stripes=2, time=2)
        >>> len(windows)
        2
        >>> inputs_Bt, targets_Bt = windows[1]
        >>> inputs_Bt.tolist(), targets_Bt.tolist(), windows.positions(1).tolist()
        ([[2, 0], [0, 0]], [[0, -100], [-100, -100]], [[2, -1], [-1, -1]])
    """

    def __init__(
        self, tokens: Tensor, eos: int, stripes: int, time: int, *, lines: bool = True
    ) -> None:
        _check(tokens, stripes=stripes, time=time)
        self.tokens, self.eos = tokens, eos
        self.stripes, self.time = stripes, time
        starts = _Starts(tokens, eos, lines)
        edges = starts.at(torch.arange(stripes + 1) * starts.count // stripes)
        self._first, self._end = edges[:-1, None], edges[1:, None]

    def __len__(self) -> int:
        return -(-int((self._end - self._first).max()) // self.time)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [B, time] int64 of a window; window 0 starts from a zero state."""
        inputs_nBt, targets_nBt = self.windows(range(number, number + 1))
        return inputs_nBt[0], targets_nBt[0]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self[number] for number in range(len(self)))

    def windows(self, numbers: range) -> tuple[Tensor, Tensor]:
        """Inputs and targets [n, B, time] int64 of some windows."""
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
        """Index [B, time] of each target of a window in the text; -1 is padding."""
        return self._positions(range(number, number + 1))[0]

    def _positions(self, numbers: range) -> Tensor:
        for number in (numbers[0], numbers[-1]):
            if not 0 <= number < len(self):
                raise IndexError(f"window {number} is not in 0..{len(self) - 1}")
        start_n = torch.tensor(numbers).view(-1, 1, 1) * self.time
        index_nBt = self._first + start_n + torch.arange(self.time)
        return index_nBt.masked_fill(index_nBt >= self._end, -1)


class _Starts:
    """Where in the text a stripe may start: at its lines, or at any token."""

    def __init__(self, tokens: Tensor, eos: int, lines: bool) -> None:
        self.count = len(tokens)
        self._bounds: Tensor | None = None  # 90 million bytes need no table of their places
        if lines:
            ends = (tokens == eos).nonzero().flatten().cpu() + 1
            starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
            starts = starts[starts < len(tokens)]
            self.count = len(starts)
            self._bounds = torch.cat([starts, torch.tensor([len(tokens)])])

    def at(self, index: Tensor) -> Tensor:
        """Token index of the starts of these numbers; number `count` is the end of the text."""
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
