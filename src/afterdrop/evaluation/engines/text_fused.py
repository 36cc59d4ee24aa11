"""Texts on a GPU by kernels alone: all multipliers, windows and samples of a chunk at once.

The rows of a chunk run through the stack together (`sampled_features`), and the vocabulary is
taken a number of targets at a time. Operands and logits are float16; everything that is summed over
samples or time is float32.

Legend: M multipliers, W windows, K samples, time steps, H units, E of the embedding, V token types;
rows are M × W × K, features M × W × time × K.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from afterdrop import kernels
from afterdrop.evaluation.batches import Batch
from afterdrop.evaluation.chunks import Memory, split_evenly
from afterdrop.evaluation.engines import Outcome, kernel_sums
from afterdrop.evaluation.engines.generic import identity
from afterdrop.evaluation.engines.integrated_mean import integrates
from afterdrop.evaluation.engines.kernel_sums import (
    family_results,
    family_sums,
    mean_results,
    why_not_held,
)
from afterdrop.evaluation.engines.sampled_features import (
    MOST_MULTIPLIERS,
    SampledFeatures,
    with_bias,
    with_ones,
)
from afterdrop.evaluation.likelihoods import Likelihood
from afterdrop.evaluation.likelihoods.categorical_sums import at_targets
from afterdrop.evaluation.request import Protocol, Request
from afterdrop.evaluation.scores import schema
from afterdrop.evaluation.scores.schema import Results
from afterdrop.family.member import Grid
from afterdrop.kernels.family_logits import FamilyLogits
from afterdrop.kernels.family_sums import OF_SAMPLES, width
from afterdrop.kernels.log_constants import LN2
from afterdrop.kernels.lstm_stack import product
from afterdrop.kernels.uniform import why_not_drawn
from afterdrop.models import LanguageModel
from afterdrop.models.fused import Copies, DeterministicPass, why_not_fused
from afterdrop.models.kernel_support import Table, why_unsupported
from afterdrop.transfer import Parcel, Post, upload

DTYPE = torch.float16  # of operands and logits: eight times finer than bfloat16
_LOWEST = "lowest"  # beside the results of a chunk: what `why_not_held` reads


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much runs at once.

    Attributes:
        rows: Rows of a product: enough to run at full speed.
        logits: Logits: 640 MiB, for a product at full speed.
        sums: Bytes of sums of their powers: 768 MiB, for programs enough to fill the processors.
        means: Logits of mean features, in float32: 512 MiB, likewise.
    """

    rows: int = 2**15
    logits: int = 5 * 2**26
    sums: int = 3 * 2**26
    means: int = 2**27


def supports(request: Request, model: nn.Module, device: torch.device) -> str | None:
    """Why the kernels cannot evaluate a request; None if they can."""
    if not isinstance(model, LanguageModel):
        return f"{type(model).__name__} is not a LanguageModel"
    if reason := kernels.why_not(device) or why_not_fused(model.config):
        return reason
    if (components := model.config.softmax_components) > 1:
        return f"softmax_components is {components}, and only training has kernels for mixtures"
    if model.softmax_bias.dtype != torch.float32:
        return f"weights are {model.softmax_bias.dtype}"
    return why_unsupported(request, SUPPORTED)


def _why_not_multipliers(grid: Grid) -> str | None:
    if len(grid.stochastic) > MOST_MULTIPLIERS:
        return f"there are more than {MOST_MULTIPLIERS} multipliers"
    return None


# The values of every field of a `Request` that the kernels support.
SUPPORTED: Table = {
    "grid": {
        "alphas": kernel_sums.why_not_alphas,
        "multipliers": _why_not_multipliers,
        "temper": ("mean",),
    },
    "plan": {
        "num_samples": lambda plan: "there is one sample" if plan.num_samples == 1 else None,
        "seed": "any",
        "scheme": why_not_drawn,
        "blocks": (2,),
    },
    "split": "any",
    "rates": ((),),
    "noise": ((),),
    "batch_dim": (0,),
    "class_dim": (None, -1),
    "ignore_index": "any",
    "temperatures": kernel_sums.why_not_temperatures,
    "stream": {
        "window": "any",
        "stripes": "any",
        "carry": ("deterministic",),
        "lifetime": "any",
    },
    "limit": "any",
    "adaptive": "any",
    "logits": (None,),
    "targets": (None,),
    "targets_per_example": (None,),
    "likelihood": ("categorical",),
    "noise_variance": "any",
    "dynamic": (None,),  # the kernels' copies of the weights do not change
}


