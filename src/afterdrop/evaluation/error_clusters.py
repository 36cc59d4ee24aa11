"""Which targets belong together when errors are made: those of an example, or of a passage of text.

Examples are independent draws. The windows of a text are not: what makes one hard makes its
neighbours hard, over hundreds of tokens. So a text is cut into passages, runs of windows long
enough to be nearly independent and enough of them for an error, folds and resamples.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

PASSAGES = 64  # their spread has an error of 9 %


def clusters(examples: Tensor, stream: Mapping[str, Any]) -> Tensor:
    """[N] the number of each target's example or passage, 0, 1, ...

    Args:
        examples: [N] numbers of the targets' examples; windows of a text are numbered stripe by
            stripe, one of each at a time.
        stream: How a text was cut (`Protocol.stream`); empty for other data.

    Example:
        >>> import torch
        >>> windows = torch.arange(130)
        >>> clusters(windows, {"stripes": 1})[[0, 2, 3, 129]].tolist()
        [0, 0, 1, 43]
        >>> clusters(windows, {}).max().item()
        129
    """
    if stream and examples.numel():
        stripes = int(stream["stripes"])
        window = examples // stripes
        window = window - window.min()
        each = max(1, PASSAGES // stripes)
        length = -(-(int(window.max()) + 1) // each)
        examples = window // length * stripes + examples % stripes
    return examples.unique(return_inverse=True)[1]
