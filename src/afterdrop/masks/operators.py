"""What each random operator of torch does under control: the same function with given masks.

`HANDLERS` maps a torch function to a handler `(control, func, *args, **kwargs)`. Rescaling follows
each operator's own rule, per row: 1/(1 − rate) for plain and feature dropout and attention, the
affine form that keeps mean and variance for alpha dropout (Klambauer et al., 2017).

Python functions of torch.nn.functional dispatch as a whole, which would hide the operators in
their bodies. `under_control` runs a copy of the body whose dispatch test says no, with the mode on
inside, so that F.multi_head_attention_forward is seen as the attention and dropout it consists of.
"""

import math
import warnings
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from afterdrop.masks.keep import attention_weights

if TYPE_CHECKING:
    from afterdrop.masks.control import Control

Handler = Callable[..., Any]

_SELU = 1.7580993408473766  # λα of SELU, the value that alpha dropout gives to dropped units


def drop(
    control: "Control", op: str, x: Tensor, rate: float, shape: list[int], place: Any = None
) -> Tensor:
    """Plain dropout of `x` with one mask value per element of `shape`."""
    keep = control.visit(op, rate, x.new_empty(()).expand(shape), x, place)
    return x if keep is None else keep.drop(x)


def alpha_drop(
    control: "Control", op: str, x: Tensor, rate: float, shape: list[int], place: Any = None
) -> Tensor:
    """Alpha dropout: dropped units become −λα, then an affine map restores mean and variance."""
    keep = control.visit(op, rate, x.new_empty(()).expand(shape), x, place)
    if keep is None:
        return x
    p = keep.rate
    a = ((_SELU**2 * p + 1) * (1 - p)) ** -0.5
    shift = (keep.mask - 1 + p) * (_SELU * a)
    return (keep.unfold(x) * keep.mask * a + shift).to(x.dtype).reshape(x.shape)


def _dropout(rule: Handler, op: str, *, feature: bool, inplace: bool) -> Handler:
    def handler(control: "Control", func: Any, input: Tensor, p: float, train: bool) -> Tensor:
        place = control.arrive()
        if not (train or control.forces(place)) or p == 0:
            return input
        shape = list(input.shape)
        if feature:
            shape = shape[:2] + [1] * (len(shape) - 2)
        result = rule(control, op, input, p, shape, place)
        return input.copy_(result) if inplace else result

    return handler


