import pytest
from table_sources import make_source


@pytest.fixture(scope="session")
def mnist():
    return make_source("mnist-mlp", "mnist-1", unit="image", parameters=1_900_000)


@pytest.fixture(scope="session")
def ptb():
    return make_source("ptb-24m-retuned", "ptb-1")
