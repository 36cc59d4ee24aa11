"""Modules that finish before the first dropout site: computed once for all samples.

Their output does not depend on masks, so it is the same for every sample and multiplier. It is
recorded once per batch, with one row per example, and passes under masks take copies of its rows
instead of running the modules. All other code of the model runs as it always does: a ReLU between
two of these modules, in the forward of the whole model, runs for all rows.

    Prefix   which calls of which modules they are; `prefix_search` finds and verifies them
    Record   their output for one batch
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from afterdrop.masks.control import Control, OperatorMode
from afterdrop.masks.lazy_rows import LazyRows, copied_rows, copied_shape
from afterdrop.masks.rows import Layout


class ModuleCall(NamedTuple):
    """One call of a module in a pass."""

    module: str
    number: int


class NotRecorded(Exception):
    """A pass needs what was not recorded: the model takes another path than in the dry run."""


class FirstSite(BaseException):
    """Ends a pass at the first dropout site; not an error, so that no model handles it as one."""


Answer = Callable[[ModuleCall, Callable[..., Any], Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Prefix:
    """The calls of modules that are computed once per batch.

    Attributes:
        layouts: For each call, where the rows lie in each tensor of its output.
        needed: The calls whose output other code reads; the others are read by these modules alone.
        in_eval: Whether a pass in eval mode gives the same output, to the bit.
        row_bytes: Bytes alive at the peak of a pass that runs none of these modules, per row.
        largest_bytes: Bytes of the largest tensor of such a pass, per row.
    """

    layouts: dict[ModuleCall, tuple[Layout, ...]]
    needed: frozenset[ModuleCall]
    in_eval: bool = False
    row_bytes: int = 0
    largest_bytes: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the modules, in the order in which they run."""
        return tuple(dict.fromkeys(call.module for call in self.layouts))


class Record:
    """The output of a prefix for one batch.

    Args:
        prefix: Which calls.
        rows: The number of examples, each with one row.
        outputs: What the calls returned, if that is known already.
    """

    def __init__(
        self, prefix: Prefix, rows: int, outputs: Mapping[ModuleCall, Any] | None = None
    ) -> None:
        self.prefix, self.rows = prefix, rows
        self._outputs: dict[ModuleCall, tuple[list[Any], Any]] = {}
        for call, output in (outputs or {}).items():
            self._add(call, output)

    def _add(self, call: ModuleCall, output: Any) -> None:
        if call in self.prefix.layouts:
            leaves, spec = pytree.tree_flatten(output)
            values = call in self.prefix.needed
            self._outputs[call] = [_recorded(leaf, values=values) for leaf in leaves], spec

    @contextlib.contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        """Records the calls of a pass of the model with one row per example, in this thread."""

        def answer(call: ModuleCall, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            self._add(call, output)
            return output

        with intercepted(model, self.prefix.names, answer):
            yield

    def record_pass(self, control: Control, run: Callable[[], Any]) -> None:
        """Records a controlled pass that `run` starts; it ends at the first dropout site."""
        with self.recording(control.model), stopping(control), contextlib.suppress(FirstSite):
            run()

    @contextlib.contextmanager
    def replaying(
        self, control: OperatorMode, part: Sequence[int], copies: int
    ) -> Iterator[dict[ModuleCall, list[LazyRows]]]:
        """Passes of the model take copies of the recorded rows, in this thread.

        Args:
            control: Controls the model.
            part: The examples that run.
            copies: How often each example runs.

        Yields:
            The tensors that the passes were given, by call.
        """
        given: dict[ModuleCall, list[LazyRows]] = {}

        def answer(call: ModuleCall, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if call not in self.prefix.layouts:
                return forward(*args, **kwargs)
            if call not in self._outputs or control.masked:
                raise NotRecorded(call)
            recorded, spec = self._outputs[call]
            layouts = iter(self.prefix.layouts[call])
            leaves = [
                leaf.lazy(next(layouts), self.rows, part, copies)
                if isinstance(leaf, _Recorded)
                else leaf
                for leaf in recorded
            ]
            given[call] = [leaf for leaf in leaves if isinstance(leaf, LazyRows)]
            return pytree.tree_unflatten(leaves, spec)

        with intercepted(control.model, self.prefix.names, answer):
            yield given


class _Recorded(NamedTuple):
    """A recorded tensor.

    Attributes:
        values: The tensor, or one of the same shape without values (on the meta device).
        like: An empty tensor of the same dtype and device.
    """

    values: Tensor
    like: Tensor

    def lazy(self, layout: Layout, rows: int, part: Sequence[int], copies: int) -> LazyRows:
        """Copies of some rows, which are made when they are read."""

        def make() -> Tensor:
            if self.values.is_meta:
                raise NotRecorded("another module reads this output than in the dry run")
            return copied_rows(self.values, layout, rows, part, copies)

        return LazyRows(self.like, copied_shape(self.values, layout, rows, part, copies), make)


def _recorded(leaf: Any, *, values: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    # A clone, because what follows may write into the output.
    own = leaf.clone() if values else torch.empty(leaf.shape, device="meta")
    return _Recorded(own, leaf.new_empty(0))


@contextlib.contextmanager
def intercepted(model: nn.Module, names: Collection[str], answer: Answer) -> Iterator[None]:
    """Calls `answer` instead of the forward of some modules, in this thread; restores it on exit.

    Args:
        model: The whole model.
        names: The names of the modules.
        answer: Called with the call, the module's own forward and its arguments.
    """
    thread, numbers = threading.get_ident(), Counter[str]()

    def replacement(name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return forward(*args, **kwargs)
        call = ModuleCall(name, numbers[name])
        numbers[name] += 1
        return answer(call, forward, args, kwargs)

    before: list[tuple[nn.Module, Any]] = []
    try:
        for name in names:
            module = model.get_submodule(name)
            before.append((module, module.__dict__.get("forward")))
            module.__dict__["forward"] = partial(replacement, name, module.forward)
        yield
    finally:
        for module, forward in before:
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward


@contextlib.contextmanager
def stopping(control: Control) -> Iterator[None]:
    """Passes end at the first dropout site, by `FirstSite`."""

    def stop() -> None:
        raise FirstSite

    control.before_mask = stop
    try:
        yield
    finally:
        control.before_mask = None
