"""The maths of the extended dropout family: pure functions of tensors.

Members and grids of them, power means over mask samples, temperatures, bounds and estimates. The
modules of this package import nothing from the rest of `afterdrop` except errors and JSON files.
"""

from afterdrop.family.bounds import Bounds
from afterdrop.family.calibration import calibration_bins, calibration_error, risk_coverage
from afterdrop.family.estimates import Estimate, Values, estimate
from afterdrop.family.member import AMC, DET, GMC, Grid, Member, Temper
from afterdrop.family.power_mean import PowerSums, log_power_mean
from afterdrop.family.temperature import Nodes, bracket, fit_temperature

__all__ = [
    "AMC",
    "DET",
    "GMC",
    "Bounds",
    "Estimate",
    "Grid",
    "Member",
    "Nodes",
    "PowerSums",
    "Temper",
    "Values",
    "bracket",
    "calibration_bins",
    "calibration_error",
    "estimate",
    "fit_temperature",
    "log_power_mean",
    "risk_coverage",
]
