"""The work on one batch: the deterministic pass, then chunks of sampled rows into accumulators."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from afterdrop import kernels
from afterdrop.evaluation.accumulators import (
    Accumulator,
    MeanTemper,
    Results,
    SampleTemper,
    TooLow,
    distribution,
    log_softmax,
    require_numbers,
)
from afterdrop.evaluation.chunks import split_evenly
from afterdrop.evaluation.passes import (
    Batch,
    Chunks,
    Reader,
    call,
    fresh,
    plan_chunks,
    run_rows,
    sample_ranges,
)
from afterdrop.evaluation.pipeline import Pieces
from afterdrop.evaluation.protocol import SAMPLE_NODES, Protocol
from afterdrop.family.temperature import NODES
from afterdrop.masks.row_masks import draw_mask
from afterdrop.masks.rows import Rows
from afterdrop.masks.sites import Sites
from afterdrop.transfer import upload

_DET_ELEMENTS = {"cpu": 2**21, "cuda": 2**26}  # deterministic log-probabilities at a time


class Worker:
    """Evaluates batches; on running out of memory it goes on with smaller chunks.

    Attributes:
        ahead: How many later batches to begin before the results of one are taken.
    """

    ahead = 0

    def __init__(
        self,
        model: nn.Module,
        reader: Reader,
        protocol: Protocol,
        sites: Sites | None,
        budget: tuple[int, int],
    ) -> None:
        self.model, self.reader, self.protocol, self.sites = model, reader, protocol, sites
        self.budget, self.cache = budget
        self.control = sites.control(model) if sites else None
        self._room: Tensor | None = None  # for log-probabilities
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.on_cpu = device.type == "cpu"
        self.fused = _suits_kernels(protocol, device)
        self._uses_kernels = kernels.ready(device)
        if self.control is not None and self._uses_kernels:
            from afterdrop.kernels.mask_ops import keep_mask as drawn_by_kernel

            self.control.draw = drawn_by_kernel

    def carried(self) -> Results:
        """What the next batch needs of the ones before it, for resuming: nothing here."""
        return {}

    def restore(self, carried: Results) -> None:
        """Takes up what `carried` gave."""

    def begin(self, batch: Batch, number: int) -> Callable[[], Pieces]:
        """Begins a batch and returns what gives its results; here all work is done only then."""
        return partial(self.batch, batch, number)

    def batch(self, batch: Batch, number: int) -> Results:
        """All results of one batch, on the CPU."""
        results = self.identity(batch, number)
        output = call(self.model, fresh(batch, self.reader))
        logits = self.reader.logits(output, batch.host, 1)[0]
        targets = upload(results["targets"], logits.device)
        found = self.deterministic(logits, targets)
        del output, logits
        if self.sites is not None:  # under way before anything is waited for
            results |= self._sampled(batch, number)
        results |= {name: tensor.cpu() for name, tensor in found.items()}
        require_numbers(results["det_target"], f"batch {number}")
        return results

    def identity(self, batch: Batch, number: int) -> Results:
        """The targets of a batch that count, which must be classes, and their examples."""
        self.reader.check_classes(batch.host, self.protocol.num_classes, number)
        counts = self.reader.counts(batch.host)
        each = batch.host.numel() // batch.size
        examples = torch.arange(batch.first, batch.first + batch.size).repeat_interleave(each)
        return {"targets": batch.host.flatten()[counts], "examples": examples[counts]}

    def deterministic(self, logits: Tensor, targets: Tensor) -> Results:
        """Results of logits [N, V] without dropout, on their device; NaN is not looked for."""
        # In slices: the copies that a distribution needs would multiply the batch's own logits.
        most = _DET_ELEMENTS.get(logits.device.type, _DET_ELEMENTS["cpu"])
        step = max(1, most // logits.shape[-1])
        parts = [
            distribution(log_softmax(part, None), of, self.protocol.nodes)
            for part, of in zip(logits.split(step), targets.split(step))
        ]
        return {f"det_{name}": tensor for name, tensor in concatenate(parts, -1).items()}

    def _sampled(self, batch: Batch, number: int) -> Results:
        """The sampled results, on the CPU; without kernels if these cannot give them."""
        try:
            return self._held(batch, number)
        except TooLow:
            self.fused = False
        except Exception as error:
            if not self._uses_kernels:
                raise
            kernels.reason_to_fall_back(error, "the evaluation of samples")
            self._give_up_kernels()
        return self._held(batch, number)

    def _held(self, batch: Batch, number: int) -> Results:
        """The sampled results, on the CPU, if sums could hold them."""
        found = self._shrinking(batch, number)
        if "mc_held" in found:  # the kernels' sums
            from afterdrop.evaluation.engines.kernel_sums import require_held

            require_held(found.pop("mc_held"))
        return {name: tensor.cpu() for name, tensor in found.items()}

    def _give_up_kernels(self) -> None:
        """Draws and sums plainly from here on; results of batches before are as good."""
        self.fused = self._uses_kernels = False
        if self.control is not None:
            self.control.draw = draw_mask

    def _shrinking(self, batch: Batch, number: int) -> Results:
        """The sampled results on their device, in chunks that get smaller if memory runs out."""
        assert self.sites is not None
        while True:
            multipliers = len(self.protocol.grid.stochastic)
            each = max(1, batch.targets.numel() // batch.size)
            chunks = plan_chunks(
                self.sites,
                self.protocol.plan,
                batch.size,
                multipliers,
                each * self._target_bytes(),
                self.budget,
                self.cache,
                4 * each * self.protocol.num_classes if self.on_cpu else 0,
            )
            try:
                ranges = split_evenly(batch.size, chunks.examples)
                done = [self._chunk(batch, number, r, chunks) for r in ranges]
                return concatenate(done, -1)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                smallest = chunks.examples == chunks.samples == chunks.multipliers == 1
                if not _out_of_memory(error) or smallest or self.budget < 2**20:
                    raise
            self.budget //= 2
            self._room = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _chunk(self, batch: Batch, number: int, examples: range, chunks: Chunks) -> Results:
        grid = self.protocol.grid
        step = chunks.multipliers
        groups = [grid.stochastic[i : i + step] for i in range(0, len(grid.stochastic), step)]
        done = [self._group(batch, number, examples, group, chunks.samples) for group in groups]
        return concatenate(done, 0)

    def _group(
        self, batch: Batch, number: int, examples: range, multipliers: tuple[float, ...], step: int
    ) -> Results:
        """Multipliers that run together, over all samples, for a chunk of examples."""
        assert self.control is not None
        plan = self.protocol.plan
        part = batch.host[examples.start : examples.stop]
        counts = self.reader.counts(part)
        targets = upload(part.flatten()[counts], batch.targets.device)
        sums = self.accumulators(targets, counts, len(multipliers))
        scale = multipliers[0] if len(multipliers) == 1 else 1.0
        with self.control.prepared(scale):
            for block in sample_ranges(plan, step):
                for samples in block:
                    rows = self.rows(multipliers, samples, batch, examples)
                    found = self.logits(batch, rows, examples)
                    if not self.fused:
                        found = self._log_probs(found, number)
                    for accumulator in sums:
                        accumulator.add(found)
                    del found  # the next pass then writes where this one did, in the cache
                for accumulator in sums:
                    accumulator.end_block()
        out: Results = {}
        for accumulator in sums:
            out.update({f"mc_{n}": tensor for n, tensor in accumulator.results().items()})
        return out

    def _log_probs(self, logits: Tensor, number: int) -> Tensor:
        """Log-probabilities [S, L, N, V], to be read before the next ones are made."""
        # A pass has the multipliers first: as they lie, the logits need no copy.
        lp = log_softmax(logits.transpose(0, 1), f"batch {number}", self._room)
        if self._room is None or self._room.numel() < lp.numel():
            self._room = lp
        return lp.transpose(0, 1)

    def accumulators(self, targets: Tensor, counts: Tensor, groups: int) -> list[Accumulator]:
        """Where a chunk's predictions go: logits if `fused`, else log-probabilities.

        Args:
            targets: [N] on the device, those that count.
            counts: Which of all targets do, on the CPU.
            groups: Multipliers that run together.
        """
        if self.fused:
            from afterdrop.evaluation.engines.kernel_sums import FusedMean

            return [FusedMean(self.protocol, targets, groups)]
        grid, blocks = self.protocol.grid, self.protocol.plan.blocks
        sums: list[Accumulator] = [MeanTemper(grid.alphas, targets, self.protocol.nodes, blocks)]
        if grid.temper == "sample" and max(grid.alphas) > 0:
            sums.append(SampleTemper(grid.alphas, targets, self.protocol.sample_nodes, blocks))
        return sums

    def rows(
        self, multipliers: tuple[float, ...], samples: range, batch: Batch, examples: range
    ) -> Rows:
        """The rows of one pass."""
        numbers = torch.arange(batch.first + examples.start, batch.first + examples.stop)
        numbers = upload(numbers, batch.targets.device)
        return Rows(self.protocol.plan, multipliers, samples, numbers)

    def logits(self, batch: Batch, rows: Rows, examples: range) -> Tensor:
        """Logits [S, L, N, V] of a chunk of examples under the masks of `rows`."""
        assert self.control is not None
        return run_rows(self.control, self.reader, batch, rows, examples)

    def _target_bytes(self) -> int:
        """Bytes per target and multiplier: class accumulators of all open blocks, and K floats."""
        alphas, plan = len(self.protocol.grid.alphas), self.protocol.plan
        levels = plan.blocks.bit_length()
        # The last term: copies that turn sums into distributions at the end of a chunk.
        powers = (alphas + 3) * levels + 3 + 12
        if self.protocol.grid.temper == "sample":
            powers += 2 * (alphas + 1) * SAMPLE_NODES
        kept = alphas * (NODES + 32)
        return 4 * (powers * self.protocol.num_classes + 2 * plan.num_samples + kept)


def _suits_kernels(protocol: Protocol, device: torch.device) -> bool:
    """Whether the kernels can sum the samples."""
    if not kernels.ready(device):
        return False
    from afterdrop.evaluation.engines.kernel_sums import why_not

    return why_not(protocol, device) is None


def _out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)


_BY_MULTIPLIER_SECOND = ("mc_curve",)


def concatenate(parts: list[Results], dim: int) -> Results:
    """Joins results along targets (−1) or multipliers (0; second in the curve)."""
    if len(parts) == 1:
        return parts[0]
    joined: dict[str, Tensor] = {}
    for name in parts[0]:
        at = 1 if dim == 0 and name in _BY_MULTIPLIER_SECOND else dim
        joined[name] = torch.cat([part[name] for part in parts], at)
    return joined
