"""What dry runs find out, and what is refused.

    discover            train mode under control: which operators ask for masks, which modules draw
                        other random numbers or change their buffers (these stay in eval mode)
    confirm             with those modules held: no site of the first pass may be lost
    check_eval_output   with every rate at 0, the output must be that of model.eval(), which must
                        be the same each time

A refusal names the modules and the remedy.
"""

import contextlib
import inspect
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from afterdrop.errors import SiteError
from afterdrop.masks.detector import GLOBAL_GENERATORS, describe_draws, detected
from afterdrop.masks.dry_run import DryRun, Recorder, Visit
from afterdrop.masks.model_call import output_tensor, without_fast_path
from afterdrop.masks.model_guard import ModelState
from afterdrop.masks.operators import Place

WITHOUT_EFFECT = ", which changes nothing"
_MASK_KERNELS = ("bernoulli", "bernoulli_", "native_dropout", "_fused_dropout")


class Discovery(NamedTuple):
    """The results of a train-mode pass.

    Attributes:
        visits: The random operations that can be controlled.
        row_bytes: Bytes alive at the peak of the pass, per row.
        largest_bytes: Bytes of its largest tensor, per row.
        off: Modules to keep in eval mode because they do more than dropout, with the reason.
        volatile: Modules whose attributes the pass changed.
        output: The logits; nothing was dropped.
    """

    visits: list[Visit]
    row_bytes: int
    largest_bytes: int
    off: list[tuple[str, str]]
    volatile: frozenset[str]
    output: Tensor

    def joined(self, later: "Discovery") -> "Discovery":
        """This pass and a later one, in which more modules were in eval mode.

        A module that was skipped at random in this pass may run in the later one only.
        """
        seen = {visit.place for visit in later.visits}
        return later._replace(
            visits=[*later.visits, *(v for v in self.visits if v.place not in seen)],
            row_bytes=max(self.row_bytes, later.row_bytes),
            largest_bytes=max(self.largest_bytes, later.largest_bytes),
            off=sorted((dict(later.off) | dict(self.off)).items()),
            volatile=self.volatile | later.volatile,
        )