class TextFusedEngine:
    """Evaluates windows with kernels, which go on while the CPU takes results.

    Args:
        model: The language model.
        protocol: The evaluation.
        likelihood: Reads targets.
        memory: The budget.
        sizes: How much runs at once.
        dtype: The type of operands and logits.
    """

    ahead = 1
    kernels = True

    def __init__(
        self,
        model: LanguageModel,
        protocol: Protocol,
        likelihood: Likelihood,
        memory: Memory,
        sizes: Sizes = Sizes(),  # noqa: B008 (frozen)
        dtype: torch.dtype = DTYPE,
    ) -> None:
        assert protocol.request.stream is not None
        self.model, self.protocol, self.likelihood = model, protocol, likelihood
        self.memory, self.sizes = memory, sizes
        self.copies = Copies(model, dtype)
        self.copies.pack()
        self.device, V = model.softmax_bias.device, protocol.num_classes
        self.multipliers, K = protocol.grid.stochastic, protocol.plan.num_samples
        self.sampled = SampledFeatures(self.copies, protocol)
        windows = max(1, sizes.rows // (max(1, len(self.multipliers)) * K))  # of a chunk
        targets = windows * protocol.request.stream.window * len(self.multipliers)
        together = min(sizes.sums // (12 * width(V)), targets)
        most = max(1, min(sizes.logits // (K * len(self.copies.softmax)), together))
        self.targets_at_once = most // 32 * 32 or most  # so that products have whole tiles
        # Sums of more targets are finished together, so that their kernel fills the processors.
        self.targets_together = max(1, together // self.targets_at_once) * self.targets_at_once
        self.sums = family_sums(protocol, self.targets_together, self.device, self.targets_at_once)
        self._logits = FamilyLogits(with_bias(self.sampled), V, self.targets_at_once, K)
        self._passes: DeterministicPass | None = None
        self._post = Post(self.device)

    def begin(self, batch: Batch, number: int) -> Callable[[], Outcome]:
        """Launches all kernels of a batch and returns what waits for its results.

        Nothing here may wait for the device, which still works on the batch before.
        """
        data = identity(batch, number, self.likelihood, self.protocol)
        parcels = [self._post.send(results) for results in self._launched(batch)]
        return partial(self._finish, data, parcels)

    def clear(self) -> None:
        """Frees the buffers of rows, which are most of the memory."""
        self.sampled.clear()

    def carried(self) -> Results:
        """Nothing: windows are independent."""
        return {}

    def restore(self, carried: Results) -> None:
        """Nothing to do."""

    def _finish(self, data: Results, parcels: list[Parcel]) -> Outcome:
        """The results of a batch, in the memory where they arrived, or why there are none."""
        det, *parts = [parcel.open() for parcel in parcels]
        if det[schema.name_of("deterministic", "target")].isnan().any():
            return "a logit is NaN, as where the bias of a masked class is infinite"
        for part in parts:
            if reason := why_not_held(part[_LOWEST]):
                return reason
        results: dict[str, Tensor | list[Tensor]] = {**data}
        results |= {name: [tensor] for name, tensor in det.items()}
        names = [name for name in parts[0] if name != _LOWEST] if parts else []
        return results | {name: [part[name] for part in parts] for name in names}

    def _launched(self, batch: Batch) -> Iterator[Results]:
        """The results without dropout, then those of each chunk of windows, on the device."""
        yield self._deterministic(batch)
        for windows in self._chunks(batch) if self.multipliers else ():
            yield self._windows(batch, windows)

    def _chunks(self, batch: Batch) -> list[range]:
        """Windows whose rows run together."""
        each = len(self.multipliers) * self.protocol.plan.num_samples
        row_bytes = self.sampled.row_bytes(batch.host.shape[1])
        rows = min(self.sizes.rows, self.memory.budget // row_bytes)
        return split_evenly(batch.size, max(1, rows // each))

    def _kept(self, batch: Batch, windows: range) -> Tensor | None:
        """Numbers of the targets of some windows that count; None if all do."""
        counts = self.likelihood.counts(batch.host[windows.start : windows.stop])
        return None if bool(counts.all()) else upload(counts.nonzero()[:, 0], self.device)

    def _deterministic(self, batch: Batch) -> Results:
        """Results of the targets that count, without dropout."""
        tokens, state = batch.inputs
        if self._passes is None:  # the first batch is the largest
            self._passes = DeterministicPass(self.copies, *tokens.shape, recorded=False)
        passes = self._passes
        passes.begin(state)
        window = torch.zeros_like(passes.tokens).t()
        window[: len(tokens)] = tokens
        y = passes.run(window).transpose(0, 1)[: len(tokens)].flatten(0, 1)
        targets = batch.targets.flatten()
        if (kept := self._kept(batch, range(batch.size))) is not None:
            y, targets = y.index_select(0, kept), targets.index_select(0, kept)
        found, at_target = self._means(self.copies.features(y).unsqueeze(1), targets)
        results = mean_results(found, 1, at_target.unsqueeze(0), self.protocol.nodes)
        fields = {name: tensor[0] for name, tensor in results.items()}
        return schema.named("deterministic", fields)

    def _windows(self, batch: Batch, windows: range) -> Results:
        """Results of some windows, and under `lowest` the smallest mean log-probability."""
        part = slice(windows.start, windows.stop)
        tokens, state = batch.inputs
        start = tuple((h[part], c[part]) for h, c in state)
        features, plain = self.sampled.run(tokens[part], start, batch.first + windows.start)
        targets, kept = batch.targets[part].flatten(), self._kept(batch, windows)
        found = self._family(features, targets if kept is None else targets.clamp_min(0))
        out = family_results(found, len(self.multipliers), self.protocol, kept)
        if kept is not None:
            targets = targets.index_select(0, kept)
        named = schema.named("sampled", out)
        if integrates(self.protocol, self.model):
            named |= schema.named("integrated", self._integrated(plain, targets, kept))
        return named | {_LOWEST: found["lowest"].amin().view(1)}

    def _family(self, features: Tensor, targets: Tensor) -> Results:
        """Sums over samples of all targets, multiplier by multiplier."""
        count, K = len(self.multipliers) * len(targets), self.protocol.plan.num_samples
        targets, found = targets.repeat(len(self.multipliers)), self.sums.results(count)
        for first in range(0, count, self.targets_together):
            end = min(first + self.targets_together, count)
            for start in range(first, end, self.targets_at_once):
                part = slice(start, min(start + self.targets_at_once, end))
                own = {name: found[name][part] for name in OF_SAMPLES}
                some = features[start * K : part.stop * K]
                logits = self._logits.product(some, targets[part], self.sums.lse, own)
                rows = logits.unflatten(0, (-1, 1, K)).permute(2, 1, 0, 3)
                self.sums.add_powers(rows, range(K), start - first, end - first)
            self.sums.finish(end - first, found, first)
        return found

    def _integrated(self, plain: Tensor, targets: Tensor, kept: Tensor | None) -> Results:
        """What `IntegratedMean` gives, from the stack's outputs."""
        M, half = len(self.multipliers), self.protocol.plan.num_samples // 2
        halves = plain.view(M, -1, 2, half, plain.shape[-1]).sum(3, dtype=torch.float32)
        if kept is not None:
            halves = halves.index_select(1, kept)
        features = self.copies.features(halves.div_(half).flatten(0, 2)).unflatten(0, (-1, 2))
        found, at_target = self._means(features, targets.repeat(M))
        return mean_results(found, M, at_target.unflatten(0, (M, -1)), self.protocol.nodes)

    def _means(self, features: Tensor, targets: Tensor) -> tuple[Results, Tensor]:
        """`FamilySums.mean_results` of features [n, halves, E₊], and their logits, to base e."""
        table, (n, halves) = self._logits.table, features.shape[:2]
        found, at_target = self.sums.mean_results(n), self.sums.lse.new_empty(n, halves)
        step = max(1, self.sizes.means // (halves * len(table)))
        for start in range(0, n, step):
            some = slice(start, start + step)
            entering = with_ones(features[some].flatten(0, 1), self.sampled)
            logits = product(entering, table.t()).unflatten(0, (-1, halves))
            self.sums.means(logits, found, start)
            at_target[some] = at_targets(logits.transpose(0, 1), targets[some]).t()
        return found, at_target * LN2.value
