"""A model's output: where its logits are, and when two of them are the same."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from afterdrop.errors import DataError
from afterdrop.masks.nested_inputs import tensors


def output_tensor(output: Any) -> Tensor:
    """The logits of what a model returned: a tensor, an object with `.logits`, a dict or a tuple.

    Raises:
        DataError: If there are no logits in it.
    """
    logits = output.get("logits") if isinstance(output, Mapping) else None
    logits = getattr(output, "logits", None) if logits is None else logits
    if not isinstance(logits, Tensor):
        found = [tensor for tensor in tensors(output) if tensor.is_floating_point()]
        if isinstance(output, Mapping) and len(found) > 1:
            raise DataError(
                f"the model returned {type(output).__name__} with the keys "
                f"{', '.join(map(repr, output))}; name its logits 'logits'"
            )
        logits = found[0] if found else None
    if logits is None or logits.dim() == 0:
        what = "no logits" if logits is None else "a single number where logits should be"
        raise DataError(
            f"the model returned {type(output).__name__} with {what}; return the logits as a "
            "tensor, first of a tuple, under the key 'logits', or as .logits of an object"
        )
    return logits


def close(output: Tensor, expected: Tensor) -> bool:
    """Whether two outputs are the same but for rounding.

    Example:
        >>> close(torch.tensor([1.0, 2.0]), torch.tensor([1.0001, 2.0]))
        True
        >>> close(torch.tensor([1.0, 2.0]), torch.tensor([1.1, 2.0]))
        False
    """
    if output.shape != expected.shape:
        return False
    finite = expected.nan_to_num(0.0, 0.0, 0.0)
    scale = finite.abs().max().item() if finite.numel() else 0.0
    kind = output.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast else output.dtype
    epsilon = torch.finfo(dtype).eps  # 16-bit models round at every layer
    rtol, atol = max(1e-3, 8 * epsilon), max(1e-4, 4 * epsilon) * scale
    return torch.allclose(output, expected, rtol=rtol, atol=atol, equal_nan=True)


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Products of float32 without TF32, whose rounding would look like something that changed."""
    cuda: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    try:
        precision, convolutions = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:  # set by torch's newer interface, which the older one does not read
        places = cuda, cudnn.conv, cudnn.rnn
        before = [place.fp32_precision for place in places]
        try:
            for place in places:
                place.fp32_precision = "ieee"
            yield
        finally:
            for place, value in zip(places, before):
                place.fp32_precision = value
        return
    try:
        torch.set_float32_matmul_precision("highest")
        cudnn.allow_tf32 = False
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        cudnn.allow_tf32 = convolutions
