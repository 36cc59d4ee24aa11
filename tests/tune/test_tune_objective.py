import pytest
import torch

from afterdrop.data import EvalStripes
from afterdrop.train import load_model, run
from afterdrop.tune.tuning_objective import Objective, spread


@pytest.fixture
def trained(settings, tmp_path):
    run(settings.config, tmp_path / "run", device="cpu", progress=False)
    return tmp_path / "run"


def logits_by_window(folder):
    """Oracle: deterministic logits and targets of the validation text, one entry per window."""
    model, _, load_data = load_model(folder)
    text = load_data()
    windows = EvalStripes(text.valid, text.vocabulary.eos_id, 4, 8, lines=text.has_lines)
    state, rows = None, []
    with torch.no_grad():
        for inputs, targets in windows:
            logits, state = model(inputs, state)
            rows.append((logits.double(), targets))
    return rows


def xe(rows, temperature):
    total, count = 0.0, 0
    for logits, targets in rows:
        real = targets >= 0
        log_p = torch.log_softmax(logits[real] / temperature, -1)
        total -= float(log_p.gather(-1, targets[real].unsqueeze(-1)).sum())
        count += int(real.sum())
    return total / count


def test_the_objective_is_det_at_its_optimal_temperature(trained):
    rows = logits_by_window(trained)
    worth = Objective().of_run(trained, "cpu", None)
    grid = torch.linspace(0.2, 4, 400).tolist()
    best = min(grid, key=lambda t: xe(rows, t))
    assert worth.temperature == pytest.approx(best, abs=0.02)
    assert worth.xe == pytest.approx(xe(rows, worth.temperature), abs=1e-5)
    assert worth.xe <= xe(rows, best) + 1e-5
    plain = Objective(temperature="plain").of_run(trained, "cpu", None)
    assert (plain.xe, plain.temperature) == (pytest.approx(xe(rows, 1.0), abs=1e-5), 1.0)


def test_the_temperature_comes_from_a_part_of_the_targets(trained):
    whole = Objective().of_run(trained, "cpu", None)
    part = Objective(targets=60).of_run(trained, "cpu", None)
    assert part.temperature != whole.temperature
    assert part.xe > whole.xe  # its temperature is not optimal for all targets
    assert part.xe == pytest.approx(xe(logits_by_window(trained), part.temperature), abs=1e-5)


def test_the_member_can_be_chosen(trained):
    det, amc = (Objective.parse(n).of_run(trained, "cpu", None) for n in ("det", "amc"))
    assert det.xe != amc.xe
    with pytest.raises(ValueError, match="ALPHA,MULTIPLIER"):
        Objective.parse("best")
    with pytest.raises(ValueError, match="alpha"):
        Objective.parse("2,1")


def test_without_dropout_every_member_is_the_deterministic_one(settings, tmp_path):
    config = settings.config.override({"model.input_dropout": 0.0, "model.output_dropout": 0.0})
    run(config, tmp_path / "run", device="cpu", progress=False)
    det, amc = (Objective.parse(n).of_run(tmp_path / "run", "cpu", None) for n in ("det", "amc"))
    assert det == amc


def test_the_fitting_examples_are_spread_over_the_data():
    clusters = torch.arange(10).repeat_interleave(3)
    assert spread(clusters, 1000).tolist() == [1] * 10
    assert spread(clusters, 10).nonzero().flatten().tolist() == [0, 3, 6, 9]
