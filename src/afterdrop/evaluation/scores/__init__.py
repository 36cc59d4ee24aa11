"""Scores: the results of an evaluation, per target, and what follows from them."""

from afterdrop.evaluation.scores.scores import Fit as Fit
from afterdrop.evaluation.scores.scores import Scores as Scores
