"""Evaluating every member of the family on data, for any module: the one expensive verb.

One set of K passes per multiplier serves every alpha and temperature. Per batch: the deterministic
pass, then chunks of examples × multipliers × samples whose logits stream into accumulators.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from afterdrop.errors import AfterdropError, DataError, MemberError
from afterdrop.evaluation.accumulators import log_softmax
from afterdrop.evaluation.engines.generic import Worker
from afterdrop.evaluation.passes import Batch, Reader, call, fresh, memory_budget
from afterdrop.evaluation.pipeline import Job, behind
from afterdrop.evaluation.protocol import Protocol
from afterdrop.evaluation.rank_shares import agree
from afterdrop.evaluation.resume_store import Parts
from afterdrop.evaluation.scores.scores import Scores
from afterdrop.family.member import Grid
from afterdrop.family.temperature import Nodes, bracket
from afterdrop.masks.eval_mode import eval_mode
from afterdrop.masks.nested_inputs import take_rows
from afterdrop.masks.sites import Sites, check_model, find_sites
from afterdrop.masks.uniforms import Plan, Scheme
from afterdrop.models.fingerprint import fingerprint
from afterdrop.ranks import ALONE, Ranks, Splitting, current

_DRY_EXAMPLES = 3  # with two, whatever else has a size of 2 would be taken for the batch


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    grid: Grid | None = None,
    num_samples: int = 100,
    seed: int = 0,
    split: str = "valid",
    masks: Scheme = "lhs",
    blocks: int = 2,
    rates: Sequence[str] = (),
    noise: Sequence[str] = (),
    batch_dim: int = 0,
    ignore_index: int = -100,
    temperatures: tuple[float, float] | None = None,
    first_example: int = 0,
    memory: int | None = None,
    resume: str | Path | None = None,
    progress: bool = False,
    ranks: Splitting | None = None,
) -> Scores:
    """Evaluates every member of the extended dropout family on data.

    The model is left as it was: modes, rates, statistics and weights. Its masks depend on the
    seed and the position of an example in the data, not on how the data are batched.

    Args:
        model: Any module that contains dropout; stays on its device.
        batches: Pairs (inputs, targets). Inputs are a tensor, a tuple of positional or a dict of
            keyword inputs; targets are class numbers [B] or [B, ...]. The model returns logits
            [B, ..., V] as a tensor, first of a tuple, or `.logits`.
        grid: The members; by default 5 alphas × 11 multipliers, each at every temperature.
        num_samples: K, even.
        seed: Of the masks.
        split: Name of the data; scores of "test" are refused by `select`.
        masks: "lhs" (two independent Latin hypercubes), "iid" or "antithetic".
        blocks: Independent blocks of samples, a power of two; more than 2 give a curve over K.
        rates: Attributes that hold rates of masks which the model draws itself (`find_sites`).
        noise: Modules whose random draws are not dropout (`find_sites`).
        batch_dim: Batch dimension of inputs, targets and logits.
        ignore_index: Targets that do not count.
        temperatures: Lowest and highest temperature; by default chosen from the first batch.
        first_example: Number of the first example, for data evaluated in parts (`Scores.merge`).
        memory: Bytes for accumulators and activations; by default 256 MiB on a CPU and 40 % of
            the free memory of a GPU.
        resume: A folder for finished parts: an interrupted evaluation goes on from there and ends
            with the same bytes. Removed when done.
        progress: Whether to show a progress bar.
        ranks: "split" shares the batches over the ranks of the caller's process group: every rank
            makes this call with the same model and all batches, and gets the same Scores.

    Returns:
        Scores of every member.

    Raises:
        DataError, SiteError, MemberError: For input that cannot be evaluated; says what to do.
        RankError: If there is no process group to share the work in, or a rank is gone.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
        >>> data = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(2)]
        >>> evaluate(net, data, num_samples=4)
        Scores(split='valid', 51 members, K=4, 16 targets in 16 examples)
    """
    settings = Settings(
        Grid() if grid is None else grid,
        Plan(num_samples, seed, masks, blocks),
        split,
        (rates,) if isinstance(rates, str) else tuple(rates),
        (noise,) if isinstance(noise, str) else tuple(noise),
        Reader(batch_dim, ignore_index),
        temperatures,
        first_example,
        memory,
        resume,
        progress,
        ranks=current(ranks),
    )
    return run_evaluation(model, batches, settings)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What an evaluation was asked for; see `evaluate` for the meaning of each.

    `stream` and `limit` are noted in the protocol: whoever makes the batches heeds them.
    """

    grid: Grid
    plan: Plan
    split: str = "valid"
    rates: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()
    reader: Reader = dataclasses.field(default_factory=Reader)
    temperatures: tuple[float, float] | None = None
    first_example: int = 0
    memory: int | None = None
    resume: str | Path | None = None
    progress: bool = False
    stream: tuple[tuple[str, Any], ...] = ()
    ranks: Ranks = ALONE
    limit: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.grid, Grid):
            raise MemberError(f"grid={self.grid!r} must be a Grid, as in Grid(alphas=(0, 1))")
        if self.temperatures is not None:
            if not isinstance(self.temperatures, tuple | list) or len(self.temperatures) != 2:
                raise MemberError(f"temperatures={self.temperatures!r} must be a pair (low, high)")
            Nodes(*self.temperatures)  # refuses what makes no sense
        if self.limit is not None and self.limit < 1:
            raise DataError(f"limit={self.limit} must be at least 1 target, or None for all")
        if self.plan.num_samples == 1 and len(self.grid.alphas) > 1 and self.grid.stochastic:
            raise DataError(
                f"num_samples=1 with alphas {self.grid.alphas}: one sample has one mean, so all "
                "alphas coincide; use more samples or a grid with a single alpha"
            )


