"""The tests of a check, in order. One that fails does not stop the others."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from afterdrop.conformance.agreement import compare, fewest_samples
from afterdrop.conformance.model_snapshot import differences, generators, snapshot
from afterdrop.conformance.train_passes import (
    Subject,
    controlled_samples,
    count_random,
    own_samples,
    seeded,
)
from afterdrop.conformance.verdicts import Check, Failed, Skipped, Verdict
from afterdrop.errors import AfterdropError
from afterdrop.evaluation.batches import BatchReader, call, open_batches
from afterdrop.evaluation.labelled_items import TargetsPlace
from afterdrop.evaluation.likelihoods.categorical import Categorical
from afterdrop.evaluation.model_inputs import check_call
from afterdrop.evaluation.request import Request
from afterdrop.family.member import AMC, Grid
from afterdrop.masks.model_call import LogitsPlace, close
from afterdrop.masks.model_guard import ModelState, Reset, guarded
from afterdrop.masks.sites import Sites, check_model, find_sites
from afterdrop.masks.uniforms import Plan
from afterdrop.selection import Predictor

_FEW = 8  # samples, where more would not find more
_ENTRIES = 2**24  # log-probabilities that are kept for a comparison
_CALLS = 6  # predictions in threads
_SHOWN = 4  # names in a message


def check(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    num_samples: int = 200,
    seed: int = 0,
    rates: Sequence[str] = (),
    noise: Sequence[str] = (),
    batch_dim: int = 0,
    class_dim: int | None = None,
    logits: LogitsPlace | None = None,
    targets: TargetsPlace | None = None,
    reset: Reset | None = None,
) -> Check:
    """Tests on the first batch whether the dropout of a model is controlled correctly.

    The tests are: dropout sites are found; every random operation of a train-mode pass is
    controlled; log-probabilities under controlled masks have the mean and the variance that they
    have under the model's own dropout; the model is left unchanged; eval mode is deterministic;
    two threads that predict at once get what one gets.

    Args:
        model: The module; stays on its device.
        batches: As for `evaluate`. Only the first is used.
        num_samples: Number of samples K with either kind of dropout, even.
        seed: Seed of both.
        rates: Attributes that hold rates of masks which the model draws itself (`find_sites`).
        noise: Modules whose random draws are not dropout (`find_sites`).
        batch_dim: Batch dimension of inputs, targets and logits.
        class_dim: Class dimension of the logits; by default the last.
        logits: Where the model's output holds its logits, if several of its tensors may be the
            logits: an index, a key or a function of the output.
        targets: Where a batch holds its targets, as for `evaluate`.
        reset: Called with the model before each forward pass, to forget state that it keeps
            between calls.

    Returns:
        The verdicts. They print as a table.

    Raises:
        DataError: If the batches cannot be read.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        >>> found = check(net, [(torch.randn(6, 4), torch.zeros(6, dtype=torch.int64))])
        >>> found.passed, found["dropout sites"].detail
        (True, '1 site, 1 random operation per pass')
    """
    check_model(model)
    likelihood = Categorical(batch_dim, class_dim, logits=logits)
    head, _, _ = open_batches(batches)
    plan = Plan(num_samples, seed, "iid")
    request = Request(Grid(), plan, batch_dim=batch_dim, class_dim=class_dim)
    with torch.no_grad(), guarded(model, reset):
        batch = BatchReader(model, likelihood, request, targets).read(head, 0, 0)
    check_call(model, batch.inputs)
    options = {"rates": rates, "noise": noise, "batch_dim": batch_dim, "logits": logits}
    return _check(Subject(model, batch, likelihood, options, reset, plan))


def _check(subject: Subject) -> Check:
    sites: list[Sites] = []

    def with_sites(test: Callable[[Subject, Sites], str]) -> str:
        if not sites:
            raise Skipped("the dropout sites were not found")
        return test(subject, sites[0])

    tests: dict[str, Callable[[], str]] = {
        "dropout sites": lambda: _find(subject, sites),
        "random operations": partial(with_sites, _random_operations),
        "mean and variance": partial(with_sites, _mean_and_variance),
        "model unchanged": partial(_unchanged, subject),
        "eval mode twice": partial(_eval_twice, subject),
        "two threads": partial(with_sites, _two_threads),
    }
    with seeded(subject.plan.seed, subject.batch.targets.device):  # models may seed generators
        return Check(tuple(_verdict(name, test) for name, test in tests.items()))


def _verdict(name: str, test: Callable[[], str]) -> Verdict:
    try:
        return Verdict(name, "ok", test())
    except Skipped as reason:
        return Verdict(name, "skipped", str(reason))
    except (Failed, AfterdropError) as reason:
        return Verdict(name, "FAILED", str(reason))
    except Exception as error:  # the user's model may fail in any way
        return Verdict(name, "FAILED", f"{type(error).__name__}: {error}")


def _find(subject: Subject, found: list[Sites]) -> str:
    find = partial(find_sites, subject.model, reset=subject.reset, **subject.options)
    sites = call(find, subject.inputs())
    found.append(sites)
    off = [f"{name or '(root)'} ({what})" for name, what in sites.off]
    return (
        f"{_count(len(sites), 'site')}, {_count(sites.calls, 'random operation')} per pass"
        + f"; stays off: {_some(off)}" * bool(off)
    )


def _random_operations(subject: Subject, sites: Sites) -> str:
    masks, single, used = count_random(subject, sites.held)
    # What is drawn in eval mode as well does not change the output: another test compares it.
    always, _, used_always = count_random(subject, _all_modules(subject.model))
    masks -= always
    if set(used) - set(used_always):
        raise Failed(f"a train-mode pass draws from the global generator of {' and '.join(used)}")
    # Single numbers may be masks of one element, or decide which layers run at all.
    fewer = masks < sites.calls and not single and not _forced(sites)
    if masks > sites.calls or fewer:
        raise Failed(
            f"a train-mode pass has {_count(masks, 'random operation')}, of which "
            f"{sites.calls} would be controlled"
        )
    few = Plan(min(_FEW, subject.plan.num_samples), subject.plan.seed, "iid")
    first, again = (controlled_samples(subject, sites, few) for _ in range(2))
    if not close(again.exp(), first.exp()):
        raise Failed(
            "the same masks give other outputs when they are used again: the model draws random "
            "numbers that do not come from torch's operators, or keeps state between calls"
        )
    drawn = min(masks + single, sites.calls)
    found = f"{drawn} in a train-mode pass"
    if drawn < sites.calls:
        others = "run only under control" if _forced(sites) else "are in skipped layers"
        found = f"{drawn} of {sites.calls} in a train-mode pass (others {others})"
    return f"{found}, all controlled; the same masks give the same output"


def _mean_and_variance(subject: Subject, sites: Sites) -> str:
    if forced := _forced(sites):
        raise Skipped(
            f"dropout in {_some(forced)} runs only under control, because the module stays in eval "
            "mode"
        )
    K = subject.plan.num_samples
    with torch.no_grad(), guarded(subject.model, subject.reset):
        output = call(subject.model, subject.inputs())
        subject.likelihood.check_axes(output, subject.batch.host)
        logits = subject.likelihood.read_output(output, subject.batch.host, 1)
    total, classes = logits.shape[1:]
    targets = max(1, min(total, _ENTRIES // (K * classes)))
    if (fewest := fewest_samples(2 * (targets * classes + 1))) > K:
        raise Skipped(f"num_samples={K} is too few to see a difference; use at least {fewest}")
    own = own_samples(subject, sites, targets)
    controlled = controlled_samples(subject, sites, subject.plan, targets)
    rounding = max(1e-4, 4 * torch.finfo(logits.dtype).eps)
    found = compare(controlled, own, rounding)
    text = (
        f"at most {found.mean:.1f} and {found.variance:.1f} standard errors from the model's own "
        f"dropout (bound {found.bound:.1f}: {found.comparisons} comparisons, K = {K})"
    )
    if not found.holds:
        raise Failed(text)
    return text


def _forced(sites: Sites) -> list[str]:
    """Modules that stay in eval mode although they contain dropout, which runs under control."""
    return sorted({place.module for place in sites.layouts} & sites.held)


def _all_modules(model: nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in model.named_modules())


def _predictor(subject: Subject) -> Predictor:
    few = min(_FEW, subject.plan.num_samples)
    class_dim = -1 if subject.likelihood.class_dim is None else subject.likelihood.class_dim
    return Predictor(
        subject.model,
        AMC,
        few,
        subject.plan.seed,
        class_dim=class_dim,
        reset=subject.reset,
        **subject.options,
    )


def _unchanged(subject: Subject) -> str:
    # Away from where a model that seeds the generators would leave them.
    torch.rand(1, device=subject.batch.targets.device), torch.rand(1)
    random.random(), np.random.random()
    unused = generators()
    with torch.no_grad(), guarded(subject.model, subject.reset):
        call(subject.model, subject.inputs())
    used = differences(unused, generators())
    before, refused = snapshot(subject.model), False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call(_predictor(subject), subject.inputs())
        except AfterdropError:  # the dropout sites have a verdict of their own
            refused = True
    changed = [n for n in differences(before, snapshot(subject.model)) if n not in used]
    if changed:
        raise Failed(f"a prediction changes {_some(changed)}")
    return (
        "weights, buffers, modes, attributes and random generators, after a prediction"
        + " that was refused" * refused
        + f", except {_some(used)}, which the model uses in eval mode, too" * bool(used)
    )


def _eval_twice(subject: Subject) -> str:
    model, device = subject.model, subject.batch.targets.device
    outputs = []
    with torch.no_grad(), guarded(model, subject.reset):
        state = ModelState(model, by_value=True)
        for number in range(2):
            with seeded(subject.plan.seed + number, device):
                outputs.append(subject.log_probs(call(model, subject.inputs()), 1).exp())
        changed = [
            f"{name or '(root)'}.{attribute}"
            for name, names in state.changed().items()
            for attribute in sorted(names)
        ]
        state.restore()
    first, second = outputs
    if not close(second, first):
        raise Failed(
            f"probabilities differ by up to {(second - first).abs().max().item():.3g}"
            + f"; the model keeps state in {_some(changed)}: pass reset=" * bool(changed)
        )
    return "the same output"


def _two_threads(subject: Subject, sites: Sites) -> str:
    predict = _predictor(subject)
    inputs = [subject.inputs() for _ in range(_CALLS)]
    wanted = call(predict, subject.inputs())
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(partial(call, predict), inputs))
    wrong = sum(not close(result.exp(), wanted.exp()) for result in found)
    if wrong:
        raise Failed(f"{wrong} of {_CALLS} predictions differ from that of one thread")
    return f"{_CALLS} predictions, all as in one thread"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
