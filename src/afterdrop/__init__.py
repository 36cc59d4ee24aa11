"""Train once with dropout, choose the model afterwards."""

__version__ = "0.1.0"
