"""Uniforms of small sites, drawn for several sites at once.

Drawing for a few units takes a dozen tiny operations, so in a model of thousands of small sites
most of a pass is the overhead of operations. Here a site's uniforms come with those of the sites
that followed it in the dry run, if these have asked for uniforms of the same shape so far: for
twice as many sites each time. A site's uniforms depend on nothing but its key, so whatever the
model runs next, a wrong guess costs only time.

Legend: S samples of a chunk, B examples, `coords` sizes of the other dimensions.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from afterdrop.masks.operators import Place
from afterdrop.masks.uniforms import Plan, site_key, sites_at_once, small_uniforms, uniforms


class DrawsAhead:
    """Gives the draws of `uniforms`, which it makes for several sites at once where that is faster.

    Args:
        places: The sites, in the order of a pass.

    Example:
        >>> places = [Place("a", 0), Place("b", 0)]
        >>> keys = [site_key(0, *place, 0) for place in places]
        >>> ahead, plan, request = DrawsAhead(places), Plan(4), (range(4), torch.arange(3), (5,))
        >>> all(
        ...     torch.equal(ahead.uniforms(plan, key, *request), uniforms(plan, key, *request))
        ...     for key in keys
        ... )
        True
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self._places = tuple(places)
        self._seed: int | None = None
        self._keys: list[int] = []  # of the first calls of the places, under this seed
        self._numbers: dict[int, int] = {}  # of the keys in that list
        self._asked: tuple[object, ...] = ()
        self._examples: Tensor | None = None
        self._drawn: dict[int, Tensor] = {}  # for sites to come, by key
        self._count = 1  # sites that the last draw was for

    def uniforms(
        self,
        plan: Plan,
        key: int,
        samples: range,
        examples: Tensor | None,
        coords: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """See `uniforms.uniforms`."""
        asked = plan, samples, tuple(coords), torch.device(device)
        as_before = asked == self._asked and examples is self._examples
        if as_before and key in self._drawn:
            return self._drawn.pop(key)
        most = sites_at_once(plan, examples, coords, device)
        if most < 2:
            return uniforms(plan, key, samples, examples, coords, device)
        self._count = min(2 * self._count, most) if as_before and not self._drawn else 1
        self._asked, self._examples = asked, examples
        keys = self._following(plan.seed, key)
        drawn = small_uniforms(plan, keys, samples, examples, coords)
        self._drawn = {other: drawn[:, number] for number, other in enumerate(keys)}
        return self._drawn.pop(key)

    def _following(self, seed: int, key: int) -> list[int]:
        """A key and those of the sites that followed it in the dry run."""
        if seed != self._seed:
            self._seed = seed
            self._keys = [site_key(seed, *place, 0) for place in self._places]
            self._numbers = {key: number for number, key in enumerate(self._keys)}
        number = self._numbers.get(key)
        if number is None:  # a later call, or a place that the dry run did not see
            return [key]
        return self._keys[number : number + self._count]
