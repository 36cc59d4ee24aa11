"""Which torch functions are intercepted, and by which handler.

Masks that a model draws itself come from torch.bernoulli, torch.rand and the like, whose handlers
are here. Python functions of torch.nn.functional dispatch as a whole, which would hide the
operators in their bodies. `run_body` runs a copy of the body that does not dispatch again, with the
mode active inside, so that F.multi_head_attention_forward is seen as attention and dropout.
"""

from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from afterdrop.masks.dropout_rules import (
    Handler,
    alpha_drop,
    attention,
    drop,
    dropout_handler,
    native_dropout,
    recurrent_handler,
)
from afterdrop.masks.mask_source import MaskSource


def _bernoulli_(
    source: MaskSource, func: Any, self: Tensor, p: Any = 0.5, *, generator: Any = None
) -> Tensor:
    return self.copy_(_bernoulli_like(source, "bernoulli_", self, p))


def _bernoulli(
    source: MaskSource, func: Any, input: Tensor, p: Any = None, *, generator: Any = None
) -> Tensor:
    return _bernoulli_like(source, "bernoulli", input, input if p is None else p)


def _bernoulli_like(source: MaskSource, op: str, like: Tensor, p: Any) -> Tensor:
    sure = bool((p >= 1).all()) if isinstance(p, Tensor) else p >= 1
    if sure:
        return torch.ones_like(like)
    rate = None if isinstance(p, Tensor) else 1.0 - p
    u = source.uniforms(op, rate, like)
    return (u >= 1.0 - p).to(like.dtype)


def _rand(source: MaskSource, func: Any, *size: Any, **kwargs: Any) -> Tensor:
    kwargs.pop("generator", None)
    return _fill_uniform(source, "rand", torch.empty(*size, **kwargs))


def _rand_like(source: MaskSource, func: Any, input: Tensor, **kwargs: Any) -> Tensor:
    return _fill_uniform(source, "rand_like", torch.empty_like(input, **kwargs))


def _uniform_(source: MaskSource, func: Any, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    bounds = {"from": 0.0, "to": 1.0, **dict(zip(("from", "to"), args)), **kwargs}
    if (bounds["from"], bounds["to"]) != (0.0, 1.0):  # noise, not a mask
        return func(self, *args, **kwargs)
    return _fill_uniform(source, "uniform_", self)


def _fill_uniform(source: MaskSource, op: str, x: Tensor) -> Tensor:
    """Fills `x` with given uniforms. A single number is left to torch: it steers control flow."""
    if x.dim() <= 1 and x.numel() <= 1:
        return x.uniform_()  # LayerDrop, for example
    return x.copy_(source.uniforms(op, None, x))


@lru_cache(maxsize=64)
def _undispatched(func: FunctionType) -> FunctionType:
    """A copy of a function of torch.nn.functional whose tests for overrides all say no."""

    def never(*args: Any) -> bool:
        return False

    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**func.__globals__, **dict.fromkeys(names, never)}
    copy = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def run_body(source: MaskSource, func: FunctionType, *args: Any, **kwargs: Any) -> Any:
    """Runs the body of a function of torch.nn.functional, whose operators are intercepted."""
    body = _undispatched(func)
    with source:
        return body(*args, **kwargs)


_FUNCTIONAL = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    F.multi_head_attention_forward,
)


def _handlers() -> dict[Any, Handler]:
    found: dict[Any, Handler] = dict.fromkeys(_FUNCTIONAL, run_body)
    for name, rule, feature in (
        ("dropout", drop, False),
        ("feature_dropout", drop, True),
        ("alpha_dropout", alpha_drop, False),
        ("feature_alpha_dropout", alpha_drop, True),
    ):
        for inplace in (False, True):
            func = getattr(torch, name + "_" * inplace)
            found[func] = dropout_handler(rule, name, feature=feature, inplace=inplace)
    found[torch.native_dropout] = native_dropout
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        found[getattr(torch, name)] = recurrent_handler(name)
    found[F.scaled_dot_product_attention] = attention
    found[torch.Tensor.bernoulli_] = _bernoulli_
    found[torch.Tensor.bernoulli] = _bernoulli
    found[torch.bernoulli] = _bernoulli
    found[torch.rand] = _rand
    found[torch.rand_like] = _rand_like
    found[torch.Tensor.uniform_] = _uniform_
    return found


HANDLERS = _handlers()
