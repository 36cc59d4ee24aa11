"""Training: the MAP objective, its schedules, and runs that survive being killed."""

from afterdrop.train.build_task import load_set
from afterdrop.train.checks import ConfigError, DivergedError, TrainError
from afterdrop.train.config import TrainConfig, differences
from afterdrop.train.device import choose_device
from afterdrop.train.folder import RunFolder, locked
from afterdrop.train.load_run import LoadedRun, Which, kept_fingerprint, load_model
from afterdrop.train.objective import prior_scale
from afterdrop.train.optimiser import AdamTF
from afterdrop.train.plan import ModelPlan
from afterdrop.train.schedule_length import shorten
from afterdrop.train.sections import (
    AveragingSection,
    DataSection,
    ObjectiveSection,
    OptimiserSection,
    ScheduleSection,
    ValidationSection,
)
from afterdrop.train.training_run import TrainResult, run

__all__ = [
    "AdamTF",
    "AveragingSection",
    "ConfigError",
    "DataSection",
    "DivergedError",
    "LoadedRun",
    "ModelPlan",
    "ObjectiveSection",
    "OptimiserSection",
    "RunFolder",
    "ScheduleSection",
    "TrainConfig",
    "TrainError",
    "TrainResult",
    "ValidationSection",
    "Which",
    "choose_device",
    "differences",
    "kept_fingerprint",
    "load_model",
    "load_set",
    "locked",
    "prior_scale",
    "run",
    "shorten",
]
