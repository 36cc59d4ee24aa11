"""Torch's dropout operators with given masks.

A handler is a function `(source, func, *args, **kwargs)` that computes what the torch function
`func` computes in training, with masks from `source`. Rescaling follows each operator's own rule,
per row: 1/(1 − rate) for plain and feature dropout and for attention; for alpha dropout, the affine
map that keeps mean and variance (Klambauer et al., 2017).
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from afterdrop.masks.mask_source import Call, MaskSource
from afterdrop.masks.row_masks import attention_weights

Handler = Callable[..., Any]
Rule = Callable[[MaskSource, str, Tensor, float, list[int], Call | None], Tensor]

_SELU = 1.7580993408473766  # λα of SELU; alpha dropout sets dropped units to its negative


def drop(
    source: MaskSource, op: str, x: Tensor, rate: float, shape: list[int], call: Call | None = None
) -> Tensor:
    """Plain dropout of `x` with one mask value per element of `shape`."""
    mask = source.mask(op, rate, x.new_empty(()).expand(shape), x, call)
    return x if mask is None else mask.drop(x)


def alpha_drop(
    source: MaskSource, op: str, x: Tensor, rate: float, shape: list[int], call: Call | None = None
) -> Tensor:
    """Alpha dropout: dropped units become −λα, then an affine map restores mean and variance."""
    mask = source.mask(op, rate, x.new_empty(()).expand(shape), x, call)
    if mask is None:
        return x
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
        if not (train or source.is_forced(call)) or p == 0:
            return input
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
