"""Detection of random draws that the operator mode does not intercept.

Below the operator mode, a dispatch mode sees every operation that reaches torch's kernels. If it is
tagged as random, it was not intercepted: noise, a library's own random kernel, or a scripted model.
Python's and NumPy's global generators are watched as well. The same pass measures how many bytes
are alive at once; chunks are sized by this number.
"""

import random
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from afterdrop.masks.control import OperatorMode

GLOBAL_GENERATORS = "python random or numpy"  # the operation of their draws


class Draw(NamedTuple):
    """A random draw that was not intercepted: the running module and the operation."""

    module: str
    op: str


class Detector(TorchDispatchMode):
    """Records random draws that were not intercepted, the coarsest dtype, and peak memory.

    Args:
        mode: The operator mode of the pass, which knows the running module.

    Attributes:
        draws: The draws, in order.
        coarsest: The floating-point dtype with the fewest digits that the pass computed with.
        peak_bytes: The most bytes that were alive at once, besides the weights.
    """

    def __init__(self, mode: OperatorMode) -> None:
        super().__init__()
        self.mode = mode
        self.draws: list[Draw] = []
        self.coarsest: torch.dtype | None = None
        self.peak_bytes = 0
        weights = [*mode.model.parameters(), *mode.model.buffers()]
        self._weights = {tensor.untyped_storage().data_ptr() for tensor in weights}
        self._live: dict[int, int] = {}
        self._bytes = 0
        self._generators = _python_generators()

    def __enter__(self) -> "Detector":
        self.mode.switch_calls.append(self._watch_generators)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        self.mode.switch_calls.remove(self._watch_generators)
        super().__exit__(*exc)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and _random(func, args, kwargs or {}):
            self.draws.append(Draw(self.mode.module, func.overloadpacket.__name__))
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, Tensor):
                self._track(tensor)
                if tensor.is_floating_point() and tensor.dtype != self.coarsest:
                    self.coarsest = coarser(tensor.dtype, self.coarsest)
        return out

    def _track(self, tensor: Tensor) -> None:
        address, size = _address(tensor), tensor.numel() * tensor.element_size()
        if not address or address in self._live or address in self._weights:
            return
        self._live[address] = size
        self._bytes += size
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        weakref.finalize(tensor, self._release, address)

    def _release(self, address: int) -> None:
        self._bytes -= self._live.pop(address, 0)

    def _watch_generators(self) -> None:
        """Attributes draws from Python's or NumPy's global generator to the innermost module."""
        now = _python_generators()
        if now != self._generators and self.mode.running:
            self.draws.append(Draw(self.mode.module, GLOBAL_GENERATORS))
        self._generators = now


def coarser(dtype: torch.dtype, other: torch.dtype | None) -> torch.dtype:
    """The floating-point dtype with fewer digits.

    Example:
        >>> coarser(torch.float32, torch.bfloat16)
        torch.bfloat16
    """
    if other is None or torch.finfo(dtype).eps > torch.finfo(other).eps:
        return dtype
    return other


def describe_draws(draws: list[Draw]) -> str:
    """The modules and operations of draws, for an error message.

    Example:
        >>> describe_draws([Draw("encoder", "randn"), Draw("", "rand"), Draw("", "rand")])
        '(root) (rand), encoder (randn)'
    """
    return ", ".join(sorted({f"{draw.module or '(root)'} ({draw.op})" for draw in draws}))


def _address(tensor: Tensor) -> int:
    """The data pointer; for packed weights of oneDNN, which have none, the object's identity."""
    try:
        return tensor.untyped_storage().data_ptr()
    except NotImplementedError:
        return id(tensor)


def _python_generators() -> tuple[Any, ...]:
    position = random.getstate()[1]
    legacy: Any = np.random.get_state()
    return position[-1], position[0], legacy[2], legacy[1][0]


def _random(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this call draws; fused kernels are tagged as random even at a rate of 0."""
    for number, argument in enumerate(func._schema.arguments):
        value = (
            args[number]
            if number < len(args)
            else kwargs.get(argument.name, argument.default_value)
        )
        if argument.name in ("dropout_p", "dropout", "p") and value == 0:
            return False
        if argument.name in ("train", "training") and value is False:
            return False
    return True
