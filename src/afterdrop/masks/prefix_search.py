"""Finds the modules that can be computed once per batch, and verifies that they can.

1. record    under masks, up to the first site: the calls that finish before it
2. compare   the same calls under other masks, with the rows twice: the same tensors
3. replay    under these masks, with the recorded output: the same logits
4. eval      in eval mode: whether the output is the same to the bit, so that the deterministic
             pass of an evaluation can record it
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from afterdrop.masks.control import Control
from afterdrop.masks.detector import Detector
from afterdrop.masks.dry_run import DryRun, Recorder
from afterdrop.masks.lazy_rows import LazyRows, copied_rows, lazy_inputs
from afterdrop.masks.model_call import output_tensor
from afterdrop.masks.prefix import FirstSite, ModuleCall, Prefix, Record, intercepted, stopping
from afterdrop.masks.rows import Layout, Rows, probe_layout
from afterdrop.masks.uniforms import Plan

_HELD = (Tensor, bool, int, float, str, type(None))  # what an output may hold
_HALF = 0.5
_OWN_HOOKS = 2  # the hooks by which a control follows which module is running

Outputs = dict[ModuleCall, Any]  # as the calls returned them


def find_prefix(dry: DryRun, control: Control, *, batched: bool) -> Prefix | None:
    """The calls that can be computed once per batch; None if there are none that can be verified.

    Args:
        dry: Runs the model, which is in eval mode.
        control: Controls its masks.
        batched: Whether samples run as rows of a batch.
    """
    search = _Search(dry, control, 2 if batched else 1)
    try:
        with control.prepared(_HALF):
            prefix = search.found()
        return None if prefix is None else search.measured(search.compared_to_eval(prefix))
    except Exception:  # the user's model may fail in any way where it meets a recorded output
        return None


class _Search:
    def __init__(self, dry: DryRun, control: Control, copies: int) -> None:
        self.dry, self.control, self.copies = dry, control, copies
        self.first: Outputs = {}
        self.record: Record

    def found(self) -> Prefix | None:
        """A verified prefix, apart from eval mode."""
        self.first = self._record()
        if not self.first:
            return None
        again, expected = self._under_other_masks()
        layouts = {call: self._layouts(self.first[call], again.get(call)) for call in self.first}
        same = {call: each for call, each in layouts.items() if each is not None}
        if not same:
            return None
        return self._replayed(Prefix(same, frozenset(same)), expected)

    def _rows(self, seed: int, copies: int) -> Rows:
        return Rows(Plan(2, seed), (_HALF,), range(copies), torch.arange(self.dry.batch))

    def _run(self, seed: int, copies: int) -> Tensor:
        args, kwargs = self.dry.take(copies)
        output = self.control.forward(self._rows(seed, copies), *args, **kwargs)
        return output_tensor(output, self.dry.logits)

    def _record(self) -> Outputs:
        """The output of the outermost calls that finish before the first site."""
        found: Outputs = {}

        def answer(call: ModuleCall, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            before = set(found)
            output = forward(*args, **kwargs)
            if all(isinstance(leaf, _HELD) for leaf in pytree.tree_leaves(output)):
                for inside in found.keys() - before:
                    del found[inside]
                found[call] = _cloned(output)
            return output

        with intercepted(self.control.model, self._candidates(), answer), stopping(self.control):
            try:
                self._run(seed=0, copies=1)
            except FirstSite:
                return found
        return {}

    def _candidates(self) -> list[str]:
        """Modules that only compute: nothing inside keeps attributes or runs the user's hooks."""
        model = self.control.model
        others = {id(module) for module in self.control.volatile}
        for module in model.modules():
            if len(module._forward_hooks) + len(module._forward_pre_hooks) > _OWN_HOOKS:
                others.add(id(module))
        return [
            name
            for name, module in model.named_modules()
            if name
            and not isinstance(module, torch.jit.ScriptModule)
            and not any(id(inside) in others for inside in module.modules())
        ]

    def _under_other_masks(self) -> tuple[Outputs, Tensor]:
        """The output of the same calls with other masks and all copies, and the logits."""
        found: Outputs = {}

        def answer(call: ModuleCall, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if call in self.first and not self.control.masked:
                found[call] = _cloned(output)
            return output

        names = dict.fromkeys(call.module for call in self.first)
        with intercepted(self.control.model, names, answer):
            return found, self._run(seed=1, copies=self.copies)

    def _layouts(self, first: Any, again: Any) -> tuple[Layout, ...] | None:
        """Where the rows lie in each tensor of an output; None if the two are not the same."""
        pairs = _paired(first, again)
        if pairs is None:
            return None
        layouts: list[Layout] = []
        for one, other in pairs:
            if isinstance(one, Tensor):
                layout = self._layout(one, other)
                if layout is None:
                    return None
                layouts.append(layout)
            elif one != other:
                return None
        return tuple(layouts)

    def _layout(self, one: Tensor, other: Tensor) -> Layout | None:
        rows, found = self.dry.batch, [Layout(None)]
        if self.copies > 1:
            found = probe_layout((one.shape, one.float()), (other.shape, other.float()), rows)
        if len(found) != 1 or found[0].varies:
            return None
        copied = copied_rows(one, found[0], rows, range(rows), self.copies)
        return found[0] if self.dry.same(copied.float(), other.float()) else None

    def _replayed(self, prefix: Prefix, expected: Tensor) -> Prefix | None:
        """The prefix with what passes read of it; None if the logits are others."""
        self.record = Record(prefix, self.dry.batch, self.first)
        rows, (args, kwargs) = self._rows(1, self.copies), self._lazy_inputs()
        with self.record.replaying(self.control, range(self.dry.batch), self.copies) as given:
            output = self.control.forward(rows, *args, **kwargs)
        if not self.dry.same(output_tensor(output, self.dry.logits), expected):
            return None
        needed = frozenset(call for call, each in given.items() if any(x.was_made for x in each))
        return dataclasses.replace(prefix, needed=needed)

    def _lazy_inputs(self) -> Any:
        dry = self.dry
        inputs, rows = (dry.inputs, dry.kwargs), range(dry.batch)
        return lazy_inputs(inputs, dry.batch_dim, dry.batch, rows, self.copies)

    def measured(self, prefix: Prefix) -> Prefix:
        """The prefix with the bytes that a row takes, in a pass that drops nothing."""
        recorder = Recorder(
            self.control.model, self.control.held, self.control.rates, self.control.layouts
        )
        detector, (args, kwargs) = Detector(recorder), self._lazy_inputs()
        with (
            recorder.prepared(_HALF),
            self.record.replaying(recorder, range(self.dry.batch), self.copies) as given,
            detector,
        ):
            recorder.run(*args, **kwargs)
        lazy = [*pytree.tree_leaves((args, kwargs)), *(x for each in given.values() for x in each)]
        made = [x for x in lazy if isinstance(x, LazyRows) and x.was_made]
        sizes = [x.numel() * x.element_size() for x in made]
        rows = self.copies * self.dry.batch
        return dataclasses.replace(
            prefix,
            row_bytes=-(-(detector.peak_bytes + sum(sizes)) // rows),
            largest_bytes=-(-max(detector.largest_bytes, *sizes, 0) // rows),
        )

    def compared_to_eval(self, prefix: Prefix) -> Prefix:
        """The prefix with whether a pass in eval mode gives the same output."""
        found: Outputs = {}

        def answer(call: ModuleCall, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if call in prefix.needed:
                found[call] = _cloned(output)
            return output

        args, kwargs = self.dry.take()
        with intercepted(self.control.model, prefix.names, answer):
            self.control.model(*args, **kwargs)
        same = all(_identical(self.first[call], found.get(call)) for call in prefix.needed)
        return dataclasses.replace(prefix, in_eval=same)


def _cloned(output: Any) -> Any:
    """An output with clones of its tensors, because what follows may write into them."""
    return pytree.tree_map_only(Tensor, Tensor.clone, output)


def _paired(output: Any, other: Any) -> list[tuple[Any, Any]] | None:
    """What two outputs hold at the same places; None if they have other places."""
    leaves, spec = pytree.tree_flatten(output)
    others, other_spec = pytree.tree_flatten(other)
    return list(zip(leaves, others)) if spec == other_spec else None


def _identical(output: Any, other: Any) -> bool:
    pairs = _paired(output, other)
    return pairs is not None and all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x is y or x == y
        for x, y in pairs
    )
