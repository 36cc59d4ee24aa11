"""Detection of random draws that the operator mode does not intercept.

Below the operator mode, a dispatch mode sees every operation that reaches torch's kernels. If it is
tagged as random, it was not intercepted: noise, a library's own random kernel, or a scripted model.
Python's and NumPy's global generators are watched as well. The same pass measures how many bytes
are alive at once; chunks are sized by this number.
"""

import random
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from afterdrop.masks.control import OperatorMode

T = TypeVar("T")
GLOBAL_GENERATORS = "python random or numpy"  # the operation of their draws


class Draw(NamedTuple):
    """A random draw that was not intercepted: the running module and the operation."""

    module: str
    op: str


class Detector(TorchDispatchMode):
    """Records random draws that were not intercepted, the coarsest dtype, and peak memory.

    Args:
        mode: The operator mode of the pass, which knows the running module.
        by_module: Whether draws from Python's and NumPy's global generators are attributed to
            modules, which reads both whenever a module begins or ends.

    Attributes:
        draws: The draws, in order.
        coarsest: The floating-point dtype with the fewest digits that the pass computed with.
        peak_bytes: The most bytes that were alive at once, besides the weights.
        largest_bytes: The bytes of the largest tensor among them.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler, which takes seconds and is not used here."""
        return False

    def __init__(self, mode: OperatorMode, *, by_module: bool = False) -> None:
        super().__init__()
        self.mode, self._by_module = mode, by_module
        self.draws: list[Draw] = []
        self.coarsest: torch.dtype | None = None
        self.peak_bytes = self.largest_bytes = 0
        weights = [*mode.model.parameters(), *mode.model.buffers()]
        self._weights = {_address(tensor) for tensor in weights}
        self._live: dict[int, int] = {}
        self._bytes = 0
        self._before = random.getstate(), np.random.get_state()
        self._generators = _python_generators()

    def __enter__(self) -> "Detector":
        if self._by_module:
            self.mode.switch_calls.append(self._watch_generators)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        if self._by_module:
            self.mode.switch_calls.remove(self._watch_generators)
        super().__exit__(*exc)

    def rewound_generators(self) -> bool:
        """Whether Python's or NumPy's global generator was used; both are set back."""
        used = _python_generators() != self._generators
        random.setstate(self._before[0])
        np.random.set_state(self._before[1])
        return used

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
        self.largest_bytes = max(self.largest_bytes, size)
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        weakref.finalize(_memory(tensor), self._release, address)

    def _release(self, address: int) -> None:
        self._bytes -= self._live.pop(address, 0)

    def _watch_generators(self) -> None:
        """Attributes draws from Python's or NumPy's global generator to the innermost module."""
        now = _python_generators()
        if now != self._generators and self.mode.running:
            self.draws.append(Draw(self.mode.module, GLOBAL_GENERATORS))
        self._generators = now


def detected(mode: OperatorMode, run: Callable[[], T]) -> tuple[T, Detector]:
    """What `run` returns, passes under a mode, and what was detected in them.

    Reading the global generators at every module takes longer than a pass of a model with
    thousands of modules, so passes run again for it only if these generators were used.
    """
    detector = Detector(mode)
    with detector:
        output = run()
    if detector.rewound_generators():
        detector = Detector(mode, by_module=True)
        with detector:
            output = run()
    return output, detector


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
    """The data pointer; the object's identity for tensors without one.

    Packed weights of oneDNN have none, nor have subclasses that hold other tensors.
    """
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def _memory(tensor: Tensor) -> Any:
    """What lives as long as the tensor's memory: its storage, which views of it share."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return tensor


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