def _native_dropout(
    control: "Control", func: Any, input: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    result = _dropout(drop, "native_dropout", feature=False, inplace=False)(
        control, func, input, p, train is not False
    )
    # The second output is the mask, which only a backward pass would use.
    return result, torch.ones_like(input, dtype=torch.bool)


def _attention(
    control: "Control",
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(QKᵀ·scale + mask), dropped, times V: what the fused kernels compute."""
    if dropout_p == 0:
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        return func(query, key, value, attn_mask, 0.0, is_causal, **options)
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    # The scores are by far the largest tensor: whatever can be done to smaller ones is.
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if attn_mask is not None:
        seen = attn_mask if attn_mask.dtype == torch.bool else ~attn_mask.isneginf()
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        else:
            scores = scores + attn_mask
    keep = control.visit("attention", dropout_p, scores, scores)
    dropped = keep.attention if keep is not None else attention_weights
    out = dropped(scores, is_causal) @ value
    if attn_mask is not None:
        # A query that sees no key gets zeros, as from torch's own kernels, and not NaN.
        out = out.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return out


def _recurrent(op: str) -> Handler:
    def handler(control: "Control", func: Any, *args: Any) -> tuple[Tensor, ...]:
        """A stack of layers as single layers with controlled dropout in between."""
        packed = isinstance(args[3], list | tuple)
        lead, (hx, params, biases, layers, rate, train, both, *rest) = (
            args[: 1 + packed],
            args[1 + packed :],
        )
        if rate == 0 or layers == 1 or not train:
            return func(*args)
        x, lengths = lead[0], lead[1:]
        sides = 2 if both else 1
        per_layer = len(params) // layers
        states = hx if isinstance(hx, list | tuple) else [hx]
        finals: list[tuple[Tensor, ...]] = []
        for layer in range(layers):
            start = [state[layer * sides : (layer + 1) * sides] for state in states]
            first = start if isinstance(hx, list | tuple) else start[0]
            own = params[layer * per_layer : (layer + 1) * per_layer]
            with warnings.catch_warnings():
                # cuDNN compacts the weights of a single layer at each call and says so.
                warnings.filterwarnings("ignore", "RNN module weights", UserWarning)
                x, *final = func(x, *lengths, first, own, biases, 1, 0.0, False, both, *rest)
            finals.append(tuple(final))
            if layer + 1 < layers:
                x = drop(control, op, x, rate, list(x.shape))
        return x, *(torch.cat(parts) for parts in zip(*finals))

    return handler


def _bernoulli_(
    control: "Control", func: Any, self: Tensor, p: Any = 0.5, *, generator: Any = None
) -> Tensor:
    return self.copy_(_bernoulli_like(control, "bernoulli_", self, p))


def _bernoulli(
    control: "Control", func: Any, input: Tensor, p: Any = None, *, generator: Any = None
) -> Tensor:
    return _bernoulli_like(control, "bernoulli", input, input if p is None else p)


def _bernoulli_like(control: "Control", op: str, like: Tensor, p: Any) -> Tensor:
    sure = bool((p >= 1).all()) if isinstance(p, Tensor) else p >= 1
    if sure:
        return torch.ones_like(like)
    rate = None if isinstance(p, Tensor) else 1.0 - p
    u = control.raw_uniforms(op, rate, like)
    return (u >= 1.0 - p).to(like.dtype)


def _rand(control: "Control", func: Any, *size: Any, **kwargs: Any) -> Tensor:
    kwargs.pop("generator", None)
    return _uniform_or(control, "rand", torch.empty(*size, **kwargs))


def _rand_like(control: "Control", func: Any, input: Tensor, **kwargs: Any) -> Tensor:
    return _uniform_or(control, "rand_like", torch.empty_like(input, **kwargs))


def _uniform_(control: "Control", func: Any, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    bounds = {"from": 0.0, "to": 1.0, **dict(zip(("from", "to"), args)), **kwargs}
    if (bounds["from"], bounds["to"]) != (0.0, 1.0):  # noise, not a mask
        return func(self, *args, **kwargs)
    return _uniform_or(control, "uniform_", self)


def _uniform_or(control: "Control", op: str, like: Tensor) -> Tensor:
    """Controlled uniforms in `like`; a single number steers control flow (LayerDrop): torch's."""
    if like.dim() <= 1 and like.numel() <= 1:
        return like.uniform_()
    return like.copy_(control.raw_uniforms(op, None, like))


@lru_cache(maxsize=64)
def _body(func: FunctionType) -> FunctionType:
    def never(*args: Any) -> bool:
        return False

    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**func.__globals__, **dict.fromkeys(names, never)}
    copy = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def under_control(control: "Control", func: FunctionType, *args: Any, **kwargs: Any) -> Any:
    """Runs the body of a function of torch.nn.functional with its inner operators under control."""
    body = _body(func)
    with control:
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
    found: dict[Any, Handler] = dict.fromkeys(_FUNCTIONAL, under_control)
    for name, rule, feature in (
        ("dropout", drop, False),
        ("feature_dropout", drop, True),
        ("alpha_dropout", alpha_drop, False),
        ("feature_alpha_dropout", alpha_drop, True),
    ):
        for inplace in (False, True):
            func = getattr(torch, name + "_" * inplace)
            found[func] = _dropout(rule, name, feature=feature, inplace=inplace)
    found[torch.native_dropout] = _native_dropout
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        found[getattr(torch, name)] = _recurrent(name)
    found[F.scaled_dot_product_attention] = _attention
    found[torch.Tensor.bernoulli_] = _bernoulli_
    found[torch.Tensor.bernoulli] = _bernoulli
    found[torch.bernoulli] = _bernoulli
    found[torch.rand] = _rand
    found[torch.rand_like] = _rand_like
    found[torch.Tensor.uniform_] = _uniform_
    return found


HANDLERS = _handlers()
