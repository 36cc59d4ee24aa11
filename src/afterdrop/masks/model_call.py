"""What goes into a model, what comes out, and how precisely it computes.

    inputs      nested tuples, lists and mappings of tensors; copies of some of their examples
    outputs     where the logits are, and when two outputs are the same
    precision   full precision for a while

The mode of a model and its other state: `model_guard`.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from afterdrop.errors import DataError

# Where an output holds its logits: an index, a key (or attribute), or a function of the output.
LogitsPlace = int | str | Callable[[Any], Any]
COUNTED_FROM_0 = "must not be negative: tensors of different dimensions share it; count from 0"


def batch_size(inputs: Any, batch_dim: int) -> int:
    """The size of the batch dimension of the first tensor in nested inputs."""
    check_inputs(inputs)
    if batch_dim < 0:
        raise DataError(f"batch_dim={batch_dim} {COUNTED_FROM_0}")
    for tensor in tensors(inputs):
        if tensor.dim() > batch_dim:
            return tensor.shape[batch_dim]
    raise DataError(
        f"no input tensor has a dimension batch_dim={batch_dim}; pass tensors (or tuples or dicts "
        "of tensors) with a batch dimension, and its index as batch_dim"
    )


def check_inputs(inputs: Any) -> None:
    """Refuses nested inputs whose rows cannot be copied, and tensors without values.

    Raises:
        DataError: If there are any.
    """
    if isinstance(inputs, PackedSequence):
        raise DataError(
            "an input is a PackedSequence, whose examples cannot be copied one by one; give the "
            "padded sequences and their lengths, and pack them in forward (pack_padded_sequence)"
        )
    if isinstance(inputs, Tensor):
        if inputs.is_meta:
            raise DataError(
                "a tensor is on the meta device, where it has no values; load the model's weights "
                "on another device, and give inputs with values"
            )
    elif isinstance(inputs, Mapping):
        check_inputs(list(inputs.values()))
    elif isinstance(inputs, list | tuple):
        for value in inputs:
            check_inputs(value)


def is_movable(value: Any) -> bool:
    """Whether an input is an object with tensors and a method `to`, such as PyG's `Data`."""
    return callable(getattr(value, "to", None)) and not isinstance(
        value, Tensor | nn.Module | Mapping | Sequence | PackedSequence
    )


def plain(tensor: Tensor) -> Tensor:
    """A tensor without metadata: rows of MONAI's MetaTensor cannot be taken at will."""
    convert = getattr(tensor, "as_tensor", None)
    return convert() if callable(convert) else tensor


