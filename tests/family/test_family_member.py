import math

import numpy as np
import pytest

import afterdrop as ad
from afterdrop.errors import FileError, MemberError

NAN = float("nan")


@pytest.mark.parametrize("value", [-0.1, 1.01, NAN, math.inf, "0.5", None, True, 1j, [0.5]])
@pytest.mark.parametrize("name", ["alpha", "multiplier"])
def test_numbers_outside_the_unit_interval_are_refused_by_name(name, value):
    with pytest.raises(MemberError, match=name):
        ad.Member(**{name: value})


@pytest.mark.parametrize("value", [0, -1.0, NAN, math.inf, "1", None, True])
def test_temperatures_that_are_not_positive_are_refused(value):
    with pytest.raises(MemberError, match="temperature"):
        ad.Member(temperature=value)


def test_temper_is_one_of_two():
    with pytest.raises(MemberError, match="temper='both'"):
        ad.Member(temper="both")
    with pytest.raises(MemberError, match="temper"):
        ad.Member(multiplier=0, temper="both")


def test_errors_derive_from_the_matching_builtins():
    assert issubclass(MemberError, ValueError) and issubclass(MemberError, ad.AfterdropError)
    assert issubclass(FileError, OSError)


def test_every_member_at_multiplier_zero_is_the_deterministic_one():
    for alpha in (0, 0.5, 1):
        assert ad.Member(alpha, 0) == ad.DET
        assert ad.Member(alpha, 0, 2.0, "sample") == ad.DET.at_temperature(2)
    assert ad.DET.deterministic and not ad.AMC.deterministic
    assert ad.Member(0, 1, 2.0, "sample") == ad.GMC.at_temperature(2)
    assert ad.Member(1, 1, 2.0, "sample") != ad.AMC.at_temperature(2)


def test_members_are_frozen_and_hashable():
    with pytest.raises(AttributeError):
        ad.AMC.alpha = 0
    assert len({ad.AMC, ad.Member(1, 1), ad.GMC}) == 2


def test_numpy_numbers_are_accepted():
    assert ad.Member(np.float64(0.5), np.float64(1)) == ad.Member(0.5, 1)
    assert ad.Member(np.float32(0.5), np.int64(1)) == ad.Member(0.5, 1)


def test_grids_sort_and_contain_the_deterministic_member_once():
    grid = ad.Grid((1, 0, 0.5, 1), (1, 0.5, 0))
    assert grid.alphas == (0, 0.5, 1) and grid.multipliers == (0, 0.5, 1)
    members = list(grid)
    assert members[0] == ad.DET and members.count(ad.DET) == 1
    assert len(members) == len(grid) == 7 == len(set(members))
    assert len(list(ad.Grid())) == 51
    assert next(iter(ad.Grid((0.5,), (1,)))) == ad.DET


@pytest.mark.parametrize(
    "options",
    [
        {"alphas": ()},
        {"multipliers": []},
        {"alphas": 0.5},
        {"alphas": "01"},
        {"alphas": (0, 2)},
        {"multipliers": (0, -1)},
        {"multipliers": (NAN,)},
        {"temper": "x"},
        {"alphas": (None,)},
    ],
)
def test_invalid_grids_are_refused_by_name(options):
    with pytest.raises(MemberError, match=next(iter(options)).rstrip("s")):
        ad.Grid(**options)


def test_members_print_their_mean_and_repr_evaluates():
    assert "geometric" in str(ad.GMC) and "arithmetic" in str(ad.AMC)
    assert "deterministic" in str(ad.DET)
    assert eval(repr(ad.Member(0.25, 0.5, 1.25, "sample")), {"Member": ad.Member}) == ad.Member(
        0.25, 0.5, 1.25, "sample"
    )
