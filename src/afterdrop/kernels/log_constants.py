"""Between natural logarithms and those of base 2, in which a GPU computes."""

from __future__ import annotations

import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
