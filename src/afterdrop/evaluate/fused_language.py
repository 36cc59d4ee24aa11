"""Family evaluation of language models on a GPU: the kernels' form of `language.LanguageWorker`.

All multipliers, windows and samples of a chunk are rows of one batch (`fused_features`), and the
vocabulary is taken some targets at a time. Operands and logits are float16, everything that is
summed over samples or time float32.

Legend: M multipliers, W windows, K samples, time steps, H units, E of the embedding, V token types;
rows are M × W × K, features M × W × time × K.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from afterdrop import kernels
from afterdrop.evaluate.accumulate import Results, TooLow
from afterdrop.evaluate.fused_features import MOST_MULTIPLIERS, SampledFeatures
from afterdrop.evaluate.fused_mean import family_results, family_sums, require_held
from afterdrop.evaluate.integrated import Integrated
from afterdrop.evaluate.language import LanguageWorker, StreamSettings
from afterdrop.evaluate.passes import Batch
from afterdrop.family.member import Grid
from afterdrop.kernels.family_sums import ALPHAS
from afterdrop.kernels.uniform import why_not_drawn
from afterdrop.masks.rows import split_evenly
from afterdrop.masks.uniforms import Plan
from afterdrop.models import LanguageModel
from afterdrop.models.fused import Copies, DeterministicPass, why_not_fused

_ROWS = 2**15  # rows of a product: enough to run at full speed
_SMALLEST = 2**20  # bytes under which a smaller budget is not tried
_LOGITS = 2**27  # logits at a time: 256 MiB, for a product at full speed


def why_not(
    model: LanguageModel, grid: Grid, plan: Plan, stream: StreamSettings, device: torch.device
) -> str | None:
    """Why the kernels cannot evaluate this; None if they can."""
    if reason := kernels.why_not(device) or why_not_fused(model.config) or why_not_drawn(plan):
        return reason
    if model.softmax_bias.dtype != torch.float32:
        return f"weights are {model.softmax_bias.dtype}"
    if stream.carry != "deterministic":
        return f"carry is {stream.carry!r}"
    if grid.temper != "mean":
        return f"temper is {grid.temper!r}"
    if not set(grid.alphas) <= set(ALPHAS):
        return f"alphas {grid.alphas} are not all among {ALPHAS}"
    if len(grid.stochastic) > MOST_MULTIPLIERS:
        return f"there are more than {MOST_MULTIPLIERS} multipliers"
    return "there is one sample" if plan.num_samples == 1 else None


class FusedLanguageWorker(LanguageWorker):
    """Evaluates windows with the kernels."""

    dtype = torch.float16  # of operands and logits; eight times finer than bfloat16

    def __init__(self, *args: Any, stream: StreamSettings) -> None:
        super().__init__(*args, stream=stream)
        assert isinstance(self.model, LanguageModel)
        self._uses_kernels = True
        self.copies = Copies(self.model, self.dtype)
        self.copies.pack()
        self.device = self.model.softmax_bias.device
        self.multipliers = self.protocol.grid.stochastic
        self.sampled = SampledFeatures(self.copies, self.protocol, stream)
        K = self.protocol.plan.num_samples
        self.targets_at_once = max(1, _LOGITS // (K * len(self.copies.softmax)))
        self.sums = family_sums(self.protocol, self.targets_at_once, self.device)
        shape = self.targets_at_once * K, len(self.copies.softmax)
        self._logits = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._passes: DeterministicPass | None = None

    def deterministic(self, batch: Batch) -> Tensor:
        """Logits [N, V] of the targets that count, without dropout."""
        if self._uses_kernels:
            try:
                return self._deterministic(batch)
            except Exception as error:
                kernels.reason_to_fall_back(error, "the deterministic pass")
                self._give_up_kernels()
        return super().deterministic(batch)

    def _deterministic(self, batch: Batch) -> Tensor:
        tokens, state = batch.inputs
        if self._passes is None:  # the first batch is the largest
            self._passes = DeterministicPass(self.copies, *tokens.shape)
        passes = self._passes
        passes.begin(state)
        window = torch.zeros_like(passes.tokens).t()
        window[: len(tokens)] = tokens
        y = passes.run(window).transpose(0, 1)[: len(tokens)]
        return self._output(y.flatten(0, 1)[self.reader.counts(batch.targets)])

    def _sampled(self, batch: Batch, number: int) -> Results:
        if not self._uses_kernels:
            return super()._sampled(batch, number)
        each = len(self.multipliers) * self.protocol.plan.num_samples
        rows = min(_ROWS, self.budget // self.sampled.row_bytes(batch.targets.shape[1]))
        chunks = split_evenly(batch.size, max(1, rows // each))
        # Results stay on the device until the batch is done: a copy would wait for the kernels.
        each = batch.targets.shape[1]
        counts = self.reader.counts(batch.targets)
        kept = [counts[r.start * each : r.stop * each].nonzero()[:, 0] for r in chunks]
        try:
            parts = [self._windows(batch, *chunk) for chunk in zip(chunks, kept)]
            require_held(torch.cat([part.pop("mc_held") for part in parts]))
        except TooLow:
            self.fused = False  # those sums would not hold them either
            return super()._sampled(batch, number)
        except torch.OutOfMemoryError:
            if self.budget < _SMALLEST:
                raise
            self.budget //= 2
            self.sampled.clear()
            torch.cuda.empty_cache()
            return self._sampled(batch, number)
        except Exception as error:
            kernels.reason_to_fall_back(error, "the evaluation of samples")
            self._give_up_kernels()
            self.sampled.clear()  # most of the memory
            return super()._sampled(batch, number)
        return on_cpu({name: torch.cat([part[name] for part in parts], -1) for name in parts[0]})

    def _windows(self, batch: Batch, examples: range, kept: Tensor) -> Results:
        """Results of some windows, and under `mc_held` the smallest log-probabilities.

        Args:
            batch: All windows.
            examples: Which.
            kept: Which of their targets count; numbers, because a mask would wait for the kernels.
        """
        part = slice(examples.start, examples.stop)
        tokens, state = batch.inputs
        start = tuple((h[part], c[part]) for h, c in state)
        features, plain = self.sampled.run(tokens[part], start, batch.first + examples.start)
        targets = batch.targets[part].flatten()
        found, lp_K = self._family(features, targets.clamp_min(0))
        held = found.pop("lowest").flatten()
        found = {name: tensor.index_select(-1, kept) for name, tensor in found.items()}
        out = family_results(found, lp_K.index_select(-1, kept), self.protocol)
        if (integrated := self.integrated(targets[kept], kept)) is not None:
            out.update(self._of_halves(integrated, plain, kept))
        out["held"] = held
        return {f"mc_{name}": tensor for name, tensor in out.items()}

    def _family(self, features: Tensor, targets: Tensor) -> tuple[Results, Tensor]:
        """Sums over samples of all targets [M, ..., N], and log-probabilities [K, M, N]."""
        M, K, N = len(self.multipliers), self.protocol.plan.num_samples, len(targets)
        assert isinstance(self.model, LanguageModel)
        bias = self.model.softmax_bias.detach()
        rows = features.view(M, N * K, -1)
        found = [self.sums.results(N) for _ in range(M)]
        for m in range(M):
            for start in range(0, N, self.targets_at_once):
                some = targets[start : start + self.targets_at_once]
                logits = self._logits[: len(some) * K]
                piece = rows[m, start * K : (start + len(some)) * K]
                torch.mm(piece, self.copies.softmax.t(), out=logits)
                self.sums.add(logits, bias, some, found[m], start)
        joined = {name: torch.stack([part[name] for part in found]) for name in found[0]}
        joined["mean_entropy"] /= K
        return joined, joined.pop("chosen").permute(2, 0, 1)

    def _of_halves(self, integrated: Integrated, plain: Tensor, kept: Tensor) -> Results:
        """Alpha 0 with output dropout integrated out, from the stack's outputs."""
        M, K = len(self.multipliers), self.protocol.plan.num_samples
        hidden = self.copies.config.hidden_sizes[0]
        halves = plain.view(M, -1, 2, K // 2, plain.shape[-1])[..., :hidden]
        halves = halves.sum(3, dtype=torch.float32).index_select(1, kept)
        integrated.output = self._output
        return integrated.of_halves([(half, K // 2) for half in halves.unbind(2)])

    def _output(self, y: Tensor) -> Tensor:
        """Logits [..., V] of the stack's mean output [..., H]."""
        rows = torch.zeros(*y.shape[:-1], self.copies.stack.w_h.shape[-1], device=self.device)
        rows[..., : y.shape[-1]] = y
        logits = self.copies.logits(self.copies.features(rows.flatten(0, -2)))
        assert isinstance(self.model, LanguageModel)
        bias = self.model.softmax_bias.detach()
        return (logits[:, : len(bias)] + bias).unflatten(0, y.shape[:-1])


def on_cpu(results: Results) -> Results:
    """Results in the CPU's memory, through pages that a GPU can write to by itself."""
    device = next(iter(results.values())).device
    if device.type != "cuda":
        return results
    made = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
            tensor, non_blocking=True
        )
        for name, tensor in results.items()
    }
    torch.cuda.synchronize(device)
    # Such pages are scarce: they go back, and the results go where they may stay.
    return {name: tensor.clone() for name, tensor in made.items()}
