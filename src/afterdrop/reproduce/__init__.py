"""The paper's tables, and the chain of training runs and evaluations that produces them.

`afterdrop.reproduce.paper_figures` needs matplotlib and is imported by name.
"""

from afterdrop.reproduce.chain import Chain
from afterdrop.reproduce.jobs import ChainJob, plan_jobs
from afterdrop.reproduce.tables import PaperTable, paper_tables, to_text, write_tables

__all__ = [
    "Chain",
    "ChainJob",
    "PaperTable",
    "paper_tables",
    "plan_jobs",
    "to_text",
    "write_tables",
]