def discover(dry: DryRun, held: set[str]) -> Discovery:
    """Finds the random operations of a model, and the modules that do more than dropout.

    Args:
        dry: Runs the model.
        held: Names of modules that stay in eval mode.
    """
    recorder = Recorder(dry.model, frozenset(held), dry.rates)
    state = ModelState(dry.model, by_value=True)
    output, detector = detected(recorder, lambda: dry.run(recorder))
    dry.dtype = detector.coarsest
    changed = state.changed()
    hidden = [draw for draw in detector.draws if draw.op in _MASK_KERNELS]
    if hidden:
        scripted = [
            name
            for name, module in dry.model.named_modules()
            if isinstance(module, torch.jit.ScriptModule)
        ]
        where = f" or in the TorchScript of {', '.join(scripted)}" if scripted else ""
        raise SiteError(
            f"masks that cannot be controlled are drawn in: {describe_draws(hidden)}{where}. A "
            "scripted or extension module hides its operators: use the eager module, or "
            "noise=('name',) if its draws are not dropout"
        )
    ops: dict[str, set[str]] = {}
    for draw in detector.draws:
        ops.setdefault(draw.module, set()).add(draw.op)
    # Python's and NumPy's generators cannot be made to give both ends of a range.
    known = bool(ops) and not any(draw.op == GLOBAL_GENERATORS for draw in detector.draws)
    effect = WITHOUT_EFFECT if known and not _draws_matter(dry, recorder, output) else ""
    off = {name: "draws " + ", ".join(sorted(drawn)) + effect for name, drawn in ops.items()}
    for name in sorted(_with_buffers(dry, changed) - set(off)):
        off[name] = "changes its buffers in training"
    row_bytes = -(-detector.peak_bytes // dry.batch)
    largest = -(-detector.largest_bytes // dry.batch)
    volatile = frozenset(changed)
    visits = list(recorder.visits)
    return Discovery(visits, row_bytes, largest, sorted(off.items()), volatile, output)


def _draws_matter(dry: DryRun, recorder: Recorder, output: Tensor) -> bool:
    """Whether draws that are not dropout change the output.

    Single numbers, by which a LayerDrop decides, are set to both ends; others are drawn again.
    """
    visits = list(recorder.visits)
    outputs = []
    for recorder.single_draw in (0.0, 1.0 - 2.0**-24):
        torch.manual_seed(torch.initial_seed() + 1)
        outputs.append(dry.run(recorder))
    recorder.single_draw = None
    recorder.visits[:] = visits
    return not all(dry.same(other, output) for other in outputs)


def _with_buffers(dry: DryRun, changed: dict[str, set[str]]) -> set[str]:
    """The modules of which a buffer changed, and not only an attribute."""
    return {
        name
        for name, attributes in changed.items()
        if attributes & dry.model.get_submodule(name)._buffers.keys()
    }


def check_declared(found: Discovery, model: nn.Module, rates: tuple[str, ...]) -> None:
    """Refuses masks without declared rates, rates without masks, and models without dropout.

    Args:
        found: From `discover`.
        model: The module.
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
            + f" Left off, because it is not dropout: {left}." * bool(found.off)
            + _mode_remedy(model)
        )


def _mode_remedy(model: nn.Module) -> str:
    """How to use a model that takes its mode as an argument, as Keras does; empty for others."""
    for name in ("forward", "call"):
        try:
            parameters = inspect.signature(getattr(model, name)).parameters
        except (AttributeError, TypeError, ValueError):
            continue
        for mode in {"training", "train", "is_training"} & parameters.keys():
            return (
                f" The model takes its mode as the argument {mode!r}: wrap it in a module whose "
                f"forward returns model(x, {mode}=self.training)."
            )
    return ""


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
    state = ModelState(dry.model, by_value=True)
    output, detector = detected(recorder, lambda: dry.run(recorder))
    changed = sorted(_with_buffers(dry, state.changed()))
    if changed:
        raise SiteError(
            f"modules change their buffers even in eval mode: {changed}; make the buffers constant "
            "in eval mode"
        )
    if detector.draws:
        # A draw that does not change the output, as of a LayerDrop in eval mode, is harmless.
        torch.manual_seed(torch.initial_seed() + 1)
        if not dry.same(dry.run(recorder), output):
            raise SiteError(
                f"random draws remain in eval mode: {describe_draws(detector.draws)}. The "
                "evaluation would not be repeatable: make these modules deterministic in eval mode"
            )
    lost = {visit.place for visit in before} - {visit.place for visit in recorder.visits}
    if lost:
        raise SiteError(
            f"dropout in {', '.join(map(str, sorted(lost)))} is gated on self.training of a "
            "module that must stay in eval mode (it also draws noise or keeps statistics); move "
            "the dropout into a module of its own, for example nn.Dropout"
        )
    return list(recorder.visits), output


def check_eval_output(
    dry: DryRun, held: set[str], places: Collection[Place], undropped: Tensor
) -> None:
    """Checks that with every rate at 0 the model computes what model.eval() computes.

    Args:
        dry: Runs the model.
        held: Names of modules that stay in eval mode.
        places: Where dropout runs.
        undropped: The logits of a pass that dropped nothing.

    Raises:
        SiteError: If the outputs differ, or if the model draws random numbers in eval mode.
    """
    expected = _eval_output(dry)
    recorder = Recorder(dry.model, frozenset(held), dry.rates, places)
    for output in _at_rate_zero(dry, recorder) if dry.rates else (undropped,):
        if dry.same(output, expected):
            continue
        if output.shape != expected.shape:
            raise SiteError(
                f"with every dropout rate at 0 the logits have shape {tuple(output.shape)}, in "
                f"model.eval() {tuple(expected.shape)}: something else changes in training; keep "
                "its module in eval mode (noise=)"
            )
        own = sorted({str(v.place) for v in recorder.visits if v.own})
        hint = f" Undeclared masks may be in: {', '.join(own)}." if own else ""
        raise SiteError(
            "with every dropout rate at 0 the model does not compute what model.eval() computes "
            f"(largest difference {(output - expected).abs().max().item():.3g}).{hint} Something "
            "else changes in training: declare its rate (rates=) or keep its module in eval mode "
            "(noise=)"
        )


def _at_rate_zero(dry: DryRun, recorder: Recorder) -> Iterator[Tensor]:
    """Logits with declared rates of 0, under which no uniform may drop anything."""
    for recorder.constant in (0.999, 0.001):
        yield dry.run(recorder, multiplier=0.0)


def _eval_output(dry: DryRun) -> Tensor:
    """The logits of model.eval(), which must be the same each time."""

    def twice() -> Iterator[Tensor]:
        for number in range(2):
            inputs, kwargs = dry.take()
            torch.manual_seed(torch.initial_seed() + number)
            yield output_tensor(dry.model(*inputs, **kwargs), dry.logits)

    with evaluating(dry.model):
        outputs = list(twice())
        if dry.same(*outputs):
            return outputs[0]
        # Only now: watching takes longer than the passes.
        recorder, state = Recorder(dry.model), ModelState(dry.model, by_value=True)
        with recorder.watching():
            _, detector = detected(recorder, lambda: list(twice()))
    if detector.draws:
        raise SiteError(
            f"random numbers are drawn even in eval mode: {describe_draws(detector.draws)}. The "
            "model then has no deterministic member: gate that dropout on self.training"
        )
    kept = [f"{n or '(root)'}.{a}" for n, names in state.changed().items() for a in sorted(names)]
    raise SiteError(
        "the model gives another output when it is called again with the same input in eval mode: "
        f"it keeps state between calls ({', '.join(kept) or 'in objects that it refers to'}). Pass "
        "reset=, a function that is called with the model before each forward pass and makes it "
        "forget that state, such as reset=lambda model: model.reset()"
    )


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """All modules in eval mode, without the fast path; their modes are restored on exit."""
    modules = list(model.modules())
    modes = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        with without_fast_path():
            yield
    finally:
        for module, mode in zip(modules, modes):
            module.training = mode