def tensors(inputs: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists, mappings and movable objects, in order."""
    if isinstance(inputs, Tensor):
        return [inputs]
    if is_movable(inputs):
        return tensors(inputs.to_dict() if hasattr(inputs, "to_dict") else vars(inputs))
    if isinstance(inputs, Mapping):
        return [tensor for value in inputs.values() for tensor in tensors(value)]
    if isinstance(inputs, Sequence) and not isinstance(inputs, str | bytes):
        return [tensor for value in inputs for tensor in tensors(value)]
    return []


def take_rows(inputs: Any, batch_dim: int, batch: int, start: int, stop: int, copies: int) -> Any:
    """Copies the examples start:stop of nested inputs.

    Args:
        inputs: Tensors whose dimension `batch_dim` has size `batch` are copied; an object with a
            method `to` can only be taken whole; everything else is returned as it is.
        batch_dim: The batch dimension.
        batch: The batch size.
        start: The first example.
        stop: The end of the examples.
        copies: How often the examples are repeated, one copy of all of them after the other.

    Example:
        >>> import torch
        >>> take_rows({"x": torch.tensor([5, 6, 7]), "scale": 2.0}, 0, 3, 0, 2, copies=2)
        {'x': tensor([5, 6, 5, 6]), 'scale': 2.0}
    """
    if isinstance(inputs, Tensor):
        if inputs.dim() <= batch_dim or inputs.shape[batch_dim] != batch:
            return inputs
        part = plain(inputs).narrow(batch_dim, start, stop - start)
        if copies == 1:
            return part.clone()  # the model may write into its input
        times = [1] * part.dim()
        times[batch_dim] = copies
        return part.repeat(times)
    if isinstance(inputs, Mapping):
        return {k: take_rows(v, batch_dim, batch, start, stop, copies) for k, v in inputs.items()}
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
        return type(inputs)(*(take_rows(v, batch_dim, batch, start, stop, copies) for v in inputs))
    if isinstance(inputs, list | tuple):
        return type(inputs)(take_rows(v, batch_dim, batch, start, stop, copies) for v in inputs)
    if is_movable(inputs):
        if (start, stop, copies) != (0, batch, 1):
            raise TypeError(f"the examples of a {type(inputs).__name__} cannot be copied")
        return copy.copy(inputs)  # the model may write to its attributes
    return inputs


def map_tensors(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Nested inputs with every tensor changed; an object with a method `to` is copied."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, Mapping):
        return {key: map_tensors(value, change) for key, value in inputs.items()}
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
        return type(inputs)(*(map_tensors(value, change) for value in inputs))
    if isinstance(inputs, list | tuple):
        return type(inputs)(map_tensors(value, change) for value in inputs)
    return copy.copy(inputs) if is_movable(inputs) else inputs


def output_tensor(output: Any, place: LogitsPlace | None = None) -> Tensor:
    """The logits in what a model returned.

    Args:
        output: A tensor, an object with `.logits`, a mapping or a (nested) sequence. If several of
            its tensors may be the logits, `place` must say which.
        place: Where the logits are; None for the only tensor that may be the logits.

    Raises:
        DataError: If it contains no logits, or several tensors that may be the logits.

    Example:
        >>> output_tensor({"logits": torch.zeros(2, 3), "hidden": torch.zeros(2, 9)}).shape
        torch.Size([2, 3])
        >>> output_tensor((torch.zeros(2, 9), torch.zeros(2, 3)), place=1).shape
        torch.Size([2, 3])
    """
    logits = _only_logits(output) if place is None else _logits_at(output, place)
    if logits is None or logits.dim() == 0:
        what = "no logits" if logits is None else "a single number where logits should be"
        raise DataError(
            f"the model returned {type(output).__name__} with {what}; return the logits as a "
            "tensor, first of a tuple, under the key 'logits', or as .logits of an object, or say "
            "where they are: logits= an index, a key or a function of the output"
        )
    return logits


def _logits_at(output: Any, place: LogitsPlace) -> Tensor:
    """What an output holds at an index or a key, or what a function finds in it."""
    if callable(place):
        found = place(output)
    elif isinstance(place, str) and not isinstance(output, Mapping):
        found = getattr(output, place, None)
    else:
        try:
            found = output[place]
        except (IndexError, KeyError, TypeError):
            found = None
    if not isinstance(found, Tensor) or not found.is_floating_point():
        raise DataError(
            f"logits={place!r}: the model returned {type(output).__name__}, which holds "
            f"{type(found).__name__} there; give the index, the key or a function of the tensor "
            "that holds the logits"
        )
    return found


def _only_logits(output: Any) -> Tensor | None:
    """The only tensor of an output that may be its logits, if there is any."""
    logits = output.get("logits") if isinstance(output, Mapping) else None
    logits = getattr(output, "logits", None) if logits is None else logits
    if isinstance(logits, Tensor):
        return logits
    found = _float_tensors(output)
    # Logits have a dimension of examples and one of classes.
    plausible = {name: tensor for name, tensor in found.items() if tensor.dim() > 1}
    if len(plausible) > 1:
        shapes = ", ".join(f"{name!r}: {tuple(t.shape)}" for name, t in plausible.items())
        raise DataError(
            f"the model returned {type(output).__name__} with {len(plausible)} tensors that may be "
            f"its logits ({shapes}); say which: logits={next(iter(plausible))!r} or another"
        )
    return next(iter((plausible or found).values()), None)


def _float_tensors(output: Any) -> dict[Any, Tensor]:
    """Floating-point tensors of an output by index or key; the nested ones if there are no others.

    A nested tensor beside others is state, such as that of an LSTM.
    """
    if isinstance(output, Tensor):
        return {0: output} if output.is_floating_point() else {}
    parts: dict[Any, Any] = {}
    if isinstance(output, Mapping):
        parts = dict(output)
    elif isinstance(output, Sequence) and not isinstance(output, str | bytes):
        parts = dict(enumerate(output))
    floats = {
        name: value
        for name, value in parts.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    nested = [tensor for tensor in tensors(output) if tensor.is_floating_point()]
    return floats or dict(enumerate(nested))


def close(output: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether two outputs are the same up to rounding.

    Args:
        output: One.
        expected: The other.
        dtype: The coarsest that they were computed with; by default their own.

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
    epsilon = torch.finfo(dtype or output.dtype).eps  # 16-bit models round at every layer
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


@contextlib.contextmanager
def without_fast_path() -> Iterator[None]:
    """Disables the fast path of nn.TransformerEncoder in eval mode; restores it on exit.

    The fast path sets padded positions to zero; the path that training takes does not.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
