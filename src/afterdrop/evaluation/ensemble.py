"""What the samples of an evaluation are if they were given, not drawn as masks of one model."""

from __future__ import annotations

import dataclasses

from afterdrop.errors import DataError
from afterdrop.family.member import Grid, Member
from afterdrop.masks.uniforms import Plan

MOST_GROUPS = 12  # of a jackknife: each costs another pass over the samples


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """The models (or other sources) that give the samples, and how each does alone.

    Each source gives one sample, or one per mask. Members of the family have multiplier 1 where
    dropout stays off: there is nothing to multiply. The deterministic member is one source alone,
    without dropout: the best one.

    Attributes:
        models: Names of the models, adapters or stored samples.
        single_xe: Cross entropy (nats) of each source alone, without dropout, at T = 1.
        best: The number of the source that stands alone: the best of them, on these data or on
            those that the choice is made on.
        views: Names of the views of an augmentation; each model then gives a source per view.
        masks: The mask samples of each source; None where dropout stays off.

    Example:
        >>> members = Ensemble(("a", "b", "c"), (0.5, 0.4, 0.6), best=1)
        >>> members.label(Member(alpha=1, multiplier=1, temperature=0.9))
        'arithmetic mean of 3, T = 0.9'
        >>> members.label(Member(multiplier=0))
        'b alone, T = 1'
    """

    models: tuple[str, ...]
    single_xe: tuple[float, ...]
    best: int
    views: tuple[str, ...] = ()
    masks: Plan | None = None

    def __post_init__(self) -> None:
        sources = len(self.names)
        if len(self.single_xe) != sources or self.best not in range(sources):
            raise DataError(
                f"an ensemble of {sources} sources has {len(self.single_xe)} cross entropies, and "
                f"the best is number {self.best}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Of the sources."""
        return source_names(self.models, self.views)

    @property
    def num_samples(self) -> int:
        """K."""
        return len(self.names) * (1 if self.masks is None else self.masks.num_samples)

    def label(self, member: Member) -> str:
        """A member of the family in words."""
        if member.deterministic:
            return f"{self.names[self.best]} alone, T = {member.temperature:.4g}"
        if self.masks is not None:
            return str(member)
        return str(member).replace(", dropout rates x1", f" of {len(self.names)}")


def source_names(models: tuple[str, ...], views: tuple[str, ...]) -> tuple[str, ...]:
    """The sources: models, views of one model, or each model with each view.

    Example:
        >>> source_names(("a", "b"), ("plain", "flip"))
        ('a, plain', 'a, flip', 'b, plain', 'b, flip')
    """
    if len(models) > 1 and views:
        return tuple(f"{model}, {view}" for model in models for view in views)
    return views or models


def given_grid(grid: Grid | None) -> Grid:
    """The members of samples without a multiplier: the alphas of a grid, and one sample alone."""
    grid = Grid() if grid is None else grid
    return Grid(grid.alphas, (0.0, 1.0), grid.temper)
