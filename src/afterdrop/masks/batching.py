"""Whether samples can run as extra rows of a batch, and where the rows lie in each mask.

Found by passes with twice the rows and with one row. All of them halve the declared rates: an
operator whose rate changes with them must not be scaled a second time (`Layout.scaled`).
"""

import dataclasses

from torch import Tensor

from afterdrop.errors import AfterdropError
from afterdrop.masks.dry_run import DryRun
from afterdrop.masks.layout import Layout, probe_layout
from afterdrop.masks.mask_source import Place
from afterdrop.masks.model_output import close
from afterdrop.masks.recorder import Recorder, Visit

_HALF = 0.5


def find_layouts(
    dry: DryRun, held: set[str], visits: list[Visit]
) -> tuple[dict[Place, Layout], bool, str]:
    """Where the rows lie at each place, whether samples can be rows, and if not, why.

    Args:
        dry: Runs the model.
        held: Names of modules that stay in eval mode.
        visits: The random operations of a pass with the rows of the input.
    """
    recorder = dry.recorder(held, visits)
    unbatched = {v.place: Layout(None, varies=True) for v in visits}
    try:
        output = dry.run(recorder, _HALF, copies=2)
    except AfterdropError:
        raise
    except Exception as error:  # the user's model may fail in any way at another batch size
        return unbatched, False, f"the model fails on twice the rows: {type(error).__name__}"
    after = list(recorder.visits)
    if len(after) != len(visits):
        return unbatched, False, "the number of random operations depends on the batch size"
    layouts: dict[Place, Layout] = {}
    for old, new in zip(visits, after):
        found = probe_layout((old.shape, _values(old)), (new.shape, _values(new)), dry.batch)
        layout = found[0] if len(found) == 1 else _probe(dry, recorder, new, found, output)
        scaled = bool(dry.rates) and not old.own and new.rate != old.rate
        layout = dataclasses.replace(layout, scaled=scaled)
        if layouts.setdefault(old.place, layout) != layout:
            layouts[old.place] = Layout(None, varies=True, scaled=scaled)
    return layouts, *_independent(dry, recorder, layouts, output)


def _values(visit: Visit) -> Tensor | None:
    """The values to be dropped, if they have the mask's dimensions."""
    value = visit.value
    return value if value is not None and value.dim() == len(visit.shape) else None


def _probe(
    dry: DryRun, recorder: Recorder, visit: Visit, found: list[Layout], expected: Tensor
) -> Layout:
    """The layout with which dropping half of the rows changes no other rows."""
    fitting = []
    for layout in found:
        recorder.probe = visit.place, layout, dry.batch
        output = dry.run(recorder, _HALF, copies=2)
        recorder.probe = None
        if output.dim() > dry.batch_dim and output.shape[dry.batch_dim] == 2 * dry.batch:
            others = [x.narrow(dry.batch_dim, dry.batch, dry.batch) for x in (output, expected)]
            if close(*others):
                fitting.append(layout)
    return fitting[0] if len(fitting) == 1 else Layout(None, varies=True)


def _independent(
    dry: DryRun, recorder: Recorder, layouts: dict[Place, Layout], output: Tensor
) -> tuple[bool, str]:
    """Whether each row has its own mask and does not influence other rows, and if not, why."""
    shared = [str(place) for place, layout in layouts.items() if layout.dim is None]
    if shared:
        return False, f"rows share the mask of {', '.join(shared)}"
    if output.dim() <= dry.batch_dim or output.shape[dry.batch_dim] != 2 * dry.batch:
        return False, "the output has another batch dimension than the input"
    try:
        single = dry.run(recorder, _HALF, rows=1)
    except Exception as error:  # the user's model may fail in any way on a single row
        return False, f"the model fails on a single row: {type(error).__name__}"
    first = output.narrow(dry.batch_dim, 0, 1)
    again = output.narrow(dry.batch_dim, dry.batch, 1)
    if not (close(single, first) and close(again, first)):
        return False, "the rows of a batch influence each other"
    return True, ""
