"""The engine for any module: a deterministic pass, then chunks of rows under masks.

It needs nothing of CUDA. On accelerators other than CUDA, which may lack float64, the model and its
masks run there, and sums over samples and classes on the CPU.

Legend: M multipliers, S samples of a chunk, B examples, N targets that count, V classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from afterdrop.evaluation.batches import Batch, call, to_device
from afterdrop.evaluation.chunks import (
    Chunks,
    Memory,
    plan_chunks,
    split_evenly,
)
from afterdrop.evaluation.engines import Outcome
from afterdrop.evaluation.engines.component_temper import ComponentTemper
from afterdrop.evaluation.engines.model_passes import Passes, run_samples
from afterdrop.evaluation.likelihoods import Accumulator, Likelihood, Partitions
from afterdrop.evaluation.likelihoods.categorical import require_numbers
from afterdrop.evaluation.request import Protocol as EvaluationProtocol
from afterdrop.evaluation.request import Request
from afterdrop.evaluation.scores import schema
from afterdrop.evaluation.scores.schema import Results
from afterdrop.family.temperature import partitions
from afterdrop.masks.prefix import NotRecorded
from afterdrop.masks.rows import Rows
from afterdrop.masks.sites import Sites
from afterdrop.transfer import with_float64


@dataclasses.dataclass(frozen=True)
class Operations:
    """The forms of the operations that dominate: plain ones, or kernels.

    Attributes:
        draw: Draws the mask of a dropout site; None for the plain form.
        partitions: Sums over classes at temperatures.
        sums: Makes accumulators of logits by kernels; None accumulates log-probabilities plainly.
        kernels: Whether any of these is a kernel.
    """

    draw: Callable[..., Any] | None = None
    partitions: Partitions = partitions
    sums: Callable[[EvaluationProtocol, Tensor, int], KernelAccumulator] | None = None
    kernels: bool = False


class KernelAccumulator(Accumulator, Protocol):
    """An accumulator of logits whose sums hold a limited range of log-probabilities."""

    def why_not_held(self) -> str | None:
        """Why sums could not hold the samples, once the results were computed; None if they did."""


def supports(request: Request, model: nn.Module, device: torch.device) -> str | None:
    """Why this engine cannot evaluate a request; None if it can."""
    return None if request.stream is None else "windows of a text need the text engine"


class GenericEngine:
    """Evaluates batches with a model's forward passes.

    Args:
        model: The model.
        protocol: The evaluation.
        likelihood: Reads targets and outputs, and accumulates.
        sites: The model's dropout sites; None if no member samples.
        passes: Its passes under masks; None likewise.
        memory: The budget, which the dispatcher makes smaller when memory runs out.
        operations: Plain ones, or kernels.
    """

    ahead = 0

    def __init__(
        self,
        model: nn.Module,
        protocol: EvaluationProtocol,
        likelihood: Likelihood,
        sites: Sites | None,
        passes: Passes | None,
        memory: Memory,
        operations: Operations,
    ) -> None:
        self.model, self.protocol, self.likelihood = model, protocol, likelihood
        self.sites, self.passes, self.memory, self.operations = sites, passes, memory, operations
        self.kernels = operations.kernels
        tempers = protocol.grid.temper == "component"
        self._components = ComponentTemper(model, protocol) if tempers else None
        self._room: Tensor | None = None  # for log-probabilities

    def begin(self, batch: Batch, number: int) -> Callable[[], Outcome]:
        """Returns what computes the results of a batch: here all work is done only then."""
        return partial(self.run, batch, number)

    def run(self, batch: Batch, number: int) -> Outcome:
        """All results of one batch, on the CPU, or why kernels could not give them."""
        results = identity(batch, number, self.likelihood, self.protocol)
        with self._watching():
            output = self._deterministic(batch)
        logits = with_float64(self.likelihood.read_output(output, batch.host, 1)[0])
        targets = to_device(results[schema.name_of("data", "targets")], logits.device)
        found = schema.named(
            "deterministic",
            self.likelihood.deterministic(
                logits, targets, self.protocol.nodes, self.operations.partitions
            ),
        )
        if self._components is not None:
            tempered = self._components.deterministic(targets, self.likelihood.counts(batch.host))
            found |= schema.named("tempered_deterministic", tempered)
        del output, logits
        if self.sites is not None:  # launched before anything is waited for
            sampled = self._sampled(batch, number)
            if isinstance(sampled, str):
                return sampled
            results |= sampled
        results |= {name: tensor.cpu() for name, tensor in found.items()}
        require_numbers(results[schema.name_of("deterministic", "target")], f"batch {number}")
        if self.passes is not None:
            self.passes.end_batch()
        return results

    def _deterministic(self, batch: Batch) -> Any:
        run = partial(call, self.model, batch.fresh_inputs(self.protocol.request.batch_dim))
        if self.passes is None:
            return run()
        return self.passes.deterministic(run, batch.inputs, batch.size)

    def _watching(self) -> AbstractContextManager[None]:
        """Keeps what temperatures that act on components need of a pass."""
        return nullcontext() if self._components is None else self._components.watching()

    def clear(self) -> None:
        """Frees the memory of log-probabilities."""
        self._room = None

    def carried(self) -> Results:
        """What the passes carry from batch to batch."""
        return {} if self.passes is None else self.passes.carried()

    def restore(self, carried: Results) -> None:
        """Takes up what `carried` gave."""
        if self.passes is not None:
            self.passes.restore(carried)

    def _sampled(self, batch: Batch, number: int) -> Results | str:
        """The sampled results, on the CPU, or why sums could not hold them."""
        assert self.sites is not None and self.passes is not None
        try:
            return self._all_chunks(batch, number)
        except NotRecorded:
            self.sites = self.sites.without_prefix()
            self.passes.run_all_modules()
            return self._all_chunks(batch, number)

    def _all_chunks(self, batch: Batch, number: int) -> Results | str:
        assert self.sites is not None
        each = max(1, batch.targets.numel() // batch.size)
        counted = min(each, self.protocol.request.targets_per_example or each)
        chunks = plan_chunks(
            self.sites,
            self.protocol.plan,
            batch.size,
            len(self.protocol.grid.stochastic),
            counted * self.likelihood.target_bytes(self.protocol),
            self.memory,
            4 * each * self.protocol.num_classes,
        )
        limited: list[KernelAccumulator] = []
        ranges = split_evenly(batch.size, chunks.examples)
        found = schema.join([self._chunk(batch, number, r, chunks, limited) for r in ranges], "N")
        for accumulator in limited:
            if reason := accumulator.why_not_held():
                return reason
        return {name: tensor.cpu() for name, tensor in found.items()}

    def _chunk(
        self,
        batch: Batch,
        number: int,
        examples: range,
        chunks: Chunks,
        limited: list[KernelAccumulator],
    ) -> Results:
        """Results of some examples, all multipliers; adds accumulators of limited range."""
        multipliers, step = self.protocol.grid.stochastic, chunks.multipliers
        groups = [multipliers[i : i + step] for i in range(0, len(multipliers), step)]
        done = [
            self._group(batch, number, examples, group, chunks.samples, limited) for group in groups
        ]
        return schema.join(done, "M")

    def _group(
        self,
        batch: Batch,
        number: int,
        examples: range,
        multipliers: tuple[float, ...],
        at_once: int,
        limited: list[KernelAccumulator],
    ) -> Results:
        """Results of some examples and of multipliers that run together, over all samples."""
        assert self.passes is not None
        part = batch.host[examples.start : examples.stop]
        counts = self.likelihood.counts(part)
        targets = with_float64(to_device(part.flatten()[counts], batch.targets.device))
        numbers = torch.arange(batch.first + examples.start, batch.first + examples.stop)
        numbers = to_device(numbers, batch.targets.device)
        if self.operations.sums is not None:
            own = self.operations.sums(self.protocol, targets, len(multipliers))
            limited.append(own)
            accumulators: list[Accumulator] = [own]
        else:
            accumulators = self.likelihood.accumulators(
                self.protocol, targets, self.operations.partitions
            )
        accumulators += self.passes.accumulators(targets, counts)
        if self._components is not None:
            accumulators.append(self._components.sums(targets, counts))

        def add(samples: range) -> None:
            assert self.passes is not None
            rows = Rows(self.protocol.plan, multipliers, samples, numbers)
            with self._watching():
                output = self.passes.run(batch.inputs, batch.size, rows, examples)
            copies = len(multipliers) * len(samples)
            logits = with_float64(self.likelihood.read_output(output, part, copies))
            logits = logits.unflatten(0, (len(multipliers), len(samples)))
            predictions = self._predictions(logits, number).transpose(0, 1)
            for accumulator in accumulators:
                accumulator.add(predictions)

        def end_block() -> None:
            for accumulator in accumulators:
                accumulator.end_block()

        run_samples(self.passes.control, self.protocol.plan, multipliers, at_once, add, end_block)
        out: Results = {}
        for accumulator in accumulators:
            out |= schema.named(accumulator.group, accumulator.results())
        return out

    def _predictions(self, logits: Tensor, number: int) -> Tensor:
        """What accumulators take of logits [M, S, N, V]; overwritten by the next call."""
        if self.operations.sums is not None:
            return logits
        lp = self.likelihood.predict(logits, f"batch {number}", self._room)
        if self._room is None or self._room.numel() < lp.numel():
            self._room = lp
        return lp


def identity(
    batch: Batch, number: int, likelihood: Likelihood, protocol: EvaluationProtocol
) -> Results:
    """The targets of a batch that count, which must be classes, and their examples."""
    likelihood.check_targets(batch.host, protocol.num_classes, number)
    counts = likelihood.counts(batch.host)
    each = batch.host.numel() // batch.size
    examples = torch.arange(batch.first, batch.first + batch.size).repeat_interleave(each)
    data = {"targets": batch.host.flatten()[counts], "examples": examples[counts]}
    if (labels := likelihood.labels(batch.host)) is not None:
        data["labels"] = labels
    return schema.named("data", data)
