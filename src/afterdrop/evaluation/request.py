"""What an evaluation is asked for, and what it found out before it began.

    Request    everything that a number depends on, as the caller wants it
    Protocol   the request, and what the model and the first batch made of it

The API, the command line and the tuner build a request; Scores keep the protocol; a choice keeps
the request, and a predictor is made from it. Nothing has to be said twice.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

from afterdrop.errors import DataError, MemberError, ScoresError
from afterdrop.family.member import Grid
from afterdrop.family.temperature import Nodes
from afterdrop.masks.model_call import LogitsPlace
from afterdrop.masks.uniforms import Plan
from afterdrop.typed_records import read_record

Carry = Literal["deterministic", "sampled"]
Lifetime = Literal["window", "stream"]
LOGITS_FUNCTION = "<function>"  # what a request records of a function that finds the logits
SAMPLE_NODES = 13  # XE of tempered samples is kept at these temperatures, from center/2 to center*2


def recorded_place(logits: LogitsPlace | None) -> int | str | None:
    """What a request keeps of where the logits are: of a function only that there is one."""
    return LOGITS_FUNCTION if callable(logits) else logits


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

    def __post_init__(self) -> None:
        if not isinstance(self.grid, Grid):
            raise MemberError(f"grid={self.grid!r} must be a Grid, as in Grid(alphas=(0, 1))")
        for name in ("rates", "noise"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        if self.temperatures is not None:
            pair = self.temperatures
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise MemberError(f"temperatures={pair!r} must be a pair (low, high)")
            Nodes(*pair)  # refuses a bracket that cannot be used
            object.__setattr__(self, "temperatures", tuple(pair))
        if self.limit is not None and self.limit < 1:
            raise DataError(f"limit={self.limit} must be at least 1 target, or None for all")
        if self.plan.num_samples == 1 and len(self.grid.alphas) > 1 and self.grid.stochastic:
            raise DataError(
                f"num_samples=1 with alphas {self.grid.alphas}: one sample has one mean, so all "
                "alphas coincide; use more samples or a grid with a single alpha"
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
    """

    request: Request
    low: float
    high: float
    num_classes: int
    fingerprint: str
    batched: bool
    shared: bool
    sites: tuple[tuple[Any, ...], ...] = ()
    off: tuple[tuple[str, ...], ...] = ()

    @property
    def grid(self) -> Grid:
        """The members."""
        return self.request.grid

    @property
    def plan(self) -> Plan:
        """The samples."""
        return self.request.plan

    def with_grid(self, grid: Grid) -> Protocol:
        """The same for other members."""
        return dataclasses.replace(self, request=dataclasses.replace(self.request, grid=grid))

    @property
    def nodes(self) -> Nodes:
        """Nodes of temperatures that act on the mean."""
        return Nodes(self.low, self.high)

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
        return read_record(cls, json.loads(text))

    def require_same(self, other: Protocol, what: str) -> None:
        """Raises `ScoresError` that names the first field in which two protocols differ."""
        for mine, theirs in ((self.request, other.request), (self, other)):
            for field in dataclasses.fields(mine):
                here, there = getattr(mine, field.name), getattr(theirs, field.name)
                if field.name == "request" or here == there:
                    continue
                remedy = "evaluate with the same settings and the same weights"
                if field.name in ("low", "high", "temperatures"):
                    remedy = "evaluate each with the same temperatures=(low, high)"
                raise ScoresError(
                    f"{what} differ in {field.name}: {here!r} against {there!r}; {remedy}"
                )
