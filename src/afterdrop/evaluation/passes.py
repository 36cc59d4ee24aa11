"""Forward passes over chunks: which rows run together, and their logits per target.

Legend: L multipliers, S samples, B examples, N targets that count, V classes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from afterdrop.errors import DataError
from afterdrop.evaluation.chunks import split_evenly
from afterdrop.masks.control import Control
from afterdrop.masks.model_output import output_tensor
from afterdrop.masks.nested_inputs import take_rows
from afterdrop.masks.rows import Rows
from afterdrop.masks.sites import Sites
from afterdrop.masks.uniforms import Plan
from afterdrop.transfer import upload

_SAMPLES_AT_ONCE = 5
CPU_MEMORY = 256 * 2**20
CPU_CACHE = 96 * 2**20  # rows of a pass on a CPU: beyond this, activations leave the caches
# From 32 MiB on, glibc returns a tensor's memory to the system at once, and fetching it anew page
# by page takes as long as a product with a vocabulary of 10,000 writes to it: stay below.
CPU_LOGITS = 24 * 2**20


@dataclasses.dataclass(frozen=True)
class Batch:
    """Inputs and targets of some examples, on the model's device.

    Attributes:
        inputs: Nested inputs.
        targets: [B, ...] with the batch dimension first.
        first: Number of the first example in the data.
        size: B.
        given: The inputs as they were given.
        host: The targets on the CPU, which can be read without waiting for a device.
    """

    inputs: Any
    targets: Tensor
    first: int
    size: int
    given: Any
    host: Tensor


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Calls a model with a tensor, a tuple of positional or a mapping of keyword inputs."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(inputs)


def to_device(inputs: Any, device: torch.device) -> Any:
    """Moves the tensors of nested inputs."""
    if isinstance(inputs, Tensor):
        return upload(inputs, device)
    if isinstance(inputs, Mapping):
        return {key: to_device(value, device) for key, value in inputs.items()}
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
        return type(inputs)(*(to_device(value, device) for value in inputs))
    if isinstance(inputs, list | tuple):
        return type(inputs)(to_device(value, device) for value in inputs)
    return inputs


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads batches and logits: where the batch dimension is and which targets count.

    Args:
        batch_dim: The batch dimension of inputs, targets and logits.
        ignore_index: Targets with this value do not count.
    """

    batch_dim: int = 0
    ignore_index: int = -100

    def batch(self, item: Any, number: int, first: int, device: torch.device) -> Batch:
        """Checks and moves one item of the user's batches."""
        if not isinstance(item, list | tuple) or len(item) != 2:
            raise DataError(
                f"batch {number} is {type(item).__name__}, not a pair (inputs, targets); wrap your "
                "data so that each batch is such a pair"
            )
        inputs, targets = item
        if not isinstance(targets, Tensor):
            targets = torch.as_tensor(targets)
        if targets.is_floating_point() or targets.dtype == torch.bool or targets.dim() == 0:
            raise DataError(
                f"the targets of batch {number} are {targets.dtype} of shape "
                f"{tuple(targets.shape)}; give class numbers (int64) with a batch dimension"
            )
        if targets.dim() > self.batch_dim:
            targets = targets.movedim(self.batch_dim, 0)
        if targets.shape[0] == 0:
            raise DataError(f"batch {number} has no examples; leave it out")
        if isinstance(inputs, list):
            inputs = tuple(inputs)
        host = targets.cpu().long()
        moved = to_device(inputs, device)
        return Batch(moved, upload(host, device), first, len(host), inputs, host)

    def counts(self, targets: Tensor) -> Tensor:
        """Which targets count, flattened."""
        return (targets != self.ignore_index).flatten()

    def logits(self, output: Any, targets: Tensor, copies: int) -> Tensor:
        """Logits [copies, N, V] of the targets (on the CPU) that count."""
        logits = output_tensor(output)
        found = tuple(logits.shape)
        if self.batch_dim and logits.dim() > self.batch_dim + 1:
            logits = logits.movedim(self.batch_dim, 0)
        rows, *rest = targets.shape
        whole = (copies * rows, *rest)
        # [B · time, V] is read batch-major, which no other batch dimension gives.
        flat = (copies * targets.numel(),) if self.batch_dim == 0 else whole
        if tuple(logits.shape[:-1]) not in (whole, flat):
            raise DataError(
                f"logits of shape {found} do not match targets of shape {tuple(targets.shape)}"
                + f" x {copies} samples" * (copies > 1)
                + "; logits must have the targets' shape with the classes as last dimension "
                f"(batch_dim={self.batch_dim})"
            )
        logits = logits.reshape(copies, targets.numel(), logits.shape[-1])
        counts = self.counts(targets)
        return logits if bool(counts.all()) else logits[:, counts]

    def check_classes(self, targets: Tensor, classes: int, number: int) -> None:
        """Refuses targets outside 0 to classes − 1."""
        valid = targets.flatten()[self.counts(targets)]
        if valid.numel() and (int(valid.min()) < 0 or int(valid.max()) >= classes):
            raise DataError(
                f"batch {number} has targets from {int(valid.min())} to {int(valid.max())}, but "
                f"the model has {classes} classes (0 to {classes - 1}); ignored targets must be "
                f"ignore_index={self.ignore_index}"
            )


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How the work on a batch is cut: examples, then multipliers, then samples of each block."""

    examples: int
    multipliers: int
    samples: int


def plan_chunks(
    sites: Sites,
    plan: Plan,
    size: int,
    multipliers: int,
    target_bytes: int,
    budget: int,
    cache: int,
    logits_bytes: int = 0,
) -> Chunks:
    """Chunks whose accumulators and rows fit a memory budget.

    Args:
        sites: Bytes per row of a pass, and whether rows can be batched.
        plan: The samples.
        size: Examples in the batch.
        multipliers: L.
        target_bytes: Bytes of accumulators per example and multiplier.
        budget: Bytes for accumulators and rows together.
        cache: Bytes of rows beyond which a pass gets slower; the smaller of both counts.
        logits_bytes: Of a row's logits on a CPU, where they should stay below `CPU_LOGITS`.
    """
    block = len(plan.spans[0])
    together = multipliers if sites.batched and not sites.rates else 1
    while together > 1 and target_bytes * together > budget // 2:
        together = -(-together // 2)
    examples = min(size, max(1, budget // 2 // max(1, target_bytes * together)))
    # Besides what the model holds, a row has its mask words and the log-probabilities' copies.
    rows = max(1, min(budget // 2, cache) // max(1, 2 * sites.row_bytes))
    if logits_bytes:
        rows = min(rows, max(1, CPU_LOGITS // logits_bytes))
    if not sites.batched:
        return Chunks(size, 1, 1)
    # Sums over few samples at a time mostly move their peaks: rather fewer examples at once.
    examples = max(1, min(examples, rows // min(block, _SAMPLES_AT_ONCE)))
    together = min(together, max(1, rows // (examples * min(block, _SAMPLES_AT_ONCE))))
    return Chunks(examples, together, min(block, max(1, rows // (examples * together))))


def memory_budget(memory: int | None, device: torch.device) -> tuple[int, int]:
    """Bytes for accumulators and rows, and the useful bytes of rows, on a device."""
    if memory is not None:
        if memory < 2**20:
            raise DataError(f"memory={memory} is less than 1 MiB (1048576 bytes); give more")
        return memory, memory if device.type == "cuda" else CPU_CACHE
    if device.type == "cuda":
        # What torch keeps for tensors to come is free as well, though the driver does not say so.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = int((torch.cuda.mem_get_info(device)[0] + kept) * 0.4)
        return free, free
    return CPU_MEMORY, CPU_CACHE


def fresh(batch: Batch, reader: Reader) -> Any:
    """A copy of a batch's inputs: a model may write into what it is given."""
    return take_rows(batch.inputs, reader.batch_dim, batch.size, 0, batch.size, 1)


def run_rows(control: Control, reader: Reader, batch: Batch, rows: Rows, examples: range) -> Tensor:
    """Logits [S, L, N, V] of a chunk of examples under the masks of `rows`."""
    copies = len(rows.multipliers) * len(rows.samples)
    start, stop = examples.start, examples.stop
    inputs = take_rows(batch.inputs, reader.batch_dim, batch.size, start, stop, copies)
    output = call(lambda *a, **k: control.forward(rows, *a, **k), inputs)
    logits = reader.logits(output, batch.host[start:stop], copies)
    return logits.unflatten(0, (len(rows.multipliers), len(rows.samples))).transpose(0, 1)


def sample_ranges(plan: Plan, chunk: int) -> list[list[range]]:
    """For each independent block, the chunks of its samples."""
    return [
        [range(span.start + part.start, span.start + part.stop) for part in parts]
        for span in plan.spans
        for parts in [split_evenly(len(span), chunk)]
    ]
