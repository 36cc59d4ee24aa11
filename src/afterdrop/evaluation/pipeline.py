"""Batches under way: the device works on the next one while the CPU takes the results of one."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from torch import Tensor

from afterdrop.evaluation.passes import Batch

Item = TypeVar("Item")
# The results of a batch by name: a tensor, which may be kept, or pieces of one along the targets,
# in memory that is needed again and to be copied at once.
Pieces = Mapping[str, Tensor | list[Tensor]]


@dataclasses.dataclass(frozen=True)
class Job:
    """A batch whose evaluation has begun.

    Attributes:
        number: Which batch of the data.
        batch: The batch, which must live until its results are there.
        results: Waits for the results, or only then makes them.
    """

    number: int
    batch: Batch
    results: Callable[[], Pieces]


def behind(made: Iterator[Item], ahead: int) -> Iterator[Item]:
    """Gives each item when so many later ones have been made.

    If making one fails, those made before it come first and the error after them.

    Args:
        made: The items.
        ahead: How many later ones.

    Example:
        >>> def noted():
        ...     for number in range(3):
        ...         print("made", number)
        ...         yield number
        >>> for number in behind(noted(), 1):
        ...     print("given", number)
        made 0
        made 1
        given 0
        made 2
        given 1
        given 2
    """
    held: deque[Item] = deque()
    error: BaseException | None = None
    while error is None:
        try:
            held.append(next(made))
        except StopIteration:
            break
        except (Exception, KeyboardInterrupt) as found:
            error = found
        else:
            if len(held) > ahead:
                yield held.popleft()
    while held:
        yield held.popleft()
    if error is not None:
        raise error
