"""How far numbers may differ that were computed twice by the same model from the same data.

Another number of threads, another kernel for the same operation, or atomic additions add in another
order. Layers accumulate that to some hundred units in the last place of the largest logits. In 16
bits this many would be as large as the logits, which do not differ by that much: each layer
averages.
"""

import torch
from torch import nn

_UNITS = 1000  # in the last place
_TF32 = 2.0**-10  # the epsilon of TF32, in which GPUs may multiply float32


def epsilon_of(model: nn.Module, dtype: torch.dtype, *, same_shapes: bool = True) -> float:
    """The largest epsilon among the dtypes that a model computes with.

    Args:
        model: The model.
        dtype: Of its outputs, beside those of its weights.
        same_shapes: Whether chunks of rows are as large each time. If not, a GPU chooses other
            kernels, some of which multiply float32 in TF32: cuDNN has such ones by default.

    Example:
        >>> epsilon_of(nn.Linear(2, 2), torch.bfloat16)
        0.0078125
    """
    weights = [weight for weight in model.parameters() if weight.is_floating_point()]
    epsilon = max(torch.finfo(kind).eps for kind in {weight.dtype for weight in weights} | {dtype})
    on_cpu = all(weight.device.type == "cpu" for weight in weights)
    return epsilon if on_cpu or same_shapes else epsilon_across_devices(epsilon)


def device_kind(device: torch.device) -> str:
    """The name of a GPU, or the type of another device.

    Example:
        >>> device_kind(torch.device("cpu"))
        'cpu'
    """
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def epsilon_across_devices(epsilon: float) -> float:
    """That of the same computation on another kind of device, which may be a GPU.

    Example:
        >>> epsilon_across_devices(torch.finfo(torch.float32).eps)
        0.0009765625
        >>> epsilon_across_devices(torch.finfo(torch.float64).eps)
        2.220446049250313e-16
    """
    return max(epsilon, _TF32) if epsilon >= torch.finfo(torch.float32).eps else epsilon


def tolerance(epsilon: float) -> float:
    """The difference that rounding may cause, relative to the size of the numbers.

    Example:
        >>> round(tolerance(torch.finfo(torch.float32).eps), 6), tolerance(2**-8)
        (0.000119, 0.0625)
    """
    return min(_UNITS * epsilon, epsilon**0.5)
