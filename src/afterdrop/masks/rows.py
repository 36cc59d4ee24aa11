"""The rows of a forward pass: multipliers × samples × examples.

Legend: M multipliers, S samples, B examples.
"""

import dataclasses

from torch import Tensor

from afterdrop.masks.layout import Layout
from afterdrop.masks.uniforms import Plan


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of one forward pass: multipliers × samples × examples, examples innermost.

    Attributes:
        plan: How samples are drawn.
        multipliers: M factors on every rate.
        samples: Which S samples.
        examples: [B] numbers of the examples, which key their masks.
        streams: [B] numbers that key masks which outlive an example (`Layout.stream`).
    """

    plan: Plan
    multipliers: tuple[float, ...]
    samples: range
    examples: Tensor
    streams: Tensor | None = None

    def keys(self, layout: Layout) -> Tensor:
        """The numbers that key the masks of a place."""
        return self.streams if layout.stream and self.streams is not None else self.examples

    def __len__(self) -> int:
        return len(self.multipliers) * len(self.samples) * len(self.examples)
