"""Counts random operations of a train-mode pass, below the level that afterdrop controls."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class CountRandom(TorchDispatchMode):
    """Counts operations that draw more than one number; single numbers steer control flow."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and self._draws(func, args, kwargs or {}):
            first = out[0] if isinstance(out, (tuple, list)) else out
            if first.numel() > 1:
                self.ops.append(func.overloadpacket.__name__)
        return out

    @staticmethod
    def _draws(func, args, kwargs):
        names = [a.name for a in func._schema.arguments]
        given = {**dict(zip(names, args)), **kwargs}
        if any(given.get(name) == 0 for name in ("dropout_p", "dropout") if name in given):
            return False
        if func.overloadpacket.__name__ == "native_dropout" and given.get("p") == 0:
            return False
        return not any(given.get(name) is False for name in ("train", "training"))


def count_random(model, *args, **kwargs):
    """Number of random operations in a train-mode pass; restores the model's modes and buffers."""
    modes = [(m, m.training) for m in model.modules()]
    buffers = [(b, b.clone()) for b in model.buffers()]
    counter = CountRandom()
    try:
        model.train()
        with torch.no_grad(), torch.random.fork_rng(devices=[]), counter:
            model(*args, **kwargs)
    finally:
        for module, mode in modes:
            module.training = mode
        for buffer, before in buffers:
            buffer.copy_(before)
    return len(counter.ops)
