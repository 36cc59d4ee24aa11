"""Forward passes on the user's own input that drop nothing, to find and verify dropout sites."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from afterdrop.errors import SiteError
from afterdrop.masks.eval_mode import eval_mode_without_fast_path
from afterdrop.masks.model_output import output_tensor
from afterdrop.masks.nested_inputs import batch_size, take_rows
from afterdrop.masks.recorder import Recorder, Visit


class DryRun:
    """The dry runs of one model on one input.

    Args:
        model: The module.
        inputs: Positional inputs.
        kwargs: Keyword inputs.
        rates: Declared attributes that hold rates.
        batch_dim: The batch dimension of the inputs.

    Attributes:
        batch: The number of examples in the input.
    """

    def __init__(
        self, model: nn.Module, inputs: Any, kwargs: Any, rates: tuple[str, ...], batch_dim: int
    ) -> None:
        self.model, self.rates, self.batch_dim = model, rates, batch_dim
        self.inputs, self.kwargs = inputs, kwargs
        self.batch = batch_size((inputs, kwargs), batch_dim)
        if self.batch == 0:
            raise SiteError("the input has no examples; pass at least one")
        if self.batch == 1:
            self._try_two_rows()

    def _try_two_rows(self) -> None:
        """Doubles a single row, which cannot show where rows lie, if the model takes two."""
        inputs, kwargs = self.take(copies=2)
        try:
            with torch.no_grad(), self.undone(), eval_mode_without_fast_path(self.model):
                self.model(*inputs, **kwargs)
        except Exception:  # the user's model may fail in any way: stay with one row
            return
        self.inputs, self.kwargs, self.batch = inputs, kwargs, 2

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Restores the model's buffers and all global random generators on exit."""
        buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in self.model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        devices = sorted({b.device.index or 0 for b in self.model.parameters() if b.is_cuda})
        python, numpy = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=devices):
            try:
                yield
            finally:
                random.setstate(python)
                np.random.set_state(numpy)
                for module, name, buffer, before in buffers:
                    module._buffers[name] = buffer
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)

    def recorder(self, held: set[str], visits: list[Visit]) -> Recorder:
        """A recorder that also forces on the dropout of `visits` in held modules."""
        places = {visit.place for visit in visits}
        return Recorder(self.model, frozenset(held), self.rates, places)

    def take(self, copies: int = 1, rows: int | None = None) -> Any:
        """Copies of the inputs: positional and keyword arguments.

        Args:
            copies: How often the rows are repeated.
            rows: How many rows to take, the first ones; all by default.
        """
        stop = self.batch if rows is None else rows
        arguments = (self.inputs, self.kwargs)
        return take_rows(arguments, self.batch_dim, self.batch, 0, stop, copies)

    def run(
        self, recorder: Recorder, multiplier: float = 1.0, copies: int = 1, rows: int | None = None
    ) -> Tensor:
        """The logits of one recorded pass.

        Args:
            recorder: Records this pass only; earlier visits are forgotten.
            multiplier: Of the declared rates.
            copies: See `take`.
            rows: See `take`.
        """
        inputs, kwargs = self.take(copies, rows)
        recorder.visits.clear()
        with recorder.prepared(multiplier):
            return output_tensor(recorder.run(*inputs, **kwargs))
