"""Training: the MAP objective, its schedules, and runs that survive being killed."""

from afterdrop.train.checks import ConfigError, DivergedError, TrainError
from afterdrop.train.config import TrainConfig, differences
from afterdrop.train.load_run import LoadedRun, load_model
from afterdrop.train.objective import prior_scale
from afterdrop.train.plan import ModelPlan
from afterdrop.train.run import TrainResult, run

__all__ = [
    "ConfigError",
    "DivergedError",
    "LoadedRun",
    "ModelPlan",
    "TrainConfig",
    "TrainError",
    "TrainResult",
    "differences",
    "load_model",
    "prior_scale",
    "run",
]
