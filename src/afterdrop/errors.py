"""Every error afterdrop raises on purpose.

All derive from `AfterdropError`, and each also from the built-in exception that a caller would
expect, so `except ValueError` keeps working. Messages name the argument, the value and the remedy.
"""

from __future__ import annotations


class AfterdropError(Exception):
    """Base of every error that afterdrop raises on purpose."""


class MemberError(AfterdropError, ValueError):
    """A member, grid or temperature outside its domain."""


class SiteError(AfterdropError, RuntimeError):
    """Dropout sites that are missing, missed or beyond control."""


class DataError(AfterdropError, ValueError):
    """Inputs, targets or logits that cannot be evaluated."""


class ScoresError(AfterdropError, ValueError):
    """Scores that do not hold what was asked for, or do not belong together."""


class SplitError(AfterdropError, ValueError):
    """A use of data that would make the result dishonest, such as selecting on the test split."""


class FileError(AfterdropError, OSError):
    """A file that is missing, foreign, truncated or from another version."""


class DamagedError(FileError):
    """A file whose content is not what afterdrop wrote."""


class ExtraError(AfterdropError, ImportError):
    """An optional dependency that is not installed, or that cannot be imported."""

    @classmethod
    def of(cls, error: ImportError, need: str, extra: str) -> ExtraError:
        """The error for an import that failed.

        Args:
            error: Of the import.
            need: What needs which package.
            extra: The extra of this package that installs it.
        """
        if isinstance(error, ModuleNotFoundError):
            return cls(f"{need} ({error}): pip install 'afterdrop[{extra}]'")
        return cls(
            f"{need}, which is there but cannot be imported ({error}): repair it, or "
            f"pip install --upgrade 'afterdrop[{extra}]'"
        )


class RankError(AfterdropError, RuntimeError):
    """Processes that are to share the work and cannot."""


class RankLost(RankError):
    """Another rank that is gone, so that the work cannot go on here; what is finished is kept."""


class StoppedElsewhere(RankError):
    """An error of rank 0, as the other ranks see it; rank 0 raises and shows the error itself."""
