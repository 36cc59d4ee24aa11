"""What keys the masks of a predictor's examples.

    shared        0 for all: every input gets the same K masks
    by input      a hash of each example's input: every input has its own masks, whatever the batch
    by position   the number of the example in the batch, as in an evaluation, where the rows of a
                  batch influence each other: there, equal masks in all rows are another model

Legend: B examples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from afterdrop.masks.model_call import close, take_rows, tensors


def input_hashes(inputs: Any, size: int, batch_dim: int) -> Tensor:
    """[B] a 64-bit hash of each example: of its rows of all tensors with a batch dimension.

    Args:
        inputs: Nested inputs.
        size: B.
        batch_dim: Their batch dimension.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]])
        >>> a, b, c = input_hashes({"x": x, "scale": 2.0}, 3, 0).tolist()
        >>> a == c, a == b
        (True, False)
    """
    hashes = [hashlib.blake2b(digest_size=8) for _ in range(size)]
    for tensor in tensors(inputs):
        if tensor.dim() <= batch_dim or tensor.shape[batch_dim] != size:
            continue
        rows = tensor.detach().movedim(batch_dim, 0).cpu()
        shape = f"{tuple(rows.shape[1:])} {rows.dtype}".encode()
        rows = rows.reshape(size, rows[0].numel()).contiguous().view(torch.uint8)
        for row, found in zip(rows.numpy(), hashes):
            found.update(shape)
            found.update(row.tobytes())
    words = [int.from_bytes(found.digest(), "little", signed=True) for found in hashes]
    return torch.tensor(words, dtype=torch.int64)


def rows_interact(
    logits: Callable[[Any], tuple[Tensor, int]], inputs: Any, size: int, batch_dim: int
) -> bool:
    """Whether the first half of a batch has other logits without the second half.

    Args:
        logits: Gives the logits of nested inputs, and their batch dimension.
        inputs: Nested inputs.
        size: B.
        batch_dim: Their batch dimension.
    """
    half = (size + 1) // 2
    whole, dim = logits(take_rows(inputs, batch_dim, size, 0, size, 1))
    try:
        alone, _ = logits(take_rows(inputs, batch_dim, size, 0, half, 1))
    except Exception:  # the user's model may fail in any way on a part of a graph
        return True
    return whole.shape[dim] != size or not close(alone, whole.narrow(dim, 0, half))
