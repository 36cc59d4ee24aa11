"""States that a pass without dropout carries into the windows of a text, on a GPU.

The pass is a chain of small products, which leave a GPU idle. So the windows are cut into pieces
that run side by side, in rounds: a piece starts where the one before it ended in the last round, at
first from zero. The rounds end when every piece starts from where the one before it ends.

The first n pieces are right after n rounds, whatever the model. A model that forgets within a piece
what came before it needs two rounds; a trained one took three on PTB's validation text with pieces
of 1,200 tokens, and eleven with pieces of 210.

Legend: L layers, s stripes of the text, P pieces, n windows of a piece, H units.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from afterdrop.data.stripes import EvalStripes

if TYPE_CHECKING:
    from afterdrop.models.fused import DeterministicPass

ROWS = 64  # of the pieces of all stripes: so few take a GPU no longer than one row
_BYTES = 2**27  # of states at a time
_NEAR = 2.0**-11  # how closely states must agree: the resolution of float16 at 1


def carried_states(
    passes: "DeterministicPass", stripes: EvalStripes, max_bytes: int = _BYTES
) -> Iterator[Any]:
    """The state before each window, as a model takes it: (h, c) of each layer, [s, H].

    Args:
        passes: The kernels' pass over the rows of all pieces, the stripes of a piece together.
        stripes: The text.
        max_bytes: Of states that are held at a time.
    """
    passes.reset()
    state = _packed(passes.state)[:, :, : stripes.stripes]
    most = max(1, max_bytes // (state.numel() * state.element_size()))
    for first in range(0, len(stripes), most):
        numbers = range(first, min(first + most, len(stripes)))
        states, state = _section(passes, stripes, numbers, state)
        for before in states.unbind(2):
            yield tuple((h, c) for h, c in before)


def _section(
    passes: "DeterministicPass", stripes: EvalStripes, numbers: range, start: Tensor
) -> tuple[Tensor, Tensor]:
    """States before some windows [L, 2, windows, s, H], and that after the last [L, 2, s, H]."""
    s, rows = stripes.stripes, len(passes.state[0][0])
    each = -(-len(numbers) // (rows // s))
    pieces = -(-len(numbers) // each)
    tokens = [_tokens(stripes, numbers[at::each], rows) for at in range(each)]
    begins = torch.zeros_like(_packed(passes.state))
    begins[:, :, :s] = start
    for number in range(1, pieces + 1):
        passes.begin(tuple((h, c) for h, c in begins))
        found = [begins]
        for window in tokens:
            passes.run(window)
            found.append(_packed(passes.state))
        if number == pieces:
            break
        following = torch.cat([start, found[-1][:, :, :-s]], 2)
        near = (following - begins).abs() <= _NEAR * following.abs().clamp_min(1.0)
        if bool(near[:, :, : pieces * s].all()):  # NaN is never near
            break
        begins = following
    states = torch.stack(found, 2)  # [L, 2, n + 1, rows, H]
    states = states[..., : pieces * s, :].unflatten(3, (pieces, s)).transpose(2, 3)
    last = states[:, :, -1, len(numbers) - (pieces - 1) * each].clone()  # not a view of all states
    return states[:, :, :, :-1].flatten(2, 3)[:, :, : len(numbers)], last


def _tokens(stripes: EvalStripes, numbers: range, rows: int) -> Tensor:
    """A window of each piece [rows, time]; padding rows hold token 0."""
    found = stripes.windows(numbers)[0].flatten(0, 1)
    return torch.cat([found, found.new_zeros(rows - len(found), found.shape[1])])


def _packed(state: tuple[tuple[Tensor, Tensor], ...]) -> Tensor:
    """[L, 2, rows, H]."""
    return torch.stack([torch.stack(pair) for pair in state])
