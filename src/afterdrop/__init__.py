"""Train once with dropout, choose the model afterwards.

Dropout training maximises one lower bound that a whole family of models shares (Melis et al.,
2018). afterdrop evaluates them all on trained weights, picks the best on validation data, and
hands back a predictor:

    scores = afterdrop.evaluate(model, valid_batches)
    choice = afterdrop.select(scores)
    predict = afterdrop.Predictor(model, choice.member)
"""

from afterdrop.errors import AfterdropError as AfterdropError
from afterdrop.evaluation.api import evaluate as evaluate
from afterdrop.evaluation.scores.scores import Scores as Scores
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
from afterdrop.selection.choice import Selection as Selection
from afterdrop.selection.choice import select as select
from afterdrop.selection.predictor import Predictor as Predictor

__version__ = "0.1.0"
