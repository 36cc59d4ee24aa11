"""The protocol of an evaluation: everything that a number depends on, kept with the numbers."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from afterdrop.errors import ScoresError
from afterdrop.family.member import Grid
from afterdrop.family.temperature import Nodes
from afterdrop.masks.uniforms import Plan, Scheme

SAMPLE_NODES = 13  # XE of a tempered sample is kept at these, from center/2 to center*2


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How `Scores` were made.

    Attributes:
        split: Which data: "train", "valid", "test" or any other name.
        grid: The members.
        plan: Samples, seed and mask scheme.
        low: Lowest temperature of the bracket.
        high: Highest temperature of the bracket.
        num_classes: V.
        fingerprint: Of the model's parameters and buffers (`fingerprint`).
        batched: Whether samples ran as rows of a batch.
        shared: Whether examples shared masks.
        sites: Name, operator, rate and calls of each dropout site.
        off: Modules whose other training-time randomness stayed off.
        rates: Declared attributes that hold rates.
        ignore_index: Targets that do not count.
        stream: For a text: window, stripes, carried state and the like, by name.
        limit: The first so many tokens or images of the split only; None for all.
    """

    split: str
    grid: Grid
    plan: Plan
    low: float
    high: float
    num_classes: int
    fingerprint: str
    batched: bool
    shared: bool
    sites: tuple[tuple[Any, ...], ...] = ()
    off: tuple[tuple[str, ...], ...] = ()
    rates: tuple[str, ...] = ()
    ignore_index: int = -100
    stream: tuple[tuple[str, Any], ...] = ()
    limit: int | None = None

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
        """As JSON, in a fixed order."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Protocol":
        """From what `to_json` gave."""
        record = json.loads(text)
        grid, plan = record.pop("grid"), record.pop("plan")
        scheme: Scheme = plan.pop("scheme")
        return cls(
            grid=Grid(tuple(grid["alphas"]), tuple(grid["multipliers"]), grid["temper"]),
            plan=Plan(scheme=scheme, **plan),
            sites=tuple(map(tuple, record.pop("sites"))),
            off=tuple(map(tuple, record.pop("off"))),
            rates=tuple(record.pop("rates")),
            stream=tuple((name, value) for name, value in record.pop("stream")),
            **record,
        )

    def require_same(self, other: "Protocol", what: str) -> None:
        """Raises `ScoresError` that names the first field in which two protocols differ."""
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                remedy = "evaluate with the same settings and the same weights"
                if field.name in ("low", "high"):
                    remedy = "evaluate each with the same temperatures=(low, high)"
                raise ScoresError(
                    f"{what} differ in {field.name}: {mine!r} against {theirs!r}; {remedy}"
                )


def digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of named tensors: names, shapes, types and values."""
    total = hashlib.blake2b(digest_size=12)
    for name, tensor in named:
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        data = tensor.detach().cpu().contiguous().flatten()
        total.update(data.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
