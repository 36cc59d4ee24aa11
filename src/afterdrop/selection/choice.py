"""A choice: the chosen member, what it was chosen on, and how sure that is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from afterdrop.errors import AfterdropError, DataError, FileError
from afterdrop.evaluation.ensemble_models import Model, Views, combined_fingerprint, list_models
from afterdrop.evaluation.likelihoods.parametric import ParametricLikelihood
from afterdrop.evaluation.likelihoods.predictive import Average, check_average
from afterdrop.evaluation.request import Request
from afterdrop.family.estimates import Estimate
from afterdrop.family.member import Grid, Member
from afterdrop.family.temperature import Nodes
from afterdrop.files import read_json, write_json
from afterdrop.masks.model_call import LogitsPlace
from afterdrop.masks.model_guard import Reset
from afterdrop.masks.uniforms import Plan
from afterdrop.models import LanguageModel
from afterdrop.models.fingerprint import fingerprint
from afterdrop.run_layout import RunLayout
from afterdrop.selection.candidate import Candidate, OtherData
from afterdrop.selection.choice_text import choice_text, headline
from afterdrop.selection.combined_samples import combine_samples
from afterdrop.selection.ensemble_gain import EnsembleGain
from afterdrop.selection.ensemble_predictor import EnsemblePredictor
from afterdrop.selection.export import Format, export_predictor
from afterdrop.selection.predictor import Predictor
from afterdrop.selection.stream_predictor import StreamPredictor
from afterdrop.typed_records import read_record

Prefer = Literal["best", "cheapest"]
_KIND, _VERSION = "afterdrop-choice", 2
_OTHER_WEIGHTS = (
    "the weights of the model are not those that this choice was made for; load those, "
    "or evaluate and select again; any_weights=True predicts all the same"
)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The chosen member, everything a predictor needs, and how sure the choice is.

    Prints as a table.

    Attributes:
        member: The chosen member.
        request: The evaluation that it was chosen on.
        fingerprint: Of the weights that were evaluated.
        temperatures: Lowest and highest temperature of that evaluation.
        deterministic: The deterministic member at its own best temperature.
        ranking: All candidates, best first.
        gain: Paired gain over the deterministic model at T = 1, on the data that chose.
        temperature_share: Share of that gain which the deterministic model gets from temperature.
        crossfit: Gain of taking the best of some folds, measured on the others; None without folds.
            Its error includes that the choice differs between data sets; that of `gain` does not.
        recurrence: Share of bootstrap resamples whose best is (alpha, multiplier, tuned or not).
            Not the probability that other data choose it, which is lower.
        num_samples: Samples of the predictor.
        prefer: "best" or "cheapest".
        optimistic: Whether fewer samples cost more than is said here, because those that were
            evaluated are evenly spread (Latin hypercube, antithetic) and fewer are less so.
        agreement: How often two disjoint halves of the examples, chosen on separately, have the
            same best: what independent data of half the size agree in. None without resamples.
        left_off: Modules whose random behaviour in training is not dropout and stayed off.
        by: What was minimised: "xe", another criterion, or the name of a function.
        unit: Of the gain, for what is printed.
        also: What the choice does on other data.
        ensemble: What an ensemble gains; None for masks of one model. Its deterministic member is
            the best of its models alone.
        pilot: The best candidate of each multiplier that only a pilot on part of the data
            evaluated, compared with the best of the pilot; None without a pilot.
    """

    member: Member
    request: Request
    fingerprint: str
    temperatures: tuple[float, float]
    deterministic: Member
    ranking: tuple[Candidate, ...]
    gain: Estimate
    temperature_share: float
    crossfit: Estimate | None
    recurrence: tuple[tuple[Member, bool, float], ...]
    num_samples: int
    prefer: Prefer
    optimistic: bool = False
    left_off: tuple[str, ...] = ()
    agreement: float | None = None
    by: str = "xe"
    unit: str = "nats"
    also: tuple[OtherData, ...] = ()
    ensemble: EnsembleGain | None = None
    pilot: tuple[Candidate, ...] | None = None

    def __post_init__(self) -> None:
        Nodes(*self.temperatures)  # refuses a range that cannot be used
        if self.ensemble is None:
            Plan(self.num_samples)  # refuses what no predictor can have

    def predictor(
        self,
        model: nn.Module | Sequence[Model],
        *,
        num_samples: int | None = None,
        logits: LogitsPlace | None = None,
        likelihood: ParametricLikelihood | None = None,
        average: Average = "power",
        per_example: bool = False,
        blocks: int = 2,
        memory: int | None = None,
        any_weights: bool = False,
        reset: Reset | None = None,
        augment: Views | None = None,
        tolerance: float | None = None,
    ) -> Predictor | StreamPredictor | EnsemblePredictor:
        """A predictor of the chosen member, as it was evaluated.

        Args:
            model: The model that was evaluated; of an ensemble, the models in the same order, and
                of adapters the model with its adapters.
            num_samples: Mask samples; by default those that the choice was made for.
            logits: The function that finds the logits in the model's output, if one was given to
                `evaluate`: it is not stored with the choice.
            likelihood: The likelihood, if one of your own was given to `evaluate`: it is not stored
                with the choice, either.
            average: "power" or, of numbers, "quantile" (see `Predictor`).
            per_example: Whether each input has masks of its own (see `Predictor`).
            blocks: Independent blocks of samples (see `Predictor`).
            memory: Bytes for accumulators and activations.
            any_weights: Whether to accept weights that are not those that were evaluated.
            reset: As for `evaluate`, for a model that keeps state between calls.
            augment: As for `evaluate`: functions are not stored with the choice.
            tolerance: The standard error at which an input gets no more samples (see `Predictor`);
                not for texts.

        Returns:
            A `StreamPredictor` for a text, an `EnsemblePredictor` for several models or views, a
            `Predictor` otherwise.

        Raises:
            DataError: If the weights are not those that were evaluated, or `logits` or `augment` is
                missing.
        """
        if self.request.dynamic is not None:
            raise DataError(
                "this choice was made with dynamic evaluation, whose weights follow a text; a "
                "predictor has fixed weights. Choose on scores without dynamic="
            )
        check_average(average, self.request.likelihood)
        if self.ensemble is not None:
            _refuse_options(
                num_samples=num_samples is not None,
                per_example=per_example,
                blocks=blocks != 2,
                tolerance=tolerance is not None,
            )
            return self._ensemble_predictor(
                model,
                any_weights,
                views=augment,
                logits=logits,
                likelihood=likelihood,
                average=average,
                memory=memory,
                reset=reset,
            )
        if not isinstance(model, nn.Module):
            raise DataError(f"model is {type(model).__name__}; this choice is of one model")
        if not any_weights and fingerprint(model) != self.fingerprint:
            raise DataError(_OTHER_WEIGHTS)
        request, plan = self.request, self.request.plan
        k = num_samples or self.num_samples
        if request.stream is None:
            return Predictor(
                model,
                self.member,
                k,
                plan.seed,
                masks=plan.scheme,
                rates=request.rates,
                noise=request.noise,
                batch_dim=request.batch_dim,
                # The evaluation saw from the targets that it is the last, where nothing was said.
                class_dim=-1 if request.class_dim is None else request.class_dim,
                logits=request.logits if logits is None else logits,
                likelihood=likelihood or request.likelihood,
                noise_variance=request.noise_variance,
                average=average,
                per_example=per_example,
                blocks=blocks,
                memory=memory,
                reset=reset,
                tolerance=tolerance,
            )
        if not isinstance(model, LanguageModel):
            raise DataError(
                f"model is {type(model).__name__}; this choice is of a LanguageModel on a text"
            )
        return StreamPredictor(
            model, self.member, k, plan.seed, request.stream, plan.scheme, memory
        )

    def export(
        self,
        model: nn.Module,
        example_inputs: Any,
        path: str | Path,
        format: Format = "torch",
        *,
        num_samples: int | None = None,
        logits: LogitsPlace | None = None,
        any_weights: bool = False,
    ) -> None:
        """Writes the predictor as a file that runs without afterdrop, for any batch size.

        The file takes the tensors among the inputs, in their order, and returns log-probabilities
        in the shape of the logits. The K masks are constants in it; a deterministic member is the
        model and one division. All sizes other than that of the batch are those of the example.

        Args:
            model: The model that was evaluated.
            example_inputs: At least two examples: a tensor, a tuple of positional or a mapping of
                keyword inputs of the model.
            path: The file, which ends in .pt2 ("torch") or .onnx ("onnx").
            format: "torch" for `torch.export.load`, or "onnx" for onnxruntime and others.
            num_samples: Mask samples; by default those that the choice was made for.
            logits: As for `predictor`.
            any_weights: Whether to accept weights that are not those that were evaluated.

        Raises:
            DataError, SiteError: If the predictor cannot be exported, with the reason.
            ExtraError: If format="onnx" lacks its packages.

        Example:
            >>> import tempfile, torch
            >>> from afterdrop import evaluate, select
            >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
            >>> x, y = torch.randn(40, 4), torch.randint(3, (40,))
            >>> choice = select(evaluate(net, [(x, y)], num_samples=4))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     choice.export(net, x[:2], f"{folder}/net.pt2")
            ...     exported = torch.export.load(f"{folder}/net.pt2").module()
            >>> torch.allclose(exported(x), choice.predictor(net)(x), atol=1e-5)
            True
        """
        predictor = self.predictor(
            model, num_samples=num_samples, logits=logits, any_weights=any_weights
        )
        export_predictor(predictor, example_inputs, path, format, logits)

    def _ensemble_predictor(
        self, model: nn.Module | Sequence[Model], any_weights: bool, **options: Any
    ) -> EnsemblePredictor:
        assert self.ensemble is not None
        members = self.ensemble.ensemble
        adapters = members.models if hasattr(model, "set_adapter") else ()
        models = list(list_models(model, adapters).values())
        loaded = [m for m in models if isinstance(m, nn.Module)]
        # Models that have yet to be loaded are not compared: that would load all of them.
        if self.fingerprint and len(loaded) == len(models) and not any_weights:
            found = combined_fingerprint(map(fingerprint, loaded))
            if found != self.fingerprint:
                raise DataError(_OTHER_WEIGHTS)
        # The evaluation saw from the targets that it is the last, where nothing was said.
        class_dim = -1 if self.request.class_dim is None else self.request.class_dim
        request = dataclasses.replace(self.request, class_dim=class_dim)
        return EnsemblePredictor(models, self.member, members, request, **options)

    def combine(self, samples: Any) -> Any:
        """The chosen mean of samples of an ensemble that were computed elsewhere.

        Args:
            samples: [K, ..., V] log-probabilities or logits, of the samples that were evaluated, in
                their order; of another likelihood as for `evaluate_samples`. A tensor or an array.

        Returns:
            [..., V] log-probabilities, or what a predictor of the likelihood returns.
        """
        if self.ensemble is None:
            raise DataError("combine is for the choice of an ensemble; use predictor(model)")
        return combine_samples(samples, self.member, self.ensemble.ensemble, self.request)

    def test_request(self, split: str, num_samples: int | None = None) -> Request:
        """The request that evaluates the chosen member, beside deterministic, on other data.

        Args:
            split: Name of the data.
            num_samples: Mask samples; by default those that the choice was made for.
        """
        member, plan = self.member, self.request.plan
        if self.ensemble is None:
            plan = Plan(num_samples or self.num_samples, plan.seed, plan.scheme)
        return dataclasses.replace(
            self.request,
            grid=Grid((member.alpha,), (0.0, member.multiplier), member.temper),
            plan=plan,
            split=split,
            # Those of the choice: the data's own bracket need not hold the chosen temperatures.
            temperatures=self.temperatures,
            limit=None,
            adaptive=None,
        )

    def save(self, path: str | Path) -> None:
        """Writes the choice as JSON, atomically.

        Args:
            path: The file; in a folder, `choice.json`.
        """
        write_json(_file(path), _KIND, _VERSION, dataclasses.asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> Choice:
        """Reads what `save` wrote.

        Args:
            path: The file, or its folder.

        Raises:
            FileError: If the file is missing, damaged, foreign or of another version.
        """
        record = read_json(_file(path), _KIND, _VERSION)
        try:
            return read_record(cls, record)
        except (AfterdropError, ValueError) as error:
            raise FileError(
                f"{_file(path)} is damaged ({error}); choose again with select"
            ) from error

    def headline(self) -> str:
        """What was gained over deterministic evaluation, and what temperature alone gives."""
        return headline(self)

    def label(self, member: Member) -> str:
        """A member in words: of masks, or of an ensemble."""
        return str(member) if self.ensemble is None else self.ensemble.ensemble.label(member)

    def __str__(self) -> str:
        return choice_text(self)


def _refuse_options(**given: bool) -> None:
    """Refuses options of masks, which the predictor of an ensemble does not have."""
    for name, found in given.items():
        if found:
            raise DataError(
                f"{name}= is for masks of one model, and this choice is of an ensemble, which "
                f"predicts with the samples that were evaluated; leave out {name}="
            )


def _file(path: str | Path) -> Path:
    path = Path(path)
    return RunLayout(path).choice if path.is_dir() else path
