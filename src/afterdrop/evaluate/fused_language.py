"""Family evaluation of language models on a GPU: the kernels' form of `language.LanguageWorker`.

All multipliers, windows and samples of a chunk are rows of one batch; a layer's step is one product
and one kernel, and the vocabulary is taken some targets at a time. Operands and logits are float16,
everything that is summed over samples or time float32.

Legend: M multipliers, W windows, K samples, time steps, H units, E of the embedding, V token types;
rows are M × W × K, features M × W × time × K.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from afterdrop import kernels
from afterdrop.evaluate.accumulate import Results, TooLow
from afterdrop.evaluate.fused_mean import family_results, family_sums, require_held
from afterdrop.evaluate.integrated import Integrated
from afterdrop.evaluate.language import LanguageWorker, StreamSettings
from afterdrop.evaluate.passes import Batch
from afterdrop.family.member import Grid
from afterdrop.kernels.family_cell import Mask, cell
from afterdrop.kernels.family_masks import Site, drop, mask_levels
from afterdrop.kernels.family_sums import ALPHAS
from afterdrop.kernels.uniform import draws, why_not_drawn, words
from afterdrop.masks.rows import split_evenly
from afterdrop.masks.uniforms import Plan, site_key
from afterdrop.models import LanguageModel
from afterdrop.models.fused import Copies, DeterministicPass, why_not_fused

_ROWS = 2**15  # rows of a product: enough to run at full speed
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
        self.draws = draws(self.protocol.plan, self.device)
        self.multipliers = self.protocol.grid.stochastic
        weights = self.copies.stack
        inputs = self.copies.embedding.shape[1]
        self.weights = [
            torch.cat([w_x[..., : w_h.shape[-1] if at else inputs], w_h], -1).flatten(0, 1)
            for at, (w_x, w_h) in enumerate(zip(weights.w_x, weights.w_h))
        ]
        K = self.protocol.plan.num_samples
        self.targets_at_once = max(1, _LOGITS // (K * len(self.copies.softmax)))
        self.sums = family_sums(self.protocol, self.targets_at_once, self.device)
        shape = self.targets_at_once * K, len(self.copies.softmax)
        self._logits = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._buffers: dict[str, Tensor] = {}
        self._rates: dict[str, Tensor] = {}  # of each site, for every multiplier
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
        rows = min(_ROWS, self.budget // self._row_bytes(batch.targets.shape[1]))
        chunks = split_evenly(batch.size, max(1, rows // each))
        # Results stay on the device until the batch is done: a copy would wait for the kernels.
        each = batch.targets.shape[1]
        counts = self.reader.counts(batch.targets)
        kept = [counts[r.start * each : r.stop * each].nonzero()[:, 0] for r in chunks]
        try:
            parts = [self._windows(batch, *chunk) for chunk in zip(chunks, kept)]
            require_held(torch.cat([part.pop("mc_held") for part in parts]))
        except TooLow:
            return super()._sampled(batch, number)
        except Exception as error:
            kernels.reason_to_fall_back(error, "the evaluation of samples")
            self._give_up_kernels()
            self._buffers.clear()  # most of the memory
            return super()._sampled(batch, number)
        return on_cpu({name: torch.cat([part[name] for part in parts], -1) for name in parts[0]})

    def _row_bytes(self, time: int) -> int:
        """Bytes that a row has in the buffers of `_features`."""
        H, E = self.copies.stack.w_h.shape[-1], self.copies.softmax.shape[1]
        operands = sum(weight.shape[1] for weight in self.weights) + 4 * H
        outputs = 2 * H if self.copies.projection is None else 2 * H + E
        size, L = self.copies.softmax.element_size(), len(self.weights)
        levels = 2 * L * time * H // len(self.multipliers)
        return size * (operands + H + time * outputs) + 4 * H * L + levels

    def _windows(self, batch: Batch, examples: range, kept: Tensor) -> Results:
        """Results of some windows, and under `mc_held` the smallest log-probabilities.

        Args:
            batch: All windows.
            examples: Which.
            kept: Which of their targets count; numbers, because a mask would wait for the kernels.
        """
        part = slice(examples.start, examples.stop)
        tokens, state = batch.inputs
        features, plain = self._features(
            tokens[part], tuple((h[part], c[part]) for h, c in state), batch.first + examples.start
        )
        targets = batch.targets[part].flatten()
        found, lp_K = self._family(features, targets.clamp_min(0))
        held = found.pop("lowest").flatten()
        found = {name: tensor.index_select(-1, kept) for name, tensor in found.items()}
        out = family_results(found, lp_K.index_select(-1, kept), self.protocol)
        if (integrated := self.integrated(targets[kept], kept)) is not None:
            out.update(self._of_halves(integrated, plain, kept))
        out["held"] = held
        return {f"mc_{name}": tensor for name, tensor in out.items()}

    def _site(self, name: str, first: int, windows: int, time: int, units: int) -> Site | None:
        """A site of all time steps, or of one if its masks are shared; None if nothing drops."""
        assert isinstance(self.model, LanguageModel)
        module: Any = self.model.get_submodule(name)
        if module.rate == 0:
            return None
        if name not in self._rates:
            rates = [multiplier * module.rate for multiplier in self.multipliers]
            self._rates[name] = torch.tensor(rates, device=self.device)
        numbers = torch.arange(first, first + windows, device=self.device)
        if self.stream.lifetime == "stream" and module.shared:
            numbers = numbers % self.stream.stripes
        inside = name.endswith("state_dropout")  # its mask has no time dimension if shared
        steps = time if not module.shared else None if inside else 1
        places, hashes = words(site_key(self.protocol.plan.seed, name, 0, 0), numbers, steps, units)
        return places.flatten(), hashes, self._rates[name]

    def _masks(
        self, name: str, first: int, windows: int, time: int, units: int
    ) -> list[Mask | None]:
        """A site's mask at each time step."""
        site = self._site(name, first, windows, time, units)
        if site is None:
            return [None] * time
        places, group = len(site[0]), windows * self.protocol.plan.num_samples
        held = self._buffer(name, len(site[0]) * group // windows, units, torch.uint8)
        levels = mask_levels(site, self.draws, units, held).view(places // windows, group, units)
        return [(levels[t % len(levels)], site[2]) for t in range(time)]

    def _buffer(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """A zeroed or reused matrix; padding columns are never written."""
        held = self._buffers.get(name)
        if held is None or len(held) < rows:
            held = torch.zeros(rows, columns, dtype=dtype, device=self.device)
            self._buffers[name] = held
        return held[:rows]

    def _features(self, tokens: Tensor, state: Any, first: int) -> tuple[Tensor, Tensor]:
        """What enters the softmax, and the stack's output, both [M × W × time × K, ...]."""
        copies, M = self.copies, len(self.multipliers)
        (W, time), K = tokens.shape, self.protocol.plan.num_samples
        H, L = copies.stack.w_h.shape[-1], len(self.weights)
        E, half = copies.embedding.shape[1], self.dtype
        rows = M * W * K
        a = [self._buffer(f"a{at}", rows, w.shape[1], half) for at, w in enumerate(self.weights)]
        c = [self._buffer(f"c{at}", rows, H, torch.float32) for at in range(L)]
        gates = self._buffer("gates", rows, 4 * H, half)
        total = self._buffer("total", rows, H, half)
        plain = self._buffer("plain", rows * time, H, half)
        features = self._buffer("features", rows * time, H, half)

        names = [f"stack.layers.{at}.state_dropout" for at in range(L)]
        states = [self._masks(name, first, W, time, H) for name in names]
        names = [f"stack.inter_layer_dropout.{at}" for at in range(L - 1)] + ["output_dropout"]
        over = [self._masks(name, first, W, time, H) for name in names]
        hidden = copies.config.hidden_sizes[0]
        for at, (h, cell_before) in enumerate(state):
            self._start(a[at][:, -H:], h, states[at][0], W)
            c[at].view(M, W, K, H)[..., :hidden] = cell_before[None, :, None]
        entering = self._site("stack.input_dropout", first, W, time, E)
        form = copies.config.input_gate == "capped", copies.config.stacking == "skip"
        for t in range(time):
            at_t = None if entering is None else _at_step(entering, t, W)
            drop(copies.embedding, a[0], at_t, self.draws, W, M, E, tokens[:, t].contiguous())
            for at in range(L):
                torch.mm(a[at], self.weights[at].t(), out=gates)
                ends = at == 0, at == L - 1
                cell(
                    gates,
                    copies.stack.bias[at],
                    c[at],
                    a[at][:, -H:],
                    features if ends[1] else a[at + 1],
                    total,
                    plain,
                    (states[at][(t + 1) % time], over[at][t]),
                    K,
                    M,
                    (t, time),
                    (*form, *ends),
                )
        if copies.projection is None:
            return features, plain
        projected = self._buffer("projected", rows * time, copies.softmax.shape[1], half)
        torch.mm(features, copies.projection.t(), out=projected)
        size = copies.config.embedding_size or hidden
        last = self._site("projection_dropout", first, W, time, size)
        if last is not None:
            places = last[0].view(-1, W).expand(time, W).t().flatten()
            drop(projected, projected, (places, *last[1:]), self.draws, W * time, M, size)
        return projected, plain

    def _start(self, own: Tensor, h: Tensor, mask: Mask | None, windows: int) -> None:
        """Puts the carried h [W, H] of every row where the first step reads it, dropped."""
        M, K = len(self.multipliers), self.protocol.plan.num_samples
        rows = h.to(self.dtype)[None, :, None].expand(M, windows, K, -1).flatten(0, 2)
        if mask is not None:
            levels, rates = mask
            m = torch.arange(M, device=self.device).view(M, 1, 1)
            scale = (1 / (1 - rates)).view(M, 1, 1)
            keep = torch.where(m < levels, scale, 0.0)[..., : h.shape[1]].flatten(0, 1)
            rows = rows.float() * keep
        own[:, : h.shape[1]] = rows

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
    if not any(tensor.is_cuda for tensor in results.values()):
        return results
    made = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
            tensor, non_blocking=True
        )
        for name, tensor in results.items()
    }
    torch.cuda.synchronize()
    # Such pages are scarce: they go back, and the results go where they may stay.
    return {name: tensor.clone() for name, tensor in made.items()}


def _at_step(site: Site, t: int, windows: int) -> Site:
    """A site at one time step, or its only one."""
    places = site[0].view(-1, windows)
    return places[t % len(places)], *site[1:]
