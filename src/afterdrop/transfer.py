"""Asynchronous copies between a CPU and a GPU.

A copy from or to pageable memory waits for every kernel that was launched before it. A copy from or
to pinned memory is only queued.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to a device; a copy from a CPU goes through pinned memory.

    Example:
        >>> upload(torch.arange(3), torch.device("cpu"))
        tensor([0, 1, 2])
    """
    strided = (
        tensor.layout is torch.strided and not tensor.is_nested
    )  # other layouts cannot be pinned
    if device.type != "cuda" or tensor.device.type != "cpu" or not strided:
        return tensor.to(device)
    # torch's allocator reuses the pinned memory once this copy is done.
    pinned = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return pinned.to(device, non_blocking=True)


def constant(values: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A few numbers on a device, copied there once and cached; not to be written to.

    Example:
        >>> constant(torch.tensor([1.0, 2.0]), torch.device("cpu"), torch.float64)
        tensor([1., 2.], dtype=torch.float64)
    """
    return _constant(tuple(values.tolist()), device, dtype)


@functools.lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


class Parcel:
    """Tensors that are being copied to the CPU.

    Args:
        sources: The tensors on the device, kept alive until they are copied.
        copies: The copies on the CPU.
        arrived: The event after which the copies are complete; None if they already are.
    """

    def __init__(
        self,
        sources: Mapping[str, Tensor],
        copies: dict[str, Tensor],
        arrived: torch.cuda.Event | None,
    ) -> None:
        self._sources, self._copies, self._arrived = sources, copies, arrived

    def open(self) -> dict[str, Tensor]:
        """Waits for the copies and returns them. Pinned memory is scarce: copy what you keep."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copies


class Post:
    """Copies tensors to the CPU on a separate stream, so that no kernel waits for a copy.

    Args:
        device: The device of the tensors; those on a CPU are not copied.

    Example:
        >>> Post(torch.device("cpu")).send({"a": torch.ones(2)}).open()
        {'a': tensor([1., 1.])}
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, tensors: Mapping[str, Tensor]) -> Parcel:
        """Starts copies that begin once everything launched so far has finished."""
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


def with_float64(x: Tensor) -> Tensor:
    """The tensor on a device that has float64: its own, or the CPU.

    CPUs and CUDA have it; of other accelerators nothing is assumed.
    """
    return x if x.device.type in ("cpu", "cuda") else x.cpu()
