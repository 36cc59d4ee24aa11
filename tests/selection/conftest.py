import pytest
from select_cases import GRID, overconfident

import afterdrop as ad


@pytest.fixture(scope="session")
def scores():
    model, x, y = overconfident()
    return ad.evaluate(model, [(x, y)], grid=GRID, num_samples=16)


@pytest.fixture(scope="session")
def choice(scores):
    return ad.select(scores)
