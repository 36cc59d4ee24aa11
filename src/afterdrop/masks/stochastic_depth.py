"""Stochastic depth: modules that drop whole rows of a batch, or all of it.

The modules of timm, transformers and torchvision draw their mask by operators that do not show the
rate. They are recognised by the class name, because copies of them are common, and their forward is
replaced by one that asks for its mask.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from afterdrop.masks.operators import MaskSource


def drop_path_rate(module: nn.Module) -> float | None:
    """The rate of a stochastic depth module, or None for any other module.

    Example:
        >>> drop_path_rate(nn.Dropout(0.5)) is None
        True
    """
    name = type(module).__name__
    if name == "StochasticDepth":
        rate: Any = getattr(module, "p", None)
    elif name.endswith("DropPath"):
        rate = getattr(module, "drop_prob", None)
    else:
        return None
    return float(rate) if isinstance(rate, int | float) else None


@contextlib.contextmanager
def replaced_forwards(model: nn.Module, source: MaskSource) -> Iterator[None]:
    """Makes the stochastic depth modules of a model ask `source` for masks; restores them on exit.

    Args:
        model: The module.
        source: Answers with masks.
    """
    # A forward that was set on the instance, by another library for example, is put back.
    replaced = [
        (module, module.__dict__.get("forward"))
        for module in model.modules()
        if drop_path_rate(module) is not None
    ]
    try:
        for module, _ in replaced:
            module.__dict__["forward"] = _controlled_forward(module, source)
        yield
    finally:
        for module, forward in replaced:
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward


def _controlled_forward(module: nn.Module, source: MaskSource) -> Callable[[Tensor], Tensor]:
    """What the module's own forward does in training, with a mask from `source`."""

    def forward(x: Tensor) -> Tensor:
        rate = drop_path_rate(module)
        if not rate:
            return x
        shape = [1] * x.dim()
        if getattr(module, "mode", "row") == "row":
            shape[0] = x.shape[0]
        mask = source.mask("drop_path", rate, x.new_empty(()).expand(shape), x)
        if mask is None:
            return x
        if getattr(module, "scale_by_keep", True):
            return mask.drop(x)
        return (mask.unfold(x) * mask.mask).reshape(x.shape)

    return forward
