"""Tuning: a batched Gaussian-process bandit over the hyperparameters of a recipe.

The names exported here need nothing but the core dependencies. `afterdrop.tune.study_runner`
(`run_study`) needs Optuna (`pip install 'afterdrop[tune]'`) and is imported by name.
"""

from afterdrop.tune.checks import TuneError
from afterdrop.tune.search_space import Axis, Space
from afterdrop.tune.study_files import read_result, write_result
from afterdrop.tune.study_result import Ranked, StudyResult
from afterdrop.tune.study_settings import TuneSettings, plan_study
from afterdrop.tune.trials import Trial
from afterdrop.tune.tuning_objective import Objective

__all__ = [
    "Axis",
    "Objective",
    "Ranked",
    "Space",
    "StudyResult",
    "Trial",
    "TuneError",
    "TuneSettings",
    "plan_study",
    "read_result",
    "write_result",
]
