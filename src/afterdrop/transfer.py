"""Copies between a CPU and a GPU that neither waits for.

A copy from or to ordinary memory first waits for every kernel that was launched before it. One
from or to pinned memory is only another entry in a queue.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; what comes from a CPU goes through pinned memory.

    Example:
        >>> upload(torch.arange(3), torch.device("cpu"))
        tensor([0, 1, 2])
    """
    strided = tensor.layout is torch.strided and not tensor.is_nested  # others cannot be pinned
    if device.type != "cuda" or tensor.device.type != "cpu" or not strided:
        return tensor.to(device)
    # torch keeps pinned memory for the next copy, and knows when this one is done.
    pinned = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return pinned.to(device, non_blocking=True)


def constant(values: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A few numbers of a CPU on a device, copied there once; not to be written to.

    Example:
        >>> constant(torch.tensor([1.0, 2.0]), torch.device("cpu"), torch.float64)
        tensor([1., 2.], dtype=torch.float64)
    """
    return _constant(tuple(values.tolist()), device, dtype)


@functools.lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


class Parcel:
    """Tensors on their way to the CPU.

    Args:
        sources: The tensors on the device, held because nothing may be written over them yet.
        copies: Where they arrive.
        arrived: When, or None if they are there.
    """

    def __init__(
        self,
        sources: Mapping[str, Tensor],
        copies: dict[str, Tensor],
        arrived: torch.cuda.Event | None,
    ) -> None:
        self._sources, self._copies, self._arrived = sources, copies, arrived

    def open(self) -> dict[str, Tensor]:
        """The tensors, once they are there. Their memory is scarce: copy what is to stay."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copies


class Post:
    """Sends tensors to the CPU on a stream of its own, so that no kernel waits for a copy.

    Args:
        device: Where the tensors are; those of a CPU are there already.

    Example:
        >>> Post(torch.device("cpu")).send({"a": torch.ones(2)}).open()
        {'a': tensor([1., 1.])}
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, tensors: Mapping[str, Tensor]) -> Parcel:
        """Starts copies that begin when what was launched so far is done."""
        if self._stream is None:
            return Parcel(tensors, dict(tensors), None)
        sources = {name: tensor.contiguous() for name, tensor in tensors.items()}
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            copies = {
                name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
                    tensor, non_blocking=True
                )
                for name, tensor in sources.items()
            }
            return Parcel(sources, copies, self._stream.record_event())
