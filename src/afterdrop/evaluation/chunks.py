"""How the work on a batch is cut into chunks that fit a memory budget.

Legend: M multipliers, S samples of a chunk, B examples.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import torch

from afterdrop.errors import DataError
from afterdrop.masks.sites import Sites
from afterdrop.masks.uniforms import Plan, table_bytes

_SAMPLES_AT_ONCE = 5
_SMALLEST = 2**20  # bytes below which a smaller budget is not tried
CPU_MEMORY = 256 * 2**20
CPU_CACHE = 32 * 2**20  # rows of a pass on a CPU: beyond this, activations leave the caches
# From 32 MiB on, glibc returns a tensor's memory to the system at once, and fetching it anew page
# by page takes as long as a convolution or a product with a vocabulary of 10,000: stay below.
CPU_TENSOR = 24 * 2**20
# What torch says of memory on the CPU: on Windows, on Linux, and of sizes beyond 64 bits.
_NO_MEMORY = ("not enough memory", "can't allocate memory", "size calculation overflowed")


@dataclasses.dataclass
class Memory:
    """The bytes that an evaluation or prediction may use; smaller after each `halve`.

    Attributes:
        budget: For accumulators and rows together.
        cache: For rows; beyond it a pass gets slower. The smaller of both counts.
        on_cpu: Whether the device is a CPU.
        divisible: Whether the chunks planned last could be smaller.
    """

    budget: int
    cache: int
    on_cpu: bool = True
    divisible: bool = True

    @classmethod
    def of(cls, device: torch.device, given: int | None = None) -> Memory:
        """The memory of a device: as given, or 256 MiB of a CPU and 40 % of what a GPU has free.

        Raises:
            DataError: If less than 1 MiB is given.
        """
        on_cpu = device.type == "cpu"
        if given is not None:
            if given < 2**20:
                raise DataError(f"memory={given} is less than 1 MiB (1048576 bytes); give more")
            return cls(given, given if device.type == "cuda" else CPU_CACHE, on_cpu)
        if device.type == "cuda":
            # What torch keeps for tensors to come is free too, though the driver does not say so.
            kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            free = int((torch.cuda.mem_get_info(device)[0] + kept) * 0.4)
            return cls(free, free, on_cpu)
        return cls(CPU_MEMORY, CPU_CACHE, on_cpu)

    def halve(self) -> bool:
        """Halves the budget; returns False if that cannot make chunks smaller."""
        if self.budget < _SMALLEST or not self.divisible:
            return False
        self.budget //= 2
        return True


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How many examples, multipliers and samples run together."""

    examples: int
    multipliers: int
    samples: int


def plan_chunks(
    sites: Sites,
    plan: Plan,
    size: int,
    multipliers: int,
    target_bytes: int,
    memory: Memory,
    logits_bytes: int = 0,
) -> Chunks:
    """Chunks whose accumulators and rows fit a memory budget.

    Args:
        sites: Bytes per row of a pass, and whether rows can be batched.
        plan: The samples.
        size: Examples in the batch.
        multipliers: M.
        target_bytes: Bytes of accumulators per example and multiplier.
        memory: The budget.
        logits_bytes: Bytes of a row's logits, which should stay below `CPU_TENSOR` on a CPU.
    """
    block = len(plan.spans[0])
    budget, tables = memory.budget, table_bytes(plan)
    if tables <= budget // 2:  # otherwise they come on top of it: 32 MiB at most
        budget -= tables
    together = multipliers if sites.batched and not sites.rates else 1
    while together > 1 and target_bytes * together > budget // 2:
        together = -(-together // 2)
    examples = min(size, max(1, budget // 2 // max(1, target_bytes * together)))
    # Besides what the model holds, a row has its mask words and copies of its log-probabilities.
    rows = max(1, min(budget // 2, memory.cache) // max(1, 2 * sites.sampled_row_bytes))
    if memory.on_cpu:
        largest = max(logits_bytes, sites.sampled_largest_bytes, 1)
        rows = min(rows, max(1, CPU_TENSOR // largest))
    if not sites.batched:
        memory.divisible = False
        return Chunks(size, 1, 1)
    # Sums over few samples at a time mostly move their peaks: rather fewer examples at once.
    examples = max(1, min(examples, rows // min(block, _SAMPLES_AT_ONCE)))
    together = min(together, max(1, rows // (examples * min(block, _SAMPLES_AT_ONCE))))
    samples = min(block, max(1, rows // (examples * together)))
    memory.divisible = max(examples, together, samples) > 1
    return Chunks(examples, together, samples)


def sample_ranges(plan: Plan, chunk: int) -> list[list[range]]:
    """For each independent block, the chunks of its samples."""
    return [
        [range(span.start + part.start, span.start + part.stop) for part in parts]
        for span in plan.spans
        for parts in [split_evenly(len(span), chunk)]
    ]


def split_evenly(total: int, limit: int) -> list[range]:
    """Consecutive ranges over `total` of nearly equal length, none longer than `limit`.

    Example:
        >>> split_evenly(10, 4)
        [range(0, 3), range(3, 7), range(7, 10)]
    """
    parts = max(1, math.ceil(total / max(1, limit)))
    edges = [round(i * total / parts) for i in range(parts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(edges)]


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out.

    Example:
        >>> out_of_memory(RuntimeError("DefaultCPUAllocator: not enough memory"))
        True
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _NO_MEMORY)
