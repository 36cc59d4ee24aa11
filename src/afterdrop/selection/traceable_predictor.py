"""A predictor as plain tensor operations, which torch.export can trace.

All inputs share the masks of sample k, so a dropout site needs K masks and no random numbers. They
are drawn once and become buffers; the batch size stays free. Nothing depends on values of tensors.

Legend: K samples, B examples, V classes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from afterdrop.errors import DataError, SiteError
from afterdrop.evaluation.likelihoods.categorical import Categorical
from afterdrop.evaluation.request import Request
from afterdrop.family.member import Member
from afterdrop.family.power_mean import log_power_mean
from afterdrop.masks.control import Control
from afterdrop.masks.model_call import full_precision, take_rows, without_fast_path
from afterdrop.masks.model_guard import guarded
from afterdrop.masks.rows import Layout, RowMask, Rows, coordinates, draw_row_mask
from afterdrop.masks.sites import find_sites
from afterdrop.selection.member_mean import member_log_probs

MASK_BYTES = 2**30  # more in masks than this is refused: files of 2 GiB are the most ONNX has
_ONE_PASS = "train a deterministic copy (afterdrop.distil) and export that"
_RECORDED = 2  # examples of the pass that draws the masks; one row alone may be squeezed away


class TraceablePredictor(nn.Module):
    """Log-probabilities of a member, from the tensors among the inputs of a model.

    Calls work inside `ready` only.

    Args:
        model: The model.
        member: How to predict.
        request: Samples and dimensions.
        likelihood: Reads the output.
        arguments: Example inputs: positional and keyword ones, a pair (args, kwargs).
        size: B of the example inputs.

    Raises:
        DataError, SiteError: If the masks cannot become buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        member: Member,
        request: Request,
        likelihood: Categorical,
        arguments: Any,
        size: int,
    ) -> None:
        super().__init__()
        self.model, self.member, self.likelihood = model, member, likelihood
        self.batch_dim = request.batch_dim
        leaves, self._spec = pytree.tree_flatten(arguments)
        self._leaves = leaves
        self.example = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        self.batched = [self._has_batch(tensor, size) for tensor in self.example]
        self._control: Control | None = None
        self._places: dict[int, tuple[str, tuple[int, ...]]] = {}
        if not member.deterministic:
            self._rows = Rows(
                request.plan, (member.multiplier,), range(request.plan.num_samples), _keys(1)
            )
            self._control = self._find_control(request, arguments)
            self._record(arguments, size)

    def _has_batch(self, tensor: Tensor, size: int) -> bool:
        return tensor.dim() > self.batch_dim and tensor.shape[self.batch_dim] == size

    def _find_control(self, request: Request, arguments: Any) -> Control:
        inputs, kwargs = arguments
        options: Any = {"rates": request.rates, "noise": request.noise}
        options |= {"batch_dim": request.batch_dim, "logits": self.likelihood.logits}
        sites = find_sites(self.model, *inputs, **options, compute_once=False, **kwargs)
        if request.rates:
            raise SiteError(
                f"rates={request.rates} declares masks that the model draws itself, which cannot "
                f"become constants of a file; use nn.Dropout or F.dropout there, or {_ONE_PASS}"
            )
        if not sites.batched:
            raise SiteError(
                f"the samples of this model run in one pass each ({sites.reason}), which a file "
                f"with a free batch size cannot hold; {_ONE_PASS}"
            )
        return sites.control(self.model)

    def _record(self, arguments: Any, size: int) -> None:
        """Draws the masks of all samples, in a pass of a few examples."""
        assert self._control is not None
        few, samples = min(size, _RECORDED), len(self._rows.samples)
        inputs, kwargs = take_rows(arguments, self.batch_dim, size, 0, few, samples)
        rows = Rows(self._rows.plan, self._rows.multipliers, self._rows.samples, _keys(few))
        self._control.draw = self._draw
        with torch.no_grad(), self.ready():
            self._control.forward(rows, *inputs, **kwargs)
        self._control.draw = self._recall

    def _draw(
        self, rows: Rows, key: int, layout: Layout, like: Tensor, rates: tuple[float, ...]
    ) -> RowMask:
        """Draws a mask as `draw_row_mask` does, and keeps it."""
        assert layout.dim is not None  # the rows have masks of their own, or no samples are batched
        coords, at, flattened = coordinates(list(like.shape), layout, len(rows))
        name = f"mask_{len(self._places)}"
        found = draw_row_mask(rows, key, layout, like, rates)
        # [1, K, B] stand at `at`; every example has the same masks.
        self.register_buffer(name, found.mask.narrow(at + 2, 0, 1).to(torch.bool))
        unfolded = [1, len(rows.samples), -1]
        sizes = tuple(flattened + unfolded if at > layout.dim else unfolded + flattened)
        self._places[key] = name, sizes
        total = sum(buffer.numel() for buffer in self._masks)
        if total > MASK_BYTES:
            needed = len(rows.samples) * math.prod(coords)
            raise DataError(
                f"the masks take more than {MASK_BYTES >> 20} MiB ({needed >> 20} MiB for one "
                f"dropout site, num_samples={len(rows.samples)}); export with a smaller "
                f"num_samples=, or {_ONE_PASS}"
            )
        return found

    @property
    def _masks(self) -> list[Tensor]:
        return [self.get_buffer(name) for name, _ in self._places.values()]

    def _recall(
        self, rows: Rows, key: int, layout: Layout, like: Tensor, rates: tuple[float, ...]
    ) -> RowMask:
        """The mask that was kept, for any number of examples."""
        if key not in self._places:
            raise SiteError(
                "a dropout operation runs that did not run for two of the examples; a model whose "
                "path depends on the batch size cannot be exported"
            )
        name, sizes = self._places[key]
        mask = self.get_buffer(name).to(like.dtype)
        return RowMask(mask, rates[0], layout.dim, sizes)

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Holds the model as its passes need it, and restores it on exit."""
        with contextlib.ExitStack() as held:
            held.enter_context(guarded(self.model))
            held.enter_context(without_fast_path())
            held.enter_context(full_precision())
            if self._control is not None:
                held.enter_context(self._control.prepared((self.member.multiplier,)))
            yield

    def forward(self, *tensors: Tensor) -> Tensor:
        """Log-probabilities in the shape of the logits."""
        if self._control is None:
            inputs, kwargs = self._arguments(tensors)
            logits, _ = self.likelihood.read_logits(self.model(*inputs, **kwargs))
            found = (logits.float() / self.member.temperature).log_softmax(-1)
            return self.likelihood.prediction(found, self.member)
        samples = len(self._rows.samples)
        copies = [self._repeat(x, samples) if b else x for x, b in zip(tensors, self.batched)]
        inputs, kwargs = self._arguments(copies)
        output = self._control.forward(self._rows, *inputs, **kwargs)
        logits, dim = self.likelihood.read_logits(output)
        logits_K = logits.float().unflatten(dim, (samples, -1)).movedim(dim, 0)
        if self.member.temper == "sample":
            logits_K = logits_K / self.member.temperature
        log_means = log_power_mean(logits_K.log_softmax(-1), self.member.alpha)
        return self.likelihood.prediction(member_log_probs(log_means, self.member), self.member)

    def _repeat(self, tensor: Tensor, copies: int) -> Tensor:
        times = [1] * tensor.dim()
        times[self.batch_dim] = copies
        return tensor.repeat(times)

    def _arguments(self, tensors: Sequence[Tensor]) -> Any:
        """Positional and keyword inputs of the model."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)


def _keys(size: int) -> Tensor:
    """[B] equal keys of examples: all of them share the masks."""
    return torch.zeros(size, dtype=torch.int64)
