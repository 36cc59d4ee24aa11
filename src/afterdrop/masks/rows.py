"""The rows of a forward pass: multipliers × samples × examples.

Legend: M multipliers, S samples, B examples.
"""

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from afterdrop.masks.layout import Layout
from afterdrop.masks.rates import Multipliers
from afterdrop.masks.uniforms import Plan


@dataclasses.dataclass(frozen=True, init=False)
class Rows:
    """The rows of one forward pass: multipliers × samples × examples, examples innermost.

    Attributes:
        plan: How samples are drawn.
        multipliers: The M multipliers; the constructor also accepts plain numbers.
        samples: Indices of the S samples.
        examples: [B] numbers of the examples, which key their masks.
        streams: [B] numbers that key masks which outlive an example (`Layout.stream`).
    """

    plan: Plan
    multipliers: Multipliers
    samples: range
    examples: Tensor
    streams: Tensor | None

    def __init__(
        self,
        plan: Plan,
        multipliers: Multipliers | Sequence[float],
        samples: range,
        examples: Tensor,
        streams: Tensor | None = None,
    ) -> None:
        values = plan, Multipliers.of(multipliers), samples, examples, streams
        for field, value in zip(dataclasses.fields(self), values):
            object.__setattr__(self, field.name, value)

    def keys(self, layout: Layout) -> Tensor:
        """The numbers that key the masks of a place."""
        return self.streams if layout.stream and self.streams is not None else self.examples

    def __len__(self) -> int:
        return len(self.multipliers) * len(self.samples) * len(self.examples)
