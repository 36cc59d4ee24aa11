"""What an evaluation is asked for, and what it found out before it began.

    Request    everything that a number depends on, as the caller wants it
    Protocol   the request, and what the model and the first batch made of it

The API, the command line and the tuner build a request; Scores keep the protocol; a choice keeps
the request, and a predictor is made from it. Nothing has to be said twice.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
from collections.abc import Callable
from typing import Any, Literal

from afterdrop.errors import DataError, MemberError, ScoresError
from afterdrop.evaluation.dynamic_evaluation import DynamicEvaluation
from afterdrop.evaluation.ensemble import Ensemble
from afterdrop.family.member import Grid
from afterdrop.family.temperature import Nodes
from afterdrop.masks.model_call import COUNTED_FROM_0, LogitsPlace
from afterdrop.masks.uniforms import Plan, Scheme
from afterdrop.typed_records import parse_json, read_record

Carry = Literal["deterministic", "sampled"]
LIKELIHOODS = ("categorical", "binary", "multilabel", "gaussian", "squared_error")
CLASS_LIKELIHOODS = LIKELIHOODS[:3]  # those whose targets are classes; others have densities
Lifetime = Literal["window", "stream"]
LOGITS_FUNCTION = "<function>"  # what a request records of a function that finds logits or targets
DENSITY_NODES = 21  # results of numbers are kept at these temperatures
SAMPLES = 100  # of a predictor, and of an evaluation without a pilot, if nothing else is said
_LONGEST_WINDOW = 2**20  # tokens, which are in memory with their logits
SAMPLE_NODES = 13  # XE of tempered samples is kept at these temperatures, from center/2 to center*2


def density_temperatures(nodes: Nodes, *, noise: bool) -> tuple[float, ...]:
    """The temperatures at which results of numbers are kept, highest first.

    Args:
        nodes: The bracket.
        noise: Whether the temperature is a noise variance, for which 1 is nothing special.
    """
    inverse = dataclasses.replace(nodes, count=DENSITY_NODES, reach=1.0).inverse()
    return (*(1 / inverse).tolist(), *(() if noise else (1.0,)))


def recorded_place(logits: LogitsPlace | None) -> int | str | None:
    """What a request keeps of where the logits are: of a function only that there is one."""
    return LOGITS_FUNCTION if callable(logits) else logits


def recorded_targets(targets: str | Callable[[Any], Any] | None) -> str | None:
    """The same of where a batch holds its targets."""
    return LOGITS_FUNCTION if callable(targets) else targets


@dataclasses.dataclass(frozen=True)
class StreamSettings:
    """How a text becomes examples: windows that are read in order.

    Attributes:
        window: Tokens per window.
        stripes: Contiguous shares of the text, each starting from a zero state; 1 reads the text
            as one exact stream.
        carry: What a window starts from: the state of a pass without dropout ("deterministic"), or
            the state of each sample's own pass ("sampled").
        lifetime: How long a mask that is shared over time lives: "window" or "stream".
    """

    window: int = 35
    stripes: int = 1
    carry: Carry = "deterministic"
    lifetime: Lifetime = "window"

    def __post_init__(self) -> None:
        if self.carry not in ("deterministic", "sampled"):
            raise DataError(f"carry={self.carry!r} must be 'deterministic' or 'sampled'")
        if self.lifetime not in ("window", "stream"):
            raise DataError(f"lifetime={self.lifetime!r} must be 'window' or 'stream'")
        for name in ("window", "stripes"):
            if getattr(self, name) < 1:
                raise DataError(f"{name}={getattr(self, name)} must be at least 1")
        if self.window > _LONGEST_WINDOW:
            raise DataError(f"window={self.window} must be at most {_LONGEST_WINDOW:,} tokens")


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """How a pilot decides about multipliers and samples (`pilot_decision`).

    Attributes:
        samples: Samples of the predictor that the choice is made for; none needs more.
        mask_share: The mask error of paired differences between the leading members that is
            tolerated, as a share of the data error of their XE.
        beaten_by: Standard errors by which a multiplier has to be worse to be dropped.
        pilot_samples: Samples of the pilot, and the fewest of the main evaluation. The pilot has
            fewer where it cannot be confined to its share of the data.
        pilot_share: Share of the batches that the pilot evaluates.
    """

    samples: int = SAMPLES
    mask_share: float = 0.125
    beaten_by: float = 2.0
    pilot_samples: int = 16
    pilot_share: float = 0.125

    def __post_init__(self) -> None:
        for name in ("mask_share", "beaten_by", "pilot_share"):
            if not 0 < getattr(self, name) < math.inf:
                raise DataError(f"{name}={getattr(self, name)} must be a positive number")
        if self.pilot_share > 1:
            raise DataError(f"pilot_share={self.pilot_share} must be at most 1, all of the data")


def default_samples(split: str, carry: Carry = "deterministic") -> int | Literal["auto"]:
    """What `num_samples` is where a caller does not say: "auto" where a member is chosen.

    On other data than "valid" the chosen member is measured or all are compared, so that none may
    be missing. Ranks share a text with a sampled carry by multipliers, which a pilot would drop.

    Example:
        >>> default_samples("valid"), default_samples("test")
        ('auto', 100)
    """
    return "auto" if split == "valid" and carry == "deterministic" else SAMPLES


def requested_samples(
    num_samples: int | Literal["auto"],
    seed: int,
    scheme: Scheme,
    blocks: int,
    mask_share: float = Adaptive.mask_share,
    beaten_by: float = Adaptive.beaten_by,
) -> tuple[Plan, Adaptive | None]:
    """The samples that a caller asks for, and the rules of a pilot if it is to find their number.

    Example:
        >>> requested_samples("auto", 0, "lhs", 2)[0].num_samples
        100
    """
    if isinstance(num_samples, str) and num_samples != "auto":
        raise DataError(f"num_samples={num_samples!r} must be an even number, or 'auto'")
    if num_samples != "auto":
        return Plan(num_samples, seed, scheme, blocks), None
    step = blocks * (2 if scheme == "antithetic" else 1)
    samples = step * max(1, round(Adaptive.samples / step))
    return Plan(samples, seed, scheme, blocks), Adaptive(samples, mask_share, beaten_by)


@dataclasses.dataclass(frozen=True)
class Request:
    """Everything that the numbers of an evaluation depend on, apart from model and data.

    Attributes:
        grid: The members.
        plan: Number of samples, seed, mask scheme and independent blocks.
        split: Name of the data: "train", "valid", "test" or any other.
        rates: Attributes that hold the rates of masks which the model draws itself.
        noise: Modules whose random draws are not dropout.
        batch_dim: Batch dimension of inputs, targets and logits.
        class_dim: Class dimension of the logits; None for the last, if that is beyond doubt.
        ignore_index: Targets with this value do not count.
        temperatures: Lowest and highest temperature; None to choose them from the first batch.
        stream: How a text is read; None for other data.
        limit: Number of leading tokens or images of the split to evaluate; None for all.
        logits: Index or key of the logits in the model's output, or `LOGITS_FUNCTION`; None for the
            only tensor that may be the logits.
        targets: Key of the targets in a batch, or `LOGITS_FUNCTION`; None where the kind of batch
            says where they are.
        targets_per_example: How many targets of an example count, drawn by the seed; None for all.
        adaptive: How a pilot decides about multipliers and samples; None without a pilot, and
            where nothing is sampled. Scores then have the grid and the samples that it left.
        likelihood: The kind of targets: one of `LIKELIHOODS`, or the name of a user's own.
        noise_variance: Of the squared error: the noise variance that temperature 1 stands for; None
            for the mean squared error of the deterministic model on the data.
        dynamic: How weights learn from the text that was predicted; None if they do not.

    Example:
        >>> request = Request(Grid((0, 1), (0, 1)), Plan(8))
        >>> read_record(Request, json.loads(json.dumps(dataclasses.asdict(request)))) == request
        True
    """

    grid: Grid
    plan: Plan
    split: str = "valid"
    rates: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()
    batch_dim: int = 0
    class_dim: int | None = None
    ignore_index: int = -100
    temperatures: tuple[float, float] | None = None
    stream: StreamSettings | None = None
    limit: int | None = None
    logits: int | str | None = None
    targets: str | None = None
    targets_per_example: int | None = None
    adaptive: Adaptive | None = None
    likelihood: str = "categorical"
    noise_variance: float | None = None
    dynamic: DynamicEvaluation | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.grid, Grid):
            raise MemberError(f"grid={self.grid!r} must be a Grid, as in Grid(alphas=(0, 1))")
        self._check_integers()
        for name in ("rates", "noise"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        if self.batch_dim < 0:
            raise DataError(f"batch_dim={self.batch_dim} {COUNTED_FROM_0}")
        if self.temperatures is not None:
            pair = self.temperatures
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise MemberError(f"temperatures={pair!r} must be a pair (low, high)")
            Nodes(*pair)  # refuses a bracket that cannot be used
            object.__setattr__(self, "temperatures", tuple(pair))
        if self.grid.temper == "component" and self.stream is None:
            raise MemberError(
                "temper='component' is for texts of a language model that mixes softmaxes, as "
                "evaluate_text and StreamPredictor take; use temper='sample' or 'mean'"
            )
        if not self.grid.stochastic:  # there is nothing to decide
            object.__setattr__(self, "adaptive", None)
        if self.limit is not None and self.limit < 1:
            raise DataError(f"limit={self.limit} must be at least 1 target, or None for all")
        if self.targets_per_example is not None and self.targets_per_example < 1:
            raise DataError(
                f"targets_per_example={self.targets_per_example} must be at least 1, or None for "
                "all targets"
            )
        if self.noise_variance is not None and not 0 < self.noise_variance < math.inf:
            raise DataError(f"noise_variance={self.noise_variance} must be positive, or None")
        if self.likelihood == "squared_error" and self.grid.temper != "sample":
            # The noise is that of each sample.
            object.__setattr__(self, "grid", dataclasses.replace(self.grid, temper="sample"))
        if self.plan.num_samples == 1 and len(self.grid.alphas) > 1 and self.grid.stochastic:
            raise DataError(
                f"num_samples=1 with alphas {self.grid.alphas}: one sample has one mean, so all "
                "alphas coincide; use more samples or a grid with a single alpha"
            )
        if self.dynamic is not None:
            self._check_dynamic()

    def _check_integers(self) -> None:
        """Refuses dimensions and numbers that are not integers."""
        optional = ("class_dim", "limit", "targets_per_example")
        for name in ("batch_dim", "ignore_index", *optional):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if isinstance(value, bool) or not isinstance(value, numbers.Integral):
                wanted = "an integer, or None" if name in optional else "an integer"
                raise DataError(f"{name}={value!r} must be {wanted}")
            object.__setattr__(self, name, int(value))

    def _check_dynamic(self) -> None:
        """Refuses dynamic evaluation where weights cannot follow one text."""
        if self.stream is None:
            raise DataError(
                "dynamic evaluation learns from a text that is read in order; leave out dynamic= "
                "for other data"
            )
        if self.grid.stochastic:
            raise DataError(
                f"dynamic evaluation with multipliers {self.grid.multipliers}: every mask sample "
                "would need weights of its own; give grid=Grid((0,), (0,)), the deterministic "
                "member"
            )
        if self.stream.stripes != 1:
            raise DataError(
                f"dynamic evaluation with stripes={self.stream.stripes}: weights follow one text "
                "from its beginning; give stripes=1"
            )


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How `Scores` were made: the request, and what was found before the first batch.

    Attributes:
        request: What was asked for.
        low: Lowest temperature of the bracket.
        high: Highest temperature of the bracket.
        num_classes: V.
        fingerprint: Of the model's parameters and buffers.
        batched: Whether samples ran as rows of a batch.
        shared: Whether examples shared masks.
        sites: Name, operator, rate and calls of each dropout site.
        off: Modules whose other training-time randomness stayed off.
        ensemble: What the samples are if they were given; None for masks of one model.
        device: The kind of device that computed the results, which rounds in its own way.
    """

    request: Request
    low: float
    high: float
    num_classes: int
    fingerprint: str
    batched: bool
    shared: bool
    sites: tuple[tuple[str, str, float | None, int], ...] = ()
    off: tuple[tuple[str, str], ...] = ()
    ensemble: Ensemble | None = None
    device: str = "cpu"

    @property
    def grid(self) -> Grid:
        """The members."""
        return self.request.grid

    @property
    def plan(self) -> Plan:
        """The samples."""
        return self.request.plan

    @property
    def has_classes(self) -> bool:
        """Whether the targets are classes, as opposed to numbers with a density."""
        return self.request.likelihood in CLASS_LIKELIHOODS

    def with_grid(self, grid: Grid) -> Protocol:
        """The same for other members."""
        return dataclasses.replace(self, request=dataclasses.replace(self.request, grid=grid))

    @property
    def nodes(self) -> Nodes:
        """Nodes of temperatures that act on the mean."""
        return Nodes(self.low, self.high)

    @property
    def density_nodes(self) -> Nodes:
        """Nodes of temperatures at which results of numbers are kept."""
        return Nodes(self.low, self.high, DENSITY_NODES, 1.0)

    @property
    def density_temperatures(self) -> tuple[float, ...]:
        """The temperatures of these nodes, and 1 unless the temperature is a noise variance."""
        noise = self.request.likelihood == "squared_error"
        return density_temperatures(self.nodes, noise=noise)

    @property
    def sample_nodes(self) -> Nodes:
        """Nodes of temperatures that act on each sample: the middle of the bracket."""
        center = (self.low * self.high) ** 0.5
        return Nodes(center / 2, center * 2, SAMPLE_NODES, 1.0)

    def to_json(self) -> str:
        """As JSON, with sorted keys."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Protocol:
        """The inverse of `to_json`.

        Raises:
            ValueError: If it is not; names the field that is wrong.
        """
        record = parse_json(text)
        if isinstance(record, dict):  # files of earlier versions do not say it
            record.setdefault("device", "unknown")
        return read_record(cls, record)

    def require_same(self, other: Protocol, what: str) -> None:
        """Raises `ScoresError` that names the first field in which two protocols differ.

        Devices may differ, which only rounds in other ways.
        """
        for mine, theirs in ((self.request, other.request), (self, other)):
            for field in dataclasses.fields(mine):
                here, there = getattr(mine, field.name), getattr(theirs, field.name)
                if field.name in ("request", "device") or here == there:
                    continue
                remedy = "evaluate with the same settings and the same weights"
                if field.name in ("low", "high", "temperatures"):
                    remedy = "evaluate each with the same temperatures=(low, high)"
                if field.name in ("grid", "plan") and self.request.adaptive is not None:
                    remedy = (
                        "a pilot decides for each part on its own: give each the same grid= and "
                        f"num_samples={self.request.adaptive.samples}"
                    )
                if field.name == "ensemble":
                    remedy = "evaluate given samples on all data at once"
                raise ScoresError(
                    f"{what} differ in {field.name}: {here!r} against {there!r}; {remedy}"
                )
