"""Family evaluation of language models on a GPU: the kernels' form of `language.LanguageWorker`.

All multipliers, windows and samples of a chunk are rows of one batch; a layer's step is one product
and one kernel, and the vocabulary is taken a few targets at a time, so that their logits stay in
the cache. Operands and logits are float16, everything that is summed float32.

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
from afterdrop.kernels.family_cell import Site, cell, drop, site
from afterdrop.kernels.family_sums import ALPHAS
from afterdrop.kernels.uniform import draws, why_not_drawn, words
from afterdrop.masks.rows import split_evenly
from afterdrop.masks.uniforms import Plan, site_key
from afterdrop.models import LanguageModel
from afterdrop.models.fused import Copies, why_not_fused

_ROWS = 2**15  # rows of a product: enough to run at full speed
_LOGITS = 2**25  # logits at a time: 64 MiB, most of them stay in the cache


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

    def _sampled(self, batch: Batch, number: int) -> Results:
        if not self._uses_kernels:
            return super()._sampled(batch, number)
        each = len(self.multipliers) * self.protocol.plan.num_samples
        rows = min(_ROWS, self.budget // self._row_bytes(batch.targets.shape[1]))
        chunks = split_evenly(batch.size, max(1, rows // each))
        try:
            parts = [self._windows(batch, examples) for examples in chunks]
        except TooLow:
            return super()._sampled(batch, number)
        except Exception as error:
            kernels.reason_to_fall_back(error, "the evaluation of samples")
            self._give_up_kernels()
            self._buffers.clear()  # most of the memory
            return super()._sampled(batch, number)
        return {name: torch.cat([part[name] for part in parts], -1) for name in parts[0]}

    def _row_bytes(self, time: int) -> int:
        """Bytes that a row has in the buffers of `_features`."""
        H, E = self.copies.stack.w_h.shape[-1], self.copies.softmax.shape[1]
        operands = sum(weight.shape[1] for weight in self.weights) + 4 * H
        outputs = 2 * H if self.copies.projection is None else 2 * H + E
        size = self.copies.softmax.element_size()
        return size * (operands + time * outputs) + 4 * H * (len(self.weights) + 1)

    def _windows(self, batch: Batch, examples: range) -> Results:
        """Results of some windows."""
        part = slice(examples.start, examples.stop)
        tokens, state = batch.inputs
        features, plain = self._features(
            tokens[part], tuple((h[part], c[part]) for h, c in state), batch.first + examples.start
        )
        targets = batch.targets[part].flatten()
        counts = targets != self.reader.ignore_index
        found, lp_K = self._family(features, targets.clamp_min(0))
        require_held(found.pop("lowest"))
        found = {name: tensor[..., counts] for name, tensor in found.items()}
        out = family_results(found, lp_K[..., counts], self.protocol)
        if (integrated := self.integrated(targets[counts], counts)) is not None:
            out.update(self._of_halves(integrated, plain, counts))
        return {f"mc_{name}": tensor.cpu() for name, tensor in out.items()}

    def _site(
        self, name: str, first: int, windows: int, time: int, units: int
    ) -> list[Site | None]:
        """A site at each time step, or None where nothing is dropped."""
        assert isinstance(self.model, LanguageModel)
        module: Any = self.model.get_submodule(name)
        if module.rate == 0:
            return [None] * time
        numbers = torch.arange(first, first + windows, device=self.device)
        if self.stream.lifetime == "stream" and module.shared:
            numbers = numbers % self.stream.stripes
        inside = name.endswith("state_dropout")  # its mask has no time dimension if shared
        steps = time if not module.shared else None if inside else 1
        places, hashes = words(site_key(self.protocol.plan.seed, name, 0, 0), numbers, steps, units)
        rates = [multiplier * module.rate for multiplier in self.multipliers]
        made = [site(place, hashes, rates, self.device) for place in places.contiguous()]
        return [made[t % len(made)] for t in range(time)]

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
        total = self._buffer("total", rows, H, torch.float32)
        plain = self._buffer("plain", rows * time, H, half)
        features = self._buffer("features", rows * time, H, half)

        def at_steps(name: str, units: int) -> list[Site | None]:
            return self._site(name, first, W, time, units)

        entering = at_steps("stack.input_dropout", E)
        states = [at_steps(f"stack.layers.{at}.state_dropout", H) for at in range(L)]
        over = [at_steps(f"stack.inter_layer_dropout.{at}", H) for at in range(L - 1)]
        over.append(at_steps("output_dropout", H))
        window = torch.arange(W, device=self.device)
        hidden = copies.config.hidden_sizes[0]
        for at, (h, cell_before) in enumerate(state):
            own = a[at][:, -H:]
            drop(h.contiguous(), own, states[at][0], self.draws, W, M, hidden, window)
            c[at].view(M, W, K, H)[..., :hidden] = cell_before[None, :, None]
        form = copies.config.input_gate == "capped", copies.config.stacking == "skip"
        for t in range(time):
            drop(
                copies.embedding, a[0], entering[t], self.draws, W, M, E, tokens[:, t].contiguous()
            )
            for at in range(L):
                torch.mm(a[at], self.weights[at].t(), out=gates)
                ahead = states[at][(t + 1) % time]
                ends = at == 0, at == L - 1
                cell(
                    gates,
                    copies.stack.bias[at],
                    c[at],
                    a[at][:, -H:],
                    features if ends[1] else a[at + 1],
                    total,
                    plain,
                    (ahead, over[at][t]),
                    self.draws,
                    W,
                    M,
                    (t, time),
                    (*form, *ends),
                )
        if copies.projection is None:
            return features, plain
        projected = self._buffer("projected", rows * time, copies.softmax.shape[1], half)
        torch.mm(features, copies.projection.t(), out=projected)
        size = copies.config.embedding_size or hidden
        sites = at_steps("projection_dropout", size)
        if sites[0] is not None:
            places = torch.stack([s[0] for s in sites if s is not None], 1).flatten()
            whole = (places, *sites[0][1:])
            drop(projected, projected, whole, self.draws, W * time, M, size)
        return projected, plain

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

    def _of_halves(self, integrated: Integrated, plain: Tensor, counts: Tensor) -> Results:
        """Alpha 0 with output dropout integrated out, from the stack's outputs."""
        M, K, N = len(self.multipliers), self.protocol.plan.num_samples, len(counts)
        hidden = self.copies.config.hidden_sizes[0]
        halves = plain.view(M, N, 2, K // 2, -1)[..., :hidden].sum(3, dtype=torch.float32)
        integrated.output = self._output
        return integrated.of_halves([(halves[:, counts, half], K // 2) for half in range(2)])

    def _output(self, y: Tensor) -> Tensor:
        """Logits [..., V] of the stack's mean output [..., H]."""
        rows = torch.zeros(*y.shape[:-1], self.copies.stack.w_h.shape[-1], device=self.device)
        rows[..., : y.shape[-1]] = y
        logits = self.copies.logits(self.copies.features(rows.flatten(0, -2)))
        assert isinstance(self.model, LanguageModel)
        bias = self.model.softmax_bias.detach()
        return (logits[:, : len(bias)] + bias).unflatten(0, y.shape[:-1])
