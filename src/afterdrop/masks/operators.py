"""The random operators of torch, each with its own rule of dropping.

    MaskSource    the interface between random operators and whatever answers them with masks
    rules         what each operator does with a mask: plain, features, alpha, attention, LSTM
    HANDLERS      which rule answers which function

Stochastic depth, which consists of other operators, has its own file.
"""

import math
import warnings
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from afterdrop.masks.rows import RowMask, attention_weights


class Place(NamedTuple):
    """A dropout operation in the code: a module and the number of the operation in its forward."""

    module: str
    number: int

    def __str__(self) -> str:
        name = self.module or "(root)"
        return f"{name}#{self.number}" if self.number else name


class Call(NamedTuple):
    """One execution of a dropout operation: its place, and which call of the module this is."""

    place: Place
    number: int


class MaskSource(Protocol):
    """Answers random operators; entered as a context manager, it intercepts them."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: Any) -> None: ...

    def locate(self) -> Call:
        """The random operation that runs now. Each operation asks once."""

    def is_forced(self, call: Call) -> bool:
        """Whether dropout is off here only because its module is held in eval mode."""

    def mask(
        self, op: str, rate: float, like: Tensor, value: Tensor, call: Call | None = None
    ) -> RowMask | None:
        """The mask of a dropout operation, or None if nothing is dropped.

        Args:
            op: The name of the operator.
            rate: The operator's own rate.
            like: A tensor of the mask's shape, dtype and device.
            value: The tensor to be dropped.
            call: From `locate`, unless the operation has not asked yet.
        """

    def uniforms(self, op: str, rate: float | None, like: Tensor) -> Tensor:
        """Uniforms of the shape of `like` for a mask that the model computes itself."""

    @property
    def declared(self) -> bool:
        """Whether attributes that hold rates were declared."""

    @property
    def single_draw(self) -> float | None:
        """What draws of a single number give; None leaves them to torch."""


Handler = Callable[..., Any]
Rule = Callable[[MaskSource, str, Tensor, float, list[int], Call | None], Tensor]

_SELU = 1.7580993408473766  # λα of SELU; alpha dropout sets dropped units to its negative


def drop(
    source: MaskSource, op: str, x: Tensor, rate: float, shape: list[int], call: Call | None = None
) -> Tensor:
    """Plain dropout of `x` with one mask value per element of `shape`."""
    like = x if shape == list(x.shape) else x.new_empty(()).expand(shape)
    mask = source.mask(op, rate, like, x, call)
    return _anew(x) if mask is None else mask.drop(x)


def _anew(x: Tensor) -> Tensor:
    """Another tensor with the values of `x`: a caller may register it, and `x` may be a parameter.

    A chain of views takes longer with every view.
    """
    return x.view_as(x) if torch.is_grad_enabled() else x.detach()


def alpha_drop(
    source: MaskSource, op: str, x: Tensor, rate: float, shape: list[int], call: Call | None = None
) -> Tensor:
    """Alpha dropout: dropped units become −λα, then an affine map restores mean and variance."""
    mask = source.mask(op, rate, x.new_empty(()).expand(shape), x, call)
    if mask is None:
        return _anew(x)
    p = mask.rate
    a = ((_SELU**2 * p + 1) * (1 - p)) ** -0.5
    shift = (mask.mask - 1 + p) * (_SELU * a)
    return (mask.unfold(x) * mask.mask * a + shift).to(x.dtype).reshape(x.shape)


def dropout_handler(rule: Rule, op: str, *, feature: bool, inplace: bool) -> Handler:
    """The handler of a dropout function of torch.

    Args:
        rule: `drop` or `alpha_drop`.
        op: The operator's name.
        feature: Whether whole channels are dropped.
        inplace: Whether the function overwrites its input.
    """

    def handler(source: MaskSource, func: Any, input: Tensor, p: float, train: bool) -> Tensor:
        call = source.locate()
        if not (train or source.is_forced(call)):
            return input
        if p == 0:  # a declared rate may be scaled to 0
            return input if inplace else _anew(input)
        shape = list(input.shape)
        if feature:
            shape = shape[:2] + [1] * (len(shape) - 2)
        result = rule(source, op, input, p, shape, call)
        return input.copy_(result) if inplace else result

    return handler


def native_dropout(
    source: MaskSource, func: Any, input: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    """Handles torch.native_dropout, which returns the mask as well."""
    result = dropout_handler(drop, "native_dropout", feature=False, inplace=False)(
        source, func, input, p, train is not False
    )
    # Only a backward pass would use the mask.
    return result, torch.ones_like(input, dtype=torch.bool)


def attention(
    source: MaskSource,
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
    """Handles F.scaled_dot_product_attention: dropout(softmax(Q·Kᵀ·scale + mask))·V."""
    if dropout_p == 0:
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        return func(query, key, value, attn_mask, 0.0, is_causal, **options)
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    # The scores are by far the largest tensor, so the queries are scaled instead.
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if attn_mask is not None:
        seen = attn_mask if attn_mask.dtype == torch.bool else ~attn_mask.isneginf()
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        else:
            scores = scores + attn_mask
    mask = source.mask("attention", dropout_p, scores, scores)
    weights = mask.attention if mask is not None else attention_weights
    out = weights(scores, is_causal) @ value
    if attn_mask is not None:
        # As torch's own kernels do, give zeros rather than NaN to a query that sees no key.
        out = out.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return out


def recurrent_handler(op: str) -> Handler:
    """The handler of torch.lstm and its siblings: single layers, with dropout between them."""

    def handler(source: MaskSource, func: Any, *args: Any) -> tuple[Tensor, ...]:
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
                # cuDNN compacts the weights of a single layer at each call and warns about it.
                warnings.filterwarnings("ignore", "RNN module weights", UserWarning)
                x, *final = func(x, *lengths, first, own, biases, 1, 0.0, False, both, *rest)
            finals.append(tuple(final))
            if layer + 1 < layers:
                x = drop(source, op, x, rate, list(x.shape))
        return x, *(torch.cat(parts) for parts in zip(*finals))

    return handler


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
    # A draw of ones with a small probability marks what is dropped (DropBlock), else what is kept.
    rate = None if isinstance(p, Tensor) else min(p, 1.0 - p)
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
    """Fills `x` with given uniforms.

    A single number steers control flow, as in LayerDrop. It is a mask if rates are declared.
    """
    if x.dim() <= 1 and x.numel() <= 1 and not source.declared:
        return x.uniform_() if source.single_draw is None else x.fill_(source.single_draw)
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


def functional_dropout(
    source: MaskSource,
    func: FunctionType,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """Handles F.dropout as `run_body` does, without intercepting a second call."""
    if not 0 <= p <= 1:
        return run_body(source, func, input, p, training, inplace)  # its error
    operator = torch.dropout_ if inplace else torch.dropout
    return HANDLERS[operator](source, operator, input, p, training)


_FUNCTIONAL = (
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    F.multi_head_attention_forward,
)


def _handlers() -> dict[Any, Handler]:
    found: dict[Any, Handler] = dict.fromkeys(_FUNCTIONAL, run_body)
    found[F.dropout] = functional_dropout
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
