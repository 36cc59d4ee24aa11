"""The mean of an ensemble as a module: inputs in, log-probabilities or a distribution out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from afterdrop.errors import DataError, MemberError
from afterdrop.evaluation.chunks import Memory, plan_chunks
from afterdrop.evaluation.engines.model_passes import ModelPasses, run_samples
from afterdrop.evaluation.ensemble import Ensemble
from afterdrop.evaluation.ensemble_models import (
    Model,
    Views,
    adapters_restored,
    check_views,
    load_model,
    mask_plan,
)
from afterdrop.evaluation.likelihoods.build_likelihood import build_likelihood
from afterdrop.evaluation.likelihoods.density_reading import DensityReading
from afterdrop.evaluation.likelihoods.parametric import ParametricLikelihood
from afterdrop.evaluation.likelihoods.predictive import Average
from afterdrop.evaluation.request import Request
from afterdrop.family.member import Member
from afterdrop.masks.model_call import LogitsPlace, batch_size, check_inputs
from afterdrop.masks.model_guard import Reset, guarded
from afterdrop.masks.rows import Rows
from afterdrop.masks.sites import find_sites
from afterdrop.selection.ensemble_uncertainty import JackknifeUncertainty
from afterdrop.selection.member_mean import Collector, KeptParameters, KeptSamples, MemberMean
from afterdrop.selection.uncertainty import Uncertainty, certain


class EnsemblePredictor(nn.Module):
    """Predicts with a power mean over several models, views or both, at a temperature.

    A function that loads a model is called for each prediction, so that one model at a time is in
    memory. With mask samples, all inputs share the masks of a sample, as in a `Predictor`.

    `Choice.predictor` makes one from the choice of an ensemble, as it was evaluated.

    Args:
        models: Modules, and functions that load one, in the order of the evaluation.
        member: Power and temperature of the mean; the deterministic member is one model alone.
        ensemble: What was evaluated.
        request: The evaluation.
        views: The views of the inputs, by name, if the evaluation had any.
        logits: Where the models' output holds the logits.
        likelihood: The likelihood, if one of your own was evaluated.
        average: Of numbers: "power" or "quantile" (see `Predictor`).
        memory: Bytes for activations.
        reset: For models that keep state between calls.

    Raises:
        DataError: If models or views are not as many as were evaluated.

    Example:
        >>> from afterdrop.family.member import Grid
        >>> from afterdrop.masks.uniforms import Plan
        >>> models = [nn.Linear(4, 3) for _ in range(3)]
        >>> ensemble = Ensemble(("a", "b", "c"), (0.5, 0.4, 0.6), best=1)
        >>> request = Request(Grid((0.0,), (0.0, 1.0)), Plan(3, scheme="given", blocks=3))
        >>> predict = EnsemblePredictor(models, Member(0.0, 1.0), ensemble, request)
        >>> x = torch.randn(5, 4)
        >>> mean = torch.stack([model(x).log_softmax(-1) for model in models]).mean(0)
        >>> torch.allclose(predict(x), mean.log_softmax(-1), atol=1e-6)
        True
    """

    def __init__(
        self,
        models: Sequence[Model],
        member: Member,
        ensemble: Ensemble,
        request: Request,
        *,
        views: Views | None = None,
        logits: LogitsPlace | None = None,
        likelihood: ParametricLikelihood | None = None,
        average: Average = "power",
        memory: int | None = None,
        reset: Reset | None = None,
    ) -> None:
        super().__init__()
        if views:
            check_views(views)
        if tuple(views or ()) != ensemble.views:
            raise DataError(
                f"augment has the views {tuple(views or ())}; the evaluation had {ensemble.views}, "
                "in this order: give the same functions"
            )
        if len(models) != len(ensemble.models):
            raise DataError(
                f"{len(models)} models are given, and {len(ensemble.models)} were evaluated; give "
                "those, in the same order"
            )
        self.models = nn.ModuleList(m for m in models if isinstance(m, nn.Module))
        self._given = tuple(models)
        self._views: Sequence[Callable[[Any], Any] | None] = tuple((views or {}).values()) or (
            None,
        )
        self.member, self.ensemble, self.request = member, ensemble, request
        self.memory, self.reset, self.average = memory, reset, average
        self._likelihood = build_likelihood(request, logits, likelihood)

    def extra_repr(self) -> str:
        """The member, for the printed form."""
        return self.ensemble.label(self.member)

    @torch.no_grad()
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Log-probabilities of the inputs (as the models take them), in the shape of the logits.

        Of labels [..., 2], of 0 and 1. Of numbers a distribution (see `Predictor`).
        """
        if isinstance(self._likelihood, DensityReading):
            kept = self._collected(KeptParameters(self.member), (inputs, kwargs))
            return self._likelihood.prediction(kept, self.member, self.average)
        found = self._collected(MemberMean(self.member), (inputs, kwargs))
        return self._likelihood.prediction(found, self.member)

    @torch.no_grad()
    def uncertainty(self, *inputs: Any, **kwargs: Any) -> Uncertainty:
        """How uncertain the predictions for the inputs are, with errors from a jackknife.

        Standard errors say by how much other models of the same kind would change the result. The
        log-probabilities of all samples are kept in memory.

        Args:
            *inputs: Positional inputs of the models.
            **kwargs: Keyword inputs of the models.

        Returns:
            As of a `Predictor`.
        """
        self._require_classes("uncertainty")
        found = self._collected(JackknifeUncertainty(self.member), (inputs, kwargs))
        if self.member.deterministic:
            found = certain(found.log_probs, self.member)
        return found.classes_at(self._class_dim)

    @torch.no_grad()
    def samples(self, *inputs: Any, **kwargs: Any) -> Tensor:
        """Log-probabilities of every sample, [K, B, ..., V], in the order of the evaluation.

        Args:
            *inputs: Positional inputs of the models.
            **kwargs: Keyword inputs of the models.

        Returns:
            As of a `Predictor`: what the member averages; of one model alone, its prediction.
        """
        self._require_classes("samples")
        if self.member.deterministic:
            return self(*inputs, **kwargs)[None]
        found = self._collected(KeptSamples(self.member), (inputs, kwargs))
        at = self._class_dim + (self._class_dim >= 0)
        return found.movedim(-1, at)

    def _require_classes(self, what: str) -> None:
        if isinstance(self._likelihood, DensityReading):
            raise MemberError(
                f"{what} is known for classes, not for likelihood={self.request.likelihood!r}; "
                "call the predictor for a distribution, whose variance is its uncertainty"
            )

    @property
    def _class_dim(self) -> int:
        """Where predictions hold their classes; of labels, 0 and 1 are always last."""
        if self.request.class_dim is None or self.request.likelihood != "categorical":
            return -1
        return self.request.class_dim

    def _collected(self, collector: Collector, arguments: Any) -> Any:
        """What a collector makes of the samples of all models, with the classes last."""
        with adapters_restored(self._given):
            for number, model in enumerate(self._given):
                self._add_model(collector, model, number, arguments)
        return collector.result()

    def _add_model(self, collector: Collector, model: Model, number: int, arguments: Any) -> None:
        """Adds the samples of one model, of all its views."""
        views = dict(enumerate(self._views, number * len(self._views)))
        if self.member.deterministic:  # one source alone
            best = self.ensemble.best
            views = {source: view for source, view in views.items() if source == best}
        if not views:
            return
        loaded = load_model(model)
        check_inputs([*islice(loaded.parameters(), 1), *arguments])
        with guarded(loaded, self.reset):
            for source, view in views.items():
                self._add(collector, loaded, source, _viewed(view, *arguments))
                if len(self._given) == 1:  # its views are the groups of the jackknife
                    collector.end_block()
        if len(self._given) > 1:
            collector.end_block()

    def _add(self, mean: Collector, model: nn.Module, source: int, arguments: Any) -> None:
        """Adds the samples of one source."""
        args, kwargs = arguments
        if self.member.deterministic or self.ensemble.masks is None:
            logits, _ = self._likelihood.read_logits(model(*args, **kwargs))
            mean.add(logits.unsqueeze(0), "the input")
            return
        request, plan = self.request, mask_plan(self.ensemble.masks, source)
        size, multipliers = batch_size(arguments, request.batch_dim), (self.member.multiplier,)
        options: Any = {"rates": request.rates, "noise": request.noise}
        options |= {"batch_dim": request.batch_dim, "logits": self._likelihood.logits}
        sites = find_sites(model, *args, compute_once=False, **options, **kwargs)
        passes = ModelPasses(model, sites, request.batch_dim)
        keys = torch.zeros(size, dtype=torch.int64)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        chunks = plan_chunks(sites, plan, size, 1, 1, Memory.of(device, self.memory))

        def add(samples: range) -> None:
            rows = Rows(plan, multipliers, samples, keys)
            output = passes.run_arguments(arguments, size, rows, range(size))
            logits, dim = self._likelihood.read_logits(output)
            mean.add(logits.unflatten(dim, (len(samples), -1)).movedim(dim, 0), "the input")

        run_samples(passes.control, plan, multipliers, chunks.samples, add, lambda: None)


def _viewed(view: Callable[[Any], Any] | None, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments of a call after a view, which takes inputs as batches have them."""
    if view is None:
        return inputs, kwargs
    if kwargs and inputs:
        raise DataError(
            "views take the inputs as a batch has them: positional or keyword inputs, not both"
        )
    found = view(kwargs or (inputs[0] if len(inputs) == 1 else inputs))
    if kwargs:
        return (), found
    return (found if isinstance(found, tuple) else (found,)), {}
