"""Distillation: a deterministic copy of a model that predicts as a choice does, in one pass."""

from afterdrop.distillation.distil import Distilled as Distilled
from afterdrop.distillation.distil import distil as distil
from afterdrop.distillation.kept_gain import KeptGain as KeptGain
