"""The check that a model without its dropout is the model in eval mode."""

from collections.abc import Collection, Iterator

from torch import Tensor

from afterdrop.errors import SiteError
from afterdrop.masks.detector import Detector, describe_draws
from afterdrop.masks.dry_run import DryRun
from afterdrop.masks.eval_mode import eval_mode_without_fast_path
from afterdrop.masks.mask_source import Place
from afterdrop.masks.model_output import close, output_tensor
from afterdrop.masks.recorder import Recorder


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
        if close(output, expected):
            continue
        if output.shape != expected.shape:
            raise SiteError(
                f"with every dropout rate at 0 the logits have shape {tuple(output.shape)}, in "
                f"model.eval() {tuple(expected.shape)}: a module called DropPath or "
                "StochasticDepth does more than drop, or something else changes in training; "
                "rename it, or keep its module in eval mode (noise=)"
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
    """The logits of model.eval(), which must not be random."""
    recorder = Recorder(dry.model)
    detector = Detector(recorder)
    inputs, kwargs = dry.take()
    with eval_mode_without_fast_path(dry.model), recorder.watching(), detector:
        output = output_tensor(dry.model(*inputs, **kwargs))
    if detector.draws:
        raise SiteError(
            f"random numbers are drawn even in eval mode: {describe_draws(detector.draws)}. The "
            "model then has no deterministic member: gate that dropout on self.training"
        )
    return output
