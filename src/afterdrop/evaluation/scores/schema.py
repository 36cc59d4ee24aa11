"""The tensors of Scores: name, dimensions, type, and when each is there.

Whatever joins, divides, checks, stores or makes room for results derives from this table; no other
file knows how a tensor is named or on which axis the multipliers are.

Letters: M multipliers above 0, A alphas, N targets. Other dimensions:
    positive   alphas whose members have tempered samples: above 0, or all with components
    nodes      temperatures at which log-partitions are kept (`Protocol.nodes`)
    coarse     every fourth of them, then temperature 1: for differences of halves
    tempered   temperatures of tempered samples or components (`Protocol.sample_nodes`)
    halves     the two independent halves of the samples, or the groups of given ones
    at         temperatures at which results of numbers are kept (`Protocol.density_temperatures`)
    summaries  every second of them, and temperature 1: for summaries of distributions of numbers
    sizes      numbers of merged blocks: 1, 2, 4, ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from afterdrop.errors import ScoresError
from afterdrop.evaluation.request import LIKELIHOODS, Protocol
from afterdrop.family.temperature import COARSE

Results = dict[str, Tensor]
Group = Literal[
    "data",
    "deterministic",
    "sampled",
    "integrated",
    "tempered",
    "tempered_deterministic",
    "quantile",
]
SUMMARIES = 2  # distributions of numbers are summarised at every second node


def _sampled(protocol: Protocol) -> bool:
    return bool(protocol.grid.stochastic)


def _halved(protocol: Protocol) -> bool:
    return _sampled(protocol) and protocol.plan.num_samples > 1


def _tempered(protocol: Protocol) -> bool:
    return _sampled(protocol) and bool(protocol.grid.tempered_alphas)


def _components(protocol: Protocol) -> bool:
    return protocol.grid.temper == "component"


def _labelled(protocol: Protocol) -> bool:
    return protocol.request.likelihood == "multilabel"


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One tensor of Scores.

    Attributes:
        group: What it describes.
        field: Its name within the group.
        dims: Its dimensions; the targets N come last.
        dtype: The type of its elements.
        present: Whether Scores of a protocol have it.
        optional: Whether they may lack its whole group even then, because the model or a likelihood
            of a user's own decides.
    """

    group: Group
    field: str
    dims: tuple[str, ...]
    dtype: torch.dtype
    present: Callable[[Protocol], bool]
    optional: bool = False

    @property
    def name(self) -> str:
        """The name in Scores and in files."""
        return name_of(self.group, self.field)


def name_of(group: Group, field: str) -> str:
    """The name of a tensor in Scores and in files.

    Example:
        >>> name_of("sampled", "bound")
        'sampled.bound'
    """
    return f"{group}.{field}"


def _distribution(group: Group, front: tuple[str, ...], **when: object) -> list[TensorSpec]:
    """What later temperatures need of an averaged distribution."""
    numbers = ("target", "peak", "one", "two", "entropy")
    specs = [TensorSpec(group, field, (*front, "N"), torch.float64, **when) for field in numbers]  # type: ignore[arg-type]
    specs.append(TensorSpec(group, "class", (*front, "N"), torch.int32, **when))  # type: ignore[arg-type]
    specs.append(TensorSpec(group, "partition", (*front, "nodes", "N"), torch.float32, **when))  # type: ignore[arg-type]
    return specs


def _integrated(protocol: Protocol) -> bool:
    return (
        _sampled(protocol) and protocol.request.stream is not None and 0.0 in protocol.grid.alphas
    )


_EXAMPLES = 2**53  # more than there are, and exact in float64
_HALF = ("halves", "coarse", "N")
_NODES = ("M", "positive", "tempered", "N")

