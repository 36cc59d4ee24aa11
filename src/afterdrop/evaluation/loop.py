"""The loop of an evaluation: what was found first, then batch after batch.

One set of K passes per multiplier serves every alpha and temperature. Per batch: the deterministic
pass, then chunks of examples × multipliers × samples whose logits stream into accumulators.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from afterdrop.errors import AfterdropError, DataError
from afterdrop.evaluation.adaptive_evaluation import run_adaptive
from afterdrop.evaluation.batches import AS_GIVEN, Batch, BatchReader, Source, call, open_batches
from afterdrop.evaluation.chunks import Memory
from afterdrop.evaluation.engines.dispatch import Dispatcher, evaluation_engines
from afterdrop.evaluation.likelihoods import Likelihood
from afterdrop.evaluation.likelihoods.build_likelihood import build_likelihood
from afterdrop.evaluation.likelihoods.categorical import Categorical
from afterdrop.evaluation.likelihoods.model_loss import check_loss
from afterdrop.evaluation.likelihoods.parametric import ParametricLikelihood
from afterdrop.evaluation.model_identity import identify
from afterdrop.evaluation.model_inputs import check_call, find_or_explain
from afterdrop.evaluation.rank_shares import agree
from afterdrop.evaluation.request import Protocol, Request
from afterdrop.evaluation.result_buffer import Pieces, ResultBuffer
from afterdrop.evaluation.resume_store import ResumeStore
from afterdrop.evaluation.rounding import device_kind
from afterdrop.evaluation.scores.schema import Results, name_of
from afterdrop.evaluation.scores.scores import Scores
from afterdrop.family.temperature import Nodes
from afterdrop.masks.detector import GLOBAL_GENERATORS
from afterdrop.masks.model_call import LogitsPlace, batch_size, take_rows
from afterdrop.masks.model_guard import Reset, guarded
from afterdrop.masks.sites import Sites, check_model, find_sites
from afterdrop.models.fingerprint import fingerprint
from afterdrop.ranks import SINGLE_PROCESS, Ranks
from afterdrop.transfer import with_float64

_DRY_EXAMPLES = 3  # with two, anything else of size 2 would be taken for the batch
_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True)
class Execution:
    """How an evaluation is carried out, on which its numbers do not depend.

    Attributes:
        first_example: Number of the first example, for data evaluated in parts (`Scores.merge`).
        memory: Bytes for accumulators and activations; None for the device's default.
        resume: A folder for finished parts.
        progress: Whether to show a progress bar.
        ranks: The processes that share the work.
        windows: Windows of a text per batch, at most.
        reset: Makes the model forget state that it keeps between calls.
        compute_once: Whether modules before the first dropout site run once per batch.
    """

    first_example: int = 0
    memory: int | None = None
    resume: str | Path | None = None
    progress: bool = False
    ranks: Ranks = SINGLE_PROCESS
    windows: int = 32
    reset: Reset | None = None
    compute_once: bool = True


def run_evaluation(
    model: nn.Module,
    batches: Iterable[Any],
    request: Request,
    execution: Execution,
    targets: int | None = None,
    choose_engines: Callable[..., tuple[Dispatcher, str | None]] = evaluation_engines,
    logits: LogitsPlace | None = None,
    source: Source = AS_GIVEN,
    likelihood: str | ParametricLikelihood | None = None,
) -> Scores:
    """Evaluates batches, and keeps finished parts where asked.

    Args:
        model: The model.
        batches: Pairs (inputs, targets).
        request: What to evaluate.
        execution: How to carry it out.
        targets: Number of targets in the data, if known: results are then copied to their final
            place at once.
        choose_engines: Chooses the engines for a model and a protocol.
        logits: The function that finds the logits in the model's output, if the request has one.
        source: How batches are made and read.
        likelihood: The user's own likelihood, if the request names one.
    """
    check_model(model)
    if request.adaptive is not None:

        def run(some: Iterable[Any], what: Request, how: Execution, count: int | None) -> Scores:
            made = Source(targets=source.targets)
            options = (choose_engines, logits, made, likelihood)
            return run_evaluation(model, some, what, how, count, *options)

        return run_adaptive(run, batches, request, execution, targets, source)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    current_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    reading = build_likelihood(request, logits, likelihood)
    with (
        torch.no_grad(),
        guarded(model, execution.reset),
        current_device,
    ):  # kernels go to the current device
        head, stream, total = open_batches(batches, source.batch_size, source.collate)
        reader = BatchReader(model, reading, request, source.targets)
        first = reader.read(head, 0, execution.first_example)
        check_call(model, first.inputs)
        once = execution.compute_once and request.stream is None
        sites = find_batch_sites(model, first, request, reading, compute_once=once)
        if sites is not None and sites.randomness_off and execution.ranks.rank == 0:
            warn_of_randomness(sites)
        found = first_output(model, first, request, reading)
        protocol = first_protocol(model, first, request, reading, sites, found)
        identity = None
        if execution.resume is not None:
            identity = identify(model, first, request, reading, sites, found)
        del found  # it may be large, and the memory for chunks is what is free
        if execution.ranks.count > 1:
            protocol = agree(protocol, execution.ranks)
        memory = Memory.of(device, execution.memory)
        engines, reason = choose_engines(model, protocol, reading, sites, memory)
        shown = execution.progress and execution.ranks.first
        if reason is not None and shown:
            tqdm.write(f"Evaluating without kernels, which is slower: {reason}.")
        numbered = _read(stream, execution.first_example, reader)
        bar = tqdm(total=total, desc=f"evaluate {request.split}", unit="batch", disable=not shown)
        with bar:
            if execution.resume is None and execution.ranks.count == 1:
                buffer = ResultBuffer(targets)
                for job in _jobs(numbered, engines):
                    buffer.add(job.results())
                    bar.update()
                tensors = buffer.take()
            else:
                store = ResumeStore(
                    execution.resume,
                    protocol,
                    engines,
                    execution.first_example,
                    identity,
                    execution.ranks,
                    targets,
                )
                tensors = _run_kept(numbered, engines, store, bar)
    if not tensors[name_of("data", "targets")].numel():
        raise DataError(f"no target counts: all equal ignore_index={request.ignore_index}")
    parts = None if execution.resume is None else Path(execution.resume)
    return Scores(protocol, tensors, parts=parts)


@dataclasses.dataclass(frozen=True)
class Job:
    """A batch whose evaluation has begun.

    Attributes:
        number: Which batch of the data.
        batch: The batch, which must live until its results are there.
        results: Waits for the results, or only then computes them.
    """

    number: int
    batch: Batch
    results: Callable[[], Pieces]


def behind(made: Iterator[_Item], ahead: int) -> Iterator[_Item]:
    """Yields an item once `ahead` later ones have been produced.

    If producing one fails, those produced before it come first and the error after them.

    Args:
        made: The items.
        ahead: How many later ones.

    Example:
        >>> def noted():
        ...     for number in range(3):
        ...         print("made", number)
        ...         yield number
        >>> for number in behind(noted(), 1):
        ...     print("given", number)
        made 0
        made 1
        given 0
        made 2
        given 1
        given 2
    """
    held: deque[_Item] = deque()
    error: BaseException | None = None
    while error is None:
        try:
            held.append(next(made))
        except StopIteration:
            break
        except (Exception, KeyboardInterrupt) as found:
            error = found
        else:
            if len(held) > ahead:
                yield held.popleft()
    while held:
        yield held.popleft()
    if error is not None:
        raise error


def _read(stream: Iterator[Any], position: int, reader: BatchReader) -> Iterator[tuple[int, Batch]]:
    """All batches, with their numbers."""
    for number, item in enumerate(stream):
        batch = reader.read(item, number, position)
        position += batch.size
        yield number, batch


def _jobs(numbered: Iterator[tuple[int, Batch]], engines: Dispatcher) -> Iterator[Job]:
    """Batches whose results can be taken, while the engines work on later ones."""
    begun = (Job(number, batch, engines.begin(batch, number)) for number, batch in numbered)
    return behind(begun, engines.ahead)


def _run_kept(
    numbered: Iterator[tuple[int, Batch]],
    engines: Dispatcher,
    store: ResumeStore,
    bar: Any,
) -> Results:
    """Results of all batches, of which this process evaluates those that are due."""

    def due() -> Iterator[tuple[int, Batch]]:
        for number, batch in numbered:
            if store.due(number, batch):
                yield number, batch
            else:
                bar.update()

    with store:
        for job in _jobs(due(), engines):
            store.add(job.number, job.batch, job.results())
            bar.update()
        return store.finish()


def find_batch_sites(
    model: nn.Module,
    first: Batch,
    request: Request,
    likelihood: Likelihood,
    *,
    compute_once: bool = True,
) -> Sites | None:
    """The dropout sites, found on a few examples of the first batch; None if nothing samples."""
    if not request.grid.stochastic:
        return None
    dim = request.batch_dim
    options: dict[str, Any] = {"rates": request.rates, "noise": request.noise, "batch_dim": dim}
    options |= {"logits": likelihood.logits, "compute_once": compute_once}

    def dry_run(examples: int) -> Sites:
        inputs = take_rows(first.inputs, dim, first.size, 0, examples, 1)
        sites = call(lambda *args, **kwargs: find_sites(model, *args, **options, **kwargs), inputs)
        # Several rows of the input may belong to an example, as the nodes of a graph do.
        return sites if batch_size(inputs, dim) == examples else sites.drawn_per_pass()

    try:
        return dry_run(min(first.size, _DRY_EXAMPLES))
    except AfterdropError:
        raise
    except Exception:  # an input that only looks like a batch cannot be cut: take all of it
        return find_or_explain(
            lambda: dry_run(first.size), lambda: call(model, first.fresh_inputs(dim))
        )


def warn_of_randomness(sites: Sites) -> None:
    """Says that training was random in another way as well, which no member has."""
    what = "; ".join(f"{name or '(root)'} {draws}" for name, draws in sites.randomness_off)
    # Python's and NumPy's generators cannot be given masks.
    remedy = "; rates=('attribute',) treats the skipping of layers at a rate as a dropout site"
    if all(GLOBAL_GENERATORS in draws for _, draws in sites.randomness_off):
        remedy = "; draw by torch.rand to make the skipping of layers a dropout site (rates=)"
    warnings.warn(
        f"random behaviour of training stays off because it is not dropout: {what}. The members "
        f"differ from the trained model by that. noise=('module',) says that this is meant{remedy}",
        stacklevel=3,
    )


def first_output(
    model: nn.Module, first: Batch, request: Request, likelihood: Likelihood
) -> Tensor:
    """What the model gives for the first batch without dropout, checked."""
    output = call(model, first.fresh_inputs(request.batch_dim))
    likelihood.check_axes(output, first.host)
    logits = with_float64(likelihood.read_output(output, first.host, 1)[0])
    likelihood.check_output(logits)
    likelihood.check_targets(first.host, logits.shape[-1], 0)
    if type(likelihood) is Categorical:
        check_loss(output, first.host, likelihood)
    return logits


def first_protocol(
    model: nn.Module,
    first: Batch,
    request: Request,
    likelihood: Likelihood,
    sites: Sites | None,
    logits: Tensor,
) -> Protocol:
    """The request, and what the model and the first batch make of it."""
    if request.temperatures is None:
        targets = with_float64(first.targets.flatten()[likelihood.counts(first.targets)])
        nodes = likelihood.bracket(logits, targets)
    else:
        nodes = Nodes(*request.temperatures)
    # Windows of a text share masks that live as long as the text.
    streamed = request.stream is not None and request.stream.lifetime == "stream"
    return Protocol(
        request=request,
        low=nodes.low,
        high=nodes.high,
        num_classes=logits.shape[-1],
        fingerprint=fingerprint(model),
        batched=sites.batched if sites else True,
        shared=sites.shared or streamed if sites else False,
        sites=tuple((s.name, s.op, s.rate, s.calls) for s in sites) if sites else (),
        off=tuple((name, what) for name, what in sites.off) if sites else (),
        device=device_kind(first.targets.device),
    )
