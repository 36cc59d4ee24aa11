"""A member as a module: inputs in, log-probabilities out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from afterdrop.errors import DataError, MemberError
from afterdrop.evaluation.chunks import Memory, plan_chunks
from afterdrop.evaluation.engines.dispatch import Dispatcher, EngineMaker, operations_for
from afterdrop.evaluation.likelihoods.build_likelihood import build_likelihood, likelihood_name
from afterdrop.evaluation.likelihoods.density_reading import DensityReading
from afterdrop.evaluation.likelihoods.parametric import ParametricLikelihood
from afterdrop.evaluation.likelihoods.predictive import Average, check_average
from afterdrop.evaluation.model_inputs import find_or_explain
from afterdrop.evaluation.request import Request, recorded_place
from afterdrop.family.member import Grid, Member
from afterdrop.masks.model_call import LogitsPlace, batch_size, check_inputs, take_rows
from afterdrop.masks.model_guard import Reset, guarded
from afterdrop.masks.sites import Sites, find_sites
from afterdrop.masks.uniforms import Plan, Scheme
from afterdrop.selection.example_keys import input_hashes, rows_interact
from afterdrop.selection.member_mean import Collector, KeptParameters, KeptSamples, MemberMean
from afterdrop.selection.number_uncertainty import number_uncertainty, sample_parameters
from afterdrop.selection.prediction_engine import PredictionEngine
from afterdrop.selection.uncertainty import UncertaintySums, certain


class Predictor(nn.Module):
    """Predicts with one member of the family.

    A predictor is a fixed function: an example gets the same prediction whatever batch it is in,
    and the same seed gives the same output. By default all inputs share the masks of sample k;
    with `per_example=True` each input has masks of its own, keyed by a hash of it.

    Where the rows of a batch influence each other (nodes of a graph, attention over the batch),
    each row has masks of its own, keyed by its position, as in `evaluate`. A prediction then
    depends on the whole batch.

    `Choice.predictor` makes one from a choice, as it was evaluated.

    Args:
        model: The trained module.
        member: How to predict.
        num_samples: Mask samples, even; the deterministic member takes one pass without any.
        seed: Seed of the masks.
        masks: "lhs", "iid" or "antithetic".
        rates: Attributes that hold rates of masks which the model draws itself (`find_sites`).
        noise: Modules whose random draws are not dropout (`find_sites`).
        batch_dim: Batch dimension of inputs and logits.
        class_dim: Class dimension of the logits; needed where they are not [B, V].
        logits: Where the model's output holds its logits, if several of its tensors may be the
            logits: an index, a key or a function of the output.
        likelihood: The kind of targets, as for `evaluate`.
        noise_variance: Of the squared error: what temperature 1 stands for
            (`Scores.noise_variance`).
        average: Of numbers: "power" for the member's power mean, "quantile" for the distribution
            whose quantiles are the means of the samples' quantiles, whatever alpha is.
        per_example: Whether each input has masks of its own. The mean over many inputs then has the
            small mask error of an evaluation (`Estimate.mc_error`); with shared masks it is larger.
        blocks: Independent blocks of samples, a power of two. Errors of `uncertainty` come from the
            spread between them; 8 or more make these errors themselves precise.
        memory: Bytes for accumulators and activations.
        reset: Called with the model before each forward pass, to forget state that it keeps
            between calls.
        compute_once: Whether modules that finish before the first dropout site run once per call
            instead of once per sample (`find_sites` lists them).

        tolerance: An input gets no more samples, `num_samples` at most, once the standard error of
            its log-probabilities is below this number of nats: the root mean square over classes,
            weighted by their probability; of sequences, at the worst position. Samples come in up
            to 8 independent blocks, so that the masks differ from those without a tolerance. What
            an input gets still depends on it and the seed alone.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        >>> predict = Predictor(net, Member(alpha=1, multiplier=0.5), num_samples=8)
        >>> x = torch.randn(5, 4)
        >>> predict(x).shape, torch.allclose(predict(x)[:2], predict(x[:2]), atol=1e-6)
        (torch.Size([5, 3]), True)
    """

    def __init__(
        self,
        model: nn.Module,
        member: Member,
        num_samples: int = 100,
        seed: int = 0,
        *,
        masks: Scheme = "lhs",
        rates: Sequence[str] = (),
        noise: Sequence[str] = (),
        batch_dim: int = 0,
        class_dim: int | None = None,
        logits: LogitsPlace | None = None,
        likelihood: str | ParametricLikelihood = "categorical",
        noise_variance: float | None = None,
        average: Average = "power",
        per_example: bool = False,
        blocks: int = 2,
        memory: int | None = None,
        reset: Reset | None = None,
        compute_once: bool = True,
        tolerance: float | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(member, Member):
            raise MemberError(
                f"member={member!r:.60} must be a Member, for example select(scores).member"
            )
        self.model, self.member, self.memory, self.reset = model, member, memory, reset
        self.per_example, self.average = per_example, average
        self.compute_once, self.tolerance = compute_once, tolerance
        plan = Plan(num_samples, seed, masks, blocks)
        if tolerance is not None:
            plan = _in_stages(plan, tolerance)
        self.request = Request(
            Grid((member.alpha,), (member.multiplier,), member.temper),
            plan,
            rates=tuple(rates) if not isinstance(rates, str) else (rates,),
            noise=tuple(noise) if not isinstance(noise, str) else (noise,),
            batch_dim=batch_dim,
            class_dim=class_dim,
            logits=recorded_place(logits),
            likelihood=likelihood_name(likelihood),
            noise_variance=noise_variance,
        )
        self._likelihood = build_likelihood(self.request, logits, likelihood)
        check_average(average, self.request.likelihood)
        self._sites: Sites | None = None
        self._found_on = 0  # the number of examples on which sites were found
        self._by_position = False
        self._dispatcher: tuple[torch.device, Dispatcher] | None = None

    def extra_repr(self) -> str:
        """Member, samples and seed, for the printed form."""
        plan = self.request.plan
        return f"{self.member}, K = {plan.num_samples}, seed = {plan.seed}"

    def __getstate__(self) -> dict[str, Any]:
        """What copies and files need: engines are made again."""
        return {**self.__dict__, "_dispatcher": None}

    @torch.no_grad()
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Log-probabilities of the inputs (as the model takes them), in the shape of the logits.

        Of labels [..., 2], of 0 and 1. Of numbers a distribution with `mean`, `variance`,
        `log_prob`, `cdf`, `quantile` and `sample` (`evaluation.likelihoods.predictive`).
        """
        if isinstance(self._likelihood, DensityReading):
            found = self._run((inputs, kwargs), KeptParameters)
            return self._likelihood.prediction(found, self.member, self.average)
        found = self._run((inputs, kwargs), MemberMean)
        return self._likelihood.prediction(found, self.member)

    def uncertainty(self, *inputs: Any, **kwargs: Any) -> Any:
        """How uncertain the predictions for the inputs are, with standard errors from the masks.

        Samples of classes are not kept: memory does not grow with their number.

        Args:
            *inputs: Positional inputs of the model.
            **kwargs: Keyword inputs of the model.

        Returns:
            An `Uncertainty`: log-probabilities, confidence, entropies, disagreement (the mutual
            information of a plain mean) and variance. Of numbers a `NumberUncertainty`: mean,
            variance, expected variance (aleatoric) and variance of the means (epistemic).

        Example:
            >>> net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
            >>> found = Predictor(net, Member(1, 1), num_samples=8).uncertainty(torch.randn(5, 4))
            >>> entropy = found.expected_entropy + found.mutual_information
            >>> torch.allclose(found.predictive_entropy, entropy, atol=1e-5)
            True
        """
        if isinstance(self._likelihood, DensityReading):
            with torch.no_grad():
                found = self._run((inputs, kwargs), KeptParameters)
            spans = () if self.member.deterministic else self.request.plan.spans
            reading = self._likelihood
            return number_uncertainty(reading, found, self.member, self.average, spans)
        with torch.no_grad():
            found = self._run((inputs, kwargs), UncertaintySums)
            if isinstance(found, Tensor):
                found = certain(found, self.member)
        return found.classes_at(self._class_dim)

    def samples(self, *inputs: Any, **kwargs: Any) -> Tensor:
        """Log-probabilities of every mask sample, [K, B, ..., V]; of numbers, their parameters.

        These are what the member averages: tempered if it tempers samples. The parameters of
        "gaussian" and "squared_error" are means and variances [K, B, ..., 2], in float64.
        `stream_samples` gives them chunk by chunk, where all of them together are too large.

        Args:
            *inputs: Positional inputs of the model.
            **kwargs: Keyword inputs of the model.

        Returns:
            The samples in the shape of the logits, with a dimension of samples in front; of the
            deterministic member, the only one.

        Example:
            >>> net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
            >>> Predictor(net, Member(1, 1), num_samples=6).samples(torch.randn(5, 4)).shape
            torch.Size([6, 5, 3])
        """
        return torch.cat(list(self.stream_samples(*inputs, **kwargs)))

    def stream_samples(self, *inputs: Any, **kwargs: Any) -> Iterator[Tensor]:
        """Yields what `samples` returns in chunks of samples [S, B, ..., V], in order."""
        arguments = inputs, kwargs
        reading = self._likelihood if isinstance(self._likelihood, DensityReading) else None
        at = self._class_dim + (self._class_dim >= 0)
        if self.member.deterministic:
            if reading is None:
                yield self(*inputs, **kwargs)[None]
            else:
                with torch.no_grad():
                    found = self._run(arguments, KeptParameters)
                yield sample_parameters(reading, found, self.member)
            return
        plan, start = self.request.plan, 0
        while start < plan.num_samples:  # each step takes the model, and gives it back
            with torch.no_grad():
                found = self._run(
                    arguments, KeptSamples if reading is None else KeptParameters, start
                )
            if reading is not None:
                found = sample_parameters(reading, found, self.member)
            start += len(found)
            yield found.movedim(-1, at) if reading is None else found

    @property
    def depends_on_batch(self) -> bool:
        """Whether predictions depend on the other rows of their batch; known after a call."""
        return self._by_position

    @property
    def _class_dim(self) -> int:
        """Where predictions hold their classes; of labels, 0 and 1 are always last."""
        if self.request.class_dim is None or self.request.likelihood != "categorical":
            return -1
        return self.request.class_dim

    def _run(
        self,
        arguments: Any,
        collector: Callable[[Member], Collector],
        start: int | None = None,
    ) -> Any:
        """What a collector makes of all samples, or of those from `start` on that fit the memory.

        Of the deterministic member, log-probabilities. The classes are last.
        """
        check_inputs([*islice(self.model.parameters(), 1), *arguments])
        with guarded(self.model, self.reset):
            if self.member.deterministic:
                logits, _ = self._logits(arguments)
                if isinstance(self._likelihood, DensityReading):
                    return logits.unsqueeze(-2)  # one sample
                logits = logits.float() / self.member.temperature
                return self._likelihood.predict(logits, "the input")
            return self._sampled(arguments, collector, start)

    def _logits(self, arguments: Any) -> tuple[Tensor, int]:
        """Logits of a pass in the model's present mode, and their batch dimension."""
        inputs, kwargs = arguments
        return self._likelihood.read_logits(self.model(*inputs, **kwargs))

    def _sampled(
        self, arguments: Any, collector: Callable[[Member], Collector], start: int | None
    ) -> Any:
        dim = self.request.batch_dim
        size = batch_size(arguments, dim)
        if size == 0:
            raise DataError("the input has no examples; give at least one")
        engines = self._engines(arguments, size)
        keys = torch.zeros(size, dtype=torch.int64)
        if self._by_position:
            keys = torch.arange(size)
        elif self.per_example:
            keys = input_hashes(arguments, size, dim)
        samples = None if start is None else self._samples_from(start, size, engines.memory)
        return engines.begin((arguments, keys, collector, samples))()

    def _samples_from(self, start: int, size: int, memory: Memory) -> range:
        """The samples of one chunk for `size` examples."""
        assert self._sites is not None
        plan, bytes_per_row = self.request.plan, 4 * self._sites.sampled_row_bytes
        at_once = plan_chunks(self._sites, plan, size, 1, bytes_per_row, memory).samples
        return range(start, min(start + at_once, plan.num_samples))

    def _engines(self, arguments: Any, size: int) -> Dispatcher:
        """The engines for the model's device, once its dropout sites are known."""
        if self._sites is None or self._found_on == 1 < size:  # one row says little of the others
            self._find_sites(arguments, size)
        assert self._sites is not None
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        if self._dispatcher is None or self._dispatcher[0] != device:
            memory = Memory.of(device, self.memory)
            make = partial(
                PredictionEngine,
                self.model,
                self.member,
                self.request,
                self._likelihood,
                self._sites,
                memory,
            )
            candidates = [
                EngineMaker(partial(make, operations, self.tolerance), operations.kernels)
                for operations in operations_for(self.request, self.model, device)
                if operations.sums is None  # those keep the targets only, not all classes
            ]
            self._dispatcher = device, Dispatcher(candidates, memory, "the prediction")
        return self._dispatcher[1]

    def _find_sites(self, arguments: Any, size: int) -> None:
        request, (inputs, kwargs) = self.request, arguments
        self._logits(take_rows(arguments, request.batch_dim, size, 0, size, 1))  # refuses early
        options: Any = {"rates": request.rates, "noise": request.noise}
        options |= {"batch_dim": request.batch_dim, "logits": self._likelihood.logits}
        options["compute_once"] = self.compute_once
        self._sites = find_or_explain(
            lambda: find_sites(self.model, *inputs, **options, **kwargs), lambda: None
        )
        self._by_position = not self._sites.batched and rows_interact(
            self._logits, arguments, size, request.batch_dim
        )
        self._found_on, self._dispatcher = size, None


def _in_stages(plan: Plan, tolerance: float) -> Plan:
    """The plan with as many independent blocks as it allows, after each of which inputs may stop.

    Example:
        >>> _in_stages(Plan(100), 0.01).spans[0]
        range(0, 25)
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not tolerance > 0:
        raise DataError(
            f"tolerance={tolerance!r} must be a positive number of nats, such as 0.01, or None to "
            "run all samples"
        )
    step = 2 if plan.scheme == "antithetic" else 1
    fitting = [n for n in (8, 4, 2) if plan.num_samples % (n * step) == 0]
    return dataclasses.replace(plan, blocks=max([plan.blocks, *fitting]))
