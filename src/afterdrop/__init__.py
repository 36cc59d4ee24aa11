"""Train once with dropout, choose the model afterwards.

Dropout training maximises one lower bound that a whole family of models shares (Melis et al.,
2018). afterdrop evaluates them all on trained weights, picks the best on validation data, and
hands back a predictor:

    scores = afterdrop.evaluate(model, valid_batches)
    choice = afterdrop.select(scores)
    predict = choice.predictor(model)
"""

import afterdrop.interrupted_import  # noqa: F401 (first: for Ctrl-C during the imports below)
from afterdrop.conformance import check as check
from afterdrop.distillation import distil as distil
from afterdrop.errors import AfterdropError as AfterdropError
from afterdrop.evaluation import Request as Request
from afterdrop.evaluation import Scores as Scores
from afterdrop.evaluation import evaluate as evaluate
from afterdrop.evaluation import evaluate_samples as evaluate_samples
from afterdrop.evaluation import evaluate_text as evaluate_text
from afterdrop.evaluation.likelihoods.parametric import (
    ParametricLikelihood as ParametricLikelihood,
)
from afterdrop.family.bounds import Bounds as Bounds
from afterdrop.family.estimates import Estimate as Estimate
from afterdrop.family.member import AMC as AMC
from afterdrop.family.member import DET as DET
from afterdrop.family.member import GMC as GMC
from afterdrop.family.member import Grid as Grid
from afterdrop.family.member import Member as Member
from afterdrop.family.power_mean import log_power_mean as log_power_mean
from afterdrop.masks.sites import Site as Site
from afterdrop.masks.sites import Sites as Sites
from afterdrop.masks.sites import find_sites as find_sites
from afterdrop.runs import Run as Run
from afterdrop.selection import Choice as Choice
from afterdrop.selection import Predictor as Predictor
from afterdrop.selection import StreamPredictor as StreamPredictor
from afterdrop.selection import select as select

__version__ = "0.2.0"
