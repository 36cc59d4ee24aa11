"""Evaluation: every member of the family on data, for any module or a text."""

from afterdrop.evaluation.api import evaluate as evaluate
from afterdrop.evaluation.api import evaluate_samples as evaluate_samples
from afterdrop.evaluation.api import evaluate_text as evaluate_text
from afterdrop.evaluation.request import Request as Request
from afterdrop.evaluation.request import StreamSettings as StreamSettings
from afterdrop.evaluation.scores import Fit as Fit
from afterdrop.evaluation.scores import Scores as Scores
