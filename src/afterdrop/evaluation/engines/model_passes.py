"""Forward passes of a model under masks.

Passes         what the generic engine needs of them
ModelPasses    those of any module; modules before the first dropout site run once per batch
run_samples    the order of samples and blocks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from afterdrop.evaluation.batches import call
from afterdrop.evaluation.chunks import out_of_memory, sample_ranges
from afterdrop.evaluation.likelihoods import Accumulator
from afterdrop.evaluation.scores.schema import Results
from afterdrop.masks.control import Control
from afterdrop.masks.lazy_rows import lazy_inputs
from afterdrop.masks.model_call import take_rows
from afterdrop.masks.prefix import NotRecorded, Record
from afterdrop.masks.rows import Rows
from afterdrop.masks.sites import Sites
from afterdrop.masks.uniforms import Plan


class Passes(Protocol):
    """Forward passes of a model under masks."""

    control: Control

    def deterministic(self, run: Callable[[], Any], inputs: Any, size: int) -> Any:
        """What `run` returns, a pass without masks; may keep parts of it for passes under masks."""

    def run(self, inputs: Any, size: int, rows: Rows, examples: range) -> Any:
        """What the model returns for some examples of nested inputs, under the masks of `rows`.

        Raises:
            NotRecorded: If the parts that were kept do not serve; `run_all_modules` helps.
        """

    def run_all_modules(self) -> None:
        """From now on, every pass runs all modules."""

    def accumulators(self, targets: Tensor, counts: Tensor) -> Sequence[Accumulator]:
        """Further accumulators, which look at the passes themselves."""

    def end_batch(self) -> None:
        """Called when all results of a batch are there."""

    def carried(self) -> Results:
        """What the next batch needs of those before it."""

    def restore(self, carried: Results) -> None:
        """Takes up what `carried` gave."""


class ModelPasses:
    """Forward passes of any module, whose examples need nothing of each other.

    Modules that finish before the first dropout site (`Sites.prefix`) run once per batch.

    Args:
        model: The module.
        sites: Its dropout sites.
        batch_dim: Batch dimension of its inputs.
        draw: Draws masks in place of the control's own function.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sites,
        batch_dim: int,
        draw: Callable[..., Any] | None = None,
    ) -> None:
        self.control, self.batch_dim = sites.control(model), batch_dim
        if draw is not None:
            self.control.draw = draw
        self._prefix = sites.prefix
        self._recorded: tuple[Any, Record] | None = None  # inputs, and what was recorded of them

    def deterministic(self, run: Callable[[], Any], inputs: Any, size: int) -> Any:
        """What `run` returns; records what does not depend on masks."""
        self._recorded = None
        if self._prefix is None or not self._prefix.in_eval:
            return run()
        record = Record(self._prefix, size)
        with record.recording(self.control.model):
            output = run()
        self._recorded = inputs, record
        return output

    def run(self, inputs: Any, size: int, rows: Rows, examples: range) -> Any:
        """What the model returns for some examples, copied for each sample and multiplier."""

        def forward(arguments: Any) -> Any:
            return call(
                lambda *args, **kwargs: self.control.forward(rows, *args, **kwargs), arguments
            )

        return self._run(forward, inputs, size, rows, examples)

    def run_arguments(self, arguments: Any, size: int, rows: Rows, examples: Sequence[int]) -> Any:
        """The same for positional and keyword arguments, a pair (args, kwargs)."""

        def forward(arguments: Any) -> Any:
            args, kwargs = arguments
            return self.control.forward(rows, *args, **kwargs)

        return self._run(forward, arguments, size, rows, examples)

    def _run(
        self,
        forward: Callable[[Any], Any],
        inputs: Any,
        size: int,
        rows: Rows,
        examples: Sequence[int],
    ) -> Any:
        copies = len(rows.multipliers) * len(rows.samples)
        if self._prefix is None:
            if isinstance(examples, range):
                ends = examples.start, examples.stop
                return forward(take_rows(inputs, self.batch_dim, size, *ends, copies))
            return forward(lazy_inputs(inputs, self.batch_dim, size, examples, copies))
        try:
            if self._recorded is None or self._recorded[0] is not inputs:
                whole = take_rows(inputs, self.batch_dim, size, 0, size, 1)
                self._recorded = inputs, Record(self._prefix, size)
                self._recorded[1].record_pass(self.control, lambda: forward(whole))
            part = lazy_inputs(inputs, self.batch_dim, size, examples, copies)
            with self._recorded[1].replaying(self.control, examples, copies):
                return forward(part)
        except Exception as error:  # the model may take another path than in the dry run
            if out_of_memory(error):
                raise
            raise NotRecorded(f"{type(error).__name__}: {error}") from error

    def run_all_modules(self) -> None:
        """From now on, every pass runs all modules."""
        self._prefix = self._recorded = None

    def accumulators(self, targets: Tensor, counts: Tensor) -> Sequence[Accumulator]:
        """None."""
        return ()

    def end_batch(self) -> None:
        """Forgets what was recorded of the batch."""
        self._recorded = None

    def carried(self) -> Results:
        """Nothing."""
        return {}

    def restore(self, carried: Results) -> None:
        """Nothing to do."""


def run_samples(
    control: Control,
    plan: Plan,
    multipliers: tuple[float, ...],
    at_once: int,
    add: Callable[[range], None],
    end_block: Callable[[], None],
) -> None:
    """Runs all samples of some multipliers, chunk by chunk, block by block.

    Args:
        control: Controls the model's masks.
        plan: The samples.
        multipliers: Those that run together; declared rates allow one only.
        at_once: Samples per chunk.
        add: Runs a chunk of samples and takes what comes out.
        end_block: Called after each independent block.
    """
    with control.prepared(multipliers):
        for block in sample_ranges(plan, at_once):
            for samples in block:
                add(samples)
            end_block()
