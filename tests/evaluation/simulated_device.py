"""An accelerator without CUDA and without float64, simulated on the CPU.

Tensors of the simulated device hold a tensor of the CPU. Operators run there, refuse to mix
devices, and refuse float64, as the GPUs of Apple do.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("lazy", 0)  # a type of device that any build of torch can name


class _There(Tensor):
    """A tensor of the simulated device."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, held: Tensor) -> "_There":
        if held.dtype == torch.float64:
            raise TypeError("the simulated device has no float64")
        there = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=DEVICE
        )
        there.held = held
        return there

    def __repr__(self) -> str:
        return f"there({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    given = pytree.tree_leaves((args, kwargs))
    tensors = [x for x in given if isinstance(x, Tensor)]
    here = [x for x in tensors if not isinstance(x, _There) and x.dim()]
    there = [x for x in tensors if isinstance(x, _There)]
    to = kwargs.get("device")
    if here and there and func is not torch.ops.aten.copy_.default:
        raise RuntimeError(f"{func}: tensors on the CPU and on the simulated device")
    target = torch.device(to).type == DEVICE.type if to is not None else bool(there)
    plain = pytree.tree_map_only(_There, lambda x: x.held, (args, kwargs))
    if to is not None:
        plain[1]["device"] = torch.device("cpu")
    out = func(*plain[0], **plain[1])
    if not target:
        return out
    written = {id(x.held): x for x in there}  # what an operator overwrites stays the same object

    def wrapped(x: Tensor) -> Tensor:
        return written[id(x)] if id(x) in written else _There(x)

    return pytree.tree_map_only(Tensor, wrapped, out)


class Simulated(TorchDispatchMode):
    """While entered, tensors can be made on the simulated device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})
