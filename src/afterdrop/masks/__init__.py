"""Dropout sites of any module, and forward passes under masks that depend only on a seed."""

from afterdrop.masks.control import Control
from afterdrop.masks.rates import Multipliers
from afterdrop.masks.rows import Rows
from afterdrop.masks.sites import Site, Sites, find_sites
from afterdrop.masks.uniforms import SCHEMES, Plan, Scheme

__all__ = [
    "SCHEMES",
    "Control",
    "Multipliers",
    "Plan",
    "Rows",
    "Scheme",
    "Site",
    "Sites",
    "find_sites",
]
