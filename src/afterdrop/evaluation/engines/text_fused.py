"""Family evaluation of language models on a GPU: the kernels' form of `language.LanguageWorker`.

All multipliers, windows and samples of a chunk are rows of one batch (`fused_features`), and the
vocabulary is taken some targets at a time. Operands and logits are float16, everything that is
summed over samples or time float32.

Legend: M multipliers, W windows, K samples, time steps, H units, E of the embedding, V token types;
rows are M × W × K, features M × W × time × K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from afterdrop import kernels
from afterdrop.evaluation.accumulators import Results, TooLow, at_targets
from afterdrop.evaluation.api import Settings
from afterdrop.evaluation.chunks import split_evenly
from afterdrop.evaluation.engines.kernel_sums import (
    family_results,
    family_sums,
    mean_results,
    require_held,
)
from afterdrop.evaluation.engines.sampled_features import (
    MOST_MULTIPLIERS,
    SampledFeatures,
    with_bias,
    with_ones,
)
from afterdrop.evaluation.engines.text import LanguageWorker, StreamSettings
from afterdrop.evaluation.passes import Batch
from afterdrop.evaluation.pipeline import Pieces
from afterdrop.family.partition_ladder import PartitionLadder
from afterdrop.family.temperature import Nodes
from afterdrop.kernels.family_logits import FamilyLogits
from afterdrop.kernels.family_sums import ALPHAS, OF_SAMPLES, width
from afterdrop.kernels.log_constants import LN2
from afterdrop.kernels.lstm_stack import product
from afterdrop.kernels.uniform import why_not_drawn
from afterdrop.models import LanguageModel
from afterdrop.models.fused import Copies, DeterministicPass, why_not_fused
from afterdrop.transfer import Parcel, Post, upload

_ROWS = 2**15  # rows of a product: enough to run at full speed
_SMALLEST = 2**20  # bytes under which a smaller budget is not tried
_LOGITS = 5 * 2**26  # logits at a time: 640 MiB, for a product at full speed
_SUMS = 3 * 2**26  # sums of their powers: 768 MiB, for programs enough to fill the processors
_MEANS = 2**27  # logits of mean features, in float32: 512 MiB, likewise


def why_not(
    model: LanguageModel, settings: Settings, stream: StreamSettings, device: torch.device
) -> str | None:
    """Why the kernels cannot evaluate this; None if they can."""
    grid, plan = settings.grid, settings.plan
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
    if settings.temperatures is not None and not PartitionLadder.reaches(
        Nodes(*settings.temperatures)
    ):
        return f"temperatures={settings.temperatures} are too far apart"
    return "there is one sample" if plan.num_samples == 1 else None


class FusedLanguageWorker(LanguageWorker):
    """Evaluates windows with the kernels, which go on while the CPU takes results."""

    ahead = 1
    dtype = torch.float16  # of operands and logits; eight times finer than bfloat16

    def __init__(self, *args: Any, stream: StreamSettings) -> None:
        super().__init__(*args, stream=stream)
        assert isinstance(self.model, LanguageModel)
        self._uses_kernels = True
        self.copies = Copies(self.model, self.dtype)
        self.copies.pack()
        self.device, V = self.model.softmax_bias.device, self.protocol.num_classes
        self.multipliers = self.protocol.grid.stochastic
        self.sampled = SampledFeatures(self.copies, self.protocol, stream)
        K = self.protocol.plan.num_samples
        windows = max(1, _ROWS // (max(1, len(self.multipliers)) * K))  # of a chunk
        together = min(_SUMS // (12 * width(V)), windows * stream.time * len(self.multipliers))
        most = max(1, min(_LOGITS // (K * len(self.copies.softmax)), together))
        self.targets_at_once = most // 32 * 32 or most  # so that products have whole tiles
        # Sums of more targets are finished together, so that their kernel fills the processors.
        self.targets_together = max(1, together // self.targets_at_once) * self.targets_at_once
        self.sums = family_sums(
            self.protocol, self.targets_together, self.device, self.targets_at_once
        )
        self._logits = FamilyLogits(with_bias(self.sampled), V, self.targets_at_once, K)
        self._passes: DeterministicPass | None = None
        self._post = Post(self.device)

    def begin(self, batch: Batch, number: int) -> Callable[[], Pieces]:
        """Launches all kernels of a batch and returns what waits for its results."""
        if self._uses_kernels:
            identity = self.identity(batch, number)
            try:
                parcels = self._launch(batch)
            except Exception as error:
                kernels.reason_to_fall_back(error, "the evaluation of samples")
                self._give_up_kernels()
                self.sampled.clear()  # most of the memory
            else:
                return partial(self._finish, batch, number, identity, parcels)
        return super().begin(batch, number)

    def _finish(
        self, batch: Batch, number: int, identity: Results, parcels: list[Parcel]
    ) -> Pieces:
        """The results of a batch, in the memory where they arrived."""
        det, *parts = [parcel.open() for parcel in parcels]
        if det["det_target"].isnan().any():  # of a class that is masked too: its bias is −inf
            self.fused = False
            return self.batch(batch, number)
        results: dict[str, Tensor | list[Tensor]] = {**identity}
        results |= {name: [tensor] for name, tensor in det.items()}
        try:
            for part in parts:
                require_held(part["mc_held"])
        except TooLow:
            self.fused = False  # sums of the plain form's samples may not hold them either
            return results | self._sampled(batch, number)
        names = [name for name in parts[0] if name != "mc_held"] if parts else []
        return results | {name: [part[name] for part in parts] for name in names}

    def _launch(self, batch: Batch) -> list[Parcel]:
        """All results of a batch on their way, in chunks that get smaller when memory runs out.

        Nothing here may wait for the device, which still works on the batch before.
        """
        while True:
            try:
                return [self._post.send(results) for results in self._launched(batch)]
            except torch.OutOfMemoryError:
                if self.budget < _SMALLEST:
                    raise
            self.budget //= 2
            self.sampled.clear()
            torch.cuda.empty_cache()

    def _launched(self, batch: Batch) -> Iterator[Results]:
        """The results without dropout, then those of each chunk of windows, on the device."""
        yield self._deterministic(batch)
        for windows in self._chunks(batch) if self.multipliers else ():
            yield self._windows(batch, windows)

    def _chunks(self, batch: Batch) -> list[range]:
        """Windows whose rows run together."""
        each = len(self.multipliers) * self.protocol.plan.num_samples
        rows = min(_ROWS, self.budget // self.sampled.row_bytes(batch.host.shape[1]))
        return split_evenly(batch.size, max(1, rows // each))

    def _kept(self, batch: Batch, windows: range) -> Tensor | None:
        """Numbers of the targets of some windows that count; None if all do."""
        counts = self.reader.counts(batch.host[windows.start : windows.stop])
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
        return {f"det_{name}": tensor[0] for name, tensor in results.items()}

    def _windows(self, batch: Batch, windows: range) -> Results:
        """Results of some windows, and under `mc_held` the smallest mean log-probability."""
        part = slice(windows.start, windows.stop)
        tokens, state = batch.inputs
        start = tuple((h[part], c[part]) for h, c in state)
        features, plain = self.sampled.run(tokens[part], start, batch.first + windows.start)
        targets, kept = batch.targets[part].flatten(), self._kept(batch, windows)
        found = self._family(features, targets if kept is None else targets.clamp_min(0))
        out = family_results(found, len(self.multipliers), self.protocol, kept)
        if kept is not None:
            targets = targets.index_select(0, kept)
        if self.integrates:
            out.update(self._integrated(plain, targets, kept))
        out["held"] = found["lowest"].amin().view(1)
        return {f"mc_{name}": tensor for name, tensor in out.items()}

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
        """Alpha 0 with output dropout integrated out, from the stack's outputs (`Integrated`)."""
        M, half = len(self.multipliers), self.protocol.plan.num_samples // 2
        halves = plain.view(M, -1, 2, half, plain.shape[-1]).sum(3, dtype=torch.float32)
        if kept is not None:
            halves = halves.index_select(1, kept)
        features = self.copies.features(halves.div_(half).flatten(0, 2)).unflatten(0, (-1, 2))
        found, at_target = self._means(features, targets.repeat(M))
        results = mean_results(found, M, at_target.unflatten(0, (M, -1)), self.protocol.nodes)
        return {f"integrated_{name}": tensor for name, tensor in results.items()}

    def _means(self, features: Tensor, targets: Tensor) -> tuple[Results, Tensor]:
        """`FamilySums.mean_results` of features [n, halves, E₊], and their logits, to base e."""
        table, (n, halves) = self._logits.table, features.shape[:2]
        found, at_target = self.sums.mean_results(n), self.sums.lse.new_empty(n, halves)
        step = max(1, _MEANS // (halves * len(table)))
        for start in range(0, n, step):
            some = slice(start, start + step)
            entering = with_ones(features[some].flatten(0, 1), self.sampled)
            logits = product(entering, table.t()).unflatten(0, (-1, halves))
            self.sums.means(logits, found, start)
            at_target[some] = at_targets(logits.transpose(0, 1), targets[some]).t()
        return found, at_target * LN2.value
