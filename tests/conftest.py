import sys
from pathlib import Path

import pytest
import torch

# Not to be searched for doctests: as modules they all have one name, and pytest refuses the second.
collect_ignore_glob = ["*/conftest.py"]

sys.path.insert(0, str(Path(__file__).parent))  # for `oracles`


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
