"""The progress bar: loss, validation, speed and time left."""

from __future__ import annotations

import contextlib
import math

from tqdm import tqdm

from afterdrop.train.validation import Validation

_SPEEDS = {"word": "words", "char": "chars", "byte": "bytes", "image": "images"}


def present(unit: str, xe: float) -> str:
    """A cross entropy in the usual unit: perplexity, bits per character, or nats.

    Example:
        >>> present("word", 4.0), present("byte", 0.886), present("image", 0.07)
        ('ppl 54.60', 'bpc 1.278', 'xe 0.0700')
    """
    if unit == "word":
        return f"ppl {math.exp(min(xe, 99)):.2f}"
    return f"bpc {xe / math.log(2):.3f}" if unit in ("char", "byte") else f"xe {xe:.4f}"


class Progress:
    """A bar over all steps of a run; silent if not shown.

    Args:
        total: Steps of the whole run, at most.
        done: Steps done before this call.
        unit: What a target is.
        shown: Whether to show the bar.
    """

    def __init__(self, total: int, done: int, unit: str, *, shown: bool) -> None:
        self._unit = unit
        self._parts: dict[str, str] = {}
        self._bar = tqdm(
            total=total, initial=done, unit="step", disable=not shown, dynamic_ncols=True
        )

    def step(self) -> None:
        """Counts one step."""
        self._bar.update()

    def training(self, loss: float, speed: float) -> None:
        """Shows the loss (nats per target) and the targets per second."""
        self._parts["train"] = present(self._unit, loss)
        self._parts["speed"] = f"{speed:,.0f} {_SPEEDS[self._unit]}/s"
        self._show()

    def validated(self, found: Validation, best: float) -> None:
        """Shows a validation and the best so far."""
        self._parts["valid"] = (
            f"{present(self._unit, found.xe)}, at T={found.temperature:.2f} "
            f"{present(self._unit, found.xe_optimal)}"
        )
        self._parts["best"] = present(self._unit, best)
        self._show()

    def note(self, message: str) -> None:
        """Prints a message above the bar, unless the terminal was closed."""
        if not self._bar.disable:
            with contextlib.suppress(OSError):
                self._bar.write(message)

    def close(self, message: str) -> None:
        """Closes the bar, with a final message if there is one."""
        if message:
            self.note(message)
        self._bar.close()

    def _show(self) -> None:
        self._bar.set_postfix_str(
            "; ".join(f"{k} {v}" for k, v in self._parts.items()), refresh=False
        )
