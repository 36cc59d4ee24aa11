import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # kernels then run in Triton's interpreter, on CPU tensors
    os.environ["TRITON_INTERPRET"] = "1"

sys.path.insert(0, str(Path(__file__).parent))  # for `oracles`
if not torch.cuda.is_available():  # read when a kernel is defined, so before any is imported
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
