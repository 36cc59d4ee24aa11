"""Evaluating language models: a text in windows, with a carried state by name.

A window of a text is an example. Every window starts from a state:

    carry="deterministic"  the state of a pass without dropout over all tokens before it. Windows
                           are then independent, and windows, samples and multipliers run together.
    carry="sampled"        each sample carries its own state from window to window: the model as it
                           was trained, and lamb's arithmetic evaluation. Windows run in order.

Masks live for a window (as in training), or with lifetime="stream" those shared over time live for
the whole text. Alpha 0 also comes with output dropout integrated out (`integrated`).

Legend: B stripes, L multipliers, S samples, N targets, V token types.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from tqdm import tqdm

from afterdrop import kernels
from afterdrop.data.stream import EvalStripes
from afterdrop.errors import DataError
from afterdrop.evaluation.accumulators import Accumulator, Results
from afterdrop.evaluation.api import Settings, run_evaluation
from afterdrop.evaluation.carried_states import ROWS
from afterdrop.evaluation.engines.generic import Worker
from afterdrop.evaluation.engines.integrated_mean import Integrated
from afterdrop.evaluation.passes import Batch, Reader, memory_budget
from afterdrop.evaluation.protocol import Protocol
from afterdrop.evaluation.rank_shares import split_multipliers
from afterdrop.evaluation.scores.scores import Scores
from afterdrop.evaluation.text_windows import Windows
from afterdrop.family.member import Grid
from afterdrop.masks.nested_inputs import take_rows
from afterdrop.masks.rows import Rows
from afterdrop.masks.sites import Sites
from afterdrop.models import LanguageModel
from afterdrop.models.fingerprint import fingerprint
from afterdrop.ranks import ALONE

if TYPE_CHECKING:
    from afterdrop.models.fused import DeterministicPass

Carry = Literal["deterministic", "sampled"]
Lifetime = Literal["window", "stream"]


@dataclasses.dataclass(frozen=True)
class StreamSettings:
    """How a text becomes examples.

    Attributes:
        time: Tokens a window.
        stripes: Contiguous shares of the text that start from a zero state; 1 is the exact stream.
        carry: What a window starts from: "deterministic" or "sampled".
        lifetime: How long masks live that are shared over time: "window" or "stream".
        windows: Windows that are handed over together (deterministic carry only); any number gives
            the same result.
    """

    time: int = 35
    stripes: int = 1
    carry: Carry = "deterministic"
    lifetime: Lifetime = "window"
    windows: int = 32

    def __post_init__(self) -> None:
        if self.carry not in ("deterministic", "sampled"):
            raise DataError(f"carry={self.carry!r} must be 'deterministic' or 'sampled'")
        if self.lifetime not in ("window", "stream"):
            raise DataError(f"lifetime={self.lifetime!r} must be 'window' or 'stream'")
        for name in ("time", "stripes", "windows"):
            if getattr(self, name) < 1:
                raise DataError(f"{name}={getattr(self, name)} must be at least 1")

    def named(self) -> tuple[tuple[str, Any], ...]:
        """What the protocol records: everything that a number depends on."""
        names = ("time", "stripes", "carry", "lifetime")
        return tuple((name, getattr(self, name)) for name in names)


def evaluate_text(
    model: LanguageModel,
    tokens: Tensor,
    eos: int,
    settings: Settings,
    stream: StreamSettings | None = None,
    *,
    lines: bool = True,
) -> Scores:
    """Evaluates every member of the family on a text.

    Args:
        model: The language model; stays on its device.
        tokens: [N] the text.
        eos: The token before the first.
        settings: Members, samples and the like.
        stream: Windows and carried state.
        lines: Whether stripes are made of whole lines.

    Returns:
        Scores with the tokens as targets and the windows as examples.

    Example:
        >>> import torch
        >>> from afterdrop.family.member import Grid
        >>> from afterdrop.masks.uniforms import Plan
        >>> from afterdrop.models import LanguageModelConfig
        >>> config = LanguageModelConfig(vocabulary=9, hidden_sizes=(8,), output_dropout=0.5)
        >>> settings = Settings(Grid((0, 1), (0, 1)), Plan(4))
        >>> text = torch.randint(1, 9, (100,))
        >>> evaluate_text(LanguageModel(config), text, 0, settings, lines=False)
        Scores(split='valid', 3 members, K=4, 100 targets in 3 examples)
    """
    stream = stream or StreamSettings()
    # The text stays on the CPU: which of its targets count is asked for at every step.
    stripes = EvalStripes(tokens.cpu(), eos, stream.stripes, stream.time, lines=lines)
    together = _windows_at_once(model, stream, settings) if stream.carry == "deterministic" else 1
    settings = dataclasses.replace(settings, stream=stream.named(), reader=Reader(0, -100))
    kind, passes = _fused(model, settings, stream, len(stripes))
    windows = Windows(model, stripes, together, passes)

    def worker(*args: Any) -> LanguageWorker:
        return kind(*args, stream=stream)

    if stream.carry == "deterministic" or settings.ranks.count == 1:
        return run_evaluation(model, windows, settings, worker, len(tokens))

    def fits(kept: Protocol) -> bool:
        mine = (settings.plan, settings.split, settings.stream, fingerprint(model))
        return mine == (kept.plan, kept.split, kept.stream, kept.fingerprint)

    def some(grid: Grid, resume: Path | None) -> Scores:
        own = dataclasses.replace(settings, grid=grid, resume=resume, ranks=ALONE)
        own = dataclasses.replace(own, progress=settings.progress and settings.ranks.first)
        return run_evaluation(model, windows, own, worker, len(tokens))

    return split_multipliers(settings.grid, settings.ranks, settings.resume, fits, some)


def _windows_at_once(model: LanguageModel, stream: StreamSettings, settings: Settings) -> int:
    """Windows whose deterministic logits and states, with their copies, fit the memory."""
    logits = 4 * stream.stripes * stream.time * model.config.vocabulary
    return max(1, min(stream.windows, _most_windows(model, stream, settings, 4 * logits)))


def _most_windows(
    model: LanguageModel, stream: StreamSettings, settings: Settings, more: int = 0
) -> int:
    """Windows of all stripes whose states, and `more` bytes of each, fit the memory."""
    budget, _ = memory_budget(settings.memory, model.softmax_bias.device)
    config = model.config.resolved()
    width = max(*config.hidden_sizes, config.embedding_size or 0) + 64  # padded
    units = len(config.hidden_sizes) * (stream.time + 1) * stream.stripes * width
    # The kernels count in 32 bits.
    return min(budget // (more + 10 * units), (2**31 - 1) // units)


def _fused(
    model: LanguageModel, settings: Settings, stream: StreamSettings, windows: int
) -> tuple[type["LanguageWorker"], "DeterministicPass | None"]:
    """The worker that suits model and device, and the kernels' deterministic pass if it has one."""
    device = model.softmax_bias.device
    reason = kernels.why_not(device)
    if reason is None:
        from afterdrop.evaluation.engines.text_fused import FusedLanguageWorker, why_not
        from afterdrop.models.fused import Copies, DeterministicPass

        reason = why_not(model, settings, stream, device)
        if reason is None:
            copies = Copies(model, FusedLanguageWorker.dtype)
            copies.pack()
            most = _most_windows(model, stream, settings)
            pieces = max(1, min(ROWS // stream.stripes, windows, most))
            passes = DeterministicPass(copies, pieces * stream.stripes, stream.time)
            return FusedLanguageWorker, passes
    if device.type == "cuda" and settings.progress and settings.ranks.first:
        tqdm.write(f"Evaluating without kernels, which is slower: {reason}.")
    return LanguageWorker, None


class LanguageWorker(Worker):
    """Evaluates windows; knows carried states, mask lifetimes and the features of the model."""

    def __init__(self, *args: Any, stream: StreamSettings) -> None:
        super().__init__(*args)
        self.stream = stream
        self._states: dict[str, Any] = {}  # after the last finished window
        self._after: dict[str, Any] = {}  # of the window that is running
        self._captured: Tensor | None = None
        if self.sites is not None and stream.lifetime == "stream":
            self.sites = with_streams(self.model, self.sites)
            draw = None if self.control is None else self.control.draw
            self.control = self.sites.control(self.model)
            self.control.draw = draw or self.control.draw

    def batch(self, batch: Batch, number: int) -> Results:
        """All results of one window; only then do the samples' states move on."""
        results = super().batch(batch, number)
        self._states.update(self._after)
        return results

    def rows(
        self, multipliers: tuple[float, ...], samples: range, batch: Batch, examples: range
    ) -> Rows:
        """The rows of one pass, with the stripe of each window."""
        rows = super().rows(multipliers, samples, batch, examples)
        return dataclasses.replace(rows, streams=rows.examples % self.stream.stripes)

    def logits(self, batch: Batch, rows: Rows, examples: range) -> Tensor:
        """Logits [S, L, N, V]; notes the features before output dropout."""
        assert isinstance(self.model, LanguageModel) and self.control is not None
        hook = self.model.output_dropout.register_forward_pre_hook(self._capture)
        try:
            if self.stream.carry == "deterministic":
                return super().logits(batch, rows, examples)
            return self._carried_logits(batch, rows, examples)
        finally:
            hook.remove()

    def _capture(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._captured = args[0]

    def _carried_logits(self, batch: Batch, rows: Rows, examples: range) -> Tensor:
        """A window from the states that its own samples had after the one before."""
        assert self.control is not None
        copies = len(rows.multipliers) * len(rows.samples)
        tokens, start = batch.inputs
        key = f"{examples.start}-{rows.multipliers.values}-{rows.samples}"
        if key not in self._states and batch.first > 0:
            raise DataError(
                "the chunks of a sampled carry changed on the way (memory ran out); evaluate again "
                "with less memory= or fewer stripes"
            )
        part = take_rows((tokens, start), 0, batch.size, examples.start, examples.stop, copies)
        logits, self._after[key] = self.control.forward(
            rows, part[0], self._states.get(key, part[1])
        )
        logits = self.reader.logits(logits, batch.host[examples.start : examples.stop], copies)
        return logits.unflatten(0, (len(rows.multipliers), len(rows.samples))).transpose(0, 1)

    def carried(self) -> Results:
        """The samples' states, for resuming."""
        return {
            f"{key}/{layer}/{part}": tensor.cpu()
            for key, state in self._states.items()
            for layer, pair in enumerate(state)
            for part, tensor in enumerate(pair)
        }

    def restore(self, carried: Results) -> None:
        """Takes up the samples' states."""
        device = next(self.model.parameters()).device
        parts = {tuple(name.rsplit("/", 2)): t.to(device) for name, t in carried.items()}
        for key in {name[0] for name in parts}:
            layers = sorted({int(name[1]) for name in parts if name[0] == key})
            self._states[key] = tuple(
                (parts[key, str(layer), "0"], parts[key, str(layer), "1"]) for layer in layers
            )

    def accumulators(self, targets: Tensor, counts: Tensor, groups: int) -> list[Accumulator]:
        """The family's, and the geometric mean with output dropout integrated out."""
        sums = super().accumulators(targets, counts, groups)
        return [*sums, Integrated(self, targets, counts)] if self.integrates else sums

    @property
    def integrates(self) -> bool:
        """Whether alpha 0 is asked for and the softmax allows to take it from mean features."""
        assert isinstance(self.model, LanguageModel)
        config = self.model.config
        softmax_drops = config.embedding_rows == "input_and_softmax" and config.embedding_dropout
        return 0.0 in self.protocol.grid.alphas and not softmax_drops

    def features(self) -> Tensor:
        """The features [time, rows, H] of the pass just run, before output dropout."""
        assert self._captured is not None
        return self._captured


def with_streams(model: nn.Module, sites: Sites) -> Sites:
    """Sites whose masks shared over time live for the whole stream."""
    layouts = {
        place: dataclasses.replace(
            layout, stream=bool(getattr(model.get_submodule(place.module), "shared", False))
        )
        for place, layout in sites.layouts.items()
    }
    return dataclasses.replace(sites, layouts=layouts)
