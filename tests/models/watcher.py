"""Observes, names and replays every mask of a forward pass."""

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

RANDOM = ("rand", "bernoulli", "normal", "uniform", "multinomial", "exponential")


class Watcher(TorchFunctionMode):
    """Replaces F.dropout by its own masks and keeps them under the name of the calling module."""

    def __init__(self, model: torch.nn.Module, seed: int = 0):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.masks: dict[str, torch.Tensor] = {}
        self.stray: list[str] = []
        self.path: list[str] = []
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self.path.append(name))
            module.register_forward_hook(self._leave)

    def _leave(self, *_):
        self.path.pop()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.dropout:
            x, rate = args[0], kwargs["p"]
            keep = torch.rand(x.shape, generator=self.generator, dtype=x.dtype) >= rate
            mask = keep.to(x.dtype) / (1 - rate)
            assert self.path[-1] not in self.masks, "a site drew twice in a window"
            self.masks[self.path[-1]] = mask
            return x * mask
        name = getattr(func, "__name__", "")
        if any(word in name for word in RANDOM) or "dropout" in name:
            self.stray.append(name)
        return func(*args, **kwargs)
