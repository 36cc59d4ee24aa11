"""A choice: the chosen member, what it was chosen on, and how sure that is."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Literal

from torch import nn

from afterdrop.errors import AfterdropError, DataError, FileError
from afterdrop.evaluation.request import Request
from afterdrop.family.estimates import Estimate
from afterdrop.family.member import DET, Grid, Member
from afterdrop.files import read_json, write_json
from afterdrop.masks.model_call import LogitsPlace
from afterdrop.masks.model_guard import Reset
from afterdrop.masks.uniforms import Plan
from afterdrop.models import LanguageModel
from afterdrop.models.fingerprint import fingerprint
from afterdrop.run_layout import RunLayout
from afterdrop.selection.predictor import Predictor
from afterdrop.selection.stream_predictor import StreamPredictor
from afterdrop.typed_records import read_record

Prefer = Literal["best", "cheapest"]
_KIND, _VERSION = "afterdrop-choice", 1


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A member in the ranking.

    Attributes:
        member: With its temperature.
        xe: Cross entropy at the predictor's number of samples.
        difference: Paired difference to the best candidate, with its errors.
        tuned: Whether its temperature was fitted.
        at_edge: Whether the fitted temperature lies at the edge of its bracket.
    """

    member: Member
    xe: float
    difference: Estimate
    tuned: bool
    at_edge: bool


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

    def __post_init__(self) -> None:
        Plan(self.num_samples)  # refuses what no predictor can have

    def predictor(
        self,
        model: nn.Module,
        *,
        num_samples: int | None = None,
        logits: LogitsPlace | None = None,
        per_example: bool = False,
        memory: int | None = None,
        any_weights: bool = False,
        reset: Reset | None = None,
    ) -> Predictor | StreamPredictor:
        """A predictor of the chosen member, as it was evaluated.

        Args:
            model: The model that was evaluated.
            num_samples: Mask samples; by default those that the choice was made for.
            logits: The function that finds the logits in the model's output, if one was given to
                `evaluate`: it is not stored with the choice.
            per_example: Whether each input has masks of its own (see `Predictor`).
            memory: Bytes for accumulators and activations.
            any_weights: Whether to accept weights that are not those that were evaluated.
            reset: As for `evaluate`, for a model that keeps state between calls.

        Returns:
            A `StreamPredictor` for a text, a `Predictor` otherwise.

        Raises:
            DataError: If the weights are not those that were evaluated, or `logits` is missing.
        """
        if not any_weights and fingerprint(model) != self.fingerprint:
            raise DataError(
                "the weights of the model are not those that this choice was made for; load those, "
                "or evaluate and select again; any_weights=True predicts all the same"
            )
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
                per_example=per_example,
                memory=memory,
                reset=reset,
            )
        if not isinstance(model, LanguageModel):
            raise DataError(
                f"model is {type(model).__name__}; this choice is of a LanguageModel on a text"
            )
        return StreamPredictor(
            model, self.member, k, plan.seed, request.stream, plan.scheme, memory
        )

    def test_request(self, split: str, num_samples: int | None = None) -> Request:
        """The request that evaluates the chosen member, beside deterministic, on other data.

        Args:
            split: Name of the data.
            num_samples: Mask samples; by default those that the choice was made for.
        """
        member, plan = self.member, self.request.plan
        return dataclasses.replace(
            self.request,
            grid=Grid((member.alpha,), (0.0, member.multiplier), member.temper),
            plan=Plan(num_samples or self.num_samples, plan.seed, plan.scheme),
            split=split,
            # Those of the choice: the data's own bracket need not hold the chosen temperatures.
            temperatures=self.temperatures,
            limit=None,
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
        if self.member == DET:
            return "Nothing gained: deterministic evaluation at T = 1 is chosen."
        if math.isinf(self.gain.value):
            return (
                "Deterministic evaluation at T = 1 calls a target impossible; the choice does not."
            )
        text = f"Gained {_shown(self.gain)} over deterministic evaluation at T = 1"
        if self.crossfit is not None:
            text += f" (this ± ignores the selection; {self.crossfit.value:.4f} ± "
            text += f"{self.crossfit.error:.4f} cross-fitted"
            text += ")" if self.prefer == "best" else ", taking the best)"
        elif not math.isnan(self.gain.error):
            text += " (this ± ignores the selection)"
        if self.gain.value > 0:
            text += f"; temperature alone gives {100 * self.temperature_share:.0f} % of it"
        return text + "."

    def __str__(self) -> str:
        chosen = next((c for c in self.ranking if c.member == self.member), None)
        lines = [
            self.headline(),
            f"Chosen ({self.prefer}, for {self.num_samples} samples): {self.member}",
            "",
            f"{'member':<52}{'XE':>9}{'to best':>10}{'± ':>9}",
        ]
        shown = list(self.ranking[:8])
        shown += [c for c in self.ranking[8:] if c.member.deterministic or c is chosen]
        for candidate in shown:
            mark = "*" if candidate is chosen else " "
            edge = "  T at the edge of its bracket" if candidate.at_edge else ""
            lines.append(
                f"{mark} {candidate.member!s:<50}{candidate.xe:>9.4f}"
                f"{candidate.difference.value:>10.4f}{_number(candidate.difference.error)}{edge}"
            )
        if any(candidate.at_edge for candidate in shown):
            lines += [
                "",
                "The best T may lie beyond an edge: evaluate with temperatures=(low, high).",
            ]
        if self.recurrence:
            lines += ["", "How often these examples, resampled, have as their best:"]
            for member, tuned, share in self.recurrence[:4]:
                name = str(member).rsplit(", T =", 1)[0]
                lines.append(f"  {100 * share:4.0f} %  {name}, T {'fitted' if tuned else '= 1'}")
        if self.agreement is not None:
            lines.append(
                "Two disjoint halves of the examples have the same best in "
                f"{100 * self.agreement:.0f} % of divisions."
            )
        lines += self._notes()
        if self.left_off:
            lines += [
                "",
                "Random behaviour of training that no member has: "
                + "; ".join(self.left_off)
                + ".",
            ]
        return "\n".join(lines)

    def _notes(self) -> list[str]:
        """What to know of a predictor with another number of samples than were evaluated."""
        k, evaluated = self.num_samples, self.request.plan.num_samples
        if self.member.deterministic:
            return []
        if self.optimistic:
            return [
                "",
                f"{k} samples are fewer than were evaluated and may cost more than this says; to "
                f"know, evaluate with num_samples={k}.",
            ]
        if k > evaluated:
            return [
                "",
                f"{k} samples are more than the {evaluated} that were evaluated: what they gain is "
                f"extrapolated as 1/K; to know, evaluate with num_samples={k}.",
            ]
        return []


def _shown(gain: Estimate) -> str:
    """A gain and its error, if the data show one."""
    if math.isnan(gain.error):
        return f"{gain.value:.4f} nats, of unknown error,"
    return f"{gain.value:.4f} ± {gain.error:.4f} nats"


def _number(error: float) -> str:
    return f"{'unknown':>9}" if math.isnan(error) else f"{error:>9.4f}"


def _file(path: str | Path) -> Path:
    path = Path(path)
    return RunLayout(path).choice if path.is_dir() else path
