"""A function without arguments as a CUDA graph, and work beside its main stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Replay:
    """Runs a function that reads and writes fixed tensors, after its first call as a CUDA graph.

    The function is given with each call and not kept: an owner that is its own function's object
    would otherwise hold itself, and its memory, until the next search for such circles.

    Args:
        device: Where the function works; on a CPU it is simply called.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, function: Callable[[], None]) -> None:
        """One run of always the same function; the first call also compiles its kernels."""
        if self._graph is not None:
            self._graph.replay()
            return
        function()
        if self._device.type != "cuda":
            return
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        main = torch.cuda.Stream(self._device, priority=-1)  # goes before work `SideStream` it
        with torch.cuda.graph(graph, stream=main):  # records, does not run
            function()
        self._graph = graph


class SideStream:
    """A second stream for work that the main one needs later; on a CPU all runs in order.

    What one stream makes for the other must lie in tensors that are there from the start: memory
    that is given back is used again by its own stream, whatever the other still reads.

    Args:
        device: Where.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def work(self) -> Iterator[None]:
        """What is launched inside runs beside the main stream, after all that it has so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What the main stream does next comes after all work beside it."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
