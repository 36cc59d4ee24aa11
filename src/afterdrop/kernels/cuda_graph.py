"""Replays a function as a CUDA graph, and runs work on a second stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Replay:
    """Runs a function that reads and writes fixed tensors, as a CUDA graph after its first call.

    The function is an argument of each call and is not stored: an owner whose bound method it is
    would form a reference cycle and keep its memory until the next garbage collection.

    Args:
        device: The device of the function's tensors; on a CPU the function is simply called.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, function: Callable[[], None]) -> None:
        """Runs the function, the same in every call; the first call also compiles its kernels."""
        if self._graph is not None:
            self._graph.replay()
            return
        function()
        if self._device.type != "cuda":
            return
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        main = torch.cuda.Stream(self._device, priority=-1)  # before a `SideStream`
        # Records without running. Other threads, such as NCCL's, may go on meanwhile.
        with torch.cuda.graph(graph, stream=main, capture_error_mode="thread_local"):
            function()
        self._graph = graph


class SideStream:
    """A second stream for work whose results the main stream needs later.

    Results that one stream passes to the other must lie in tensors allocated beforehand: memory
    that is freed is reused by its own stream, even while the other stream still reads it.

    Args:
        device: The device; on a CPU everything runs in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def work(self) -> Iterator[None]:
        """Launches inside run concurrently with the main stream, after all of its work so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Makes the main stream wait for all work on this stream."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
