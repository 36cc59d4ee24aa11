"""A function without arguments as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

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
        with torch.cuda.graph(graph):  # records, does not run
            function()
        self._graph = graph
