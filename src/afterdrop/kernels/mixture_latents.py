"""The dropped latent vectors of a mixture of softmaxes, and the gradient of their products.

    t = tanh(P y + q)      z = mask∘t      d(P y) = mask∘(1 − t²)∘dz

A program handles a block of the units of one place. Letters: R places (time steps × rows), C
components, E units of each, padded to E₊; W ≥ C·E₊ columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from afterdrop.kernels.lstm_forward import tanh

_BLOCK = 1024  # units per program


@triton.jit
def _forward(
    projected,  # [R, stride] float32: P y, overwritten by t
    bias,  # [C · E₊] float32
    mask,  # [rows, C · E₊]
    latents,  # [R, C · E₊]: z
    stride,
    rows,
    width,
    padded,
    units,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = projected + place * stride + column
    x = tl.load(at, mask=inside, other=0.0) + tl.load(bias + column, mask=inside, other=0.0)
    t = tanh(x)
    tl.store(at, t, mask=inside)
    if MASK:
        t *= tl.load(mask + place % rows * width + column, mask=inside, other=0.0).to(tl.float32)
    # Padding units keep what they hold, such as the one that is always 1.
    real = inside & (column % padded < units)
    tl.store(latents + place * width + column, t.to(latents.dtype.element_ty), mask=real)


@triton.jit
def _backward(
    d_latents,  # [R, C · E₊] float32: dz
    tanhs,  # [R, stride] float32: t
    mask,  # [rows, C · E₊]
    d_projected,  # [R, d_stride], written
    stride,
    d_stride,
    rows,
    width,
    scale,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    t = tl.load(tanhs + place * stride + column, mask=inside, other=0.0)
    d = tl.load(d_latents + place * width + column, mask=inside, other=0.0) * (1 - t * t) * scale
    if MASK:
        d *= tl.load(mask + place % rows * width + column, mask=inside, other=0.0).to(tl.float32)
    at = d_projected + place * d_stride + column
    tl.store(at, d.to(d_projected.dtype.element_ty), mask=inside)


def latent_vectors(
    projected: Tensor, bias: Tensor, mask: Tensor | None, latents: Tensor, units: int
) -> None:
    """Writes dropped latent vectors, and their tanh without the mask over the products.

    Args:
        projected: [R, W] float32, whose first C·E₊ columns are read and overwritten.
        bias: [C·E₊] float32, 0 for padding units.
        mask: [rows, C·E₊], repeated R / rows times; None for ones.
        latents: [R, C, E₊], whose units below E are written.
        units: E.
    """
    R, C, E = latents.shape
    assert latents.is_contiguous() and (mask is None or mask.is_contiguous())
    given = latents if mask is None else mask
    _forward[(R, -(-C * E // _BLOCK))](
        projected,
        bias,
        given,
        latents,
        projected.stride(0),
        len(given),
        C * E,
        E,
        units,
        MASK=mask is not None,
        BLOCK=_BLOCK,
    )


def latent_gradients(
    d_latents: Tensor, tanhs: Tensor, mask: Tensor | None, d_projected: Tensor, scale: float
) -> None:
    """Writes the gradient of the products from that of the dropped latent vectors.

    Args:
        d_latents: [R, C·E₊] float32, contiguous.
        tanhs: [R, W] float32, as `latent_vectors` left them.
        mask: As in `latent_vectors`.
        d_projected: [R, W], whose first C·E₊ columns are written.
        scale: Factor of the gradient.
    """
    R, width = d_latents.shape
    assert d_latents.is_contiguous() and (mask is None or mask.is_contiguous())
    given = d_latents if mask is None else mask
    _backward[(R, -(-width // _BLOCK))](
        d_latents,
        tanhs,
        given,
        d_projected,
        tanhs.stride(0),
        d_projected.stride(0),
        len(given),
        width,
        scale,
        MASK=mask is not None,
        BLOCK=_BLOCK,
    )
