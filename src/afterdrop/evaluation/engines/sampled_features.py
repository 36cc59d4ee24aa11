"""The stack's outputs of windows under the masks of all samples and multipliers, by the kernels.

All multipliers, windows and samples are rows of one batch; a layer's step is one product and one
kernel, and each of its Mogrifier rounds two products and one kernel.

Legend: M multipliers, W windows, K samples, time steps, H units, E of the embedding, V token types;
rows are M × W × K, features M × W × time × K.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from afterdrop.evaluation.request import Protocol
from afterdrop.kernels.family_cell import cell
from afterdrop.kernels.family_masks import LevelMask, SiteWords, drop_rows, mask_levels
from afterdrop.kernels.family_rounds import gate_rows
from afterdrop.kernels.log_constants import LOG2E
from afterdrop.kernels.lstm_stack import padded
from afterdrop.kernels.uniform import cuts, draws, words
from afterdrop.masks.rates import Multipliers
from afterdrop.masks.uniforms import site_key, unit_words
from afterdrop.models.fused import Copies
from afterdrop.transfer import upload

MOST_MULTIPLIERS = 255  # a mask's level is a byte
BIASES = 2  # columns of features that are 1, for the bias and what its rounding leaves


class SampledFeatures:
    """Runs windows of tokens through a language model's stack under masks.

    Args:
        copies: The model's weights.
        protocol: Samples, seed, multipliers, and how long masks live.
    """

    def __init__(self, copies: Copies, protocol: Protocol) -> None:
        assert protocol.request.stream is not None
        self.copies, self.plan, self.stream = copies, protocol.plan, protocol.request.stream
        self.multipliers = protocol.grid.stochastic
        self.device, self.dtype = copies.embedding.device, copies.dtype
        self.draws = draws(self.plan, self.device)
        inputs = copies.embedding.shape[1]
        self.weights = [
            torch.cat([w_x[..., : w_h.shape[-1] if at else inputs], w_h], -1).flatten(0, 1)
            for at, (w_x, w_h) in enumerate(zip(copies.stack.w_x, copies.stack.w_h))
        ]
        self.size = copies.config.embedding_size or copies.config.hidden_sizes[0]
        self.width = padded(self.size + BIASES - 1)
        self._buffers: dict[str, Tensor] = {}
        self._drops = {name: module for name, module in self._modules() if module.rate > 0}
        multipliers = Multipliers(self.multipliers)
        self._cuts = {
            name: cuts(
                torch.tensor(multipliers.rates(name, module.rate), dtype=torch.float32),
                self.draws.size,
            ).to(self.device)
            for name, module in self._drops.items()
        }
        keys = [site_key(self.plan.seed, name, 0, 0) for name in self._drops]
        self._keys = torch.tensor(keys, dtype=torch.int64).view(-1, 1)
        self._embedding_mask = self._table_mask("embedding_dropout")

    def row_bytes(self, time: int) -> int:
        """Bytes that a row has in the buffers."""
        H, E = self.copies.stack.w_h.shape[-1], self.width
        operands = sum(weight.shape[1] for weight in self.weights) + 4 * H
        if (rounds := self.copies.stack.rounds) is not None:
            operands += sum(rounds.down.shape[2:]) + H
        outputs = 2 * H if self.copies.projection is None else 2 * H + E
        size, L = self.copies.softmax.element_size(), len(self.weights)
        levels = 2 * (L + 1) * time * H // len(self.multipliers)
        return size * (operands + H + time * outputs) + 4 * H * L + levels

    def clear(self) -> None:
        """Gives the buffers back."""
        self._buffers.clear()

    def _modules(self) -> Iterator[tuple[str, Any]]:
        """The modules that may drop units, by name."""
        L, model = len(self.weights), self.copies.model
        names = [f"stack.layers.{at}.state_dropout" for at in range(L)]
        names += [f"stack.inter_layer_dropout.{at}" for at in range(L - 1)]
        names += ["stack.input_dropout", "output_dropout"]
        names += ["projection_dropout"] if self.copies.projection is not None else []
        return ((name, model.get_submodule(name)) for name in names)

    def _table_mask(self, name: str) -> LevelMask | None:
        """The mask of the rows of the embedding table, which all windows of a sample share."""
        rate, V = self.copies.model.get_submodule(name).rate, self.copies.config.vocabulary
        if rate == 0:
            return None
        assert isinstance(rate, float)
        rates = Multipliers(self.multipliers).rates(name, rate)
        divided = cuts(torch.tensor(rates, dtype=torch.float32), self.draws.size).to(self.device)
        key = site_key(self.plan.seed, name, 0, 0)
        shared = upload(unit_words(key, torch.zeros(1, dtype=torch.int64)), self.device)
        places, hashes = words(shared, V, 1)  # the mask is [V, 1]
        levels = torch.zeros(V * self.plan.num_samples, 1, dtype=torch.uint8, device=self.device)
        return mask_levels((places.flatten(), hashes, divided), self.draws, 1, levels), divided

    def _examples(self, first: int, windows: int) -> dict[str, Tensor]:
        """The words of windows at every site that drops something.

        Made on the CPU: on a GPU they would take hundreds of tiny kernels.
        """
        numbers = torch.arange(first, first + windows).expand(len(self._keys), windows)
        if self.stream.lifetime == "stream":
            shared = [[module.shared] for module in self._drops.values()]
            numbers = torch.where(torch.tensor(shared), numbers % self.stream.stripes, numbers)
        found = upload(unit_words(self._keys, numbers), self.device)
        return dict(zip(self._drops, found))

    def _site(
        self, name: str, examples: dict[str, Tensor], time: int, units: int
    ) -> SiteWords | None:
        """A site of all time steps, or of one if its masks are shared; None if nothing drops."""
        if name not in examples:
            return None
        shared = self._drops[name].shared
        inside = name.endswith("state_dropout")  # its mask has no time dimension if shared
        steps = time if not shared else None if inside else 1
        places, hashes = words(examples[name], steps, units)
        return places.flatten(), hashes, self._cuts[name]

    def _masks(
        self, name: str, examples: dict[str, Tensor], time: int, units: int
    ) -> list[LevelMask | None]:
        """A site's mask at each time step."""
        site = self._site(name, examples, time, units)
        if site is None:
            return [None] * time
        levels, divided = self._levels(name, site, units)
        steps = levels.view(-1, len(examples[name]) * self.plan.num_samples, units)
        return [(steps[t % len(steps)], divided) for t in range(time)]

    def _levels(self, name: str, site: SiteWords, units: int) -> LevelMask:
        """A site's mask at all its places."""
        held = self._buffer(name, len(site[0]) * self.plan.num_samples, units, torch.uint8)
        return mask_levels(site, self.draws, units, held), site[2]

    def _buffer(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """A zeroed or reused matrix; padding columns are never written."""
        held = self._buffers.get(name)
        if held is None or len(held) < rows:
            held = torch.zeros(rows, columns, dtype=dtype, device=self.device)
            self._buffers[name] = held
        return held[:rows]

    def run(self, tokens: Tensor, state: Any, first: int) -> tuple[Tensor, Tensor]:
        """What enters the softmax, and the stack's output, both [M × W × time × K, ...].

        The former has `size` columns and `BIASES` of ones, padded to `width`.
        """
        copies, M = self.copies, len(self.multipliers)
        (W, time), K = tokens.shape, self.plan.num_samples
        H, L = copies.stack.w_h.shape[-1], len(self.weights)
        E, half = copies.embedding.shape[1], self.dtype
        rows = M * W * K
        a = [self._buffer(f"a{at}", rows, w.shape[1], half) for at, w in enumerate(self.weights)]
        c = [self._buffer(f"c{at}", rows, H, torch.float32) for at in range(L)]
        gates = self._buffer("gates", rows, 4 * H, half)
        total = self._buffer("total", rows, H, half)
        plain = self._buffer("plain", rows * time, H, half)
        projects = copies.projection is not None
        features = self._buffer("features", rows * time, H if projects else self.width, half)

        examples = self._examples(first, W)
        names = [f"stack.layers.{at}.state_dropout" for at in range(L)]
        states = [self._masks(name, examples, time, H) for name in names]
        names = [f"stack.inter_layer_dropout.{at}" for at in range(L - 1)] + ["output_dropout"]
        over = [self._masks(name, examples, time, H) for name in names]
        entering = self._masks("stack.input_dropout", examples, time, E)
        hidden, window = copies.config.hidden_sizes[0], torch.arange(W, device=self.device)
        for at, (h, cell_before) in enumerate(state):
            drop_rows(h.contiguous(), a[at][:, -H:], states[at][0], K, M, hidden, window)
            c[at].view(M, W, K, H)[..., :hidden] = cell_before[None, :, None]
        form = copies.config.input_gate == "capped", copies.config.stacking == "skip"
        for t in range(time):
            read = tokens[:, t].contiguous()
            drop_rows(copies.embedding, a[0], entering[t], K, M, E, read, self._embedding_mask)
            for at in range(L):
                self._mogrify(at, a[at])
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
        if projects:
            features = self._projected(features, examples, W, time)
        size = self.size
        features[:, size : size + BIASES] = 1.0  # again: what comes before writes zeros
        return features, plain

    def _mogrify(self, layer: int, a: Tensor) -> None:
        """Gates the input and the state of a layer's step, which are columns of `a`, in place.

        Both are written again before the next step.
        """
        rounds = self.copies.stack.rounds
        if rounds is None:
            return
        H = self.copies.stack.w_h.shape[-1]
        read, gated = a[:, -H:], a[:, :-H]
        z = self._buffer("z", len(a), rounds.down.shape[2], self.dtype)
        for down, up, bias in zip(rounds.down, rounds.up, rounds.bias):
            width = gated.shape[1]
            p = self._buffer(f"p{width}", len(a), width, self.dtype)
            torch.mm(read, down[layer, :, : read.shape[1]].t(), out=z)
            torch.mm(z, up[layer, :width].t(), out=p)
            gate_rows(gated, p, bias[layer, :width])
            read, gated = gated, read  # the next round gates what this one has read

    def _projected(
        self, features: Tensor, examples: dict[str, Tensor], windows: int, time: int
    ) -> Tensor:
        """The features through the down-projection and its dropout."""
        projection = self.copies.projection
        assert projection is not None
        units = len(projection)  # padded, for wide loads
        projected = self._buffer("projected", len(features), self.width, self.dtype)
        inner = projected[:, :units]
        torch.mm(features, projection.t(), out=inner)
        site = self._site("projection_dropout", examples, time, units)
        if site is not None:
            places = site[0].view(-1, windows).expand(time, windows).t().flatten()
            mask = self._levels("projection", (places, *site[1:]), units)
            K, M = self.plan.num_samples, len(self.multipliers)
            drop_rows(inner, inner, mask, K, M, units)
        return projected


@torch.no_grad()
def with_bias(sampled: SampledFeatures) -> Tensor:
    """The softmax's table [V₊, width] for logits to base 2, with its bias in columns.

    A second column has what rounding leaves of the bias.

    Args:
        sampled: Whose features have ones for it.
    """
    copies, model, size = sampled.copies, sampled.copies.model, sampled.size
    table = model.embedding if model.softmax is None else model.softmax
    wide = copies.softmax.new_zeros(len(copies.softmax), sampled.width)
    wide[: len(table), :size] = table * LOG2E.value
    bias = model.softmax_bias * LOG2E.value
    for column in range(size, size + BIASES):
        wide[: len(bias), column] = bias
        bias = bias - wide[: len(bias), column]
    return wide


def with_ones(features: Tensor, sampled: SampledFeatures) -> Tensor:
    """Features [R, ≥ size] with the ones that `with_bias` needs [R, width]."""
    wide = features.new_zeros(len(features), sampled.width)
    wide[:, : sampled.size] = features[:, : sampled.size]
    wide[:, sampled.size : sampled.size + BIASES] = 1.0
    return wide
