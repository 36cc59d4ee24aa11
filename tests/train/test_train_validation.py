import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from afterdrop.data import IGNORE, EvalStripes
from afterdrop.errors import DataError
from afterdrop.ranks import Ranks
from afterdrop.train.averaging import WeightAverage
from afterdrop.train.validation import validate
from afterdrop.train.validation_windows import windows_on_device
from oracles.waits import CountCopies


def test_both_cross_entropies_are_exact():
    logits = 2.5 * torch.randn(2000, 50)
    targets = torch.distributions.Categorical(logits=logits / 1.4).sample()
    found = validate(zip(logits.split(300), targets.split(300)))
    grid = torch.linspace(0.5, 2, 3001, dtype=torch.float64)
    xes = torch.stack([F.cross_entropy(logits.double() / t, targets) for t in grid[::10]])
    assert found.xe == pytest.approx(F.cross_entropy(logits.double(), targets).item(), abs=1e-6)
    assert found.xe_optimal == pytest.approx(xes.min().item(), abs=5e-6)
    assert found.temperature == pytest.approx(float(grid[::10][xes.argmin()]), abs=0.01)
    assert found.targets == 2000


def test_the_optimum_stays_in_its_bracket():
    logits = 20 * torch.randn(500, 5)  # nothing to do with the targets
    found = validate([(logits, torch.randint(5, (500,)))])
    assert found.temperature == pytest.approx(2.0)
    assert found.xe_optimal < found.xe


def test_no_targets_are_refused():
    with pytest.raises(DataError, match="no targets"):
        validate([])


def test_sums_come_to_the_cpu_after_the_last_batch():
    copies, counts = CountCopies(), []

    def batches():
        for _ in range(3):
            yield torch.randn(6, 5), torch.randint(5, (6,))
            counts.append(len(copies.ops))

    with copies:
        assert validate(batches()).targets == 18
    assert counts == [0, 0, 0] and "cpu" in copies.ops


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.integers(1, 7),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(1, 70)),
    st.integers(1, 3),
)
def test_windows_on_a_device_are_those_of_the_stripes_without_padding(
    tokens, rows, window, max_targets, ranks
):
    """For the stripes of every rank; they end with the window that reaches `max_targets`."""
    stripes = EvalStripes(torch.tensor(tokens, dtype=torch.int32), 0, rows, window)
    windows, seen = [], 0
    for inputs_Bt, targets_Bt in stripes:
        if max_targets is None or seen < max_targets:
            windows.append((inputs_Bt, targets_Bt))
        seen += int((targets_Bt != IGNORE).sum())
    for rank in range(ranks):
        mine = Ranks(rank, ranks).share(rows)
        held = windows_on_device(stripes, torch.device("cpu"), mine, max_targets)
        assert len(held) == (len(windows) if mine.start < mine.stop else 0)
        for found, (inputs_Bt, targets_Bt) in zip(held, windows):
            real_Bt = targets_Bt[mine] != IGNORE
            assert torch.equal(found.inputs.long(), inputs_Bt[mine])
            assert torch.equal(found.targets, targets_Bt[mine][real_Bt])
            assert torch.equal(found.real(targets_Bt[mine]), found.targets)
            assert (found.places is None) == bool(real_Bt.all())


def test_the_average_is_the_mean_of_all_weights_after_the_trigger():
    model = nn.Linear(3, 2)
    average, seen = WeightAverage(model), []
    before = [p.detach().clone() for p in model.parameters()]
    with average.in_place():  # before any update: the weights themselves
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before))
    for _ in range(7):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        average.update()
        seen.append([p.detach().clone() for p in model.parameters()])
    last = [p.detach().clone() for p in model.parameters()]
    pointers = [p.data_ptr() for p in model.parameters()]
    with average.in_place():
        for p, *values in zip(model.parameters(), *seen):
            torch.testing.assert_close(p.detach(), torch.stack(values).mean(0))
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), last))
