"""The error of tuning."""

from afterdrop.errors import AfterdropError


class TuneError(AfterdropError, RuntimeError):
    """A study that cannot start, or cannot go on."""