CATEGORICAL: tuple[TensorSpec, ...] = (
    TensorSpec("data", "targets", ("N",), torch.int64, lambda _: True),
    TensorSpec("data", "examples", ("N",), torch.int64, lambda _: True),
    TensorSpec("data", "labels", ("N",), torch.int64, _labelled),
    *_distribution("deterministic", (), present=lambda _: True),
    *_distribution("sampled", ("M", "A"), present=_sampled),
    TensorSpec("sampled", "half", ("M", "A", *_HALF), torch.float32, _halved),
    *(
        TensorSpec("sampled", field, ("M", "N"), torch.float64, _sampled)
        for field in ("bound", "lowest", "highest", "mean", "square", "spread", "mean_entropy")
    ),
    TensorSpec("sampled", "second", ("M", "A", "N"), torch.float64, _sampled),
    TensorSpec(
        "sampled",
        "curve",
        ("sizes", "M", "A", "N"),
        torch.float64,
        lambda p: _sampled(p) and p.plan.blocks > 2 and p.plan.scheme != "given",
    ),
    *_distribution("integrated", ("M",), present=_integrated, optional=True),
    TensorSpec(
        "integrated",
        "half",
        ("M", *_HALF),
        torch.float32,
        lambda p: _integrated(p) and _halved(p),
        optional=True,
    ),
    *(
        TensorSpec("tempered", field, _NODES, torch.float64, _tempered)
        for field in ("xe", "log_z", "peak", "square", "entropy")
    ),
    TensorSpec("tempered", "class", _NODES, torch.int32, _tempered),
    TensorSpec("tempered", "bound", ("M", "tempered", "N"), torch.float64, _tempered),
    TensorSpec(
        "tempered",
        "half",
        ("M", "positive", "halves", "tempered", "N"),
        torch.float32,
        lambda p: _tempered(p) and _halved(p),
    ),
    *(
        TensorSpec("tempered_deterministic", field, ("tempered", "N"), dtype, _components)
        for field, dtype in (
            *((name, torch.float64) for name in ("xe", "peak", "square", "entropy")),
            ("class", torch.int32),
        )
    ),
)


def _density(
    group: Group,
    front: tuple[str, ...],
    present: Callable[[Protocol], bool],
    *,
    optional: bool = False,
) -> Iterator[TensorSpec]:
    """What is kept of distributions of numbers, at nodes of temperature."""
    at, summaries = (*front, "at", "N"), (*front, "summaries", "N")
    yield TensorSpec(group, "nll_at", at, torch.float64, present, optional)
    yield TensorSpec(group, "mean_at", summaries, torch.float64, present, optional)
    for field in ("variance_at", "entropy_at", "crps_at", "cdf_at", "width50_at", "width90_at"):
        yield TensorSpec(group, field, summaries, torch.float32, present, optional)


def _noisy(protocol: Protocol) -> bool:
    return protocol.request.likelihood == "squared_error"


def _moments(protocol: Protocol) -> bool:
    return _sampled(protocol) and not _noisy(protocol)


def _decomposed(protocol: Protocol) -> bool:
    return _sampled(protocol) and protocol.grid.temper == "sample"


def _quantiles(protocol: Protocol) -> bool:
    return _sampled(protocol) and protocol.request.likelihood == "gaussian"


def _own_quantiles(protocol: Protocol) -> bool:
    """A likelihood of a user's own may have means of quantiles."""
    return _sampled(protocol) and protocol.request.likelihood not in LIKELIHOODS


DENSITY: tuple[TensorSpec, ...] = (
    TensorSpec("data", "targets", ("N",), torch.float64, lambda _: True),
    TensorSpec("data", "examples", ("N",), torch.int64, lambda _: True),
    TensorSpec("deterministic", "target", ("N",), torch.float64, lambda _: True),
    *_density("deterministic", (), lambda _: True),
    *_density("sampled", ("M", "A"), _sampled),
    *_density("quantile", ("M",), _quantiles),
    *_density("quantile", ("M",), _own_quantiles, optional=True),
    TensorSpec("sampled", "nll_half", ("M", "A", "halves", "at", "N"), torch.float32, _halved),
    TensorSpec("sampled", "quadrature", ("M", "A", "N"), torch.float32, _sampled),
    *(
        TensorSpec("sampled", field, ("M", "A", "N"), torch.float64, _moments)
        for field in ("target", "one", "second")
    ),
    *(
        TensorSpec("sampled", field, ("M", "N"), torch.float64, _moments)
        for field in ("bound", "lowest", "highest", "mean", "square", "spread", "mean_entropy")
    ),
    TensorSpec("sampled", "bound_at", ("M", "at", "N"), torch.float64, _decomposed),
    TensorSpec("sampled", "log_z_at", ("M", "A", "at", "N"), torch.float64, _decomposed),
    TensorSpec(
        "sampled",
        "curve",
        ("sizes", "M", "A", "N"),
        torch.float64,
        lambda p: _moments(p) and p.plan.blocks > 2 and p.plan.scheme != "given",
    ),
)
# Where both have a tensor, its dimensions are the same.
_BY_NAME = {spec.name: spec for spec in (*DENSITY, *CATEGORICAL)}


def summarised(temperatures: Sequence[float]) -> list[tuple[float, bool]]:
    """Temperatures, and whether distributions are summarised there: every second, and T = 1.

    Example:
        >>> summarised((4.0, 2.0, 0.5, 1.0))
        [(4.0, True), (2.0, False), (0.5, True), (1.0, True)]
    """
    return [(t, i % SUMMARIES == 0 or t == 1) for i, t in enumerate(temperatures)]


