"""What is random in a model: dropout, other noise, and draws that cannot be controlled."""

from typing import NamedTuple

from torch import Tensor

from afterdrop.errors import SiteError
from afterdrop.masks.detector import Detector, describe_draws
from afterdrop.masks.dry_run import DryRun
from afterdrop.masks.recorder import Recorder, Visit

_MASK_KERNELS = ("bernoulli", "bernoulli_", "native_dropout", "_fused_dropout")


class Discovery(NamedTuple):
    """The results of a train-mode pass.

    Attributes:
        visits: The random operations that can be controlled.
        row_bytes: Bytes alive at the peak of the pass, per row.
        off: Modules to keep in eval mode because they do more than dropout, with the reason.
        output: The logits; nothing was dropped.
    """

    visits: list[Visit]
    row_bytes: int
    off: list[tuple[str, str]]
    output: Tensor


def discover(dry: DryRun, held: set[str]) -> Discovery:
    """Finds the random operations of a model, and the modules that do more than dropout.

    Args:
        dry: Runs the model.
        held: Names of modules that stay in eval mode.
    """
    recorder = Recorder(dry.model, frozenset(held), dry.rates)
    detector = Detector(recorder)
    with detector:
        output = dry.run(recorder)
    hidden = [draw for draw in detector.draws if draw.op in _MASK_KERNELS]
    if hidden:
        raise SiteError(
            f"masks that cannot be controlled are drawn in: {describe_draws(hidden)}. A scripted, "
            "compiled or extension module hides its operators: use the eager module, or "
            "noise=('name',) if its draws are not dropout"
        )
    ops: dict[str, set[str]] = {}
    for draw in detector.draws:
        ops.setdefault(draw.module, set()).add(draw.op)
    off = {name: "draws " + ", ".join(sorted(drawn)) for name, drawn in ops.items()}
    for name in sorted(detector.changed - set(off)):
        off[name] = "changes its buffers in training"
    row_bytes = -(-detector.peak_bytes // dry.batch)
    return Discovery(list(recorder.visits), row_bytes, sorted(off.items()), output)


def check_declared(found: Discovery, rates: tuple[str, ...]) -> None:
    """Refuses masks without declared rates, rates without masks, and models without dropout.

    Args:
        found: From `discover`.
        rates: The declared attributes.
    """
    own = [visit for visit in found.visits if visit.own]
    if own and not rates:
        where = ", ".join(sorted({f"{v.place} ({v.op})" for v in own}))
        raise SiteError(
            f"the model draws its own masks in: {where}. Declare the attributes that hold their "
            "rates, as in rates=('dropouti', 'encoder.p'), so that the masks can be controlled; "
            "or noise=('module',) if a module's draws are not dropout"
        )
    if rates and not own:
        raise SiteError(
            f"rates={rates!r} were declared, but the model draws no masks of its own; operators "
            "such as F.dropout need no declaration: omit rates"
        )
    if not found.visits:
        left = "; ".join(f"{name or '(root)'} {what}" for name, what in found.off)
        raise SiteError(
            "the model has no dropout: no operator dropped anything in a train-mode pass (rates "
            "of 0 do not count). There is nothing to choose from: train it with dropout."
            + f" Left off, because it is not dropout: {left}."
            * bool(found.off)
        )


def confirm(dry: DryRun, held: set[str], before: list[Visit]) -> tuple[list[Visit], Tensor]:
    """Runs the model again with noisy modules held; returns the visits and the logits.

    Args:
        dry: Runs the model.
        held: Names of modules that stay in eval mode.
        before: The operations that ran when fewer modules were held.

    Raises:
        SiteError: If something else is still random, or if dropout is lost.
    """
    recorder = dry.recorder(held, before)
    detector = Detector(recorder)
    with detector:
        output = dry.run(recorder)
    if detector.draws:
        raise SiteError(
            f"random draws remain in eval mode: {describe_draws(detector.draws)}. The evaluation "
            "would not be repeatable: make these modules deterministic in eval mode"
        )
    if detector.changed:
        raise SiteError(
            f"modules change their buffers even in eval mode: {sorted(detector.changed)}; make "
            "the buffers constant in eval mode"
        )
    lost = {visit.place for visit in before} - {visit.place for visit in recorder.visits}
    if lost:
        raise SiteError(
            f"dropout in {', '.join(map(str, sorted(lost)))} is gated on self.training of a "
            "module that must stay in eval mode (it also draws noise or keeps statistics); move "
            "the dropout into a module of its own, for example nn.Dropout"
        )
    return list(recorder.visits), output
