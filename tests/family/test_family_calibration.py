"""Risk against coverage by its definition (reject predictions below a confidence), and ties."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afterdrop.family.calibration import calibration_error, risk_coverage

predictions = st.lists(
    st.tuples(st.sampled_from([0.1, 0.25, 0.5, 0.75, 0.9]), st.booleans()), min_size=1, max_size=30
)


@settings(max_examples=60, deadline=None)
@given(predictions)
def test_risk_is_the_share_of_errors_at_or_above_each_confidence(pairs):
    confidence = torch.tensor([c for c, _ in pairs])
    correct = torch.tensor([right for _, right in pairs])
    coverage, risk = risk_coverage(confidence, correct)
    for place, threshold in enumerate(sorted(set(confidence.tolist()), reverse=True)):
        kept = [right for c, right in zip(confidence.tolist(), correct.tolist()) if c >= threshold]
        assert coverage[place].item() == len(kept) / len(pairs)
        assert abs(risk[place].item() - kept.count(False) / len(kept)) < 1e-12
    assert len(coverage) == len(risk) == len(set(confidence.tolist()))
    assert coverage[-1] == 1


@settings(max_examples=30, deadline=None)
@given(predictions, st.randoms(use_true_random=False))
def test_the_order_of_the_targets_does_not_matter(pairs, chance):
    mixed = list(pairs)
    chance.shuffle(mixed)
    curves = [
        risk_coverage(torch.tensor([c for c, _ in p]), torch.tensor([r for _, r in p]))
        for p in (pairs, mixed)
    ]
    assert all(torch.allclose(a, b) for a, b in zip(*curves))


@settings(max_examples=30, deadline=None)
@given(predictions, st.randoms(use_true_random=False), st.sampled_from([1, 3, 10]))
def test_equal_mass_bins_do_not_depend_on_the_order_of_the_targets(pairs, chance, bins):
    mixed = list(pairs)
    chance.shuffle(mixed)
    errors = [
        calibration_error(
            torch.tensor([c for c, _ in p]), torch.tensor([r for _, r in p]), bins, "mass"
        )
        for p in (pairs, mixed)
    ]
    assert abs(errors[0] - errors[1]) < 1e-12


def test_a_constant_confidence_that_is_right_has_no_calibration_error():
    confidence, correct = torch.full((50,), 0.8, dtype=torch.float64), torch.arange(50) < 40
    assert calibration_error(confidence, correct, 10, "mass") < 1e-12
