"""Selection: from Scores to a choice, and from a choice to a predictor."""

from afterdrop.selection.candidate import Candidate as Candidate
from afterdrop.selection.choice import Choice as Choice
from afterdrop.selection.ensemble_predictor import EnsemblePredictor as EnsemblePredictor
from afterdrop.selection.number_uncertainty import NumberUncertainty as NumberUncertainty
from afterdrop.selection.predictor import Predictor as Predictor
from afterdrop.selection.ranking import select as select
from afterdrop.selection.stream_predictor import StreamPredictor as StreamPredictor
from afterdrop.selection.text_tables import bounds_table as bounds_table
from afterdrop.selection.text_tables import family_table as family_table
from afterdrop.selection.text_tables import summary_table as summary_table
from afterdrop.selection.uncertainty import Uncertainty as Uncertainty
