"""Temporary eval mode, after which every module's own mode is restored."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Puts a model into eval mode; restores every module's own mode on exit.

    Example:
        >>> model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5).eval())
        >>> with eval_mode(model):
        ...     [module.training for module in model.modules()]
        [False, False, False]
        >>> [module.training for module in model.modules()]
        [True, True, False]
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def eval_mode_without_fast_path(model: nn.Module) -> Iterator[None]:
    """Eval mode without the fast path of nn.TransformerEncoder.

    The fast path sets padded positions to zero; the path that training takes does not.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with eval_mode(model):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
