"""Which targets form one error cluster: those of an example, or of a block of text.

Examples are independent draws. The windows of a text are not: what makes one hard makes its
neighbours hard, over hundreds of tokens. So a text is cut into blocks, runs of windows long enough
to be nearly independent and enough of them for an error, folds and resamples.
"""

from __future__ import annotations

from torch import Tensor

from afterdrop.evaluation.request import StreamSettings

TEXT_BLOCKS = 64  # the spread between them has an error of 9 %


def clusters(examples: Tensor, stream: StreamSettings | None) -> Tensor:
    """[N] the number of each target's error cluster, 0, 1, ...

    Args:
        examples: [N] numbers of the targets' examples; windows of a text are numbered window by
            window, one per stripe.
        stream: How a text was read; None for other data.

    Example:
        >>> import torch
        >>> windows = torch.arange(130)
        >>> clusters(windows, StreamSettings(stripes=1))[[0, 2, 3, 129]].tolist()
        [0, 0, 1, 43]
        >>> clusters(windows, None).max().item()
        129
    """
    if stream is not None and examples.numel():
        window = examples // stream.stripes
        window = window - window.min()
        per_stripe = max(1, TEXT_BLOCKS // stream.stripes)
        length = -(-(int(window.max()) + 1) // per_stripe)
        examples = window // length * stream.stripes + examples % stream.stripes
    return examples.unique(return_inverse=True)[1]
