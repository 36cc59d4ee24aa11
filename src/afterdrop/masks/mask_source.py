"""The interface between random operators and whatever answers them with masks."""

from typing import Any, NamedTuple, Protocol, Self

from torch import Tensor

from afterdrop.masks.row_masks import RowMask


class Place(NamedTuple):
    """A dropout operation in the code: a module and the number of the operation in its forward."""

    module: str
    number: int

    def __str__(self) -> str:
        name = self.module or "(root)"
        return f"{name}#{self.number}" if self.number else name


class Call(NamedTuple):
    """One execution of a dropout operation: its place, and which call of the module this is."""

    place: Place
    number: int


class MaskSource(Protocol):
    """Answers random operators; entered as a context manager, it intercepts them."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: Any) -> None: ...

    def locate(self) -> Call:
        """The random operation that runs now. Each operation asks once."""

    def is_forced(self, call: Call) -> bool:
        """Whether dropout is off here only because its module is held in eval mode."""

    def mask(
        self, op: str, rate: float, like: Tensor, value: Tensor, call: Call | None = None
    ) -> RowMask | None:
        """The mask of a dropout operation, or None if nothing is dropped.

        Args:
            op: The name of the operator.
            rate: The operator's own rate.
            like: A tensor of the mask's shape, dtype and device.
            value: The tensor to be dropped.
            call: From `locate`, unless the operation has not asked yet.
        """

    def uniforms(self, op: str, rate: float | None, like: Tensor) -> Tensor:
        """Uniforms of the shape of `like` for a mask that the model computes itself."""