def run_evaluation(
    model: nn.Module,
    batches: Iterable[Any],
    settings: Settings,
    worker_class: Callable[..., Worker] = Worker,
    targets: int | None = None,
) -> Scores:
    """Evaluates batches with a worker, in parts that are kept where asked.

    Args:
        model: The model.
        batches: The data.
        settings: What to evaluate.
        worker_class: Makes the worker.
        targets: How many targets the data have, if known: results then go straight to where they
            stay.
    """
    check_model(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    reader = settings.reader
    current_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with torch.no_grad(), eval_mode(model), current_device:  # kernels go to the current device
        head, stream, total = _peek(batches)
        first = reader.batch(head, 0, settings.first_example, device)
        sites = _dry_run(model, first, settings)
        protocol = agree(_protocol(model, first, settings, sites), settings.ranks)
        worker = worker_class(
            model, reader, protocol, sites, memory_budget(settings.memory, device)
        )
        start, ranks = settings.first_example, settings.ranks
        parts = Parts(settings.resume, protocol, worker, start, ranks, targets)
        bar = tqdm(
            total=total,
            desc=f"evaluate {settings.split}",
            unit="batch",
            disable=not (settings.progress and settings.ranks.first),
        )
        with bar, parts:
            batches_due = _due(stream, settings, device, parts, bar)
            begun = (Job(n, batch, worker.begin(batch, n)) for n, batch in batches_due)
            for job in behind(begun, worker.ahead):
                parts.add(job.number, job.batch, job.results())
                bar.update()
        tensors = parts.finish()
    if not tensors["targets"].numel():
        raise DataError(f"no target counts: all equal ignore_index={reader.ignore_index}")
    return Scores(protocol, tensors)


def _due(
    stream: Iterator[Any], settings: Settings, device: torch.device, parts: Parts, bar: Any
) -> Iterator[tuple[int, Batch]]:
    """The batches that are left to evaluate here, with their numbers."""
    position = settings.first_example
    for number, item in enumerate(stream):
        batch = settings.reader.batch(item, number, position, device)
        position += batch.size
        if parts.due(number, batch):
            yield number, batch
        else:
            bar.update()


def _peek(batches: Iterable[Any]) -> tuple[Any, Iterator[Any], int | None]:
    total = len(batches) if isinstance(batches, Sized) else None
    try:
        stream = iter(batches)
    except TypeError:
        raise DataError(
            f"batches is {type(batches).__name__}; give (inputs, targets) pairs, such as a loader"
        ) from None
    try:
        head = next(stream)
    except StopIteration:
        raise DataError("batches is empty; give at least one (inputs, targets) pair") from None
    return head, itertools.chain([head], stream), total


def _dry_run(model: nn.Module, first: Batch, settings: Settings) -> Sites | None:
    if not settings.grid.stochastic:
        return None
    dim = settings.reader.batch_dim
    options: dict[str, Any] = {"rates": settings.rates, "noise": settings.noise, "batch_dim": dim}

    def dry_run(examples: int) -> Sites:
        inputs = take_rows(first.inputs, dim, first.size, 0, examples, 1)
        return call(lambda *args, **kwargs: find_sites(model, *args, **options, **kwargs), inputs)

    try:
        return dry_run(min(first.size, _DRY_EXAMPLES))
    except AfterdropError:
        raise
    except Exception:  # an input that only looks like a batch cannot be cut: take all of it
        return dry_run(first.size)


def _refuse_probabilities(logits: Tensor) -> None:
    """Refuses outputs that are no logits: rows of positive numbers that all sum to 1."""
    sums = logits.double().sum(-1)
    if len(logits) and bool((logits >= 0).all()) and bool(((sums - 1).abs() < 1e-3).all()):
        raise DataError(
            "the model gives probabilities (no row has a negative number, and each sums to 1); "
            "give logits, or their logarithms, which serve as well"
        )


def _shared(sites: Sites, settings: Settings) -> bool:
    """Whether examples share masks, as windows of a text do where these live as long as it."""
    return sites.shared or dict(settings.stream).get("lifetime") == "stream"


def _protocol(model: nn.Module, first: Batch, settings: Settings, sites: Sites | None) -> Protocol:
    reader = settings.reader
    logits = reader.logits(call(model, fresh(first, reader)), first.host, 1)[0]
    classes = logits.shape[-1]
    if classes < 2:
        raise DataError(f"the model gives {classes} logit per target; give at least 2 classes")
    reader.check_classes(first.host, classes, 0)
    _refuse_probabilities(logits)
    targets = first.targets.flatten()[reader.counts(first.targets)]
    if settings.temperatures is None:
        some = max(1, 2**21 // classes)  # enough to tell the scale
        nodes = bracket(log_softmax(logits[:some], "the first batch"), targets[:some])
    else:
        nodes = Nodes(*settings.temperatures)
    return Protocol(
        split=settings.split,
        grid=settings.grid,
        plan=settings.plan,
        low=nodes.low,
        high=nodes.high,
        num_classes=classes,
        fingerprint=fingerprint(model),
        batched=sites.batched if sites else True,
        shared=_shared(sites, settings) if sites else False,
        sites=tuple((s.name, s.op, s.rate, s.calls) for s in sites) if sites else (),
        off=sites.off if sites else (),
        rates=settings.rates,
        ignore_index=reader.ignore_index,
        stream=settings.stream,
        limit=settings.limit,
    )
