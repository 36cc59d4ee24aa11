"""A model's output: where its logits are, and whether two of them are equal up to rounding."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from afterdrop.errors import DataError
from afterdrop.masks.nested_inputs import tensors


def output_tensor(output: Any) -> Tensor:
    """The logits in what a model returned.

    Args:
        output: A tensor, an object with `.logits`, a mapping or a (nested) sequence.

    Raises:
        DataError: If it contains no logits.

    Example:
        >>> output_tensor({"logits": torch.zeros(2, 3), "hidden": torch.zeros(2, 9)}).shape
        torch.Size([2, 3])
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
    """Whether two outputs are equal up to rounding.

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
    """Disables TF32, whose rounding would look like a change of the output; restores it on exit."""
    cuda: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    try:
        precision, convolutions = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:  # set through torch's newer interface, which the older one refuses to read
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
