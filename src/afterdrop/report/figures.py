"""The figures of the report, as functions that take Scores and return matplotlib Axes.

    from afterdrop.report import figures
    figures.family_map(scores).figure.savefig("map.pdf")

Each function takes `ax=` to draw into existing axes; otherwise it creates a figure in the style of
the report.
"""

from afterdrop.report.bound_figures import bounds_stacked, tightness
from afterdrop.report.confidence_figures import reliability_diagram, risk_coverage_curves
from afterdrop.report.curve_figures import sample_curves, temperature_curves
from afterdrop.report.frequency_figures import gain_by_class, gain_by_frequency, xe_by_frequency
from afterdrop.report.map_figures import family_map
from afterdrop.report.quantile_figures import quantile_diagram
from afterdrop.report.training_figures import training_curves, validation_curves

__all__ = [
    "bounds_stacked",
    "family_map",
    "gain_by_class",
    "gain_by_frequency",
    "quantile_diagram",
    "reliability_diagram",
    "risk_coverage_curves",
    "sample_curves",
    "temperature_curves",
    "tightness",
    "training_curves",
    "validation_curves",
    "xe_by_frequency",
]
