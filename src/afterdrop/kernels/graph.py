"""A function of nothing as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Replay:
    """Runs a function that reads and writes fixed tensors, after its first call as a CUDA graph.

    Args:
        function: The function; its first call also compiles its kernels.
        device: Where it works; on a CPU it is simply called.
    """

    def __init__(self, function: Callable[[], None], device: torch.device) -> None:
        self._function, self._device = function, device
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """One run."""
        if self._graph is not None:
            self._graph.replay()
            return
        self._function()
        if self._device.type != "cuda":
            return
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # records, does not run
            self._function()
        self._graph = graph
