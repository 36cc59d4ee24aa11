import os
import sys
from pathlib import Path

import pytest
import torch

# Not to be searched for doctests: as modules they all have one name, and pytest refuses the second.
collect_ignore_glob = ["*/conftest.py"]

if not torch.cuda.is_available():  # kernels then run in Triton's interpreter, on CPU tensors
    os.environ["TRITON_INTERPRET"] = "1"

sys.path.insert(0, str(Path(__file__).parent))  # for `oracles`


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
