"""The error class of tuning."""

from afterdrop.errors import AfterdropError


class TuneError(AfterdropError, RuntimeError):
    """A study cannot start or cannot continue."""
