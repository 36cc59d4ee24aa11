"""Detects on a CPU what would make the host wait for a GPU."""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_SIZES = {"_local_scalar_dense", "nonzero", "masked_select"}  # the host needs a number or a size


class CountWaits(TorchDispatchMode):
    """Records operations whose result, or its size, the host needs, such as boolean indexing."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in _SIZES or masks:
            self.ops.append(name)
        return func(*args, **(kwargs or {}))


class CountCopies(TorchFunctionMode):
    """Records calls that copy a tensor, or one of its numbers, to the CPU."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in {"cpu", "numpy", "item", "__float__", "__int__", "__bool__"}:
            self.ops.append(name)
        return func(*args, **(kwargs or {}))
