"""The HTML report of a run, of several runs, or of a study, and its figures.

The names exported here need nothing but the core dependencies. Modules that draw need matplotlib
(`pip install 'afterdrop[report]'`) and are imported by name, so that `import afterdrop.report` does
not load it: `afterdrop.report.figures`, `run_page` (`write_report`), `comparison_page`
(`write_comparison`) and `study_page` (`write_study`).
"""

from afterdrop.report.prose import certainty, headline
from afterdrop.report.report_input import ReportInput, is_study, read_input
from afterdrop.report.run_outcome import Outcome, find_outcome

__all__ = [
    "Outcome",
    "ReportInput",
    "certainty",
    "find_outcome",
    "headline",
    "is_study",
    "read_input",
]
