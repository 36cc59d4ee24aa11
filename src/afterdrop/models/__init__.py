"""The paper's models: LSTM stack, language model, classifier, and the sizes that fit a budget."""

from afterdrop.models.budget import Sizes, count_parameters, sizes_within
from afterdrop.models.cell import InputGate, lstm_step
from afterdrop.models.checks import ModelError
from afterdrop.models.classifier import Classifier, ClassifierConfig
from afterdrop.models.language_model import LanguageModel
from afterdrop.models.layer import LSTMLayer
from afterdrop.models.mask import Drop, Mask, MaskConfig
from afterdrop.models.model_config import LanguageModelConfig
from afterdrop.models.stack import LSTMStack

__all__ = [
    "Classifier",
    "ClassifierConfig",
    "Drop",
    "InputGate",
    "LSTMLayer",
    "LSTMStack",
    "LanguageModel",
    "LanguageModelConfig",
    "Mask",
    "MaskConfig",
    "ModelError",
    "Sizes",
    "count_parameters",
    "lstm_step",
    "sizes_within",
]