def named(group: Group, fields: Mapping[str, Tensor]) -> Results:
    """Results of a group under their names in Scores."""
    return {name_of(group, field): tensor for field, tensor in fields.items()}


def join(parts: Sequence[Mapping[str, Tensor]], dim: Literal["N", "M"]) -> Results:
    """Joins results along the targets or along the multipliers.

    Tensors without that dimension must be the same in all parts; the first is taken.

    Example:
        >>> part = {"sampled.bound": torch.zeros(2, 3), "data.targets": torch.arange(3)}
        >>> {name: tuple(tensor.shape) for name, tensor in join([part, part], "M").items()}
        {'sampled.bound': (4, 3), 'data.targets': (3,)}
    """
    if len(parts) == 1:
        return dict(parts[0])
    joined: Results = {}
    for name in parts[0]:
        dims = _BY_NAME[name].dims
        tensors = [part[name] for part in parts]
        joined[name] = torch.cat(tensors, dims.index(dim)) if dim in dims else tensors[0]
    return joined


def room_shape(name: str, piece: Tensor, targets: int) -> tuple[int, ...]:
    """The shape of a tensor of `targets` targets, of which `piece` is a part."""
    axis = _BY_NAME[name].dims.index("N")
    return (*piece.shape[:axis], targets, *piece.shape[axis + 1 :])


def select_targets(name: str, tensor: Tensor, index: Tensor) -> Tensor:
    """The targets `index` of a tensor."""
    return tensor.index_select(_BY_NAME[name].dims.index("N"), index)


def sizes(protocol: Protocol, targets: int) -> dict[str, int]:
    """The size of each dimension."""
    grid, nodes = protocol.grid, protocol.nodes
    return {
        "M": len(grid.stochastic),
        "A": len(grid.alphas),
        "N": targets,
        "positive": len(grid.tempered_alphas),
        "nodes": nodes.count,
        "coarse": len(range(0, nodes.count, COARSE)) + 1,
        "tempered": protocol.sample_nodes.count,
        "at": len(protocol.density_temperatures),
        "summaries": sum(kept for _, kept in summarised(protocol.density_temperatures)),
        "halves": protocol.plan.num_halves,
        "sizes": protocol.plan.blocks.bit_length(),
    }


def check(tensors: Mapping[str, Tensor], protocol: Protocol) -> None:
    """Requires that tensors are those of a protocol: none missing, each of its shape and type.

    Raises:
        ScoresError: If they are not; names the first that is wrong.
    """
    specs = list(expected(protocol))
    groups = {spec.group for spec in specs if spec.name in tensors}
    needed = [spec.name for spec in specs if not spec.optional or spec.group in groups]
    lacking = [name for name in needed if name not in tensors]
    if lacking:
        raise ScoresError(f"the scores lack {', '.join(lacking)}; evaluate again")
    unknown = sorted(set(tensors) - {spec.name for spec in specs})
    if unknown:
        raise ScoresError(f"the scores hold {', '.join(unknown)}, which their protocol does not")
    size = sizes(protocol, tensors[name_of("data", "targets")].numel())
    for spec in specs:
        tensor = tensors.get(spec.name)
        shape = tuple(size[dim] for dim in spec.dims)
        if tensor is not None and (tuple(tensor.shape), tensor.dtype) != (shape, spec.dtype):
            raise ScoresError(
                f"{spec.name} is {tensor.dtype} of shape {tuple(tensor.shape)}; the protocol asks "
                f"for {spec.dtype} of shape {shape}; evaluate again"
            )


def check_ranges(tensors: Mapping[str, Tensor], protocol: Protocol) -> None:
    """Requires classes of the model, and numbers of examples and labels that are not negative.

    Raises:
        ScoresError: If a value lies outside; names the tensor.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() or not tensor.numel():
            continue
        low, high = (int(value) for value in tensor.aminmax())
        numbers = (name_of("data", "examples"), name_of("data", "labels"))
        end = _EXAMPLES if name in numbers else protocol.num_classes
        if low < 0 or high >= end:
            raise ScoresError(f"{name} has values from {low} to {high}, outside 0 to {end - 1}")


def expected(protocol: Protocol) -> Iterable[TensorSpec]:
    """The tensors that Scores of a protocol have."""
    table = CATEGORICAL if protocol.has_classes else DENSITY
    return (spec for spec in table if spec.present(protocol))
