"""Factors between natural and base-2 logarithms; a GPU has instructions for base 2."""

from __future__ import annotations

import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
